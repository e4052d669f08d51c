"""Where sealed blocks are, and the only place that changes it.

    seal ──▶ staging ──write-back──▶ L1 ──demotion──▶ L2
                │                     │                │
                └───────── read: the nearest copy ─────┘

Every move is: make the lower copy, wait until it is complete, flip the residency under the lock, let the upper
copy go. So a block always has a complete copy, and a read that began keeps its copy alive by a pin.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from typing import NamedTuple

import numpy as np

from .blocks import Bits, Block, BlockCopy, BlockKey
from .errors import TierError, TierFullError
from .eviction import EvictionPolicy
from .metrics import Metrics
from .tiers import Tier, TierIO
from .transfer.engine import Event
from .transfer.staging import StagingPool, StagingSlot
from .transfer.worker import Worker

logger = logging.getLogger(__name__)

STAGING = "staging"
# Blocks that are written, or demoted, together: enough to keep a drive busy.
_BATCH_BLOCKS = 8


class _Move(NamedTuple):
    """A block on its way to a tier."""

    block: Block
    tier: Tier
    write: TierIO


class Residency:
    """Copies of blocks in staging and in the tiers; see the module for the moves.

    Reads run on the caller's thread and block; write-back and demotion run on one background thread. A failed
    move is kept and raised once by the next `raise_failure`; the block stays readable where it was, and the
    move is tried again when the next block is added.

    Invariants:
        - a referenced block has at least one copy, and `read` can always load it;
        - a tier's copy exists in `copies` only while the tier can read it.

    Args:
        tiers: from the nearest to the farthest.
        policies: for each tier but the last, which blocks leave first.
        metrics: counts blocks and bytes.
    """

    def __init__(self, tiers: Sequence[Tier], policies: Sequence[EvictionPolicy], metrics: Metrics) -> None:
        self._tiers = {tier.name: tier for tier in tiers}
        self._policies = {tier.name: policy for tier, policy in zip(tiers, policies, strict=False)}
        self._metrics = metrics
        self._changed = threading.Condition()
        self._resident: dict[BlockKey, Block] = {}
        self._queue: deque[Block] = deque()
        self._garbage: list[tuple[Tier, BlockKey]] = []
        self._write_failure: TierError | None = None
        self._delete_failure: TierError | None = None
        self._stopped = False
        self._pools: set[StagingPool] = set()
        self._worker = Worker("write-back")

    # -- blocks come and go ---------------------------------------------------------------------------------

    def add(self, block: Block, slot: StagingSlot, ready: Event) -> None:
        """Take over a new block that is being copied into `slot`; its write-back begins at once.

        Args:
            block: with one reference, its caller's.
            slot: given back when the block is stored.
            ready: fires when the slot is complete.
        """
        slot.ready = ready
        with self._changed:
            block.copies[STAGING] = BlockCopy(slot)
            self._resident[block.key] = block
            self._queue.append(block)
            self._pools.add(slot.pool)
        self._worker.submit(self._drain)

    def retain(self, blocks: Iterable[Block]) -> None:
        """Count one more reference to each block."""
        with self._changed:
            for block in blocks:
                block.references += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Count one reference less; what nobody references any more is deleted in the background."""
        with self._changed:
            for block in blocks:
                block.references -= 1
                if block.references == 0:
                    for place in list(block.copies):
                        self._doom(block, place)
                    self._resident.pop(block.key, None)
            if not any(block.references for block in self._queue):
                self._write_failure = None  # what could not be written is not needed any more
            garbage = bool(self._garbage)
        if garbage:
            with suppress(RuntimeError):  # closing: the whole directory goes
                self._worker.submit(self._collect)

    def read(self, blocks: Sequence[Block], target: Bits) -> None:
        """Load blocks of one layout into host memory; blocks.

        Args:
            blocks: each referenced by the caller.
            target: `[len(blocks), rows, row_elements]`; undefined when this raises.

        Raises:
            TierReadError: a block could not be read.
        """
        with self._changed:
            places = [next(iter(block.copies)) for block in blocks]
            copies = [block.copies[place] for block, place in zip(blocks, places, strict=True)]
            for copy in copies:
                copy.pins += 1
        try:
            self._read_pinned(blocks, places, copies, target)
        finally:
            with self._changed:
                for block, copy in zip(blocks, copies, strict=True):
                    self._unpin(block, copy)

    def retry(self) -> None:
        """Try again what failed before. Does not block.

        Raises:
            TierError: as `raise_failure`.
        """
        self.raise_failure()
        self._worker.submit(self._drain)

    def raise_failure(self) -> None:
        """Raise what went wrong in the background since the last call, once.

        Raises:
            TierFullError: no tier has room; the blocks are still held in staging.
            TierError: a tier failed.
        """
        with self._changed:
            failure = self._write_failure or self._delete_failure
            self._write_failure = self._delete_failure = None
        if failure is not None:
            raise failure

    def flush(self) -> None:
        """Wait until every block has left staging and what nobody needs is deleted; blocks.

        Raises:
            TierError: a block could not be stored.
        """
        self._worker.submit(self._drain).result()
        self._worker.submit(self._collect).result()
        self.raise_failure()
        for tier in self._tiers.values():
            tier.flush()

    def close(self) -> None:
        """End the background thread and close the tiers. May be called twice."""
        self._worker.close()
        for tier in self._tiers.values():
            tier.close()

    # -- reading --------------------------------------------------------------------------------------------

    def _read_pinned(
        self, blocks: Sequence[Block], places: Sequence[str], copies: Sequence[BlockCopy], target: Bits
    ) -> None:
        loads = []
        for first, end in _equal_runs(places):
            if places[first] == STAGING:
                continue
            tier = self._tiers[places[first]]
            run = blocks[first:end]
            loads.append(tier.read_into([block.key for block in run], run[0].layout, target[first:end]))
            self._metrics.count(**{f"{tier.name}_read": sum(block.layout.nbytes for block in run)})
        for position, place in enumerate(places):
            if place == STAGING:
                slot: StagingSlot = copies[position].origin
                assert slot.ready is not None
                slot.ready.wait()
                target[position] = slot.bits(blocks[position].layout)[0]
        for load in loads:
            load.result()

    # -- write-back and demotion, on the background thread ----------------------------------------------------

    def _drain(self) -> None:
        """Store everything that is queued, in order, a batch at a time; stop at a failure."""
        failure: TierError | None = None
        while failure is None:
            with self._changed:
                batch = self._take_batch()
                if not batch and not self._queue:
                    self._changed.notify_all()
                    return
            try:
                self._store(batch)
                self._stopped = False
            except TierError as error:
                failure = error
            except Exception as error:  # a failed copy, or a bug: it must reach the user as well
                failure = TierError(f"write-back failed: {error!r}")
                failure.__cause__ = error
            with self._changed:
                for block, copy in batch:
                    self._unpin(block, copy)
                # What is not stored goes back to where it was, to be tried again.
                self._queue.extendleft(block for block, copy in reversed(batch) if not copy.doomed)
                self._write_failure = failure or self._write_failure
                self._changed.notify_all()
        if not self._stopped:
            logger.warning("write-back stopped: %s", failure)
        self._stopped = True
        for pool in self._pools:
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
        for move in moves:
            try:
                move.write.result()
            except TierError as error:
                if not (isinstance(error, TierFullError) and self._shrink(move.tier)):
                    failure = failure or error
                continue
            self._metrics.count(**{f"{move.tier.name}_written": move.block.layout.nbytes})
            with self._changed:
                self._arrive(move.block, move.tier)
                self._doom(move.block, leaving)
                self._changed.notify_all()
        moves.clear()
        if failure is not None:
            raise failure

    def _shrink(self, tier: Tier) -> bool:
        """Its device is full before its capacity is: go on with what it has, if there is a tier below."""
        if tier.name not in self._policies:
            return False
        tier.capacity_bytes = tier.used_bytes
        logger.warning("%s: the device is full, capacity reduced to %d bytes", tier.name, tier.used_bytes)
        return True

    def _tier_with_room(self, block: Block, moves: list[_Move]) -> Tier:
        """The nearest tier that can take the block, after demoting others if need be."""
        tiers = list(self._tiers.values())
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
        if self._collect():
            return True
        if lower is not None and self._demote(tier, lower):
            return True
        if moves:
            self._finish(moves, leaving=STAGING)  # what is complete can be demoted
            return lower is not None
        with self._changed:
            resident = sum(tier.name in block.copies for block in self._resident.values())
            if tier.blocks <= resident or self._delete_failure is not None:
                return False
            self._changed.wait(timeout=0.1)  # copies that are doomed go when the reads that hold them end
        return True

    def _demote(self, upper: Tier, lower: Tier) -> bool:
        """Move the blocks that leave `upper` first to `lower`, a few at a time. False when none can leave."""
        with self._changed:
            few = max(1, min(_BATCH_BLOCKS, upper.blocks // _BATCH_BLOCKS))
            keys = self._policies[upper.name].victims(few, lambda key: key in self._resident)
            victims = [self._resident[key] for key in keys]
            victims = [block for block in victims if block.layout == victims[0].layout]
            for block in victims:
                block.references += 1
        if not victims:
            return False
        layout = victims[0].layout
        payload = np.empty((len(victims), layout.rows, layout.row_elements), layout.bits_dtype)
        moves: list[_Move] = []
        try:
            self.read(victims, payload)
            for block, part in zip(victims, payload, strict=True):
                moves.append(_Move(block, lower, lower.write(block.key, layout, part)))
        finally:
            try:
                self._finish(moves, leaving=upper.name)
            finally:
                self.release(victims)
        self._metrics.count(blocks_demoted=len(victims))
        return True

    def _collect(self) -> bool:
        """Delete the copies that nobody needs. Whether there were any."""
        with self._changed:
            garbage, self._garbage = self._garbage, []
        for tier, key in garbage:
            try:
                tier.delete(key)
            except TierError as error:
                with self._changed:
                    self._delete_failure = self._delete_failure or error
        return bool(garbage)

    # -- residency; the caller holds the lock -----------------------------------------------------------------

    def _arrive(self, block: Block, tier: Tier) -> None:
        block.copies[tier.name] = BlockCopy(tier)
        if tier.name in self._policies:
            self._policies[tier.name].admit(block.key)
        if block.references == 0:
            self._doom(block, tier.name)

    def _doom(self, block: Block, place: str) -> None:
        """Take a copy off the residency; it is dropped when the last read that holds it has ended."""
        copy = block.copies.pop(place, None)
        if copy is None:
            return
        copy.doomed = True
        if place in self._policies:
            self._policies[place].forget(block.key)
        if copy.pins == 0:
            self._drop(block, copy)

    def _unpin(self, block: Block, copy: BlockCopy) -> None:
        copy.pins -= 1
        if copy.doomed and copy.pins == 0:
            self._drop(block, copy)
            self._changed.notify_all()

    def _drop(self, block: Block, copy: BlockCopy) -> None:
        if isinstance(copy.origin, StagingSlot):
            copy.origin.pool.release(copy.origin)
        else:
            self._garbage.append((copy.origin, block.key))


def _equal_runs(items: Sequence[str]) -> Iterator[tuple[int, int]]:
    first = 0
    for position in range(1, len(items) + 1):
        if position == len(items) or items[position] != items[first]:
            yield first, position
            first = position
