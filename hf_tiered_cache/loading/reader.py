"""Sealed blocks of a layer, a few at a time, through a fixed number of buffers, as they lie in storage.

    storage ──▶ [ buffer ] [ buffer ] [ buffer ] ──▶ attention
                 loading    loading    being read

The buffers go round: while attention reads one part, the next ones are being loaded, first those of the same
layer, then those of the layers that come after it, over the end of the forward pass. Parts are not tied to batch
rows, so a reorder leaves what is under way as it is.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..core.blocks import Block, BlockLayout, as_bits
from ..core.metrics import Metrics
from ..core.row_map import RowMap
from ..residency.table import ResidencyTable
from ..sequence.layer_state import LayerState
from ..transfer.engine import Event
from ..transfer.worker import Task
from .buffers import LoadBuffer
from .pipeline import DevicePipeline, Source

logger = logging.getLogger(__name__)

Following = Callable[[LayerState], Iterable[LayerState]]


@dataclass(eq=False)
class Split:
    """Consecutive sealed blocks in accelerator memory, valid until the next part is asked for. Then it loses keys
    and values, so that nobody keeps the memory of a buffer that grows.

    Args:
        keys: `[n, stored rows, Hk, T, Dk]`.
        values: `[n, stored rows, Hv, T, Dv]`.
        row_map: for each batch row the stored row that it reads.
        first_block: index of the first in its layer.
    """

    keys: torch.Tensor
    values: torch.Tensor
    row_map: RowMap
    first_block: int


@dataclass(eq=False)
class _Load:
    """Blocks of one layer and one layout on their way into a buffer; referenced until the load ends.

    `storage` is the buffer's when the load began, `after` the event that must have passed before it is written.
    """

    layer: LayerState
    first_block: int
    blocks: list[Block]
    buffer: LoadBuffer
    storage: torch.Tensor
    after: Event
    task: Task[Event | None] | None = None
    cancelled: bool = False

    @property
    def layout(self) -> BlockLayout:
        return self.blocks[0].layout

    @property
    def end_block(self) -> int:
        return self.first_block + len(self.blocks)

    def payload(self) -> torch.Tensor:
        """The blocks, `[n, stored rows, row_elements]`."""
        return self.layout.over(self.storage, len(self.blocks))

    def let_go(self) -> None:
        """Keep no memory: the buffer may be about to grow."""
        self.storage = self.storage.new_empty(0)

    def is_next(self, layer: LayerState, first_block: int) -> bool:
        """Return true if these are still the blocks of the layer from `first_block` on."""
        return (
            self.layer is layer
            and self.first_block == first_block
            and self.blocks == layer.table.blocks[first_block : self.end_block]
        )


class BlockReader:
    """The buffers of one device, and the loads into them in the order in which they will be read.

    Used by one thread at a time. A layer that was not expected next makes it start over, and so does an interrupt
    (Ctrl-C) that struck while loads were being handed on: then it is not `_settled`.

    Args:
        pipeline: of the device.
        residency: where blocks are read.
        metrics: counts hits, misses, bytes and stalls.
        buffers: how many there are, at least 2.
        buffer_bytes: size that each may reach; a larger block makes it larger. They grow with what they are asked
            to hold, which is no more than the longest layer.
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
        self._storage_lock = threading.Lock()  # of the buffers' `storage`, which the prefetch thread may give up
        self._queue: deque[_Load] = deque()
        self._begun: list[_Load] = []  # those that have a buffer
        self._given_up: list[_Load] = []  # cancelled, and not ended yet
        self._settled = True

    def read(self, layer: LayerState, following: Following) -> Iterator[Split]:
        """All sealed blocks of a layer, in order. Blocks while storage is behind, which is counted as a stall.

        Args:
            layer: must not change before the end.
            following: for a layer those that are expected to be read after it, the nearest first.

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
            load.let_go()
            self._look_ahead(load, following)
            self._settled = True
            position = load.end_block

    def look_ahead(self, layer: LayerState, following: Following) -> bool:
        """Start to load what comes after a layer, if nothing is being loaded yet. Whether anything was started."""
        upcoming = next((target for target in following(layer) if len(target.table)), None)
        if (self._queue and self._settled) or upcoming is None:
            return False
        self._unsettle()
        self._queue.append(self._start(upcoming, 0))
        self._look_ahead(self._queue[0], following)
        self._settled = True
        return True

    def discard(self, layer: LayerState) -> None:
        """Forget what is being loaded, if a part of it is this layer's, which goes away."""
        if any(load.layer is layer for load in self._begun):
            self.start_over()

    def start_over(self) -> None:
        """Forget all loads under way."""
        self._unsettle()
        self._cancel_queued()
        self._settled = True

    def _unsettle(self) -> None:
        """Loads are about to be handed on. If that was interrupted the last time, all of them are given up."""
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

    def _next(self, layer: LayerState, first_block: int, in_step: bool) -> _Load:
        """The load that brings a layer's blocks from `first_block` on, begun now if nobody foresaw it.

        Blocks that were sealed since its last part was foreseen squeeze in (`in_step`); otherwise what is under
        way was foreseen wrongly.
        """
        foreseen = bool(self._queue) and self._queue[0].is_next(layer, first_block)
        if not foreseen:
            if not in_step:
                self._cancel_queued()
            elif not self._free:
                self._cancel(self._queue.pop())
            self._queue.appendleft(self._start(layer, first_block, awaited=True))
        load = self._queue.popleft()
        self._metrics.count(**{"prefetch_hits" if foreseen else "prefetch_misses": len(load.blocks)})
        return load

    def _look_ahead(self, current: _Load, following: Following) -> None:
        """Put the free buffers to use: continue after the last load under way."""
        while self._free:
            last = self._queue[-1] if self._queue else current
            target, first_block = last.layer, last.end_block
            if first_block >= len(target.table):
                first_block = 0
                upcoming = next((layer for layer in following(last.layer) if len(layer.table)), None)
                if upcoming is None or any(
                    load.layer is upcoming and load.first_block == 0 for load in self._queue
                ):
                    return  # nothing else, or once round
                target = upcoming
            try:
                self._queue.append(self._start(target, first_block))
            except torch.OutOfMemoryError:
                logger.debug("no memory to load layer %d ahead of time", target.layer_idx)
                return

    def _start(self, layer: LayerState, first_block: int, awaited: bool = False) -> _Load:
        """Begin to load blocks of one layout, as many as a buffer holds."""
        blocks = layer.table.blocks
        layout = blocks[first_block].layout
        end = first_block + max(1, self._buffer_bytes // layout.nbytes)
        chosen = list(itertools.takewhile(lambda block: block.layout is layout, blocks[first_block:end]))
        nbytes = len(chosen) * layout.nbytes
        # One that has its memory already, if there is one: there may be no more.
        buffer = next((free for free in self._free if free.storage.numel() >= nbytes), self._free[0])
        with self._storage_lock:
            self._grow(buffer, nbytes, layout.nbytes)
            del chosen[buffer.storage.numel() // layout.nbytes :]
            load = _Load(layer, first_block, chosen, buffer, buffer.storage, buffer.released)
        self._begun.append(load)
        self._free.remove(buffer)
        self._residency.retain(chosen)
        load.task = self._pipeline.worker.submit(lambda: self._run(load), awaited)
        return load

    def _grow(self, buffer: LoadBuffer, nbytes: int, block_bytes: int) -> None:
        """Have room for a load, and an eighth more, so that a sequence that grows seldom asks again. Where there
        is no memory for it: what the buffer had, or one block."""
        had_bytes = buffer.storage.numel()
        if had_bytes >= block_bytes and any(load.buffer is buffer for load in list(self._given_up)):
            return  # a cancelled load still keeps the memory, which would be there twice
        if had_bytes < nbytes:
            try:
                buffer.reallocate(max(nbytes, min(nbytes + nbytes // 8, self._buffer_bytes)))
            except torch.OutOfMemoryError:
                buffer.reallocate(max(had_bytes, block_bytes))

    def _fit(self, buffer: LoadBuffer, nbytes: int) -> None:
        if buffer.storage.numel() < nbytes:
            buffer.reallocate(nbytes)

    def _run(self, load: _Load) -> Event | None:
        """On the prefetch thread: read from the tiers, straight into the buffer where the host may write to it."""
        if load.cancelled:
            return None
        with self._pipeline.sources(load.blocks) as pieces:
            if self._pipeline.engine.host_writes:
                self._read_in_place(load, pieces)
                event = None
            else:
                for piece, source in pieces:
                    self._copy_in(load, piece, source)
                event = self._pipeline.engine.record_copy_in()
        return event

    def _copy_in(self, load: _Load, piece: slice, source: Source | None) -> None:
        engine, nbytes = self._pipeline.engine, load.layout.nbytes
        target = load.storage[piece.start * nbytes : piece.stop * nbytes]
        if source is not None:
            engine.copy_in_whole(source.data[:nbytes], target, load.after, source.ready)
            self._pipeline.keep(load.blocks[piece.start], source)
            return
        staged = self._pipeline.stage(load.blocks[piece])
        self._pipeline.loading.busy_until(engine.copy_in_whole(staged, target, load.after))

    def _read_in_place(self, load: _Load, pieces: Sequence[tuple[slice, Source | None]]) -> None:
        load.after.wait()
        with self._storage_lock:
            if load.buffer.storage is not load.storage:  # given up since, see below
                self._fit(load.buffer, load.storage.numel())
                load.storage = load.buffer.storage
        payload = load.payload()
        try:
            for piece, source in pieces:
                if source is None:
                    self._residency.read(load.blocks[piece], as_bits(payload[piece]))
                else:
                    if source.ready is not None:
                        source.ready.wait()
                    np.copyto(as_bits(payload[piece]), as_bits(load.layout.over(source.data, 1)))
        except BaseException:
            with self._storage_lock:  # a read without an answer in time may still write to it
                if load.buffer.storage is load.storage:
                    self._pipeline.engine.free(load.storage)
                    load.buffer.storage = self._pipeline.engine.allocate(0)
            raise
        for piece, source in pieces:
            if source is None:
                self._pipeline.resident.keep(load.blocks[piece], payload[piece])
                self._pipeline.count_loaded(load.blocks[piece])

    def _wait(self, load: _Load) -> None:
        assert load.task is not None
        self._pipeline.wait([load.task])

    def _splits(self, load: _Load) -> Iterator[Split]:
        """A load's blocks, split where the row map changes."""
        self._pipeline.engine.computes_with(load.storage)
        keys, values = load.layout.split(load.payload())
        for indices, run in load.layer.table.runs(range(load.first_block, load.end_block)):
            blocks = slice(indices[0] - load.first_block, indices[-1] + 1 - load.first_block)
            split = Split(keys[blocks], values[blocks], run.row_map, indices[0])
            yield split
            del split.keys, split.values

    def _end(self, load: _Load) -> None:
        """Nothing enqueued from now on reads the load's buffer."""
        self._pipeline.engine.recycled(load.buffer.storage)
        load.buffer.released = self._pipeline.engine.record_compute()
        self._put_back(load)

    def _put_back(self, load: _Load) -> None:
        self._free.append(load.buffer)
        self._begun.remove(load)
        self._release_after(load)

    def _release_after(self, load: _Load) -> None:
        """Give the blocks back when the load has ended."""
        task, load.task = load.task, None
        if task is not None:
            # Neither does the callback hold the load, nor the load its task, or the error in it: a cycle would
            # keep the buffer until the garbage collector runs.
            blocks, release = load.blocks, self._residency.release
            task.add_done_callback(lambda: release(blocks))

    def _cancel(self, load: _Load) -> None:
        """Nobody will read this load."""
        load.cancelled = True
        self._given_up.append(load)
        task = load.task
        assert task is not None
        # The prefetch thread does one thing at a time: what it still does here precedes the buffer's next load.
        self._put_back(load)
        task.add_done_callback(lambda: self._gone(load))

    def _cancel_queued(self) -> None:
        while self._queue:
            self._cancel(self._queue.popleft())

    def _gone(self, load: _Load) -> None:
        """A cancelled load has ended; on any thread."""
        load.let_go()
        self._given_up.remove(load)
