"""What every eviction policy does; each implementation runs the same suite."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_tiered_cache import ConfigError, EvictionPolicy, TieredCacheConfig, register_eviction
from hf_tiered_cache.eviction import POLICIES, BeladyPolicy, Values, make_eviction_policy
from hf_tiered_cache.heat import HeatTable, Slots

CONFIG = TieredCacheConfig(protection_steps=2, warmup_steps=8)
SLOTS = np.arange(24)


def make(name: str, table: HeatTable, config: TieredCacheConfig = CONFIG) -> EvictionPolicy:
    """Those that know the future too."""
    return POLICIES[name](table, config)


def a_table(reads: list[list[int]]) -> HeatTable:
    """24 blocks of three groups, and a step per list of reads."""
    table = HeatTable()
    groups = [table.new_group() for _ in range(3)]
    for slot in SLOTS:
        table.add(groups[slot % 3], slot // 3)
    for slots in reads:
        table.tick()
        table.touch(np.array(slots, np.int64))
    return table


READS = st.lists(st.lists(st.sampled_from(SLOTS.tolist()), max_size=12), max_size=40)
SUBSETS = st.permutations(SLOTS.tolist()).flatmap(
    lambda slots: st.integers(0, len(slots)).map(lambda count: np.array(slots[:count], np.int64))
)
COUNTS = st.integers(0, len(SLOTS) + 2)


@pytest.mark.parametrize("name", sorted(POLICIES))
class TestContract:
    @settings(deadline=None)
    @given(reads=READS, candidates=SUBSETS, count=COUNTS)
    def test_exactly_what_is_asked_or_nothing(
        self, name: str, reads: list[list[int]], candidates: Slots, count: int
    ) -> None:
        policy = make(name, a_table(reads))
        values = policy.keep_values(candidates)
        assert values.dtype == np.float64 and values.shape == candidates.shape and not np.isnan(values).any()
        victims = policy.victims(candidates, count)
        assert victims.dtype == np.int64
        if count > np.isfinite(values).sum():
            assert len(victims) == 0
            return
        assert len(victims) == count == len(set(victims.tolist())) and set(victims) <= set(candidates)
        assert (np.diff(policy.keep_values(victims)) >= 0).all(), "the first to leave comes first"
        others = candidates[~np.isin(candidates, victims)]
        if count and len(others):
            assert policy.keep_values(victims).max() <= policy.keep_values(others).min()

    @settings(deadline=None)
    @given(reads=READS, candidates=SUBSETS, count=COUNTS)
    def test_the_same_again(self, name: str, reads: list[list[int]], candidates: Slots, count: int) -> None:
        policy = make(name, a_table(reads))
        first = policy.victims(candidates, count).tolist()
        assert policy.victims(candidates, count).tolist() == first, "naming changes nothing"
        assert policy.victims(candidates[::-1], count).tolist() == first, "whatever their order"
        assert make(name, a_table(reads)).victims(candidates, count).tolist() == first

    @settings(deadline=None)
    @given(reads=READS, candidates=SUBSETS, protection=st.integers(0, 4), warmup=st.integers(0, 20))
    def test_protection_and_warmup(
        self, name: str, reads: list[list[int]], candidates: Slots, protection: int, warmup: int
    ) -> None:
        table = a_table(reads)
        config = TieredCacheConfig(protection_steps=protection, warmup_steps=warmup)
        policy = make(name, table, config)
        evictable = policy.evictable(candidates)
        if policy.offline:
            assert evictable.tolist() == candidates.tolist()
        elif policy.acts_on_accesses and table.now < warmup:
            assert len(evictable) == 0
        else:
            recent = {slot for slots in reads[-protection or len(reads) :] for slot in slots}
            if table.now < protection:
                recent = set(SLOTS.tolist())  # they were sealed in step 0
            assert evictable.tolist() == [slot for slot in candidates.tolist() if slot not in recent]

    @settings(deadline=None)
    @given(reads=READS, slots=SUBSETS, cut=COUNTS, free=st.integers(0, 5), limit=COUNTS)
    def test_promotions(
        self, name: str, reads: list[list[int]], slots: Slots, cut: int, free: int, limit: int
    ) -> None:
        policy = make(name, a_table(reads))
        lower, upper = slots[:cut], slots[cut:]
        rising, leaving = policy.promotions(lower, upper, free, limit)
        assert rising.dtype == leaving.dtype == np.int64
        assert len(set(rising.tolist())) == len(rising) <= limit and set(rising) <= set(lower)
        assert len(set(leaving.tolist())) == len(leaving) and set(leaving) <= set(upper)
        assert len(rising) == min(free, limit, len(lower)) + len(leaving)
        gains = policy.keep_values(rising[len(rising) - len(leaving) :])
        assert (gains > policy.keep_values(leaving) + policy.margin).all()
        worth = policy.keep_values(rising)
        assert (worth[1:] <= worth[:-1]).all(), "the most valuable first"

    @settings(deadline=None)
    @given(reads=READS, slots=SUBSETS, cut=COUNTS)
    def test_an_exchange_is_final(self, name: str, reads: list[list[int]], slots: Slots, cut: int) -> None:
        policy = make(name, a_table(reads))
        lower, upper = slots[:cut], slots[cut:]
        rising, leaving = policy.promotions(lower, upper, 0, len(lower))
        lower = np.concatenate([lower[~np.isin(lower, rising)], leaving])
        upper = np.concatenate([upper[~np.isin(upper, leaving)], rising])
        again = policy.promotions(lower, upper, 0, len(lower))
        assert [part.tolist() for part in again] == [[], []]


def steps(table: HeatTable, count: int, *slots: int) -> None:
    """So many steps, each of which reads the slots."""
    for _ in range(count):
        table.tick()
        table.touch(np.array(slots, np.int64))


def test_pinned_keeps_what_is_used() -> None:
    table = a_table([list(range(24))] * 10)
    policy = make("pinned", table)
    assert policy.victims(SLOTS, 1).size == 0
    nothing = policy.promotions(SLOTS[:12], SLOTS[12:], 0, 12)
    assert [part.size for part in nothing] == [0, 0]
    assert policy.promotions(SLOTS[:12], SLOTS[12:], 3, 12)[0].tolist() == [0, 1, 2], "only free places"


def test_pinned_lets_idle_requests_go() -> None:
    table = a_table([list(range(24))] * 10)
    policy = make("pinned", table)
    active, idle = SLOTS[SLOTS % 3 == 0], SLOTS[SLOTS % 3 == 1]
    steps(table, 9, *active)
    assert policy.victims(SLOTS, len(idle) * 2).size == len(idle) * 2
    assert policy.victims(SLOTS, len(idle) * 2 + 1).size == 0
    rising, leaving = policy.promotions(active, idle, 0, 2)
    assert set(rising) <= set(active) and set(leaving) <= set(idle) and len(leaving) == 2


def test_heat_ignores_what_is_read_once() -> None:
    table = a_table([[0, 3, 6]] * 20)
    policy = make("heat", table)
    steps(table, 1, 9)
    assert [part.size for part in policy.promotions(np.array([9]), np.array([0, 3, 6]), 0, 1)] == [0, 0]
    steps(table, 6, 9)
    assert policy.promotions(np.array([9]), np.array([0, 3, 6]), 0, 1)[0].tolist() == [9]


def test_heat_lets_idle_requests_go_first() -> None:
    table = a_table([[0, 3, 1, 4]] * 20)
    steps(table, 9, 0)
    assert set(make("heat", table).victims(np.array([0, 1, 3, 4]), 2).tolist()) == {1, 4}


def test_the_textbook_policies() -> None:
    table = a_table([[0, 1, 2], [0, 1], [2], [1]])
    some = np.array([0, 1, 2, 3])
    assert make("lru", table).victims(some, 4).tolist() == [3, 0, 2, 1]
    assert make("fifo", table).victims(some[::-1], 4).tolist() == [0, 1, 2, 3]
    steps(table, 3, 0)
    assert make("lfu", table).victims(some, 1).tolist() == [3]


def test_lru_knows_the_order_within_a_step() -> None:
    table = a_table([])
    table.tick()
    for slot in (5, 2, 7):
        table.touch(np.array([slot]))
    assert make("lru", table).victims(np.array([2, 5, 7]), 3).tolist() == [5, 2, 7]


def test_random_changes_its_mind_in_every_step() -> None:
    table = a_table([])
    policy = make("random", table)
    before = policy.victims(SLOTS, 24).tolist()
    table.tick()
    assert policy.victims(SLOTS, 24).tolist() != before


def test_belady_keeps_what_is_read_soonest() -> None:
    policy = BeladyPolicy(a_table([]), CONFIG)
    policy.next_read = SLOTS[::-1].copy()
    assert policy.victims(SLOTS, 3).tolist() == [0, 1, 2]
    assert policy.promotions(SLOTS[:12], SLOTS[12:], 0, 12)[0].size == 0
    assert policy.promotions(SLOTS[12:], SLOTS[:12], 0, 2)[0].tolist() == [23, 22]


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="fifo, heat, lfu, lru, pinned, random"):
        make_eviction_policy("oracle", HeatTable(), CONFIG)
    TieredCacheConfig(eviction="oracle")  # the registry may still grow when settings are made


def test_belady_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"offline.*bench policies.*take one of fifo, heat"):
        make_eviction_policy("belady", HeatTable(), CONFIG)


@pytest.fixture
def newest_first() -> Iterator[str]:
    @register_eviction("newest-first")
    class NewestFirst(EvictionPolicy):
        def keep_values(self, slots: Slots) -> Values:
            return -self.table.order_of_sealing(slots).astype(np.float64)

    yield "newest-first"
    del POLICIES["newest-first"]


def test_a_policy_of_ones_own(newest_first: str) -> None:
    policy = make_eviction_policy(newest_first, a_table([[]] * 8), CONFIG)
    assert policy.victims(policy.evictable(SLOTS), 3).tolist() == [23, 22, 21]


def test_the_default_is_there() -> None:
    name = TieredCacheConfig().eviction_policy
    assert type(make_eviction_policy(name, HeatTable(), CONFIG)) is POLICIES[name]
