"""The `"tiered"` attention function for transformers: streams K and V from the tiers.

    model ──▶ tiered_mask: this pass will stream
          ──▶ cache.update(k, v) ──▶ k, v marked as PendingAttention
          ──▶ tiered_attention_forward ──▶ manager.attend

Marked keys and values are the new tokens only. The attention function recognises them by the mark, which is not
copied to derived tensors. A mark that is not consumed before the next update is an error. A pass whose masks were
not made here, because the caller passed a 4-D mask or another model uses the cache, gets all K and V.

Importing this module registers the attention and its masks; models that do not select them are not affected.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedConfig, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import causal_mask_function, prepare_padding_mask, sdpa_mask

from ..attention.online import AttentionRule, OnlineAttention
from ..core.errors import UnsupportedModelError
from ..manager.manager import KVCacheManager
from .passes import announce_streaming
from .streaming_models import STREAMING_MODELS

TIERED = "tiered"
"""The name for `model.set_attn_implementation("tiered")`."""

_MARK = "_tiered_pending"
_MASKED_TOKENS = "_tiered_masked_tokens"

# Arguments of attention functions that streaming attention does not support.
_UNSUPPORTED_ARGUMENTS = ("position_bias", "sliding_window")

UNTRACED = "the tiers move data beside the computation, which cannot be traced: compile without fullgraph=True"
"""The reason why `torch.compile` skips these functions; the rest of the model is compiled."""


def can_stream(text_config: PreTrainedConfig) -> bool:
    """Return true if an architecture is known to pass keys and values to attention as the cache returned them."""
    return text_config.model_type in STREAMING_MODELS


def enable_streaming(model: PreTrainedModel) -> bool:
    """Set the `"tiered"` attention for a model's text layers, if they are known to work with it. Changes the
    model.

    Returns:
        True if the model uses it now.
    """
    config = model.config
    text_config = config.get_text_config(decoder=True)
    if not can_stream(text_config):
        return False
    # The attention modules concerned: they must read this config object, and be causal.
    modules = [
        module
        for module in model.modules()
        if getattr(module, "config", None) is text_config
        and hasattr(module, "is_causal")
        and not getattr(module, "is_cross_attention", False)
    ]
    if not modules or not all(module.is_causal for module in modules):
        return False
    sub_config = next((name for name in config.sub_configs if getattr(config, name, None) is text_config), None)
    model.set_attn_implementation(TIERED if sub_config is None else {sub_config: TIERED})
    return bool(text_config._attn_implementation == TIERED)


class PendingAttention:
    """An update whose attention has not been computed yet; the attention adds its tokens.

    It is `begun` when an attention function has taken it, and `done` when the tokens are added.

    Args:
        manager, request_id, layer_idx: the layer of the tokens.
    """

    def __init__(self, manager: KVCacheManager, request_id: Hashable, layer_idx: int) -> None:
        self.layer_idx = layer_idx
        self.begun = self.done = False
        self._manager = manager
        self._request_id = request_id

    def mark(self, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return views of the new tokens that carry this object as a mark."""
        key, value = key.view_as(key), value.view_as(value)
        setattr(key, _MARK, self)
        setattr(value, _MARK, self)
        return key, value

    @staticmethod
    def of(key: torch.Tensor, value: torch.Tensor) -> PendingAttention | None:
        """Return the mark that both tensors carry, if they come from one update."""
        mark = getattr(key, _MARK, None)
        return mark if mark is not None and mark is getattr(value, _MARK, None) else None

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule
    ) -> torch.Tensor:
        """Compute the attention and add the tokens; see `KVCacheManager.attend`. May be called once."""
        if self.begun:
            raise UnsupportedModelError(
                f"the model computes the attention of layer {self.layer_idx} twice from one update, which cannot "
                'be streamed: call model.set_attn_implementation("sdpa")'
            )
        self.begun = True
        key, value = in_one_dtype(key, value)
        with torch.autocast(query.device.type, enabled=False):
            output = self._manager.attend(self._request_id, self.layer_idx, query.to(key.dtype), key, value, rule)
        self.done = True
        return output


