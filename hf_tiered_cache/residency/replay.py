"""Traces of the calls of a heat table, and replays of them with any eviction policy.

```python
table = RecordingTable()          # in place of a HeatTable
...
table.trace.save("decode.npz")
replay(Trace.load("decode.npz"), "heat", capacity=1000).hit_rate
```

A replay has one tier of some equal blocks above a tier that holds all others. It runs the policies of the cache
over a heat table that receives the same calls again.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from enum import IntEnum
from zipfile import BadZipFile

import numpy as np

from ..core.config import TieredCacheConfig
from ..core.errors import ConfigError
from .eviction import POLICIES, BeladyPolicy, EvictionPolicy
from .heat import HeatTable, Mask, Slots

_NEVER = np.iinfo(np.int64).max


class Call(IntEnum):
    """The calls of a heat table that a trace records, with the arguments that it keeps."""

    TICK = 0
    NEW_GROUP = 1  # group
    FREE_GROUP = 2  # group
    TRUNCATE = 3  # group, length
    ADD = 4  # group, position, slot
    REMOVE = 5  # slots
    TOUCH = 6  # slots, ascending


@dataclass(frozen=True)
class Trace:
    """The calls of a heat table, in order. The same calls give the same groups and slots on any new table.

    Args:
        calls: each with its arguments, int64.
    """

    calls: list[tuple[Call, Slots]] = field(default_factory=list)

    @property
    def steps(self) -> int:
        """The number of steps."""
        return sum(call is Call.TICK for call, _ in self.calls)

    @property
    def most_blocks(self) -> int:
        """The largest number of blocks registered at a time."""
        changes = [
            1 if call is Call.ADD else -len(arguments)
            for call, arguments in self.calls
            if call in (Call.ADD, Call.REMOVE)
        ]
        return int(np.cumsum([0, *changes]).max())

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write a `.npz` file: `calls` (uint8), and `arguments` (int64) that end at `ends` (int64)."""
        with open(path, "wb") as file:
            np.savez_compressed(
                file,
                calls=np.array([call for call, _ in self.calls], np.uint8),
                ends=np.cumsum([len(arguments) for _, arguments in self.calls], dtype=np.int64),
                arguments=np.concatenate([np.empty(0, np.int64), *(arguments for _, arguments in self.calls)]),
            )

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Trace:
        """Read what `save` has written.

        Raises:
            ConfigError: the file is something else.
            OSError: it cannot be read.
        """
        try:
            with open(path, "rb") as file, np.load(file) as data:
                calls = [Call(number) for number in data["calls"]]
                arguments = np.split(data["arguments"], data["ends"])[:-1]
                return cls(list(zip(calls, arguments, strict=True)))
        except (ValueError, KeyError, BadZipFile) as error:
            raise ConfigError(
                f"{os.fspath(path)!r} is not a trace that Trace.save has written: {error}"
            ) from error


