"""Eviction policies: their contract, their registry, and the built-in ones.

    keep_values   the value of each block; the smallest leaves first
       ├─ victims      the blocks that are demoted to make room
       └─ promotions   the blocks that are promoted from the tier below, and those that are demoted in exchange

A new policy is one class with `keep_values` and `register_eviction`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import numpy as np

from ..core.config import TieredCacheConfig
from ..core.errors import ConfigError
from ..core.registry import Registry
from ..tiers.io import failures_as_tier_errors
from .heat import HeatTable, Slots

Values = np.ndarray[Any, np.dtype[np.float64]]

_PolicyClass = TypeVar("_PolicyClass", bound="type[EvictionPolicy]")


class EvictionPolicy(ABC):
    """Orders the blocks of one tier. It moves nothing, keeps no state, and is called under its owner's lock.

    Blocks are given by their slots in the heat table, in arrays without duplicates. Of two blocks of the same
    value, the one that was sealed first leaves first.

    A custom policy implements `keep_values`, and is registered with `register_eviction`. When it raises, it is
    called once more; when it raises again, nothing moves, and the user gets a `TierError` with the cause.

    Args:
        table: accesses of all blocks.
        config: protection and warm-up.
    """

    acts_on_accesses: ClassVar[bool] = True
    """True if the values come from the heat table's accesses, so that nothing leaves before it is warm."""
    margin: ClassVar[float] = 0.0
    """A block only leaves for one whose value is larger by more than this."""
    offline: ClassVar[bool] = False
    """True if the policy needs to know the future."""

    def __init__(self, table: HeatTable, config: TieredCacheConfig) -> None:
        self.table = table
        self.config = config

    @abstractmethod
    def keep_values(self, slots: Slots) -> Values:
        """Return the value of each block, float64: the smallest leaves first, infinity never leaves."""

    def evictable(self, slots: Slots) -> Slots:
        """Return the blocks that may leave: none before the heat table is warm, none that is protected."""
        if self.acts_on_accesses and not self.table.warm(self.config.warmup_steps):
            return slots[:0]
        return slots[~self.table.protected(slots, self.config.protection_steps)]

    def victims(self, candidates: Slots, count: int) -> Slots:
        """Choose the blocks that leave first.

        Args:
            candidates: blocks that may leave; see `evictable`.
            count: how many must leave.

        Returns:
            Exactly `count` of the candidates, the first to leave first; none when that many cannot leave.
        """
        values = self.keep_values(candidates)
        finite = np.isfinite(values)
        chosen, _ = self._smallest(candidates[finite], values[finite], count)
        return chosen if len(chosen) == count else chosen[:0]

    def promotions(self, lower: Slots, upper: Slots, free: int, limit: int) -> tuple[Slots, Slots]:
        """Choose the blocks that are promoted from the tier below, and those that leave for them.

        Args:
            lower: blocks of the tier below that may be promoted.
            upper: blocks of this tier that may leave; see `evictable`.
            free: how many may be promoted without any leaving.
            limit: how many may be promoted.

        Returns:
            The promoted blocks, the most valuable first, and the leaving ones: the n-th of these leaves for the
            n-th promoted block after the first `free`, whose value is larger by more than `margin`.
        """
        free = max(0, free)
        rising, worth = self._smallest(lower, -self.keep_values(lower), limit)
        leaving, least = self._smallest(upper, self.keep_values(upper), len(rising) - free)
        # Values of promoted blocks fall and those of leaving blocks rise: the exchanges that pay come first.
        exchanged = np.count_nonzero(-worth[free : free + len(leaving)] > least + self.margin)
        return rising[: free + exchanged], leaving[:exchanged]

    def _smallest(self, slots: Slots, values: Values, count: int) -> tuple[Slots, Values]:
        """Return the `count` slots of the smallest values, ascending; equal ones in the order of sealing."""
        count = max(0, count)
        if 0 < count < len(slots):
            candidates = values <= np.partition(values, count - 1)[count - 1]
            slots, values = slots[candidates], values[candidates]
        order = np.lexsort((self.table.order_of_sealing(slots), values))[:count]
        return slots[order], values[order]


EVICTIONS: Registry[EvictionPolicy] = Registry(
    "eviction policy",
    EvictionPolicy,  # type: ignore[type-abstract]
    "hf_tiered_cache.eviction",
    offered=lambda policy_class: not policy_class.offline,
)
"""The policies that `eviction` can name."""

POLICIES = EVICTIONS.classes