def in_one_dtype(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return both in the wider of their dtypes, which holds either exactly. `torch.autocast` makes them differ."""
    if key.dtype == value.dtype:
        return key, value
    dtype = torch.promote_types(key.dtype, value.dtype)
    return key.to(dtype), value.to(dtype)


def _autocast_dtype(query: torch.Tensor) -> torch.dtype | None:
    """Return the dtype to which `torch.autocast` rounds the arguments of attention; `None` if it does not."""
    device_type = query.device.type
    if query.dtype is torch.float64 or not torch.is_autocast_enabled(device_type):
        return None
    return torch.get_autocast_dtype(device_type)


@torch.compiler.disable(reason=UNTRACED)
def tiered_attention_forward(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Compute attention, with the signature of transformers' attention functions.

    Keys and values that an update of a `TieredCache` has marked are streamed from the tiers. All others are
    complete K and V. For them sdpa computes the attention where it can, and the online softmax of streaming
    attention where sdpa cannot (softcap, sinks, several queries after older tokens).

    Args:
        module: the model's attention module.
        query: `[B, Hq, Q, D]`.
        key: `[B, Hk, S, Dk]`; if marked, only the new tokens.
        value: `[B, Hv, S, Dv]`.
        attention_mask: the result of `tiered_mask`.
        dropout: must be 0 for streaming.
        scaling, softcap, s_aux: scale, cap and sinks of the scores.
        is_causal: overrides the attribute of the module.

    Returns:
        `[B, Q, Hq, Dv]`, and no attention weights.

    Raises:
        UnsupportedModelError: the model asks for something that cannot be streamed.
    """
    masked_tokens = getattr(attention_mask, _MASKED_TOKENS, None)
    rule = AttentionRule(scaling, softcap, s_aux, attention_mask, masked_tokens, _autocast_dtype(query))
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    pending = PendingAttention.of(key, value)
    if any(kwargs.get(name) is not None for name in ("indices", "block_indices")):
        raise UnsupportedModelError(
            'the model selects keys by indices, which the "tiered" attention does not do: '
            'call model.set_attn_implementation("sdpa")'
        )
    if kwargs.get("output_attentions"):
        raise UnsupportedModelError(
            'the "tiered" attention computes no weights to return: leave out output_attentions=True, or call '
            'model.set_attn_implementation("eager")'
        )
    if pending is not None:
        _check_supported(pending.layer_idx, dropout, causal, kwargs)
        return pending.attend(query, key, value, rule), None
    queries, older_tokens = query.shape[2], key.shape[2] - query.shape[2]
    mask_says_all = queries == 1 or not causal or (attention_mask is not None and attention_mask.shape[2] > 1)
    plain_causal = attention_mask is None and older_tokens == 0
    if softcap is None and s_aux is None and (mask_says_all or plain_causal):
        output, _ = sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout, scaling, is_causal=causal, **kwargs
        )
        return output, None
    _check_computable(dropout, kwargs, query, key, value)
    key, value = in_one_dtype(key, value)
    query = query.to(key.dtype)
    with (
        torch.autocast(query.device.type, enabled=False),
        OnlineAttention(query, key.shape[1], value.shape[3], rule) as attention,
    ):
        if mask_says_all:
            attention.add(key, value, 0)
        else:
            attention.add(key[:, :, older_tokens:], value[:, :, older_tokens:], older_tokens, newest=True)
            if older_tokens:
                attention.add(key[:, :, :older_tokens], value[:, :, :older_tokens], 0)
        return attention.finish(), None


def _check_computable(dropout: float, kwargs: dict[str, Any], *states: torch.Tensor) -> None:
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in states):
        problem = "has no gradients"
    elif dropout or kwargs.get("position_bias") is not None:
        problem = "knows neither dropout nor a position bias"
    else:
        return
    raise UnsupportedModelError(
        f'the "tiered" attention {problem} where sdpa does not do the work: it serves inference. '
        'Call model.set_attn_implementation("sdpa"), or "eager"'
    )


def _check_supported(layer_idx: int, dropout: float, causal: bool, kwargs: dict[str, Any]) -> None:
    asked = [name for name in _UNSUPPORTED_ARGUMENTS if kwargs.get(name) is not None]
    asked += ["dropout"] * bool(dropout) + ["attention that is not causal"] * (not causal)
    if asked:
        raise UnsupportedModelError(
            f"layer {layer_idx} asks for {', '.join(asked)}, which streaming attention does not do: "
            'call model.set_attn_implementation("sdpa")'
        )


@torch.compiler.disable(reason=UNTRACED)
def tiered_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int = 0,
    kv_offset: int = 0,
    mask_function: Any = causal_mask_function,
    attention_mask: torch.Tensor | None = None,
    local_size: int | None = None,
    allow_is_causal_skip: bool = True,
    use_vmap: bool = False,
    **kwargs: Any,
) -> torch.Tensor | None:
    """Make the mask for `tiered_attention_forward`, with the signature of transformers' mask functions.

    Returns:
        For plain causal attention, where the newest query sees all keys: `None`, or the padding `[B, 1, 1, KV]`,
        bool, `True` where a key is visible; never a mask with a row per query. Otherwise the mask that sdpa takes.
    """
    announce_streaming()
    plain = mask_function is causal_mask_function and local_size is None and allow_is_causal_skip and not use_vmap
    square = isinstance(q_offset, int) and (q_offset == kv_offset and q_length == kv_length)
    if not plain or not isinstance(q_offset, int) or q_offset + q_length != kv_offset + kv_length:
        # sdpa_mask also skips the mask for an empty static cache, where `None` would have another meaning.
        skip = allow_is_causal_skip and (q_length == 1 or square)
        dense: torch.Tensor | None = sdpa_mask(
            batch_size=batch_size,
            q_length=q_length,
            kv_length=kv_length,
            q_offset=q_offset,
            kv_offset=kv_offset,
            mask_function=mask_function,
            attention_mask=attention_mask,
            local_size=local_size,
            allow_is_causal_skip=skip,
            use_vmap=use_vmap,
            **kwargs,
        )
        return dense
    padding: torch.Tensor | None = prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is None:
        return None
    padding = padding[:, kv_offset : kv_offset + kv_length]
    hidden = padding.logical_not().any(dim=0).nonzero()  # synchronises an accelerator, once per forward pass
    if len(hidden) == 0:
        return None
    mask = padding[:, None, None, :]
    setattr(mask, _MASKED_TOKENS, int(hidden[-1]) + 1)
    return mask


AttentionInterface.register(TIERED, tiered_attention_forward)
AttentionMaskInterface.register(TIERED, tiered_mask)
