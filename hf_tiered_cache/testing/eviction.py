"""Contract suite of eviction policies, to subclass."""

from __future__ import annotations

import numpy as np
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ..core.config import TieredCacheConfig
from ..residency.eviction import EvictionPolicy
from ..residency.heat import HeatTable, Slots

CONFIG = TieredCacheConfig(protection_steps=2, warmup_steps=8)
SLOTS = np.arange(24)


def a_table(reads: list[list[int]]) -> HeatTable:
    """Return a table of 24 blocks in three groups, after a step per list of reads."""
    table = HeatTable()
    groups = [table.new_group() for _ in range(3)]
    for slot in SLOTS.tolist():
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
# A suite is inherited, so one method runs in several classes.
_settings = settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors])


class EvictionContract:
    """The contract of an eviction policy; see `EvictionPolicy` for its rules. Subclass it in a test module:

    ```python
    class TestMyPolicy(EvictionContract):
        policy_class = MyPolicy
    ```
    """

    policy_class: type[EvictionPolicy]

    def make(self, table: HeatTable, config: TieredCacheConfig = CONFIG) -> EvictionPolicy:
        """Return a policy for a tier."""
        return self.policy_class(table, config)

    @_settings
    @given(reads=READS, candidates=SUBSETS, count=COUNTS)
    def test_exactly_what_is_asked_or_nothing(self, reads: list[list[int]], candidates: Slots, count: int) -> None:
        policy = self.make(a_table(reads))
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

    @_settings
    @given(reads=READS, candidates=SUBSETS, count=COUNTS)
    def test_the_same_again(self, reads: list[list[int]], candidates: Slots, count: int) -> None:
        policy = self.make(a_table(reads))
        first = policy.victims(candidates, count).tolist()
        assert policy.victims(candidates, count).tolist() == first, "choosing victims changes nothing"
        assert policy.victims(candidates[::-1], count).tolist() == first, "the order of candidates has no effect"
        assert self.make(a_table(reads)).victims(candidates, count).tolist() == first

    @_settings
    @given(reads=READS, candidates=SUBSETS, protection=st.integers(0, 4), warmup=st.integers(0, 20))
    def test_protection_and_warmup(
        self, reads: list[list[int]], candidates: Slots, protection: int, warmup: int
    ) -> None:
        table = a_table(reads)
        config = TieredCacheConfig(protection_steps=protection, warmup_steps=warmup)
        policy = self.make(table, config)
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

    @_settings
    @given(reads=READS, slots=SUBSETS, cut=COUNTS, free=st.integers(0, 5), limit=COUNTS)
    def test_promotions(self, reads: list[list[int]], slots: Slots, cut: int, free: int, limit: int) -> None:
        policy = self.make(a_table(reads))
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

    @_settings
    @given(reads=READS, slots=SUBSETS, cut=COUNTS)
    def test_an_exchange_is_final(self, reads: list[list[int]], slots: Slots, cut: int) -> None:
        policy = self.make(a_table(reads))
        lower, upper = slots[:cut], slots[cut:]
        rising, leaving = policy.promotions(lower, upper, 0, len(lower))
        lower = np.concatenate([lower[~np.isin(lower, rising)], leaving])
        upper = np.concatenate([upper[~np.isin(upper, leaving)], rising])
        again = policy.promotions(lower, upper, 0, len(lower))
        assert [part.tolist() for part in again] == [[], []]