def register_eviction(name: str, *, replace: bool = False) -> Callable[[_PolicyClass], _PolicyClass]:
    """Class decorator: make a policy available as `eviction=name`.

    Args:
        name: its name.
        replace: whether it takes the place of another class of that name. A class of the same module and qualified
            name always does: a notebook cell can be run again.

    Raises:
        ConfigError: the name is another class's, or `keep_values` is missing.
    """
    return EVICTIONS.register(name, replace=replace)


def make_eviction_policy(name: str, table: HeatTable, config: TieredCacheConfig) -> EvictionPolicy:
    """Return a fresh policy for one tier.

    Raises:
        ConfigError: there is no policy of that name, or it can only be replayed.
        TierError: the policy's own `__init__` failed.
    """
    policy_class = EVICTIONS.get(name)
    if policy_class.offline:
        raise ConfigError(
            f"eviction={name!r} needs to know the future, so it only works offline, on recorded traces "
            f"(`python -m hf_tiered_cache.bench policies`); take one of {', '.join(EVICTIONS.names())}"
        )
    with failures_as_tier_errors(f"eviction policy {name!r} cannot be made"):
        return policy_class(table, config)


@register_eviction("pinned")
class PinnedPolicy(EvictionPolicy):
    """Keeps a static set: blocks stay while their request is in use; the coldest of idle requests leave first.

    The default in exact mode. There a step reads every block, in a cycle, so a tier that holds some share of them
    serves at most that share of the reads. This policy reaches that bound and moves nothing; LRU always evicts the
    block that is needed next.
    """

    def keep_values(self, slots: Slots) -> Values:
        probability = self.table.access_probability(slots).astype(np.float64)
        return np.where(self.table.idle(slots), probability, np.inf)


@register_eviction("heat")
class HeatPolicy(EvictionPolicy):
    """Keeps blocks likely to be read, by `HeatTable.access_probability`; those of idle requests leave first.

    The default where blocks are selected. The margin was measured on the choices that the probability was fitted
    to, with room for 1, 1.5 and 2 times what a step reads: a tenth to a half fewer moves than without one, and
    between .0003 less and .008 more of Belady's hits. With 0.3 up to .01 of the hits are lost.
    """

    margin = 0.15

    def keep_values(self, slots: Slots) -> Values:
        probability = self.table.access_probability(slots).astype(np.float64)
        return probability - self.table.idle(slots)


@register_eviction("lru")
class LruPolicy(EvictionPolicy):
    """Keeps the blocks that were read last."""

    def keep_values(self, slots: Slots) -> Values:
        return self.table.order_of_access(slots).astype(np.float64)


@register_eviction("lfu")
class LfuPolicy(EvictionPolicy):
    """Keeps the blocks that were read most often; an access counts for less with every step."""

    def keep_values(self, slots: Slots) -> Values:
        return self.table.accesses(slots).astype(np.float64)


@register_eviction("fifo")
class FifoPolicy(EvictionPolicy):
    """Keeps the blocks that were sealed last, whatever is read."""

    acts_on_accesses = False

    def keep_values(self, slots: Slots) -> Values:
        return self.table.order_of_sealing(slots).astype(np.float64)


@register_eviction("random")
class RandomPolicy(EvictionPolicy):
    """Keeps random blocks, drawn anew in each step, for comparison.

    Reproducible: the random values are a hash, splitmix64 (G. Steele et al., OOPSLA 2014).
    """

    acts_on_accesses = False
    seed: ClassVar[int] = 0

    def keep_values(self, slots: Slots) -> Values:
        bits = slots.astype(np.uint64) + np.uint64((self.table.now << 32) + self.seed)
        bits *= np.uint64(0x9E3779B97F4A7C15)
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
        values: Values = (bits ^ (bits >> np.uint64(31))).astype(np.float64)
        return values


@register_eviction("belady")
class BeladyPolicy(EvictionPolicy):
    """The optimum, for comparison: keeps blocks that will be read soonest.

    A block that was just read does not enter when all blocks in the tier will be read sooner. (L. A. Belady, IBM
    Systems Journal 5(2), 1966.)
    """

    acts_on_accesses = False
    offline = True

    next_read: Slots | None = None
    """The time of each slot's next read, int64, by any clock. The replay of a trace keeps it up to date."""

    def evictable(self, slots: Slots) -> Slots:
        return slots

    def keep_values(self, slots: Slots) -> Values:
        if self.next_read is None:
            return np.zeros(len(slots))
        return -self.next_read[slots].astype(np.float64)
