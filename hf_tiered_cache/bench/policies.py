"""Eviction policies on traces, against Belady's optimum, and the cost of the heat table.

Each policy is replayed over one tier of some blocks, above a tier that holds the rest. Traces, of 4 layers each:

- `exact`: one request reads all of its blocks, in a cycle, while it grows from 96 to 121 blocks per layer;
- `selective`: 16 % of the blocks are read, of which 83 % were read in the step before: most are favourites that
  stay for 50 steps, the others are drawn by Zipf's law and nearness, anew in each step;
- `mix, exact` and `mix, selective`: of four requests, the active ones take turns; requests pause, and end;
- `scattered`, for comparison: half of the choice is drawn anew in each step;
- `memoryless`, for comparison: each step keeps 78 % of the last choice, whichever these are, so that only the last
  step says anything about the next.

`pinned` (the default in exact mode) and `heat` (in selective mode) run with the settings' protection and warm-up,
the others without, as in textbooks: a block that is read always enters. Ratios are to Belady's hits, means over
seeds; `worst` is the smallest ratio of the default. Limits: the defaults reach 0.95 of Belady on `exact`, and 0.85
on `selective` and the mixes.

The heat table holds 1 million blocks of 80 layers; a touch and a query of one layer's blocks must take less than
a millisecond together, as medians over layers and steps. The times with all blocks in one layer are
reported, too.

The command fails if a limit is missed; its last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from ..core.config import TieredCacheConfig
from ..residency.heat import HeatTable, Slots
from ..residency.replay import Replay, Trace, replay
from ._traces import Skewed, decode, everything, mix

_OPTIMUM = "belady"
_POLICIES = ("pinned", "heat", "lru", "lfu", "fifo", "random")
_SETTINGS = {
    name: TieredCacheConfig()
    if name in ("pinned", "heat")
    else TieredCacheConfig(protection_steps=0, warmup_steps=0)
    for name in (_OPTIMUM, *_POLICIES)
}
_HEAT_LIMIT_MILLISECONDS = 1.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--seeds", type=int, default=3, help="traces of each distribution (default %(default)s)")
    parser.add_argument("--trace", action="append", default=[], metavar="FILE", help="replay this trace instead")
    parser.add_argument("--blocks", type=int, default=1_000_000, help="of the heat table (default %(default)s)")
    parser.add_argument("--layers", type=int, default=80, help="of the heat table (default %(default)s)")


@dataclass(frozen=True)
class Case:
    """Traces of one distribution, and what is expected of them.

    Args:
        make: makes a trace with a random generator.
        shares: capacities of the tier, as shares of the largest number of blocks at a time.
        default: the policy that the cache would use.
        limit: share of Belady's hits that it must reach.
        by_chance: whether another seed gives another trace.
    """

    make: Callable[[np.random.Generator], Trace]
    shares: tuple[float, ...]
    default: str | None = None
    limit: float | None = None
    by_chance: bool = True


CASES = {
    "exact": Case(lambda random: decode(everything), (0.25, 0.5, 0.75), "pinned", 0.95, by_chance=False),
    # With room for 1, 1.5 and 2 times what a step reads.
    "selective": Case(lambda random: decode(Skewed(random)), (0.15, 0.225, 0.3), "heat", 0.85),
    "mix, exact": Case(lambda random: mix(random, everything), (0.2, 0.5), "pinned", 0.85),
    "mix, selective": Case(lambda random: mix(random, Skewed(random)), (0.1, 0.2), "heat", 0.85),
    "scattered": Case(lambda random: decode(Skewed(random, favourites=0.5)), (0.225,), "heat"),
    "memoryless": Case(lambda random: decode(Skewed(random, favourites=1, leaving=0.22)), (0.225,), "heat"),
}


@dataclass
class Row:
    """All policies on the traces of one case, at one capacity."""

    name: str
    share: float
    case: Case
    replays: dict[str, list[Replay]] = field(default_factory=dict)

    def ratios(self, policy: str) -> list[float]:
        """Return the ratio of hits to Belady's, per trace."""
        pairs = zip(self.replays[policy], self.replays[_OPTIMUM], strict=True)
        return [one.hits / optimum.hits if optimum.hits else 1.0 for one, optimum in pairs]

    @property
    def worst(self) -> float | None:
        """The default's smallest ratio."""
        return None if self.case.default is None else min(self.ratios(self.case.default))

    @property
    def kept(self) -> bool:
        """Return true if the limit is kept, or if there is none."""
        return self.case.limit is None or (self.worst is not None and self.worst >= self.case.limit)

    def result(self) -> dict[str, Any]:
        """Return the row for the last line of output."""
        policies = {
            policy: {
                "hit_rate": round(statistics.mean(one.hit_rate for one in replays), 4),
                "of_belady": round(statistics.mean(self.ratios(policy)), 4),
                "moves_per_step": round(statistics.mean(one.moves_per_step for one in replays), 2),
            }
            for policy, replays in self.replays.items()
        }
        default, limit = self.case.default, self.case.limit
        return {
            "trace": self.name,
            "capacity_share": self.share,
            "capacity_blocks": [one.capacity for one in self.replays[_OPTIMUM]],
            "default": default,
            "worst": None if self.worst is None else round(self.worst, 4),
            "limit": limit,
            "policies": policies,
        }


