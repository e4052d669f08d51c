"""Moves blocks between the tiers, on the background thread: down when room is needed, up when they are read.

new block ──▶ nearest tier with room            demotes other blocks first, if the policy allows it
balance   ──▶ tier above its high watermark     demotes the coldest blocks, down to the low watermark
          ──▶ blocks read from a lower tier     promoted into free room, or in exchange for a colder block
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from ..core.blocks import STAGING, Bits, Block, BlockLayout
from ..core.config import TieredCacheConfig
from ..core.errors import TierError, TierFullError, TierReadError
from ..core.metrics import Metrics
from ..tiers import Tier, TierIO
from .eviction import EvictionPolicy
from .heat import Slots
from .table import ResidencyTable

logger = logging.getLogger(__name__)

BATCH_BLOCKS = 8
"""Blocks that are written together: enough to keep a drive busy."""

# A full tier demotes this share of its blocks at a time, up to a batch.
_DEMOTED_SHARE = 1 / 8
# More candidates than this are sampled: looking at all of them would hold the lock for milliseconds.
_MOST_CANDIDATES = 1 << 15
# The longest time that a batch lets reads go first.
_YIELD_SECONDS = 0.05


class Move(NamedTuple):
    """A block on its way to a tier."""

    block: Block
    tier: Tier
    write: TierIO


class Mover:
    """Moves blocks between tiers. Used by one thread, in the background.

    An old copy is removed only when the new one is complete. Capacities hold at every moment, since room is
    reserved before a write and given back after a deletion.

    Args:
        residency: where the blocks are.
        policies: the eviction policy of each tier but the last.
        config: watermarks.
        metrics: counts bytes and moves.
    """

    def __init__(
        self,
        residency: ResidencyTable,
        policies: Sequence[EvictionPolicy],
        config: TieredCacheConfig,
        metrics: Metrics,
    ) -> None:
        self._residency = residency
        self._tiers = list(residency.tiers.values())
        self._policies = {tier.name: policy for tier, policy in zip(self._tiers, policies, strict=False)}
        self._config = config
        self._metrics = metrics
        self._sampling = np.random.default_rng(0)
        self._known_layouts: set[BlockLayout] = set()

    def tier_with_room(self, block: Block, below: Tier | None = None) -> Tier:
        """Return the nearest tier (below `below`, if given) that can take the block, after demotions if needed.

        Raises:
            TierFullError: there is none.
        """
        if block.layout not in self._known_layouts:
            self._known_layouts.add(block.layout)
            self._warn_of_small_capacities(block.layout)
        tiers = self._tiers if below is None else self._tiers[self._tiers.index(below) + 1 :]
        for tier in tiers:
            occupied = tier.occupied_bytes(block.layout)
            if tier.capacity_bytes is not None and occupied > tier.capacity_bytes:
                continue
            if tier.name in block.leaving:
                self._residency.garbage.collect(wanted=(tier, block))
            if tier.name in block.leaving:
                continue  # an older copy of the same name is still to be deleted
            while not tier.has_room(occupied) and self._make_room(tier):
                pass
            if tier.has_room(occupied):
                return tier
        held = ", ".join(f"{tier.name} {tier.used_bytes} of {tier.capacity_bytes} bytes used" for tier in tiers)
        raise TierFullError(
            f"no tier has room for layer {block.key.layer_idx}, block {block.key.block_idx} "
            f"({block.layout.nbytes} bytes): {held}. Raise l1_capacity or give an l2_url in a "
            "new cache, or free requests; the block is kept in memory and written as soon as there is room"
        )

    def _warn_of_small_capacities(self, layout: BlockLayout) -> None:
        """Warn of each capacity that the user set and that is too small for even one block."""
        config = self._config
        needed = {tier.name: tier.occupied_bytes(layout) for tier in self._tiers}
        for setting, capacity, block_bytes in (
            ("resident_capacity", config.resident_bytes, layout.nbytes),
            ("host_capacity", config.host_capacity_bytes, needed.get("host", 0)),
            ("l1_capacity", config.l1_capacity_bytes, needed.get("L1", 0)),
        ):
            if capacity and capacity < block_bytes:
                logger.warning(
                    "%s=%d is less than one block of %d bytes: nothing is kept there. Raise it, or reduce "
                    "block_tokens",
                    setting,
                    capacity,
                    block_bytes,
                )

    def finish(self, moves: list[Move], leaving: str | None) -> None:
        """Wait for all writes, record each new copy that is complete, and remove the old one in `leaving`.

        Raises the first failure.
        """
        failure: BaseException | None = None
        for block, tier, write in moves:
            try:
                write.result()
            except BaseException as error:  # of a plug-in
                if not (isinstance(error, TierFullError) and self.shrink(tier)):
                    failure = failure or error
                continue
            with self._residency.changed:
                self._residency.arrive_locked(block, tier)
                if leaving is not None:
                    self._residency.remove_copy_locked(block, leaving)
            demoted = int(leaving not in (None, STAGING))
            self._metrics.count(**{f"{tier.name}_written": block.layout.nbytes, "blocks_demoted": demoted})
        moves.clear()
        if failure is not None:
            raise failure

    def shrink(self, tier: Tier) -> bool:
        """Reduce the capacity of a tier whose device is full to what it uses; false if there is no tier below."""
        if tier.name not in self._policies:
            return False
        tier.capacity_bytes = tier.used_bytes
        logger.warning("%s: the device is full, capacity reduced to %d bytes", tier.name, tier.used_bytes)
        return True

    def balance(self, interrupted: Callable[[], bool]) -> None:
        """Demote blocks from tiers above their high watermark, and promote those that were read from lower tiers.

        Blocks that fail to move stay where they are; a later read of a block that cannot be read raises.

        Args:
            interrupted: returns whether something more urgent is waiting; called between batches.
        """
        try:
            self._residency.garbage.collect()
            for tier in self._tiers[:-1]:
                while not interrupted() and self._is_above(tier, self._config.high_watermark):
                    self._residency.wait_for_reads(_YIELD_SECONDS)
                    if not self._demote_to_low_watermark(tier, interrupted):
                        break
            if not interrupted():
                self._promote()
        except TierError as error:
            logger.warning("tiers are not balanced: %s", error)

    # -- down ---------------------------------------------------------------------------------------------------

    def _is_above(self, tier: Tier, watermark: float) -> bool:
        return tier.capacity_bytes is not None and tier.used_bytes > watermark * tier.capacity_bytes

    def _demote_to_low_watermark(self, tier: Tier, interrupted: Callable[[], bool]) -> bool:
        """Return true if it made any room."""
        demoted = False
        while not interrupted() and self._is_above(tier, self._config.low_watermark):
            if not (self._residency.garbage.collect() or self._demote(tier)):
                break
            demoted = True
        return demoted

    def _make_room(self, tier: Tier) -> bool:
        """Take one step to free room in `tier`. Return false when there is nothing left to do."""
        if self._residency.garbage.collect() or self._demote(tier):
            return True
        with self._residency.changed:
            if not self._residency.room_will_come_locked(tier):
                return False
            self._residency.changed.wait(0.1)
        return True

    def _demote(self, upper: Tier) -> bool:
        """Demote a few blocks from `upper`, in the order of its policy. Return false when none can move."""
        policy = self._policies.get(upper.name)
        if policy is None:
            return False
        few = max(1, min(BATCH_BLOCKS, int(upper.blocks * _DEMOTED_SHARE)))
        try:
            with self._residency.changed:
                idle = self._sample(self._residency.locations.idle(upper.name))
                victims = self._residency.ask(policy, lambda policy: self._victims(policy, idle, few))
        except TierError as error:  # the user gets it later; a tier below may have room
            logger.warning("%s", error)
            return False
        try:
            return self._move_down(victims, upper)
        except TierFullError as error:
            logger.debug("no block can be demoted: %s", error)
            return False

    def _victims(self, policy: EvictionPolicy, idle: Slots, few: int) -> list[Block]:
        candidates = policy.evictable(idle)
        victims = policy.victims(candidates, few)
        return self._residency.locations.blocks(victims if len(victims) else policy.victims(candidates, 1))

    def _move_down(self, victims: Sequence[Block], upper: Tier) -> bool:
        """Move blocks from `upper` to tiers below it, and return true if there was any block to move.

        Of a block with another copy, only the copy in `upper` is removed. Blocks that cannot be read stay, and are
        not chosen again.

        Raises:
            TierFullError: no tier below has room.
            TierError: one failed.
        """
        with self._residency.changed:
            blocks = [block for block in victims if upper.name in block.copies]  # not gone since they were chosen
            clean = [block for block in blocks if len(block.copies) > 1]
            only_here = [block for block in blocks if len(block.copies) == 1]
            dirty = [block for block in only_here if block.layout == only_here[0].layout]
            for block in clean:
                self._residency.remove_copy_locked(block, upper.name)
            self._borrow_locked(dirty)
        self._metrics.count(blocks_demoted=len(clean))
        moves: list[Move] = []
        try:
            payload = self._load(dirty) if dirty else None
            if payload is not None:
                for block, part in zip(dirty, payload, strict=True):
                    tier = self.tier_with_room(block, below=upper)
                    moves.append(Move(block, tier, tier.write(block.key, block.layout, part)))
        finally:
            try:
                self.finish(moves, leaving=upper.name)
            finally:
                self._give_back(dirty)
        return bool(blocks)

    # -- up -----------------------------------------------------------------------------------------------------

    def _promote(self) -> None:
        """Promote blocks that were read from lower tiers, as the policies decide, one batch per tier."""
        with self._residency.changed:
            missed = self._residency.misses_locked()
        for rank, upper in enumerate(self._tiers[:-1]):
            promoted, leaving = self._choose_promotions(
                missed, upper, [tier.name for tier in self._tiers[: rank + 1]]
            )
            if len(leaving) and not self._move_down(leaving, upper):
                continue
            self._residency.garbage.collect()
            self._move_up(promoted, upper)

    def _choose_promotions(
        self, missed: Slots, upper: Tier, not_in: Sequence[str]
    ) -> tuple[list[Block], list[Block]]:
        """Return the blocks to promote into a tier, and those that leave it for them."""
        locations = self._residency.locations
        with self._residency.changed:
            lower = locations.idle_elsewhere(missed, not_in)
            if not len(lower) or upper.capacity_bytes is None:
                return [], []
            largest = max(upper.occupied_bytes(block.layout) for block in locations.blocks(lower))
            room = self._config.high_watermark * upper.capacity_bytes - upper.used_bytes
            free = max(0, int(room // largest))
            idle = self._sample(locations.idle(upper.name))

            def choose(policy: EvictionPolicy) -> tuple[list[Block], list[Block]]:
                promoted, leaving = policy.promotions(lower, policy.evictable(idle), free, BATCH_BLOCKS)
                return locations.blocks(promoted), locations.blocks(leaving)

            return self._residency.ask(self._policies[upper.name], choose)

    def _move_up(self, promoted: Sequence[Block], upper: Tier) -> None:
        with self._residency.changed:
            blocks = [
                block
                for block in promoted
                if block.copies  # not gone since it was chosen
                and upper.name not in block.leaving
                and upper.name not in block.copies
                and STAGING not in block.copies
            ]
            blocks = [block for block in blocks if block.layout == blocks[0].layout]
            self._borrow_locked(blocks)
        if not blocks:
            return
        self._residency.wait_for_reads(_YIELD_SECONDS)
        moves: list[Move] = []
        try:
            payload = self._load(blocks)
            if payload is not None:
                for block, part in zip(blocks, payload, strict=True):
                    if upper.has_room(upper.occupied_bytes(block.layout)):
                        moves.append(Move(block, upper, upper.write(block.key, block.layout, part)))
        finally:
            begun = len(moves)
            try:
                self.finish(moves, leaving=None)
            finally:
                self._give_back(blocks)
        self._metrics.count(blocks_promoted=begun)

    # -- both ---------------------------------------------------------------------------------------------------

    def _borrow_locked(self, blocks: Sequence[Block]) -> None:
        for block in blocks:
            block.references += 1
        self._residency.locations.hold(blocks, 1)

    def _give_back(self, blocks: Sequence[Block]) -> None:
        with self._residency.changed:
            self._residency.locations.hold(blocks, -1)
        self._residency.release(blocks)

    def _load(self, blocks: Sequence[Block]) -> Bits | None:
        """Read blocks of one layout. Return `None` when one cannot be read: then none of them moves."""
        layout: BlockLayout = blocks[0].layout
        payload = np.empty((len(blocks), layout.rows, layout.row_elements), layout.bits_dtype)
        try:
            self._residency.read(blocks, payload, wanted=False)
            return payload
        except TierReadError as error:
            if len(blocks) > 1:
                for block in blocks:
                    self._load([block])
            else:  # a later read raises; here, others can move instead
                logger.warning("cannot be moved: %s", error)
                with self._residency.changed:
                    self._residency.locations.hold(blocks, 1)  # never given back
            return None

    def _sample(self, slots: Slots) -> Slots:
        if len(slots) <= _MOST_CANDIDATES:
            return slots
        return slots[self._sampling.choice(len(slots), _MOST_CANDIDATES, replace=False, shuffle=False)]
