"""L2: a Zarr v3 group per request, in the layout that readers expect; any Zarr library opens it.

    <root>/<request>.rows<B>.rev<R>/                group; attributes: format, block_tokens, first_token, kv_dtype
        layers/<layer>/keys                         [B, H, S, D], one block of tokens per chunk
        layers/<layer>/values                       likewise

A group is removed with the last of its blocks. Token `s` of an array is token `first_token + s` of the sequence.
`rev` is 0; blocks that were sealed again after a crop are in the next revision. Elements are bit patterns of
`kv_dtype` (Zarr v3 has no bfloat16).
"""

from __future__ import annotations

import json
import shutil
import threading
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tensorstore as ts

from ..core.blocks import Bits, BlockKey, BlockLayout
from ..core.config import TieredCacheConfig
from .base import Tier, register_tier
from .io import IO_TIMEOUT_SECONDS, TierFuture

FORMAT = "hf_tiered_cache/kv"
FORMAT_VERSION = 1
_FIRST_BLOCKS = 64


@register_tier("zarr")
class ZarrTier(Tier):
    """Compressed blocks as Zarr v3 arrays of keys and values; see the module for the layout."""

    def __init__(self, name: str, root: Path, capacity_bytes: int | None, config: TieredCacheConfig) -> None:
        super().__init__(name, root, capacity_bytes, config)
        self._context = ts.Context(
            {
                "cache_pool": {"total_bytes_limit": 0},
                "data_copy_concurrency": {"limit": 1},
                "file_io_sync": False,  # the data does not outlive the process
            }
        )
        self._open_lock = threading.Lock()
        self._groups: set[str] = set()
        self._arrays: dict[tuple[str, int, str], ts.TensorStore] = {}
        self._layouts: dict[BlockKey, BlockLayout] = {}
        self._blocks_in: Counter[str] = Counter()

    def close(self) -> None:
        with self._open_lock:
            self._arrays.clear()
            self._layouts.clear()

    def start_write(self, key: BlockKey, layout: BlockLayout, source: Bits) -> Sequence[TierFuture]:
        with self._open_lock:
            self._blocks_in[_group(key, layout)] += key not in self._layouts
            self._layouts[key] = layout
        chunks = [self._chunk(key, layout, which) for which in ("keys", "values")]  # before any of them is begun
        return [chunk.write(part) for chunk, part in zip(chunks, _split(source, layout), strict=True)]

    def start_read(self, keys: Sequence[BlockKey], layout: BlockLayout, target: Bits) -> Sequence[TierFuture]:
        chunks = [self._chunk(key, self._layouts[key], which) for key in keys for which in ("keys", "values")]
        parts = [part for block_target in target for part in _split(block_target, layout)]
        return [ts.array(part).write(chunk) for part, chunk in zip(parts, chunks, strict=True)]

    def start_delete(self, key: BlockKey) -> Sequence[TierFuture]:
        layout = self._layouts.get(key)
        if layout is None:
            return []
        layer = self.root / _group(key, layout) / "layers" / str(key.layer_idx)
        for which in ("keys", "values"):  # not through tensorstore, which takes several times as long
            (layer / which / f"c.0.0.{key.block_idx}.0").unlink(missing_ok=True)
        return []

    def forget(self, key: BlockKey) -> None:
        with self._open_lock:
            layout = self._layouts.pop(key, None)
            if layout is None:
                return
            group = _group(key, layout)
            self._blocks_in[group] -= 1
            if not self._blocks_in[group]:
                del self._blocks_in[group]
                self._remove_group(group)

    def _remove_group(self, group: str) -> None:
        """Remove a group without blocks. What is left of it is small; the tier's directory may be gone already."""
        for address in [address for address in self._arrays if address[0] == group]:
            del self._arrays[address]
        self._groups = {path for path in self._groups if path != group and not path.startswith(f"{group}/")}
        shutil.rmtree(self.root / group, ignore_errors=True)

    def _chunk(self, key: BlockKey, layout: BlockLayout, which: str) -> ts.TensorStore:
        """Return the part of an array that is this block, `[B, H, block_tokens, D]`; the array grows as needed."""
        first, end = (index * layout.block_tokens for index in (key.block_idx, key.block_idx + 1))
        address = (_group(key, layout), key.layer_idx, which)
        with self._open_lock:
            store = self._arrays.get(address)
            if store is None:
                store = self._create(key, layout, which)
            if store.shape[2] < end:
                length = max(end, 2 * store.shape[2])
                store = store.resize(exclusive_max=[None, None, length, None], expand_only=True).result(
                    timeout=IO_TIMEOUT_SECONDS
                )
            self._arrays[address] = store
        return store[:, :, first:end, :]

    def _create(self, key: BlockKey, layout: BlockLayout, which: str) -> ts.TensorStore:
        group = _group(key, layout)
        layer = f"{group}/layers/{key.layer_idx}"
        kv_dtype = str(layout.dtype).removeprefix("torch.")
        self._write_group(
            group,
            {
                "format": FORMAT,
                "format_version": FORMAT_VERSION,
                "block_tokens": layout.block_tokens,
                "first_token": self._config.sink_tokens,
                "kv_dtype": kv_dtype,
            },
        )
        self._write_group(f"{group}/layers", {})
        self._write_group(layer, {})
        heads, dim = (
            (layout.key_heads, layout.key_dim) if which == "keys" else (layout.value_heads, layout.value_dim)
        )
        itemsize = layout.dtype.itemsize
        metadata = {
            "shape": [layout.rows, heads, _FIRST_BLOCKS * layout.block_tokens, dim],
            "data_type": layout.bits_dtype.name,
            "fill_value": 0,
            "dimension_names": ["batch", "head", "token", "dim"],
            # One directory per array, not one per chunk: written and removed several times faster.
            "chunk_key_encoding": {"name": "default", "configuration": {"separator": "."}},
            "chunk_grid": {
                "name": "regular",
                "configuration": {"chunk_shape": [layout.rows, heads, layout.block_tokens, dim]},
            },
            "codecs": [
                {"name": "bytes", "configuration": {"endian": "little"}} if itemsize > 1 else {"name": "bytes"},
                {
                    "name": "blosc",
                    "configuration": {
                        "cname": "lz4",
                        "clevel": 5,
                        "shuffle": "bitshuffle",
                        "typesize": itemsize,
                        "blocksize": 0,
                    },
                },
                {"name": "crc32c"},
            ],
            "attributes": {"kv_dtype": kv_dtype},
        }
        spec = {
            "driver": "zarr3",
            "kvstore": {"driver": "file", "path": f"{self.root}/{layer}/{which}/"},
            "metadata": metadata,
            "fill_missing_data_reads": False,
            "store_data_equal_to_fill_value": True,
        }
        return ts.open(spec, create=True, context=self._context).result(timeout=IO_TIMEOUT_SECONDS)

    def _write_group(self, path: str, attributes: dict[str, Any]) -> None:
        if path in self._groups:
            return
        document = {"zarr_format": 3, "node_type": "group", "attributes": attributes}
        store = ts.KvStore.open({"driver": "file", "path": f"{self.root}/{path}/"}).result()
        store.write("zarr.json", json.dumps(document).encode()).result(timeout=IO_TIMEOUT_SECONDS)
        self._groups.add(path)


def _group(key: BlockKey, layout: BlockLayout) -> str:
    return f"{key.namespace}.rows{layout.rows}.rev{key.revision}"


def _split(payload: Bits, layout: BlockLayout) -> tuple[Bits, Bits]:
    """View `[rows, row_elements]` as K and V, `[rows, heads, tokens, dim]`."""
    keys, values = payload[:, : layout.key_elements], payload[:, layout.key_elements :]
    return (
        keys.reshape(layout.rows, layout.key_heads, layout.block_tokens, layout.key_dim),
        values.reshape(layout.rows, layout.value_heads, layout.block_tokens, layout.value_dim),
    )
