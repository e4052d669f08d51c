"""Planning for a transformers model: reads the shapes of its layers from its config."""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..core.config import TieredCacheConfig
from ..core.errors import ConfigError
from ..planning import planner
from ..planning.planner import LayerShapes, StreamingL0


def layer_shapes(config: PreTrainedConfig, dtype: torch.dtype | None = None) -> LayerShapes:
    """Return the shapes of the layers that a `TieredCache` for this config keeps in tiers.

    Args:
        config: of a model.
        dtype: of K and V; the model's when `None`.

    Raises:
        ConfigError: an argument is of another type.
    """
    if not isinstance(config, PreTrainedConfig):
        raise ConfigError(f"config={type(config).__name__}: pass the model's config, model.config")
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise ConfigError(f"dtype={dtype!r}: pass a torch.dtype, or None")
    text = config.get_text_config(decoder=True)
    heads = text.num_attention_heads
    return LayerShapes(
        layers=sum(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers),
        heads=heads,
        kv_heads=getattr(text, "num_key_value_heads", None) or heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // heads,
        dtype=dtype or text.dtype or torch.float32,
        softcap=getattr(text, "attn_logit_softcapping", None) is not None,
    )


def plan_streaming(
    config: PreTrainedConfig,
    cache_config: TieredCacheConfig,
    *,
    batch_size: int = 1,
    query_tokens: int = 1,
    dtype: torch.dtype | None = None,
) -> StreamingL0:
    """Return an upper bound of the accelerator memory for streaming attention, independent of the context length.

    A short context takes less. The model, and memory that PyTorch's attention kernels allocate internally, are not
    included.

    Args:
        config: of a model that streams; see `TieredCache.for_model`.
        cache_config: settings of the cache.
        batch_size: rows, beams included.
        query_tokens: most tokens in one forward pass: `prefill_chunk_size`, or the whole prompt without it.
        dtype: of K and V; the model's when `None`.

    Raises:
        ConfigError: an argument is of another type, or a number is below 1.
    """
    return planner.plan_streaming(
        layer_shapes(config, dtype), cache_config, batch_size=batch_size, query_tokens=query_tokens
    )
