"""Everything that one device needs to move blocks: engine, staging, and the buffers that attention reads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from ..core.blocks import Block, BlockLayout, as_bits
from ..core.errors import CacheClosedError
from ..core.locks import TimedLock
from ..core.metrics import Metrics
from ..residency.device_pool import DevicePool
from ..residency.table import ResidencyTable
from ..residency.writeback import WriteBack
from ..sequence.layer_state import LayerState
from ..sequence.window import WindowBuffer
from ..transfer.engine import CopyEngine, Event
from ..transfer.staging import SlotRing, StagingPool
from ..transfer.worker import AWAITED_NICENESS, AwaitedFirst, Task, Worker
from .buffers import GatherBuffers

# One more block can be packed while the one before is copied out; likewise for loading.
SLOTS_PER_RING = 2


@dataclass(frozen=True)
class Source:
    """A block's bytes, flat uint8, where the copy engine can read them: on the device from `ready` on, or on the
    host (`None`)."""

    data: torch.Tensor
    ready: Event | None = None


class DevicePipeline:
    """The copy path of one device.

        compute stream: window ──pack──▶ pack slot        gather buffer ──▶ attention
        copy-out:                        pack slot ──▶ staging slot ──▶ write-back
        copy-in:                         loading slot ──▶ gather buffer

    Any number of threads may seal and wait; `loading` is the prefetch thread's alone.

    Args:
        engine: of the device; closed with the pipeline.
        residency: knows where blocks are.
        write_back: takes the sealed blocks.
        resident: blocks that stay on the device.
        metrics: of the manager.
        prefetch_layers: buffers of a whole layer each, beside those that attention reads.
        staging_blocks: host buffers for blocks on their way out.
    """

    def __init__(
        self,
        engine: CopyEngine,
        residency: ResidencyTable,
        write_back: WriteBack,
        resident: DevicePool,
        metrics: Metrics,
        prefetch_layers: int,
        staging_blocks: int,
    ) -> None:
        self.engine = engine
        self.worker = AwaitedFirst(Worker("prefetch", AWAITED_NICENESS, enter=engine.enter_thread))
        self.buffers = GatherBuffers(engine, metrics, ahead=prefetch_layers)
        self._packing = TimedLock(metrics)
        self.resident = resident
        self._residency = residency
        self._write_back = write_back
        self._metrics = metrics
        self._staging = StagingPool(engine, staging_blocks, metrics)
        if engine.wants_page_locks:
            next(iter(residency.tiers.values())).lock_pages(engine.device)
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

    def seal_oldest(self, layer: LayerState) -> None:
        """Move the oldest block of a layer's window into its table and start its way to storage.

        Blocks only while all staging slots are in use, which is counted as a stall.

        Raises:
            TierError: storage failed and no slot will come free; window and table are unchanged.
        """
        layout = layer.geometry.layout(layer.block_tokens)
        with self._metrics.stall("write"):
            slot = self._staging.acquire(layout.nbytes, check=self._write_back.retry)
        try:
            with self._packing:
                event, resident = self._pack_and_copy(layer.window, layout, slot.buffer[: layout.nbytes])
        except BaseException:  # out of memory, say
            slot.pool.release(slot)
            raise
        with layer.changing:
            layer.torn = True
            block = layer.table.seal(layout)
            self._write_back.add(block, slot, event)
            layer.window.drop_oldest_block()
            layer.torn = False
        if resident is not None:
            self.resident.enter(block, resident, ready=self.engine.record_compute())
        self._metrics.count(blocks_sealed=1, L0_read=layout.nbytes)

    def _pack_and_copy(
        self, window: WindowBuffer, layout: BlockLayout, target: torch.Tensor
    ) -> tuple[Event, torch.Tensor | None]:
        """Copy the oldest block to the host, and on the device if it is to be resident there."""
        with self._metrics.stall("write"):
            packed = self._pack.next(layout.nbytes)
        keys, values = layout.split(layout.over(packed, 1))
        window_keys, window_values = window.oldest_block()
        keys[0].copy_(window_keys)
        values[0].copy_(window_values)
        resident = self.resident.copy_of(packed)
        event = self.engine.copy_out(packed, target, after=self.engine.record_compute())
        self._pack.busy_until(event)
        return event, resident

    def wait(self, tasks: Sequence[Task[Event | None]]) -> None:
        """Block until tasks of the worker are done, which is counted as a stall, and let the compute stream wait
        for the copies that they began.

        Raises:
            TierReadError: a block could not be read.
        """
        task: Task[Event | None] | None = None
        try:
            with self._metrics.stall("read"):
                for task in tasks:
                    if not task.done():
                        self.worker.hurry(task)
                    event = task.result()
                    if event is not None:
                        self.engine.compute_waits(event)
        except CancelledError as error:
            raise CacheClosedError("the cache was closed while its blocks were being loaded") from error
        finally:
            # An error holds this frame, and the task the error: no cycle, which would keep the task's buffer.
            del task, tasks

    @contextmanager
    def sources(self, blocks: Sequence[Block]) -> Iterator[list[tuple[slice, Source | None]]]:
        """Consecutive blocks in pieces: each that a copy to the device can read where it is by itself, and runs of
        others, which must be read. On the prefetch thread; waits in the end for copies from host memory."""
        nothing: list[torch.Tensor | None] = [None] * len(blocks)
        host = nullcontext(nothing) if self.engine.host_writes else self._residency.in_memory(blocks)
        with self.resident.copies(blocks) as resident, host as hosted:
            sources: list[Source | None] = []
            from_host = []
            for block, copy, data in zip(blocks, resident, hosted, strict=True):
                if copy is not None:
                    sources.append(Source(copy.data, copy.ready))
                elif data is not None:
                    sources.append(Source(data))
                    from_host.append(block)
                else:
                    sources.append(None)
            try:
                yield list(_pieces(sources))
            finally:
                if from_host:
                    self.engine.finish_copies_in()
            if from_host:
                self._residency.count_in_memory(from_host)
                self.count_loaded(from_host)

    def stage(self, blocks: Sequence[Block]) -> torch.Tensor:
        """Read blocks of one layout into the loading slot whose turn it is, and consider to keep them on the
        device. Blocks; on the prefetch thread. The caller copies the slot, and tells `loading` until when it is
        busy.

        Returns:
            The blocks as they are stored, flat uint8.

        Raises:
            TierReadError: a block could not be read.
        """
        layout = blocks[0].layout
        staged = self.loading.next(len(blocks) * layout.nbytes)
        payload = layout.over(staged, len(blocks))
        try:
            self._residency.read(blocks, as_bits(payload))
        except BaseException:
            self.loading.retire()
            raise
        self.resident.keep(blocks, payload)
        self.count_loaded(blocks)
        return staged

    def count_loaded(self, blocks: Sequence[Block]) -> None:
        """These blocks come from the host."""
        self._metrics.count(L0_written=sum(block.layout.nbytes for block in blocks), blocks_loaded=len(blocks))

    def keep(self, block: Block, source: Source) -> None:
        """Consider to keep on the device a block that is being copied there. On the prefetch thread, within the
        context of its source."""
        if source.ready is None:
            self.resident.keep([block], block.layout.over(source.data, 1))

    def close(self) -> None:
        """End the threads. Blocks until copies that run have finished. May be called twice."""
        self.worker.close()
        self.engine.close()
        self.buffers.close()
        self.resident.close()
        self._pack.close()
        self.loading.close()


def _pieces(sources: Sequence[Source | None]) -> Iterator[tuple[slice, Source | None]]:
    first = 0
    for index, source in enumerate(sources):
        if source is not None:
            if first < index:
                yield slice(first, index), None
            yield slice(index, index + 1), source
            first = index + 1
    if first < len(sources):
        yield slice(first, len(sources)), None