def run(arguments: argparse.Namespace) -> None:
    """Replay, measure and print."""
    rows = []
    recorded = {Path(path).stem: _recorded(path) for path in arguments.trace}
    for name, case in (recorded or CASES).items():
        seeds = range(arguments.seeds if case.by_chance else 1)
        traces = [case.make(np.random.default_rng(seed)) for seed in seeds]
        rows += [compare(name, case, share, traces) for share in case.shares]
    _print(rows)
    heat = [heat_cost(arguments.blocks, layers) for layers in (arguments.layers, 1)]
    print(f"\nheat table, {arguments.blocks:,} blocks: milliseconds for the blocks of one layer")
    print(f"{'layers':>8}{'touch':>10}{'query':>10}{'bytes per block':>18}")
    for cost in heat:
        milliseconds = f"{cost['touch_milliseconds']:>10.3f}{cost['query_milliseconds']:>10.3f}"
        print(f"{cost['layers']:>8}{milliseconds}{cost['bytes_per_block']:>18.1f}")
    missed = [f"{row.name}, {row.share:.1%}" for row in rows if not row.kept]
    if heat[0]["touch_milliseconds"] + heat[0]["query_milliseconds"] > _HEAT_LIMIT_MILLISECONDS:
        missed.append("heat table")
    result = {"rows": [row.result() for row in rows], "heat": heat, "missed": missed}
    print(json.dumps({"benchmark": "policies", "seeds": arguments.seeds, **result}))
    if missed:
        raise SystemExit("limits missed: " + "; ".join(missed))


def compare(name: str, case: Case, share: float, traces: list[Trace]) -> Row:
    """Replay all policies over some traces."""
    row = Row(name, share, case)
    for policy, settings in _SETTINGS.items():
        row.replays[policy] = [
            replay(trace, policy, round(share * trace.most_blocks), settings) for trace in traces
        ]
    return row


def heat_cost(blocks: int, layers: int, steps: int = 5) -> dict[str, float]:
    """Measure the median milliseconds to touch and to query the blocks of one layer.

    The blocks are as far apart in the table as decoding leaves them.
    """
    table = HeatTable()
    slots: list[list[int]] = [[] for _ in range(layers)]
    groups = [table.new_group() for _ in range(layers)]
    for position in range(blocks // layers):
        for layer, group in enumerate(groups):
            slots[layer].append(table.add(group, position))
    per_layer = [np.array(layer, np.int64) for layer in slots]
    touches, queries = [], []
    for _ in range(steps):
        table.tick()
        for layer_slots in per_layer:
            touches.append(_milliseconds(table.touch, layer_slots))
            queries.append(_milliseconds(table.access_probability, layer_slots))
    return {
        "layers": layers,
        "touch_milliseconds": round(statistics.median(touches), 4),
        "query_milliseconds": round(statistics.median(queries), 4),
        "bytes_per_block": round(table.nbytes / len(table), 1),
    }


def _milliseconds(call: Callable[[Slots], object], slots: Slots) -> float:
    started = time.perf_counter()
    call(slots)
    return (time.perf_counter() - started) * 1000


def _recorded(path: str) -> Case:
    trace = Trace.load(path)
    return Case(lambda random: trace, (0.1, 0.25, 0.5), by_chance=False)


def _print(rows: list[Row]) -> None:
    width = 2 + max(len(row.name) for row in rows)
    print("hit rate, and ratio to Belady's; * the default there")
    print(f"{'trace':<{width}}{'tier':>6}{_OPTIMUM:>8}" + "".join(f"{policy:>13}" for policy in _POLICIES))
    for row in rows:
        rates = {name: statistics.mean(one.hit_rate for one in replays) for name, replays in row.replays.items()}
        print(f"{row.name:<{width}}{row.share:>6.1%}{rates[_OPTIMUM]:>8.3f}", end="")
        for policy in _POLICIES:
            mark = "*" if policy == row.case.default else " "
            print(f"{rates[policy]:>7.3f}{statistics.mean(row.ratios(policy)):>5.2f}{mark}", end="")
        print()
    print(f"\nmoves per step\n{'trace':<{width}}{'tier':>6}{_OPTIMUM:>8}", end="")
    print("".join(f"{policy:>8}" for policy in _POLICIES) + f"{'default':>10}{'worst':>8}{'limit':>8}")
    for row in rows:
        moves = [statistics.mean(one.moves_per_step for one in replays) for replays in row.replays.values()]
        print(f"{row.name:<{width}}{row.share:>6.1%}" + "".join(f"{value:>8.1f}" for value in moves), end="")
        worst = "-" if row.worst is None else f"{row.worst:.3f}"
        limit = "-" if row.case.limit is None else f"{row.case.limit:.2f}"
        print(f"{row.case.default or '-':>10}{worst:>8}{limit:>8}{'' if row.kept else '  missed'}")
