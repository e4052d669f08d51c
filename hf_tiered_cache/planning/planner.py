"""The accelerator memory that a cache needs, from the shapes of a model's layers."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..attention.kernels import CONVERTED_BYTES, MATMUL_SCORE_ELEMENTS
from ..core.config import TieredCacheConfig, parse_count
from ..core.errors import ConfigError
from ..core.geometry import Geometry
from ..core.metrics import format_bytes
from ..sequence.window import ring_tokens
from ..transfer.staging import SLOTS_PER_RING


@dataclass(frozen=True)
class StreamingL0:
    """Accelerator memory of a cache with streaming attention; see `plan_streaming`.

    Args:
        window_bytes: sink and window of all layers.
        resident_bytes: resident blocks beside the windows.
        buffer_bytes: the buffers through which blocks stream.
        packing_bytes: packed blocks on their way to the host.
        attention_bytes: queries, results and temporary tensors of the attention of one layer.
    """

    window_bytes: int
    resident_bytes: int
    buffer_bytes: int
    packing_bytes: int
    attention_bytes: int

    @property
    def total_bytes(self) -> int:
        """The most memory that is held at a time."""
        return (
            self.window_bytes + self.resident_bytes + self.buffer_bytes + self.packing_bytes + self.attention_bytes
        )

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.total_bytes)}: windows {format_bytes(self.window_bytes)}, "
            f"resident blocks {format_bytes(self.resident_bytes)}, "
            f"stream buffers {format_bytes(self.buffer_bytes)}, packing {format_bytes(self.packing_bytes)}, "
            f"attention {format_bytes(self.attention_bytes)}"
        )


@dataclass(frozen=True)
class LayerShapes:
    """The attention layers of a model that a cache keeps in tiers, all of one shape.

    Args:
        layers: number of these layers.
        heads: query heads.
        kv_heads: key and value heads.
        head_dim: width of a head of K and of V.
        dtype: of K and V.
        softcap: whether the scores are capped.
    """

    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    softcap: bool


def plan_streaming(
    shapes: LayerShapes, cache_config: TieredCacheConfig, *, batch_size: int = 1, query_tokens: int = 1
) -> StreamingL0:
    """Return the accelerator memory that streaming attention takes at most; see `integration.plan`.

    Args:
        shapes: of the model's layers.
        cache_config: settings of the cache.
        batch_size: rows, beams included.
        query_tokens: largest number of tokens in one forward pass.

    Raises:
        ConfigError: an argument is of another type, or a number is below 1.
    """
    if not isinstance(cache_config, TieredCacheConfig):
        raise ConfigError(f"cache_config={cache_config!r} is not a TieredCacheConfig")
    batch_size = parse_count(batch_size, "batch_size", 1)
    query_tokens = parse_count(query_tokens, "query_tokens", 1)
    geometry = Geometry(
        batch_size, shapes.kv_heads, shapes.head_dim, shapes.kv_heads, shapes.head_dim, shapes.dtype
    )
    held = cache_config.sink_tokens + ring_tokens(cache_config.window_floor_tokens, cache_config.block_tokens)
    block_bytes = geometry.layout(cache_config.block_tokens).nbytes
    one_buffer = max(cache_config.stream_buffer_bytes, block_bytes)
    split_tokens = max(held, query_tokens, one_buffer // block_bytes * cache_config.block_tokens)
    attention = _attention_bytes(geometry, shapes.heads, query_tokens, split_tokens, one_buffer, shapes.softcap)
    return StreamingL0(
        window_bytes=shapes.layers * geometry.nbytes(held),
        resident_bytes=cache_config.resident_bytes,
        buffer_bytes=cache_config.stream_buffers * one_buffer,
        packing_bytes=SLOTS_PER_RING * block_bytes,
        # A window exists twice for a moment when it grows; no attention is being computed then.
        attention_bytes=max(attention, geometry.nbytes(held)),
    )


def _attention_bytes(
    geometry: Geometry, heads: int, queries: int, split_tokens: int, buffer_bytes: int, softcap: bool
) -> int:
    """Bound the bytes that `OnlineAttention` and its kernels hold for one layer, in splits of `split_tokens`."""
    item, exact = geometry.dtype.itemsize, max(4, geometry.dtype.itemsize)
    rows = geometry.batch * heads * queries
    running = rows * geometry.key_dim * item + rows * (geometry.value_dim + 1) * exact
    # Of one split: its output, which may have to be converted, and four numbers per row.
    split = rows * (geometry.value_dim * (item + exact) + 4 * exact)
    side_by_side = buffer_bytes
    per_head = (geometry.key_dim + geometry.value_dim) * exact
    converted = geometry.batch * geometry.key_heads * split_tokens * per_head if item < exact else 0
    if softcap:
        at_once = max(MATMUL_SCORE_ELEMENTS, geometry.batch * geometry.key_heads * split_tokens)
        kernel = converted + min(at_once, rows * split_tokens) * exact
        kernel += rows * (geometry.key_dim + geometry.value_dim) * exact
    else:
        kernel = min(converted, max(CONVERTED_BYTES, split_tokens * per_head))
        kernel += 2 * rows * geometry.key_dim * exact * (item < exact)
    return running + split + side_by_side + kernel
