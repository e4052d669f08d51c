"""R12: the next start removes everything that SIGKILL in the middle of a generation leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hf_tiered_cache import TieredCache

from ..fakes import eventually
from ..models import generate, prompt_ids, tiny_llama

_ENDLESS = """
import sys
import torch
from hf_tiered_cache import TieredCache
from tests.models import generate, prompt_ids, tiny_llama
torch.set_num_threads(1)
model = tiny_llama()
with TieredCache(
    config=model.config, window_tokens=32, block_tokens=16, host_capacity=0,
    l1_capacity=40 * 4096, l2_url=sys.argv[1]
) as cache:
    generate(model, prompt_ids(200), cache, max_new_tokens=3000)
"""


@contextmanager
def _generating(l1_base: Path, l2_base: Path) -> Iterator[subprocess.Popen[str]]:
    """Start another process that generates into the tiers; kill it at the end if it still runs."""
    before = _directories(l1_base) | _directories(l2_base)
    environment = os.environ | {"HF_TIERED_CACHE_DIR": str(l1_base), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", "-c", _ENDLESS, str(l2_base)]
    with subprocess.Popen(command, env=environment, cwd=Path(__file__).parents[2]) as process:
        try:
            assert eventually(
                lambda: (
                    len((_directories(l1_base) | _directories(l2_base)) - before) == 2
                    and all(
                        any(path.glob("**/c*"))
                        for path in (_directories(l1_base) | _directories(l2_base)) - before
                    )
                ),
                seconds=120,
            ), "it writes to both tiers"
            yield process
        finally:
            process.kill()


def _directories(base: Path) -> set[Path]:
    return {path for path in base.iterdir() if path.is_dir()}


def test_kill_in_the_middle(tmp_path: Path, cache_directory: Path) -> None:
    l2_base = tmp_path / "l2"
    l2_base.mkdir()

    def present() -> set[Path]:
        return _directories(cache_directory) | _directories(l2_base)

    def start_another() -> set[Path]:
        """Use the tiers in this process; return the directories that existed meanwhile."""
        model = tiny_llama()
        with TieredCache(
            config=model.config, window_tokens=32, block_tokens=16, l1_capacity=4096, l2_url=l2_base
        ) as cache:
            generate(model, prompt_ids(100), cache, max_new_tokens=2)
            return present()

    with _generating(cache_directory, l2_base) as survivor:
        alive = present()
        with _generating(cache_directory, l2_base) as victim:
            victim.send_signal(signal.SIGKILL)
            victim.wait()
        dead = present() - alive
        assert len(dead) == 2 and all(any(directory.iterdir()) for directory in dead), "a kill leaves them"
        seen = start_another()
        assert not dead & seen, "the next start sweeps"
        assert alive < seen, "and spares the living"
        assert survivor.poll() is None, "which generates on, undisturbed"
    start_another()
    assert list(l2_base.iterdir()) == [] and list(cache_directory.iterdir()) == []
