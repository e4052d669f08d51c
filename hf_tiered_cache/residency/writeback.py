"""Write-back: takes sealed blocks from staging to the tiers, in the background, and reports failures."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Sequence
from concurrent.futures import CancelledError

from ..core.blocks import STAGING, Block, BlockCopy
from ..core.errors import TierError, TierFullError
from ..core.metrics import Metrics
from ..tiers.io import caused_by, failures_as_tier_errors
from ..transfer.engine import Event
from ..transfer.staging import StagingPool, StagingSlot
from ..transfer.worker import Worker
from .mover import BATCH_BLOCKS, Move, Mover
from .table import ResidencyTable

logger = logging.getLogger(__name__)

# The longest time that a batch lets reads go first, unless a thread waits for its staging buffers.
_YIELD_SECONDS = 0.02


class WriteBack:
    """Takes sealed blocks from staging to the nearest tier with room, and balances the tiers in between.

    All moves run on one background thread, in the order in which blocks were sealed. A move that fails leaves its
    block readable where it is; the failure is raised once, by the next `raise_failure`, and the move is tried
    again when the next block is added, or by `retry`.

    Args:
        residency: where the blocks are.
        mover: moves blocks between the tiers.
        metrics: counts bytes.
        background: the thread.
    """

    def __init__(self, residency: ResidencyTable, mover: Mover, metrics: Metrics, background: Worker) -> None:
        self._residency = residency
        self._mover = mover
        self._metrics = metrics
        self._background = background
        self._queue: deque[Block] = deque()
        self._storing: list[Block] = []
        self._failure: TierError | None = None
        self._stopped = False
        self._balancing = False
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
        """Retry the moves that failed. Does not block.

        Raises:
            TierError: as `raise_failure`.
        """
        self.raise_failure()
        self._background.submit(self._drain)

    def raise_failure(self) -> None:
        """Raise the error that occurred in the background since the last call, once.

        Raises:
            TierFullError: no tier has room; the blocks are still held in staging.
            TierError: a tier failed.
        """
        with self._residency.changed:
            failure, self._failure = self._failure, None
            if not any(block.references for block in (*self._queue, *self._storing)):
                failure = None  # the blocks that could not be written are no longer needed
            failure = failure or self._residency.take_failure()
        if failure is not None:
            raise failure

    def flush(self) -> None:
        """Wait until every block has left staging and unneeded copies are deleted. Blocks.

        Raises:
            TierError: a block could not be stored.
        """
        self._background.submit(self._drain).result()
        self._residency.garbage.collect_all()
        self.raise_failure()
        for tier in self._residency.tiers.values():
            with failures_as_tier_errors(f"{tier.name}: flushing"):
                tier.flush()

    def balance_soon(self) -> None:
        """Balance the tiers in the background, after other work. Does not block."""
        with self._residency.changed:
            if not self._balancing:
                self._background.submit(self._balance)
                self._balancing = True

    # -- on the background thread -------------------------------------------------------------------------------

    def _drain(self) -> None:
        """Store everything that is queued, in order, a batch at a time; stop at a failure."""
        failure: TierError | None = None
        while failure is None:
            with self._residency.changed:
                batch = self._take_batch()
                self._storing = [block for block, _ in batch]
                if not batch and not self._queue:
                    return
            try:
                self._store(batch)
                self._stopped = False
            except TierError as error:
                failure = error
            except BaseException as error:  # a failed copy, a plug-in: it must reach the user as well
                failure = caused_by(error, "write-back failed")
            with self._residency.changed:
                self._residency.locations.hold([block for block, _ in batch], -1)
                for block, copy in batch:
                    self._residency.unpin_locked(block, copy)
                # Blocks that are not stored go back to where they were, to be tried again.
                self._queue.extendleft(block for block, copy in reversed(batch) if not copy.doomed)
                self._storing = []
                self._failure = failure or self._failure
                pools = list(self._pools)
        # While closing, copies to the host that have not begun are cancelled.
        if not self._stopped and not isinstance(failure.__cause__, CancelledError):
            logger.warning("write-back stopped: %s", failure)
        self._stopped = True
        for pool in pools:
            pool.wake()

    def _take_batch(self) -> list[tuple[Block, BlockCopy]]:
        """Return the next queued blocks that are still referenced, each with its staging copy, pinned."""
        batch = []
        for _ in range(min(BATCH_BLOCKS, len(self._queue))):
            block = self._queue.popleft()
            if block.references:
                copy = block.copies[STAGING]
                copy.pins += 1
                self._residency.locations.hold([block], 1)
                batch.append((block, copy))
        return batch

    def _store(self, batch: Sequence[tuple[Block, BlockCopy]]) -> None:
        """Write blocks from staging to the tiers; those before a failure are stored."""
        if not any(pool.awaited for pool in self._pools):
            self._residency.wait_for_reads(_YIELD_SECONDS)
        moves: list[Move] = []
        try:
            for block, copy in batch:
                slot: StagingSlot = copy.origin
                assert slot.ready is not None
                slot.ready.wait()
                tier = self._mover.tier_with_room(block)
                try:
                    write = tier.write(block.key, block.layout, slot.bits(block.layout)[0])
                except TierFullError:
                    if not self._mover.shrink(tier):
                        raise
                    continue  # the block stays queued, for the tier below
                moves.append(Move(block, tier, write))
        finally:
            self._mover.finish(moves, leaving=STAGING)

    def _balance(self) -> None:
        with self._residency.changed:
            self._balancing = False
        try:
            self._mover.balance(interrupted=lambda: bool(self._queue))
        except BaseException as error:  # of a plug-in: nobody waits for this task
            self._residency.report(caused_by(error, "the tiers are not balanced"))
