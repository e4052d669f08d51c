"""Sealing: a block leaves its window, is packed on the accelerator, copied to the host, and queued for write-back.

compute stream:   window ──pack──▶ pack slot
copy-out stream:                   pack slot ──▶ staging slot ──▶ write-back thread
"""

from __future__ import annotations

import torch

from ..core.blocks import BlockLayout
from ..core.locks import TimedLock
from ..core.metrics import Metrics
from ..residency.device_pool import DevicePool
from ..residency.writeback import WriteBack
from ..sequence.layer_state import LayerState
from ..sequence.window import WindowBuffer
from ..transfer.engine import CopyEngine, Event
from ..transfer.staging import SLOTS_PER_RING, SlotRing, StagingPool


class Sealer:
    """Seals the blocks of one device. Any number of threads may call, each with the lock of the layer's request.

    Args:
        engine: copies from the device.
        write_back: stores the sealed blocks.
        resident: takes copies of the blocks that should stay on the device.
        metrics: counts blocks, bytes and stalls.
        staging_blocks: host buffers for blocks on their way out.
    """

    def __init__(
        self,
        engine: CopyEngine,
        write_back: WriteBack,
        resident: DevicePool,
        metrics: Metrics,
        staging_blocks: int,
    ) -> None:
        self._engine = engine
        self._write_back = write_back
        self._resident = resident
        self._metrics = metrics
        self._packing = TimedLock(metrics)
        self._staging = StagingPool(engine, staging_blocks, metrics)
        self._pack = SlotRing(
            SLOTS_PER_RING,
            allocate=engine.allocate,
            free=engine.free,
            recycled=engine.recycled,
            wait=engine.compute_waits,
        )

    def seal_oldest(self, layer: LayerState) -> None:
        """Move the oldest block of a layer's window into its table, and start its copy to storage.

        Blocks only while all staging slots are in use, which counts as a write stall.

        Raises:
            TierError: storage failed, so that no slot will become free; window and table are unchanged.
        """
        layout = layer.geometry.layout(layer.block_tokens)
        with self._metrics.stall("write"):
            slot = self._staging.acquire(layout.nbytes, check=self._write_back.retry)
        try:
            with self._packing:
                event, resident = self._pack_and_copy(layer.window, layout, slot.buffer[: layout.nbytes])
        except BaseException:  # out of memory, for example
            slot.pool.release(slot)
            raise
        with layer.changing:
            layer.torn = True
            block = layer.table.seal(layout)
            self._write_back.add(block, slot, event)
            layer.window.drop_oldest_block()
            layer.torn = False
        if resident is not None:
            self._resident.enter(block, resident, ready=self._engine.record_compute())
        self._metrics.count(blocks_sealed=1, L0_read=layout.nbytes)

    def _pack_and_copy(
        self, window: WindowBuffer, layout: BlockLayout, target: torch.Tensor
    ) -> tuple[Event, torch.Tensor | None]:
        """Start to copy the oldest block to the host, and keep a copy on the device if it should be resident."""
        with self._metrics.stall("write"):
            packed = self._pack.next(layout.nbytes)
        keys, values = layout.split(layout.over(packed, 1))
        window_keys, window_values = window.oldest_block()
        keys[0].copy_(window_keys)
        values[0].copy_(window_values)
        resident = self._resident.copy_of(packed)
        event = self._engine.copy_out(packed, target, after=self._engine.record_compute())
        self._pack.busy_until(event)
        return event, resident

    def close(self) -> None:
        """Free the pack slots. The engine is closed: nothing is being copied."""
        self._pack.close()