class RecordingTable(HeatTable):
    """A heat table that also keeps a trace of its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.trace = Trace()

    def tick(self) -> None:
        super().tick()
        self._record(Call.TICK)

    def new_group(self) -> int:
        group = super().new_group()
        self._record(Call.NEW_GROUP, group)
        return group

    def free_group(self, group: int) -> None:
        super().free_group(group)
        self._record(Call.FREE_GROUP, group)

    def truncate(self, group: int, length: int) -> None:
        super().truncate(group, length)
        self._record(Call.TRUNCATE, group, length)

    def add(self, group: int, position: int) -> int:
        slot = super().add(group, position)
        self._record(Call.ADD, group, position, slot)
        return slot

    def remove(self, slots: Slots) -> None:
        super().remove(slots)
        self.trace.calls.append((Call.REMOVE, slots.astype(np.int64)))

    def touch(self, slots: Slots) -> None:
        super().touch(slots)
        self.trace.calls.append((Call.TOUCH, np.unique(slots).astype(np.int64)))

    def _record(self, call: Call, *arguments: int) -> None:
        self.trace.calls.append((call, np.array(arguments, np.int64)))


@dataclass(frozen=True)
class Replay:
    """The result of one policy on a trace.

    Args:
        policy: its name.
        capacity: blocks of the tier.
        steps: steps of the trace.
        accesses: reads of blocks; sealing a block is not one.
        hits: those that found their block in the tier.
        moves: promotions and demotions; the first placement of a new block is not one.
    """

    policy: str
    capacity: int
    steps: int
    accesses: int
    hits: int
    moves: int

    @property
    def hit_rate(self) -> float:
        """Share of the accesses that were hits; 0 without any."""
        return self.hits / self.accesses if self.accesses else 0.0

    @property
    def moves_per_step(self) -> float:
        """Moves per step; 0 without any step."""
        return self.moves / self.steps if self.steps else 0.0


def replay(trace: Trace, policy_name: str, capacity: int, config: TieredCacheConfig | None = None) -> Replay:
    """Run one policy over a trace.

    A block that is sealed, or read from below, enters the tier if there is room or if `promotions` finds it worth
    more than one that may leave; otherwise it goes to the lower tier, or stays there. The blocks of one touch are
    read before any of them moves.

    Args:
        trace: not changed.
        policy_name: of `POLICIES`. `"belady"` gives the largest number of hits that any choice reaches under the
            rule above. Between two reads a block takes a place or not, so a choice is a set of intervals of which
            no more than `capacity` overlap, and dropping those that end last keeps the most (U. Faigle and
            W. Nawijn, Discrete Applied Mathematics 58(1), 1995).
        capacity: blocks of the tier.
        config: protection and warm-up; the default settings when `None`.

    Raises:
        ConfigError: there is no such policy.
    """
    if policy_name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {policy_name!r}; there are {', '.join(sorted(POLICIES))}")
    table = HeatTable()
    policy = POLICIES[policy_name](table, config or TieredCacheConfig())
    tier = _Tier(policy, capacity, trace.most_blocks)  # slots are reused before new ones are added
    future = _Future(trace) if isinstance(policy, BeladyPolicy) else None
    accesses = hits = moves = 0
    for index, (call, arguments) in enumerate(trace.calls):
        _tell(table, call, arguments)
        if future is not None and isinstance(policy, BeladyPolicy):
            policy.next_read = future.after(index)
        if call is Call.ADD:
            moves += tier.enter(arguments[2:])[1]
        elif call is Call.REMOVE:
            tier.remove(arguments)
        elif call is Call.TOUCH:
            below = arguments[~tier.holds(arguments)]
            accesses += len(arguments)
            hits += len(arguments) - len(below)
            moves += sum(tier.enter(below))
    return Replay(policy_name, capacity, trace.steps, accesses, hits, moves)


class _Tier:
    """The slots in the tier, never more than `capacity`."""

    def __init__(self, policy: EvictionPolicy, capacity: int, slots: int) -> None:
        self._policy = policy
        self._capacity = capacity
        self._held = np.zeros(slots, np.bool_)

    def holds(self, slots: Slots) -> Mask:
        return self._held[slots]

    def enter(self, slots: Slots) -> tuple[int, int]:
        """Apply the policy's promotions; return the numbers of promotions and demotions."""
        if len(slots) == 0 or self._capacity == 0:
            return 0, 0
        held = np.flatnonzero(self._held)
        rising, leaving = self._policy.promotions(
            slots, self._policy.evictable(held), self._capacity - len(held), len(slots)
        )
        self._held[leaving] = False
        self._held[rising] = True
        return len(rising), len(leaving)

    def remove(self, slots: Slots) -> None:
        self._held[slots] = False


class _Future:
    """The index of the call that reads each slot next, or `_NEVER`."""

    def __init__(self, trace: Trace) -> None:
        self._next_read = np.full(trace.most_blocks, _NEVER)
        self._after: dict[int, tuple[Slots, Slots]] = {}
        upcoming = self._next_read.copy()
        for index in range(len(trace.calls) - 1, -1, -1):
            call, arguments = trace.calls[index]
            if call in (Call.ADD, Call.TOUCH):
                slots = arguments[2:] if call is Call.ADD else arguments
                self._after[index] = slots, upcoming[slots]
                upcoming[slots] = index if call is Call.TOUCH else _NEVER
            elif call is Call.REMOVE:
                upcoming[arguments] = _NEVER

    def after(self, index: int) -> Slots:
        """Return these indices after a call, int64 by slot. Call in ascending order; each call overwrites them."""
        if index in self._after:
            slots, next_read = self._after[index]
            self._next_read[slots] = next_read
        return self._next_read


def _tell(table: HeatTable, call: Call, arguments: Slots) -> None:
    if call is Call.TICK:
        table.tick()
    elif call is Call.TOUCH:
        table.touch(arguments)
    elif call is Call.ADD:
        table.add(int(arguments[0]), int(arguments[1]))
    elif call is Call.REMOVE:
        table.remove(arguments)
    elif call is Call.NEW_GROUP:
        table.new_group()
    elif call is Call.FREE_GROUP:
        table.free_group(int(arguments[0]))
    else:
        table.truncate(int(arguments[0]), int(arguments[1]))
