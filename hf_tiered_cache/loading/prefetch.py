"""Layer-ahead prefetch: while one layer computes, the sealed blocks of the next ones fill their buffers.

    update(l):  release the buffer of the layer before ─▶ start loads for the layers after l ─▶ wait for l's load

Which layers come after l is learnt from the order of updates, across the end of a forward pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ..core.blocks import Block
from ..core.locks import TimedLock
from ..core.metrics import Metrics
from ..residency.table import ResidencyTable
from ..sequence.layer_state import LayerState
from ..transfer.engine import Event
from ..transfer.worker import Task
from .buffers import LoadBuffer
from .pipeline import DevicePipeline
from .precedence import Precedence
from .scatter import Scatter, ScatterRun, packed_offsets, split_runs

logger = logging.getLogger(__name__)

# Reads of this size keep a drive busy; smaller blocks are read several at a time.
_READ_BYTES = 8 << 20


@dataclass(eq=False)
class Load:
    """Sealed blocks of one layer on their way into a buffer.

    The buffer may be written after the event `after`. `loaded` maps indices in the table to blocks; `referenced`
    lists every block that was requested, each referenced until the load ends. `keys` and `values`
    are `[B, H, capacity, D]`.
    """

    layer: LayerState
    pipeline: DevicePipeline
    owner: str
    buffer: LoadBuffer
    after: Event
    capacity_tokens: int
    rows_version: int
    keys: torch.Tensor
    values: torch.Tensor
    loaded: dict[int, Block] = field(default_factory=dict)
    referenced: list[Block] = field(default_factory=list)
    tasks: list[Task[Event | None]] = field(default_factory=list)
    cancelled: bool = False


class Prefetcher:
    """Owns the loads of all layers. A load that was taken out of `_loads` belongs to the thread that took it.

    Any thread may call. A method that takes a layer needs the lock of the layer's request.

    Args:
        residency: reads blocks.
        metrics: counts hits, misses, stalls and waits.
    """

    def __init__(self, residency: ResidencyTable, metrics: Metrics) -> None:
        self._residency = residency
        self._metrics = metrics
        self._lock = TimedLock(metrics)
        self._loads: dict[LayerState, Load] = {}
        self._precedence = Precedence()

    def start(
        self, layer: LayerState, pipeline: DevicePipeline, owner: str, block_indices: Sequence[int], tokens: int
    ) -> bool:
        """Begin to load blocks of a layer ahead of time, unless it is being loaded or there is no buffer. Return
        true if a load began.

        A load of an idle request, or of one with more loads, may give up its buffer; see `Precedence`.

        Args:
            layer, pipeline: the layer, and the pipeline of its device.
            owner: the request.
            block_indices: ascending.
            tokens: room of the buffer, which grows if more is needed.
        """
        if layer in self._loads or not block_indices:
            return False
        buffer = pipeline.buffers.take() or self._take_over(pipeline, self._rival(pipeline, owner))
        if buffer is None:
            return False
        try:
            load = self._load_into(buffer, layer, pipeline, owner, tokens)
        except torch.OutOfMemoryError:
            logger.debug("no memory to load layer %d ahead of time", layer.layer_idx)
            pipeline.buffers.put_back(buffer)
            return False
        self._submit(load, block_indices)
        with self._lock:
            self._loads[layer] = load
        return True

    def is_loading(self, layer: LayerState) -> bool:
        """Return true if a load of this layer was started ahead of time."""
        return layer in self._loads

    def begin(self, layer: LayerState, pipeline: DevicePipeline, owner: str, tokens: int) -> Load:
        """Make sure that all sealed blocks of a layer are being loaded. The caller passes the load to `finish`.

        Blocks whose load began earlier count as prefetch hits. If loads for other layers take every buffer, one of
        them is cancelled.
        """
        pipeline.buffers.enter()
        with self._lock:
            self._precedence.note_update(owner)
        blocks = layer.table.blocks
        load = self._take(layer)
        if load is not None and load.capacity_tokens < layer.sink_tokens + layer.sealed_tokens:
            self.cancel(load)
            load = None
        if load is None:
            buffer = self._some_buffer(pipeline, owner)
            try:
                load = self._load_into(buffer, layer, pipeline, owner, tokens)
            except BaseException:  # out of memory, say
                pipeline.buffers.put_back(buffer)
                raise
        # A crop, or a seal since, may have changed blocks after the load began.
        missing = [index for index, block in enumerate(blocks) if load.loaded.get(index) is not block]
        self._metrics.count(prefetch_misses=len(missing), prefetch_hits=len(blocks) - len(missing))
        if missing or not load.tasks:
            self._submit(load, missing, awaited=True)
        return load

    def finish(self, load: Load, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Let the compute stream wait for the load, and return K and V `[B, H, tokens, D]`, which attention may
        read from now on. Positions that the load did not fill are undefined.

        Raises:
            TierReadError: a block could not be read.
        """
        try:
            load.pipeline.wait(load.tasks)
            # Without blocks there was no copy that waited for it.
            load.pipeline.engine.compute_waits(load.after)
            if load.capacity_tokens < tokens:
                self._grow(load, tokens)
        except BaseException:
            self.cancel(load)
            raise
        self._residency.release(load.referenced)
        load.pipeline.buffers.use(load.buffer)
        return load.keys[:, :, :tokens], load.values[:, :, :tokens]

    @contextmanager
    def blocks(
        self, layer: LayerState, pipeline: DevicePipeline, block_indices: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor, Callable[[np.ndarray[Any, Any]], np.ndarray[Any, Any]]]]:
        """Provide some blocks of a layer, from a load that has them, else read now. Blocks.

        Yields:
            K and V `[B, H, capacity, D]`, valid inside the context, and a function from token offsets into the
            sealed part of the sequence to offsets into K and V.

        Raises:
            TierReadError: a block could not be read.
        """
        pipeline.buffers.enter()
        load = self._take(layer)
        if load is not None and all(load.loaded.get(i) is layer.table.blocks[i] for i in block_indices):
            self._metrics.count(prefetch_hits=len(block_indices))
            keys, values = self.finish(load, load.capacity_tokens)
            try:
                yield keys, values, lambda offsets: offsets + layer.sink_tokens
            finally:
                pipeline.buffers.leave()
            return
        pipeline.buffers.leave()
        if load is not None:
            self.cancel(load)
        self._metrics.count(prefetch_misses=len(block_indices))
        with self.apart(layer, pipeline, block_indices) as (keys, values):
            yield keys, values, lambda offsets: packed_offsets(offsets, block_indices, layer.block_tokens)

    def discard(self, layer: LayerState) -> None:
        """Cancel the load of a layer, if there is one: its rows change, or it is about to be dropped."""
        with self._lock:
            load = self._loads.pop(layer, None)
        if load is not None:
            self.cancel(load)

    @contextmanager
    def apart(
        self, layer: LayerState, pipeline: DevicePipeline, block_indices: Sequence[int]
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Read some blocks of a layer, packed as K and V `[B, H, tokens, D]`, into a separate buffer that exists
        inside the context. Blocks. Does not affect other loads.

        Raises:
            TierReadError: a block could not be read.
        """
        buffer = LoadBuffer.empty(pipeline.engine)
        tokens = len(block_indices) * layer.block_tokens
        load = self._load_into(buffer, layer, pipeline, "", tokens)
        starts = [position * layer.block_tokens for position in range(len(block_indices))]
        self._submit(load, block_indices, starts, awaited=True)
        try:
            load.pipeline.wait(load.tasks)
            yield load.keys[:, :, :tokens], load.values[:, :, :tokens]
        finally:
            self._residency.release(load.referenced)
            pipeline.engine.free(buffer.storage)
            load.tasks.clear()  # as in `_retire`

    def _take(self, layer: LayerState) -> Load | None:
        """Take the load of a layer that was started ahead of time, unless rows have changed since."""
        with self._lock:
            load = self._loads.pop(layer, None)
        if load is not None and load.rows_version != layer.table.rows_version:
            self.cancel(load)
            return None
        return load

    def _some_buffer(self, pipeline: DevicePipeline, owner: str) -> LoadBuffer:
        """Take a buffer for a load that attention waits for; any load ahead of time may be cancelled for it."""
        buffer = pipeline.buffers.take() or self._take_over(
            pipeline, self._rival(pipeline, owner, at_any_cost=True)
        )
        if buffer is None:  # all are being read, or taken at this moment
            buffer = pipeline.buffers.take(beyond=True)
            assert buffer is not None
        return buffer

    def _load_into(
        self, buffer: LoadBuffer, layer: LayerState, pipeline: DevicePipeline, owner: str, tokens: int
    ) -> Load:
        """Make a load without tasks.

        Raises:
            torch.OutOfMemoryError: the buffer cannot be made large enough.
        """
        capacity_tokens = buffer.fit(layer.geometry, tokens)
        keys, values = layer.geometry.carve(buffer.storage, capacity_tokens)
        version = layer.table.rows_version
        return Load(layer, pipeline, owner, buffer, buffer.released, capacity_tokens, version, keys, values)

    def _grow(self, load: Load, tokens: int) -> None:
        """Move the loaded tokens to a larger buffer, when more new tokens came than expected."""
        filled = slice(0, load.layer.sink_tokens + load.layer.sealed_tokens)
        old_keys, old_values = load.keys, load.values
        old_storage, load.buffer.storage = load.buffer.storage, load.pipeline.engine.allocate(0)
        try:
            load.buffer.fit(load.layer.geometry, tokens)
        except BaseException:  # out of memory, say
            load.buffer.storage = old_storage
            raise
        load.capacity_tokens = load.buffer.fit(load.layer.geometry, tokens)
        load.keys, load.values = load.layer.geometry.carve(load.buffer.storage, load.capacity_tokens)
        load.pipeline.engine.computes_with(old_storage)  # which another thread's stream may have allocated
        load.keys[:, :, filled].copy_(old_keys[:, :, filled])
        load.values[:, :, filled].copy_(old_values[:, :, filled])
        load.buffer.released = load.pipeline.engine.record_compute()
        load.pipeline.engine.free(old_storage)

    def _submit(
        self,
        load: Load,
        block_indices: Sequence[int],
        starts: Sequence[int] | None = None,
        awaited: bool = False,
    ) -> None:
        table = load.layer.table
        if starts is None:
            starts = [load.layer.sink_tokens + index * load.layer.block_tokens for index in block_indices]
        blocks = {index: table.blocks[index] for index in block_indices}
        self._residency.retain(blocks.values())
        load.referenced += blocks.values()
        load.loaded.update(blocks)
        runs = list(split_runs(load.layer, block_indices, starts))
        # Even without blocks: a cancelled load may still be writing to this buffer, and attention must wait.
        load.tasks.append(load.pipeline.worker.submit(lambda: self._run(load, runs), awaited))

    def _run(self, load: Load, runs: Sequence[ScatterRun]) -> Event | None:
        """Read blocks from the tiers and pass them to the copy engine, piece by piece. For the prefetch thread."""
        pipeline = load.pipeline
        for run in runs:
            layout = run.blocks[0].layout
            step = max(1, _READ_BYTES // layout.nbytes)
            for first in range(0, len(run.blocks), step):
                if load.cancelled:
                    return None
                blocks = run.blocks[first : first + step]
                with pipeline.sources(blocks) as pieces:
                    for piece, source in pieces:
                        first_token = run.first_token + (first + piece.start) * layout.block_tokens
                        scatter = Scatter(load.keys, load.values, layout, run.row_map, first_token)
                        if source is not None:
                            data = layout.over(source.data, 1)
                            pipeline.engine.copy_in(data, scatter, load.after, source.ready)
                            pipeline.keep(blocks[piece.start], source)
                        else:
                            staged = layout.over(pipeline.stage(blocks[piece]), piece.stop - piece.start)
                            pipeline.loading.busy_until(pipeline.engine.copy_in(staged, scatter, load.after))
        # The event covers more than this load: a cancelled one may still be writing to the same buffer.
        return pipeline.engine.record_copy_in()

    def cancel(self, load: Load) -> None:
        """Cancel a load, instead of `finish`."""
        self._retire(load)
        # The prefetch thread runs one load at a time: it leaves this one before it fills the buffer again.
        load.pipeline.buffers.put_back(load.buffer)

    def _retire(self, load: Load) -> None:
        load.cancelled = True
        if load.tasks:
            referenced, release = load.referenced, self._residency.release
            load.tasks[-1].add_done_callback(lambda: release(referenced))
        # The callback does not reference the load, nor the load a task (or the error in it): a cycle would keep
        # the buffer's memory until the garbage collector runs.
        load.tasks.clear()

    def _take_over(self, pipeline: DevicePipeline, rival: LayerState | None) -> LoadBuffer | None:
        """Cancel the load of a layer and return its buffer, if there still is one."""
        with self._lock:
            load = self._loads.pop(rival, None) if rival is not None else None
        if load is None:
            return None
        self._retire(load)
        return load.buffer

    def _rival(self, pipeline: DevicePipeline, owner: str, at_any_cost: bool = False) -> LayerState | None:
        """The layer whose load gives way to a load of `owner`, if any; see `Precedence`."""
        with self._lock:
            loads = [(load.owner, layer) for layer, load in self._loads.items() if load.pipeline is pipeline]
            return self._precedence.rival(loads, owner, at_any_cost)
