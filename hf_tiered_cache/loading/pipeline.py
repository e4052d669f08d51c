"""Everything that one device needs to load blocks: the prefetch thread, staging, and the buffers of attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass

import torch

from ..core.blocks import Block, as_bits
from ..core.errors import CacheClosedError
from ..core.metrics import Metrics
from ..residency.device_pool import DevicePool
from ..residency.table import ResidencyTable
from ..transfer.engine import CopyEngine, Event
from ..transfer.staging import SLOTS_PER_RING, SlotRing
from ..transfer.worker import AWAITED_NICENESS, AwaitedFirst, Task, Worker
from .buffers import GatherBuffers


@dataclass(frozen=True)
class Source:
    """A block's bytes, flat uint8, where the copy engine can read them: on the device, after the event `ready`, or
    on the host (`None`)."""

    data: torch.Tensor
    ready: Event | None = None


class DevicePipeline:
    """The way of blocks from the tiers to one device.

        prefetch thread:  tier ──▶ staging slot
        copy-in stream:            staging slot ──▶ buffer
        compute stream:                             buffer ──▶ attention

    Any number of threads may wait; only the prefetch thread uses `loading`.

    Args:
        engine: copies to the device; closed with the pipeline.
        residency: finds blocks in the tiers.
        resident: blocks that stay on the device; closed with the pipeline.
        metrics: counts bytes, blocks and stalls.
        prefetch_layers: buffers of a whole layer each, beside those that attention reads.
    """

    def __init__(
        self,
        engine: CopyEngine,
        residency: ResidencyTable,
        resident: DevicePool,
        metrics: Metrics,
        prefetch_layers: int,
    ) -> None:
        self.engine = engine
        self.worker = AwaitedFirst(Worker("prefetch", AWAITED_NICENESS, enter=engine.enter_thread))
        self.buffers = GatherBuffers(engine, metrics, ahead=prefetch_layers)
        self.resident = resident
        self._residency = residency
        self._metrics = metrics
        if engine.wants_page_locks:
            next(iter(residency.tiers.values())).lock_pages(engine.device)
        self.loading = SlotRing(
            SLOTS_PER_RING,
            allocate=engine.allocate_host,
            free=lambda buffer: None,
            recycled=engine.recycled,
            wait=lambda event: event.wait(),
        )

    def wait(self, tasks: Sequence[Task[Event | None]]) -> None:
        """Block until tasks of the worker are done, and let the compute stream wait for the copies that they
        began. Counts as a read stall.

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
            # The error references this frame, and the task the error. Break the cycle, which would keep the
            # buffer.
            del task, tasks

    @contextmanager
    def sources(self, blocks: Sequence[Block]) -> Iterator[list[tuple[slice, Source | None]]]:
        """Split consecutive blocks into pieces: single blocks that the copy engine can read in place, with their
        source, and runs of blocks that must be read from a tier. For the prefetch thread. The context ends when
        copies from host memory have ended."""
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
        """Read blocks of one layout into the next loading slot, and offer them to the resident blocks. For the
        prefetch thread; blocks. The caller copies the slot, and tells `loading` until when it is busy.

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
        """Count blocks that were loaded from the host."""
        self._metrics.count(L0_written=sum(block.layout.nbytes for block in blocks), blocks_loaded=len(blocks))

    def keep(self, block: Block, source: Source) -> None:
        """Offer a block that is being copied to the device to the resident blocks. For the prefetch thread, inside
        the context of its source."""
        if source.ready is None:
            self.resident.keep([block], block.layout.over(source.data, 1))

    def close(self) -> None:
        """End the threads, and free the buffers. Blocks until running copies have finished. May be called
        twice."""
        self.worker.close()
        self.engine.close()
        self.buffers.close()
        self.resident.close()
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
