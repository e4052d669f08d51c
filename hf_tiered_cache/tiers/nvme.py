"""L1: uncompressed blocks on local storage, one tensorstore array per layer, one chunk per block.

    <root>/L003.<n>.rows1/c.<slot>.0.0    [slots, rows, row_elements], chunk [1, rows, row_elements]

Chunk size, alignment and io modes follow measurements recorded in docs/decisions.md.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path

import numpy as np
import tensorstore as ts

from ..core.blocks import Bits, BlockKey, BlockLayout
from ..core.config import TieredCacheConfig
from ..core.host_memory import available_bytes
from .base import Tier, register_tier
from .io import TierFuture

# Declared up front: chunks that are never written cost nothing, a later resize would.
_SLOTS = 1 << 40
_FILE_SYSTEM_BLOCK_BYTES = 4096
_CONCURRENT_FILE_OPERATIONS = 8
# Buffered reads beat direct ones while all of L1 fits in the page cache with room to spare.
_PAGE_CACHE_SHARE = 0.5


def _context(io_mode: str) -> ts.Context:
    return ts.Context(
        {
            "cache_pool": {"total_bytes_limit": 0},
            "data_copy_concurrency": {"limit": 1},
            "file_io_concurrency": {"limit": _CONCURRENT_FILE_OPERATIONS},
            "file_io_mode": {"mode": io_mode},
            "file_io_sync": False,
        }
    )


@dataclass(eq=False)
class _LayerArray:
    """The open array of one layer and layout. Slots are handed out once, in order."""

    path: Path
    writable: ts.TensorStore
    readable: dict[str, ts.TensorStore]
    next_slot: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take_slot(self) -> int:
        with self.lock:
            self.next_slot += 1
            return self.next_slot - 1


@register_tier("nvme")
class NvmeTier(Tier):
    """Blocks as plain files through tensorstore; see the module for the layout and `Tier` for the contract."""

    def __init__(self, name: str, root: Path, capacity_bytes: int | None, config: TieredCacheConfig) -> None:
        super().__init__(name, root, capacity_bytes, config)
        self._arrays: dict[tuple[int, BlockLayout], _LayerArray] = {}
        self._slots: dict[BlockKey, tuple[_LayerArray, int]] = {}
        self._open_lock = threading.Lock()
        self._contexts = {"buffered": _context("default"), "direct": _context("direct")}
        self._page_cache_bytes = int(available_bytes() * _PAGE_CACHE_SHARE)
        self._io_mode: str | None = None

    @property
    def io_mode(self) -> str | None:
        return self._io_mode

    def occupied_bytes(self, layout: BlockLayout) -> int:
        return -(-layout.nbytes // _FILE_SYSTEM_BLOCK_BYTES) * _FILE_SYSTEM_BLOCK_BYTES

    def close(self) -> None:
        with self._open_lock:
            self._arrays.clear()
            self._slots.clear()

    def start_write(self, key: BlockKey, layout: BlockLayout, source: Bits) -> Sequence[TierFuture]:
        array = self._array(key.layer_idx, layout)
        slot = array.take_slot()
        self._slots[key] = (array, slot)
        return [array.writable[slot].write(source)]

    def start_read(self, keys: Sequence[BlockKey], layout: BlockLayout, target: Bits) -> Sequence[TierFuture]:
        self._io_mode = self._choose_io_mode(layout)
        located = [self._slots[key] for key in keys]
        futures, first = [], 0
        for array, run in groupby(located, key=lambda pair: pair[0]):
            slots = np.array([slot for _, slot in run])
            # The array over `target` is the destination: data lands in the caller's memory, without a copy.
            part = ts.array(target[first : first + len(slots)])
            futures.append(part.write(array.readable[self._io_mode][slots]))
            first += len(slots)
        return futures

    def start_delete(self, key: BlockKey) -> Sequence[TierFuture]:
        located = self._slots.get(key)
        if located is None:
            return []
        array, slot = located
        # Not through tensorstore, which takes ten times as long to remove a file.
        (array.path / f"c.{slot}.0.0").unlink(missing_ok=True)
        return []

    def forget(self, key: BlockKey) -> None:
        self._slots.pop(key, None)

    def _choose_io_mode(self, layout: BlockLayout) -> str:
        if layout.nbytes % _FILE_SYSTEM_BLOCK_BYTES:
            return "buffered"  # tensorstore would silently fall back: direct needs aligned files
        if self._config.l1_io_mode != "auto":
            return self._config.l1_io_mode
        return "buffered" if self.used_bytes <= self._page_cache_bytes else "direct"

    def _array(self, layer_idx: int, layout: BlockLayout) -> _LayerArray:
        with self._open_lock:
            array = self._arrays.get((layer_idx, layout))
            if array is None:
                array = self._open(layer_idx, layout, len(self._arrays))
                self._arrays[layer_idx, layout] = array
            return array

    def _open(self, layer_idx: int, layout: BlockLayout, ordinal: int) -> _LayerArray:
        path = self.root / f"L{layer_idx:03d}.{ordinal}.rows{layout.rows}"
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{path}/"},
            "metadata": {
                "shape": [_SLOTS, layout.rows, layout.row_elements],
                "data_type": layout.bits_dtype.name,
                "fill_value": 0,
                "chunk_grid": {
                    "name": "regular",
                    "configuration": {"chunk_shape": [1, layout.rows, layout.row_elements]},
                },
                "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
                "codecs": [{"name": "bytes", "configuration": {"endian": "little"}}],
                "attributes": {"kv_dtype": str(layout.dtype).removeprefix("torch.")},
            },
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }
        writable = ts.open(spec, create=True, context=self._contexts["buffered"]).result()
        readable = {
            mode: ts.open({**spec, "assume_metadata": True}, open=True, context=context).result()
            for mode, context in self._contexts.items()
        }
        return _LayerArray(path, writable, readable)
