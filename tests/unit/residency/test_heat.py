"""The heat table, against a plain record of every access."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_tiered_cache.residency.heat import DECAY, HeatTable, Slots


def slots_of(*slots: int) -> Slots:
    return np.array(slots, np.int64)


@dataclass
class Group:
    step: int = 0
    last: int = 0
    length: int = 0
    blocks: int = 0
    freed: bool = False


@dataclass
class Known:
    """The expected record of a block: its reads, by step and by step of its group."""

    group: Group
    position: int
    steps: list[int] = field(default_factory=list)
    own_steps: list[int] = field(default_factory=list)


class Account:
    """A heat table of lists and loops."""

    def __init__(self) -> None:
        self.table = HeatTable()
        self.groups: dict[int, Group] = {}
        self.blocks: dict[int, Known] = {}

    def new_group(self) -> None:
        group = self.table.new_group()
        if group in self.groups:
            assert self.groups[group].freed and self.groups[group].blocks == 0
        self.groups[group] = Group(last=self.table.now)

    def add(self, choice: int) -> None:
        usable = [number for number, group in self.groups.items() if not group.freed]
        if not usable:
            return
        number = usable[choice % len(usable)]
        group = self.groups[number]
        slot = self.table.add(number, group.length)
        assert slot not in self.blocks
        self.blocks[slot] = Known(group, group.length)
        group.length += 1
        group.blocks += 1
        self._access(slot)

    def touch(self, choices: list[int]) -> None:
        living = sorted(self.blocks)
        touched = [living[choice % len(living)] for choice in choices] if living else []
        self.table.touch(slots_of(*touched))
        for slot in set(touched):
            self._access(slot)

    def remove(self, choices: list[int]) -> None:
        living = sorted(self.blocks)
        removed = sorted({living[choice % len(living)] for choice in choices} if living else set())
        self.table.remove(slots_of(*removed))
        for slot in removed:
            self.blocks.pop(slot).group.blocks -= 1

    def free_group(self, choice: int) -> None:
        usable = [number for number, group in self.groups.items() if not group.freed]
        if usable:
            self.table.free_group(usable[choice % len(usable)])
            self.groups[usable[choice % len(usable)]].freed = True

    def truncate(self, choice: int) -> None:
        for number, group in self.groups.items():
            if not group.freed:
                group.length = min(group.length, choice)
                self.table.truncate(number, choice)

    def _access(self, slot: int) -> None:
        known = self.blocks[slot]
        if known.group.last < self.table.now:
            known.group.last = self.table.now
            known.group.step += 1
        if not known.steps or known.steps[-1] != self.table.now:
            known.steps.append(self.table.now)
            known.own_steps.append(known.group.step)

    def check(self) -> None:
        table, slots = self.table, slots_of(*self.blocks)
        assert len(table) == len(self.blocks)
        counts, probabilities = table.accesses(slots), table.access_probability(slots)
        assert probabilities.dtype == np.float32 and counts.dtype == np.float32
        for index, known in enumerate(self.blocks.values()):
            step = known.group.step
            count = sum(DECAY ** (step - own) for own in set(known.own_steps))
            distance = max(known.group.length - 1 - known.position, 0)
            log_odds = -1.68 - 0.58 * math.log1p(step - known.own_steps[-1]) + 0.481 * count
            log_odds -= 0.1 * math.log1p(distance)
            assert counts[index] == pytest.approx(count, rel=1e-4)
            assert probabilities[index] == pytest.approx(1 / (1 + math.exp(-log_odds)), rel=1e-3)
        assert table.last_access(slots).tolist() == [known.steps[-1] for known in self.blocks.values()]
        for steps in (0, 1, 3):
            expected = [table.now - known.steps[-1] < steps for known in self.blocks.values()]
            assert table.protected(slots, steps).tolist() == expected


NUMBERS = st.integers(0, 1000)
CALLS = st.lists(
    st.one_of(
        st.tuples(st.just("tick")),
        st.tuples(st.just("new_group")),
        st.tuples(st.just("add"), NUMBERS),
        st.tuples(st.just("touch"), st.lists(NUMBERS, max_size=8)),
        st.tuples(st.just("remove"), st.lists(NUMBERS, max_size=3)),
        st.tuples(st.just("free_group"), NUMBERS),
        st.tuples(st.just("truncate"), st.integers(0, 6)),
    ),
    max_size=80,
)


@settings(deadline=None)
@given(CALLS)
def test_against_a_plain_account(calls: list[tuple[str, object]]) -> None:
    account = Account()
    for name, *arguments in [("new_group",), *calls]:
        getattr(account.table if name == "tick" else account, name)(*arguments)
    account.check()


def filled(blocks: int, groups: int = 1) -> tuple[HeatTable, list[Slots]]:
    """Make groups whose blocks were sealed in turn."""
    table = HeatTable()
    numbers = [table.new_group() for _ in range(groups)]
    slots: list[list[int]] = [[] for _ in numbers]
    for position in range(blocks):
        for number in numbers:
            slots[number].append(table.add(number, position))
    return table, [slots_of(*of_group) for of_group in slots]


def test_reads_and_nearness_make_reading_likelier() -> None:
    table, (slots,) = filled(8)
    assert (np.diff(table.access_probability(slots)) > 0).all(), "the newest is the likeliest"
    before = table.access_probability(slots[:1])
    for _ in range(20):
        table.tick()
        table.touch(slots[:1])
        after = table.access_probability(slots[:1])
        assert after > before
        before = after
    assert after > 0.9 and (table.access_probability(slots[1:]) < 0.1).all()


def test_other_requests_do_not_make_blocks_colder() -> None:
    table, (mine, other) = filled(4, groups=2)
    before = table.access_probability(mine)
    for _ in range(50):
        table.tick()
        table.touch(other)
    assert np.array_equal(table.access_probability(mine), before)
    assert not table.protected(mine, 50).any() and table.protected(mine, 51).all()


@pytest.mark.parametrize("requests", [1, 4, 30, 64])
def test_idle(requests: int) -> None:
    table, slots = filled(2, groups=requests)
    for turn in range(10):
        for of_request in slots:
            if turn > 1:  # the first turns determine the interval
                assert not table.idle(np.concatenate(slots)).any(), "they only take turns"
            table.tick()
            table.touch(of_request)
    limit = min(max(4 * requests, 8), 256)
    for pause in range(1, limit + 3):
        table.tick()
        if abs(pause - limit) > 1:  # the interval is a mean
            assert table.idle(slots[-1]).all() == (pause > limit)
    table.touch(slots[-1][:1])
    assert not table.idle(slots[-1]).any(), "one block that is read stands for its request"


def test_a_request_that_was_never_read_is_idle_in_the_end() -> None:
    table, (slots,) = filled(2)
    for step in range(300):
        assert table.idle(slots).any() == (step > 256)
        table.tick()


def test_order_within_a_step() -> None:
    table, (first, second) = filled(2, groups=2)
    table.tick()
    table.touch(second)
    table.touch(first)
    assert table.order_of_access(first).min() > table.order_of_access(second).max()
    assert table.order_of_sealing(np.concatenate([first, second])).tolist() == [0, 2, 1, 3]


def test_slots_and_groups_are_used_again() -> None:
    table = HeatTable()
    group = table.new_group()
    slots = slots_of(*(table.add(group, position) for position in range(100)))
    capacity_bytes = table.nbytes
    for _ in range(5):
        table.free_group(group)
        assert table.new_group() != group, "its blocks are allocated"
        table.remove(slots)
        assert len(table) == 0
        group = table.new_group()
        again = [table.add(group, position) for position in range(100)]
        assert sorted(again) == slots.tolist()
    assert table.nbytes == capacity_bytes
    assert capacity_bytes == 128 * 32


def test_warm() -> None:
    table = HeatTable()
    assert table.warm(0) and not table.warm(1)
    table.tick()
    assert table.warm(1)
