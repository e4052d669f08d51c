"""Sealed blocks of a layer, a few at a time, through a fixed number of buffers, as they lie in storage.

    storage ──▶ [ buffer ] [ buffer ] [ buffer ] ──▶ attention
                 loading    loading    being read

The buffers form a ring. While attention reads one split, the next ones are being loaded: first those of the same
layer, then those of the following layers, across the end of the forward pass. Splits hold stored rows, not batch
rows, so a reorder of beams does not disturb loads under way.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch

from ..core.metrics import Metrics
from ..core.row_map import RowMap
from ..residency.table import ResidencyTable
from ..sequence.layer_state import LayerState
from .buffers import LoadBuffer
from .pipeline import DevicePipeline
from .split_load import SplitLoad, SplitLoader

logger = logging.getLogger(__name__)

Following = Callable[[LayerState], Iterable[LayerState]]


@dataclass(eq=False)
class Split:
    """Consecutive sealed blocks in accelerator memory, valid until the next split is taken. Then `keys` and
    `values` are deleted, so that no reference keeps the memory of a buffer that grows.

    Args:
        keys: `[n, stored rows, Hk, T, Dk]`.
        values: `[n, stored rows, Hv, T, Dv]`.
        row_map: for each batch row the stored row that it reads.
        first_block: index of the first block in its layer.
    """

    keys: torch.Tensor
    values: torch.Tensor
    row_map: RowMap
    first_block: int


class BlockReader:
    """Streams the sealed blocks of one layer after another through a ring of buffers.

    Used by one thread at a time. A layer that was not expected next makes it start over, and so does an interrupt
    (Ctrl-C) while its queue was being changed: then it is not `_settled`.

    Args:
        pipeline: of the device.
        residency: where blocks are read.
        metrics: counts hits, misses, bytes and stalls.
        buffers: number of buffers, at least 2.
        buffer_bytes: size up to which a buffer grows, and never beyond what the longest layer needs. A block that
            is larger still gets a buffer of its size.
    """

    def __init__(
        self,
        pipeline: DevicePipeline,
        residency: ResidencyTable,
        metrics: Metrics,
        buffers: int,
        buffer_bytes: int,
    ) -> None:
        self._pipeline = pipeline
        self._residency = residency
        self._metrics = metrics
        self._buffer_bytes = buffer_bytes
        self._buffers = [LoadBuffer.empty(pipeline.engine) for _ in range(buffers)]
        self._free = deque(self._buffers)
        self._loader = SplitLoader(pipeline, residency)
        self._queue: deque[SplitLoad] = deque()
        self._begun: list[SplitLoad] = []  # they have a buffer
        self._cancelled: list[SplitLoad] = []  # and not ended yet
        self._settled = True

    def read(self, layer: LayerState, following: Following) -> Iterator[Split]:
        """Yield all sealed blocks of a layer, in order. Blocks while storage is behind, which counts as a read
        stall.

        Args:
            layer: must not change before the end.
            following: yields, for a layer, the layers that are expected to be read after it, the nearest first.

        Raises:
            TierReadError: a block could not be read.
        """
        position = 0
        while position < len(layer.table):
            self._unsettle()
            load = self._next(layer, position, in_step=position > 0)
            try:
                self._look_ahead(load, following)
                self._wait(load)
                yield from self._splits(load)
            except BaseException:
                load.cancelled = True
                raise
            finally:
                self._end(load)
                self._settled = True
            self._unsettle()
            load.release_memory()
            self._look_ahead(load, following)
            self._settled = True
            position = load.end_block

    def look_ahead(self, layer: LayerState, following: Following) -> bool:
        """Start loads for the layers after one, unless loads are under way. Return true if any was started."""
        upcoming = next((target for target in following(layer) if len(target.table)), None)
        if (self._queue and self._settled) or upcoming is None:
            return False
        self._unsettle()
        self._queue.append(self._start(upcoming, 0))
        self._look_ahead(self._queue[0], following)
        self._settled = True
        return True

    def discard(self, layer: LayerState) -> None:
        """Cancel all loads if any of them is for this layer, which is about to be dropped."""
        if any(load.layer is layer for load in self._begun):
            self.start_over()

    def start_over(self) -> None:
        """Cancel all loads under way."""
        self._unsettle()
        self._cancel_queued()
        self._settled = True

    def _unsettle(self) -> None:
        """Mark the queue as being changed. If the last change was interrupted, cancel all loads."""
        if not self._settled:
            for load in self._begun:
                load.cancelled = True
                load.buffer.released = self._pipeline.engine.record_compute()
            for load in self._begun:
                self._release_after(load)
            self._queue.clear()
            self._free = deque(self._buffers)
            self._begun.clear()
        self._settled = False

    def close(self) -> None:
        """Free the memory. The pipeline is closed: nothing is being loaded."""
        self.start_over()
        for buffer in self._buffers:
            self._pipeline.engine.free(buffer.storage)
        self._buffers.clear()
        self._free.clear()

    def _next(self, layer: LayerState, first_block: int, in_step: bool) -> SplitLoad:
        """Return the load of a layer's blocks from `first_block` on, and begin it now if it was not predicted.

        With `in_step`, blocks were sealed since the layer's last load was begun, and their load goes first.
        Otherwise the loads under way were predicted wrongly and are cancelled.
        """
        predicted = bool(self._queue) and self._queue[0].is_next(layer, first_block)
        if not predicted:
            if not in_step:
                self._cancel_queued()
            elif not self._free:
                self._cancel(self._queue.pop())
            self._queue.appendleft(self._start(layer, first_block, awaited=True))
        load = self._queue.popleft()
        self._metrics.count(**{"prefetch_hits" if predicted else "prefetch_misses": len(load.blocks)})
        return load

    def _look_ahead(self, current: SplitLoad, following: Following) -> None:
        """Begin loads into the free buffers, after the last load under way."""
        while self._free:
            last = self._queue[-1] if self._queue else current
            target, first_block = last.layer, last.end_block
            if first_block >= len(target.table):
                first_block = 0
                upcoming = next((layer for layer in following(last.layer) if len(layer.table)), None)
                if upcoming is None or any(
                    load.layer is upcoming and load.first_block == 0 for load in self._queue
                ):
                    return  # no other layer, or the ring of layers is closed
                target = upcoming
            try:
                self._queue.append(self._start(target, first_block))
            except torch.OutOfMemoryError:
                logger.debug("no memory to load layer %d ahead of time", target.layer_idx)
                return

    def _start(self, layer: LayerState, first_block: int, awaited: bool = False) -> SplitLoad:
        """Begin to load blocks of one layout, as many as fit into a buffer."""
        blocks = layer.table.blocks
        layout = blocks[first_block].layout
        end = first_block + max(1, self._buffer_bytes // layout.nbytes)
        chosen = list(itertools.takewhile(lambda block: block.layout is layout, blocks[first_block:end]))
        nbytes = len(chosen) * layout.nbytes
        # Prefer one that has the memory already: there may be no more.
        buffer = next((free for free in self._free if free.storage.numel() >= nbytes), self._free[0])
        with self._loader.storage_lock:
            self._grow(buffer, nbytes, layout.nbytes)
            del chosen[buffer.storage.numel() // layout.nbytes :]
            load = SplitLoad(layer, first_block, chosen, buffer, buffer.storage, buffer.released)
        self._begun.append(load)
        self._free.remove(buffer)
        self._residency.retain(chosen)
        load.task = self._pipeline.worker.submit(lambda: self._loader.run(load), awaited)
        return load

    def _grow(self, buffer: LoadBuffer, nbytes: int, block_bytes: int) -> None:
        """Make room for a load and an eighth more, so that a growing sequence seldom reallocates. When memory is
        short: keep the former size, or make room for one block."""
        had_bytes = buffer.storage.numel()
        if had_bytes >= block_bytes and any(load.buffer is buffer for load in list(self._cancelled)):
            return  # a cancelled load still references the memory, which would be allocated twice
        if had_bytes < nbytes:
            try:
                buffer.reallocate(max(nbytes, min(nbytes + nbytes // 8, self._buffer_bytes)))
            except torch.OutOfMemoryError:
                buffer.reallocate(max(had_bytes, block_bytes))

    def _wait(self, load: SplitLoad) -> None:
        assert load.task is not None
        self._pipeline.wait([load.task])

    def _splits(self, load: SplitLoad) -> Iterator[Split]:
        """Yield a load's blocks, separated where the row map changes."""
        self._pipeline.engine.computes_with(load.storage)
        keys, values = load.layout.split(load.payload())
        for indices, run in load.layer.table.runs(range(load.first_block, load.end_block)):
            blocks = slice(indices[0] - load.first_block, indices[-1] + 1 - load.first_block)
            split = Split(keys[blocks], values[blocks], run.row_map, indices[0])
            yield split
            del split.keys, split.values

    def _end(self, load: SplitLoad) -> None:
        """Release the load's buffer: no kernel enqueued from now on reads it."""
        self._pipeline.engine.recycled(load.buffer.storage)
        load.buffer.released = self._pipeline.engine.record_compute()
        self._put_back(load)

    def _put_back(self, load: SplitLoad) -> None:
        self._free.append(load.buffer)
        self._begun.remove(load)
        self._release_after(load)

    def _release_after(self, load: SplitLoad) -> None:
        """Release the blocks when the load has ended."""
        task, load.task = load.task, None
        if task is not None:
            # The callback does not reference the load, nor the load its task (or the error in it): a cycle would
            # keep the buffer's memory until the garbage collector runs.
            blocks, release = load.blocks, self._residency.release
            task.add_done_callback(lambda: release(blocks))

    def _cancel(self, load: SplitLoad) -> None:
        """Cancel a load that will not be read."""
        load.cancelled = True
        self._cancelled.append(load)
        task = load.task
        assert task is not None
        # The prefetch thread runs one load at a time: it leaves this one before it fills the buffer again.
        self._put_back(load)
        task.add_done_callback(lambda: self._after_cancel(load))

    def _cancel_queued(self) -> None:
        while self._queue:
            self._cancel(self._queue.popleft())

    def _after_cancel(self, load: SplitLoad) -> None:
        """Release the memory of a cancelled load that has ended. On any thread."""
        load.release_memory()
        self._cancelled.remove(load)
