"""One load of streaming attention: a few blocks of one layer, from the tiers into one buffer.

Where the host may write to the buffer, blocks are read straight into it. Elsewhere they go through staging, and
the copy engine copies them.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ..core.blocks import Block, BlockLayout, as_bits
from ..residency.table import ResidencyTable
from ..sequence.layer_state import LayerState
from ..transfer.engine import Event
from ..transfer.worker import Task
from .buffers import LoadBuffer
from .pipeline import DevicePipeline, Source


@dataclass(eq=False)
class SplitLoad:
    """Blocks of one layer and one layout on their way into a buffer; referenced until the load ends.

    `storage` is the memory that the buffer had when the load began; it may be written once `after` has passed.
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

    def release_memory(self) -> None:
        """Drop the reference to the buffer's memory, since the buffer may be about to grow."""
        self.storage = self.storage.new_empty(0)

    def is_next(self, layer: LayerState, first_block: int) -> bool:
        """Return true if these are still the blocks of the layer from `first_block` on."""
        return (
            self.layer is layer
            and self.first_block == first_block
            and self.blocks == layer.table.blocks[first_block : self.end_block]
        )


class SplitLoader:
    """Fills the buffers of one reader.

    Args:
        pipeline: of the device.
        residency: reads blocks.
    """

    def __init__(self, pipeline: DevicePipeline, residency: ResidencyTable) -> None:
        self._pipeline = pipeline
        self._residency = residency
        self.storage_lock = threading.Lock()  # guards the memory of buffers, which `run` replaces after an error

    def run(self, load: SplitLoad) -> Event | None:
        """Fill a load's buffer. For the prefetch thread; blocks on reads.

        Returns:
            The event after which the buffer may be read; `None` when it may be read at once.

        Raises:
            TierReadError: a block could not be read.
        """
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

    def _copy_in(self, load: SplitLoad, piece: slice, source: Source | None) -> None:
        engine, nbytes = self._pipeline.engine, load.layout.nbytes
        target = load.storage[piece.start * nbytes : piece.stop * nbytes]
        if source is not None:
            engine.copy_in_whole(source.data[:nbytes], target, load.after, source.ready)
            self._pipeline.keep(load.blocks[piece.start], source)
            return
        staged = self._pipeline.stage(load.blocks[piece])
        self._pipeline.loading.busy_until(engine.copy_in_whole(staged, target, load.after))

    def _read_in_place(self, load: SplitLoad, pieces: Sequence[tuple[slice, Source | None]]) -> None:
        load.after.wait()
        with self.storage_lock:
            if load.buffer.storage is not load.storage:  # an error replaced it, as below
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
            with self.storage_lock:  # a read that timed out may still write to it
                if load.buffer.storage is load.storage:
                    self._pipeline.engine.free(load.storage)
                    load.buffer.storage = self._pipeline.engine.allocate(0)
            raise
        for piece, source in pieces:
            if source is None:
                self._pipeline.resident.keep(load.blocks[piece], payload[piece])
                self._pipeline.count_loaded(load.blocks[piece])

    def _fit(self, buffer: LoadBuffer, nbytes: int) -> None:
        if buffer.storage.numel() < nbytes:
            buffer.reallocate(nbytes)
