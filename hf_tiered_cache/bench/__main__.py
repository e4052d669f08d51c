"""`python -m hf_tiered_cache.bench NAME [options]`."""

from __future__ import annotations

import argparse

from . import longcontext, overhead, overlap, policies


def main() -> None:
    """Dispatch to one benchmark."""
    parser = argparse.ArgumentParser(prog="python -m hf_tiered_cache.bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", required=True)
    for benchmark in (overhead, overlap, longcontext, policies):
        assert benchmark.__doc__ is not None
        command = commands.add_parser(
            benchmark.__name__.rpartition(".")[2],
            help=benchmark.__doc__.partition("\n")[0],
            description=benchmark.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        benchmark.add_arguments(command)
        command.set_defaults(run=benchmark.run)
    arguments = parser.parse_args()
    arguments.run(arguments)


if __name__ == "__main__":
    main()
