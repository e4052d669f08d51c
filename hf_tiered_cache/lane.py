"""Everything that one device needs to move blocks: engine, staging, and the buffers that attention reads."""

from __future__ import annotations

from collections.abc import Iterable
from concurrent.futures import CancelledError, Future
from dataclasses import dataclass

import torch

from .blocks import BlockTable
from .errors import CacheClosedError
from .metrics import Metrics
from .transfer.engine import CopyEngine, Event
from .transfer.staging import SlotRing, StagingPool
from .transfer.worker import AWAITED_NICENESS, Worker
from .window import Geometry, WindowBuffer
from .writeback import WriteBack

# One more block can be packed while the one before is copied out; likewise for loading.
SLOTS_PER_RING = 2


@dataclass(eq=False)
class LoadBuffer:
    """Accelerator memory that loads fill and attention reads: K and V of one whole layer `[B, H, capacity, D]`, or
    a few blocks as they are stored. It may be overwritten after `released`, an event of the compute stream."""

    storage: torch.Tensor
    released: Event


class Lane:
    """The copy path of one device.

        compute stream: window ──pack──▶ pack slot        gather buffer ──▶ attention
        copy-out:                        pack slot ──▶ staging slot ──▶ write-back
        copy-in:                         loading slot ──▶ gather buffer

    Args:
        engine: of the device; closed with the lane.
        write_back: takes the sealed blocks.
        metrics: of the manager.
        gather_buffers: buffers of a whole layer each; allocated when first used.
        staging_blocks: host buffers for blocks on their way out.
    """

    def __init__(
        self,
        engine: CopyEngine,
        write_back: WriteBack,
        metrics: Metrics,
        gather_buffers: int,
        staging_blocks: int,
    ) -> None:
        self.engine = engine
        self.worker = Worker("prefetch", AWAITED_NICENESS)
        self.free_buffers = [self.empty_buffer() for _ in range(gather_buffers)]
        self._write_back = write_back
        self._metrics = metrics
        self._staging = StagingPool(engine, staging_blocks)
        self._pack = SlotRing(
            SLOTS_PER_RING,
            allocate=engine.allocate,
            free=engine.free,
            recycled=engine.recycled,
            wait=engine.compute_waits,
        )
        self.loading = SlotRing(
            SLOTS_PER_RING,
            allocate=engine.allocate_host,
            free=lambda buffer: None,
            recycled=engine.recycled,
            wait=lambda event: event.wait(),
        )
        self._buffer_in_use: LoadBuffer | None = None

    def seal_oldest(self, window: WindowBuffer, table: BlockTable, block_tokens: int) -> None:
        """Move the window's oldest block into the table and start its way to storage.

        Blocks only while all staging slots are in use, which is counted as a stall.

        Raises:
            TierError: storage failed and no slot will come free; window and table are unchanged.
        """
        layout = window.geometry.layout(block_tokens)
        with self._metrics.stall("write"):
            slot = self._staging.acquire(layout.nbytes, check=self._write_back.retry)
        try:
            with self._metrics.stall("write"):
                packed = self._pack.next(layout.nbytes)
            keys, values = layout.split(layout.over(packed, 1))
            window_keys, window_values = window.oldest_block()
            keys[0].copy_(window_keys)
            values[0].copy_(window_values)
            event = self.engine.copy_out(packed, slot.buffer[: layout.nbytes], after=self.engine.record_compute())
        except BaseException:  # out of memory, say
            slot.pool.release(slot)
            raise
        self._pack.busy_until(event)
        self._write_back.add(table.seal(layout), slot, event)
        window.drop_oldest_block()
        self._metrics.count(blocks_sealed=1, L0_read=layout.nbytes)

    def empty_buffer(self) -> LoadBuffer:
        """A buffer that has no memory yet."""
        return LoadBuffer(self.engine.allocate(0), self.engine.record_compute())

    def reallocate(self, buffer: LoadBuffer, nbytes: int) -> None:
        """Give a buffer other memory, losing its content."""
        self.engine.free(buffer.storage)
        buffer.storage = self.engine.allocate(0)
        buffer.storage = self.engine.allocate(nbytes)
        # The allocator may have given memory that the compute stream is not done with.
        buffer.released = self.engine.record_compute()

    def wait(self, tasks: Iterable[Future[Event | None]]) -> None:
        """Block until tasks of the worker are done, which is counted as a stall, and let the compute stream wait
        for the copies that they began.

        Raises:
            TierReadError: a block could not be read.
        """
        try:
            with self._metrics.stall("read"):
                for task in tasks:
                    event = task.result()
                    if event is not None:
                        self.engine.compute_waits(event)
        except CancelledError as error:
            raise CacheClosedError("the cache was closed while its blocks were being loaded") from error

    def fit(self, buffer: LoadBuffer, geometry: Geometry, tokens: int) -> int:
        """Give a free buffer room for `tokens`, losing its content. Returns the tokens it has room for."""
        if buffer.storage.numel() < geometry.nbytes(tokens):
            # A sequence grows by one token at a time; not so its buffers.
            self.reallocate(buffer, geometry.nbytes(tokens + tokens // 8))
        return max(tokens, geometry.tokens_in(buffer.storage.numel()))

    def use(self, buffer: LoadBuffer) -> None:
        """Attention is about to read this buffer."""
        assert self._buffer_in_use is None
        self._buffer_in_use = buffer

    def release_used(self) -> None:
        """The attention that read the buffer in use has been enqueued: it may be overwritten after that."""
        if self._buffer_in_use is not None:
            self.give_back(self._buffer_in_use)
            self._buffer_in_use = None

    def give_back(self, buffer: LoadBuffer) -> None:
        """Nothing enqueued from now on reads this buffer."""
        self.engine.recycled(buffer.storage)
        buffer.released = self.engine.record_compute()
        self.free_buffers.append(buffer)

    def close(self) -> None:
        """End the threads. Blocks until copies that run have finished. May be called twice."""
        self.worker.close()
        self.engine.close()
        self.release_used()
        for buffer in self.free_buffers:
            self.engine.free(buffer.storage)
        self.free_buffers = []
        self._pack.close()
        self.loading.close()
