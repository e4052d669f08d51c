"""Write-back and demotion: moves blocks down the tiers, in the background."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .blocks import STAGING, Block, BlockCopy
from .errors import TierError, TierFullError, TierReadError
from .metrics import Metrics
from .residency import Residency
from .tiers import Tier, TierIO
from .transfer.engine import Event
from .transfer.staging import StagingPool, StagingSlot
from .transfer.worker import Worker

logger = logging.getLogger(__name__)

# Blocks that are written together: enough to keep a drive busy.
_BATCH_BLOCKS = 8
# A full tier makes room for this share of its blocks at a time, up to a batch.
_DEMOTED_SHARE = 1 / 8


class _Move(NamedTuple):
    """A block on its way to a tier."""

    block: Block
    tier: Tier
    write: TierIO


class WriteBack:
    """Takes sealed blocks from staging to the nearest tier with room, and demotes others to make room.

    All moves run on one background thread, in the order in which blocks were sealed. A move that fails leaves its
    block readable where it is; the failure is raised once, by the next `raise_failure`, and the move is tried
    again when another block comes, or by `retry`.

    Args:
        residency: where the blocks are.
        metrics: counts bytes and demotions.
        background: the thread.
    """

    def __init__(self, residency: Residency, metrics: Metrics, background: Worker) -> None:
        self._residency = residency
        self._metrics = metrics
        self._background = background
        self._queue: deque[Block] = deque()
        self._failure: TierError | None = None
        self._stopped = False
        self._pools: set[StagingPool] = set()

    def add(self, block: Block, slot: StagingSlot, ready: Event) -> None:
        """Take over a new block that is being copied into a staging slot.

        Args:
            block: with one reference, its caller's.
            slot: given back when the block is stored.
            ready: fires when the slot is complete.
        """
        slot.ready = ready
        with self._residency.changed:
            self._residency.add_locked(block, slot)
            self._queue.append(block)
            self._pools.add(slot.pool)
        self._background.submit(self._drain)

    def retry(self) -> None:
        """Try again what failed before. Does not block.

        Raises:
            TierError: as `raise_failure`.
        """
        self.raise_failure()
        self._background.submit(self._drain)

    def raise_failure(self) -> None:
        """Raise what went wrong in the background since the last call, once.

        Raises:
            TierFullError: no tier has room; the blocks are still held in staging.
            TierError: a tier failed.
        """
        with self._residency.changed:
            failure, self._failure = self._failure, None
            if not any(block.references for block in self._queue):
                failure = None  # what could not be written is not needed any more
            failure = failure or self._residency.delete_failure
            self._residency.delete_failure = None
        if failure is not None:
            raise failure

    def flush(self) -> None:
        """Wait until every block has left staging and what nobody needs is deleted; blocks.

        Raises:
            TierError: a block could not be stored.
        """
        self._background.submit(self._drain).result()
        self._background.submit(self._residency.collect).result()
        self.raise_failure()
        for tier in self._residency.tiers.values():
            tier.flush()

    # -- on the background thread -------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Store everything that is queued, in order, a batch at a time; stop at a failure."""
        failure: TierError | None = None
        while failure is None:
            with self._residency.changed:
                batch = self._take_batch()
                if not batch and not self._queue:
                    return
            try:
                self._store(batch)
                self._stopped = False
            except TierError as error:
                failure = error
            except Exception as error:  # a failed copy, or a bug: it must reach the user as well
                failure = TierError(f"write-back failed: {error!r}")
                failure.__cause__ = error
            with self._residency.changed:
                for block, copy in batch:
                    self._residency.unpin_locked(block, copy)
                # What is not stored goes back to where it was, to be tried again.
                self._queue.extendleft(block for block, copy in reversed(batch) if not copy.doomed)
                self._failure = failure or self._failure
                pools = list(self._pools)
        if not self._stopped:
            logger.warning("write-back stopped: %s", failure)
        self._stopped = True
        for pool in pools:
            pool.wake()

    def _take_batch(self) -> list[tuple[Block, BlockCopy]]:
        """The next queued blocks that are still referenced, each with its staging copy, pinned."""
        batch = []
        for _ in range(min(_BATCH_BLOCKS, len(self._queue))):
            block = self._queue.popleft()
            if block.references:
                copy = block.copies[STAGING]
                copy.pins += 1
                batch.append((block, copy))
        return batch

    def _store(self, batch: Sequence[tuple[Block, BlockCopy]]) -> None:
        """Write blocks from staging to the tiers; those before a failure are stored."""
        moves: list[_Move] = []
        try:
            for block, copy in batch:
                slot: StagingSlot = copy.origin
                assert slot.ready is not None
                slot.ready.wait()
                tier = self._tier_with_room(block, moves)
                try:
                    write = tier.write(block.key, block.layout, slot.bits(block.layout)[0])
                except TierFullError:
                    if not self._shrink(tier):
                        raise
                    continue  # the block stays queued, for the tier below
                moves.append(_Move(block, tier, write))
        finally:
            self._finish(moves, leaving=STAGING)

    def _finish(self, moves: list[_Move], leaving: str) -> None:
        """Wait for writes and flip the residency of each that is complete. Raises the first failure."""
        failure: TierError | None = None
        for block, tier, write in moves:
            try:
                write.result()
            except TierError as error:
                if not (isinstance(error, TierFullError) and self._shrink(tier)):
                    failure = failure or error
                continue
            with self._residency.changed:
                self._residency.arrive_locked(block, tier)
                self._residency.remove_copy_locked(block, leaving)
            demoted = int(leaving != STAGING)
            self._metrics.count(**{f"{tier.name}_written": block.layout.nbytes, "blocks_demoted": demoted})
        moves.clear()
        if failure is not None:
            raise failure

    def _shrink(self, tier: Tier) -> bool:
        """Its device is full before its capacity is: go on with what it has, if there is a tier below."""
        if tier.name not in self._residency.policies:
            return False
        tier.capacity_bytes = tier.used_bytes
        logger.warning("%s: the device is full, capacity reduced to %d bytes", tier.name, tier.used_bytes)
        return True

    def _tier_with_room(self, block: Block, moves: list[_Move]) -> Tier:
        """The nearest tier that can take the block, after demoting others if need be."""
        tiers = list(self._residency.tiers.values())
        for tier, lower in zip(tiers, [*tiers[1:], None], strict=True):
            occupied = tier.occupied_bytes(block.layout)
            if tier.capacity_bytes is not None and occupied > tier.capacity_bytes:
                continue
            while not tier.has_room(occupied) and self._make_room(tier, lower, moves):
                pass
            if tier.has_room(occupied):
                return tier
        held = ", ".join(f"{tier.name} {tier.used_bytes} of {tier.capacity_bytes} bytes used" for tier in tiers)
        raise TierFullError(
            f"no tier has room for layer {block.key.layer_idx}, block {block.key.block_idx} "
            f"({block.layout.nbytes} bytes): {held}. Raise l1_capacity or give an l2_url; "
            "the block is kept in memory and written as soon as there is room"
        )

    def _make_room(self, tier: Tier, lower: Tier | None, moves: list[_Move]) -> bool:
        """Do one thing that frees room in `tier`. False when there is nothing left to do."""
        if self._residency.collect():
            return True
        if lower is not None and self._demote(tier, lower):
            return True
        if moves:
            self._finish(moves, leaving=STAGING)  # what is complete can be demoted
            return True
        with self._residency.changed:
            if not self._residency.room_will_come_locked(tier):
                return False
            self._residency.changed.wait(timeout=0.1)
        return True

    def _demote(self, upper: Tier, lower: Tier) -> bool:
        """Move the blocks that leave `upper` first to `lower`, a few at a time. False when none can leave."""
        policy = self._residency.policies[upper.name]
        with self._residency.changed:
            few = max(1, min(_BATCH_BLOCKS, int(upper.blocks * _DEMOTED_SHARE)))
            victims = self._residency.find_locked(policy.victims(few, lambda key: True))
            victims = [block for block in victims if block.layout == victims[0].layout]
            for block in victims:
                block.references += 1
        if not victims:
            return False
        layout = victims[0].layout
        payload = np.empty((len(victims), layout.rows, layout.row_elements), layout.bits_dtype)
        moves: list[_Move] = []
        try:
            self._residency.read(victims, payload)
            for block, part in zip(victims, payload, strict=True):
                moves.append(_Move(block, lower, lower.write(block.key, layout, part)))
        except TierReadError as error:
            # Whoever needs them will be told. Here, others can leave instead.
            logger.warning("cannot be demoted: %s", error)
            with self._residency.changed:
                for block in victims:
                    policy.forget(block.key)
        finally:
            try:
                self._finish(moves, leaving=upper.name)
            finally:
                self._residency.release(victims)
        return True
