"""The package's policies pass the contract suite, and keep the additional promises of each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from hf_tiered_cache import ConfigError, EvictionPolicy, TieredCacheConfig, register_eviction
from hf_tiered_cache.residency.eviction import POLICIES, BeladyPolicy, Values, make_eviction_policy
from hf_tiered_cache.residency.heat import HeatTable, Slots
from hf_tiered_cache.testing import EvictionContract
from hf_tiered_cache.testing.eviction import CONFIG, SLOTS, a_table


def make(name: str, table: HeatTable, config: TieredCacheConfig = CONFIG) -> EvictionPolicy:
    """Make any policy, offline ones included."""
    return POLICIES[name](table, config)


for _name, _policy_class in sorted(POLICIES.items()):
    globals()[f"Test{_name.title()}"] = type(
        f"Test{_name.title()}", (EvictionContract,), {"policy_class": _policy_class, "__module__": __name__}
    )


def test_every_policy_has_the_suite() -> None:
    assert {suite.policy_class for suite in EvictionContract.__subclasses__()} >= set(POLICIES.values())


def steps(table: HeatTable, count: int, *slots: int) -> None:
    """Take `count` steps, each of which reads the slots."""
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
