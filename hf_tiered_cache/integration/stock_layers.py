"""Inspection of layers that are transformers' own classes: sliding, recurrent, indexed and others."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

# The tensors of a layer with a recurrent state, and the version counter of each.
StateMark = tuple[tuple["weakref.ref[torch.Tensor]", int], ...]


def attention_layers(layers: Sequence[Any]) -> list[int]:
    """Return the layers that hold tokens."""
    return [layer_idx for layer_idx, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)]


def recurrent_layers(layers: Sequence[Any]) -> list[int]:
    """Return the layers that hold a recurrent state, alone or beside tokens."""
    return [i for i, layer in enumerate(layers) if isinstance(layer, LinearAttentionCacheLayerMixin)]


def indexer_tokens(layer: Any) -> int:
    """Return the number of keys that a layer holds for its indexer."""
    keys = getattr(layer, "indexer_keys", None)
    return keys.shape[1] if isinstance(keys, torch.Tensor) and keys.ndim == 3 else 0


def _states(layer: Any) -> list[torch.Tensor]:
    states: list[torch.Tensor] = []
    for value in vars(layer).values():
        items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else [value]
        states += [item for item in items if isinstance(item, torch.Tensor)]
    return states


def state_mark(layer: Any) -> StateMark | None:
    """Return a mark of a recurrent layer's state, for `has_changed`; `None` if changes cannot be detected."""
    states = _states(layer)
    if any(state.is_inference() for state in states):
        return None
    return tuple((weakref.ref(state), state._version) for state in states)


def has_changed(layer: Any, mark: StateMark | None) -> bool:
    """Return true if a recurrent layer's state has changed since the mark, or if that cannot be detected."""
    states = _states(layer)
    if mark is None or len(mark) != len(states) or any(state.is_inference() for state in states):
        return True
    return any(
        state is not seen() or state._version != version
        for state, (seen, version) in zip(states, mark, strict=True)
    )


def indexer_is_complete(layer: Any) -> bool:
    """Return true if a layer's indexer, if any, has as many keys as its attention."""
    tokens = indexer_tokens(layer)
    return not tokens or tokens == layer.get_seq_length()


def records_past(layer: Any) -> bool:
    """Return true if a layer keeps tokens outside its window until the next crop."""
    return bool(getattr(layer, "record_past", False))


def why_not_back(layer: Any, tokens: int, torn: bool) -> str | None:
    """Return the reason why a layer cannot undo an incomplete forward pass; `None` if it can.

    Args:
        layer: a layer that is not tiered.
        tokens: number of tokens it would have to drop.
        torn: true if that pass ended in the middle of its update.
    """
    if isinstance(layer, LinearAttentionCacheLayerMixin):
        return "it keeps a state"
    if not isinstance(layer, CacheLayerMixin) or not (tokens or layer.get_seq_length()):
        return None
    if torn or not indexer_is_complete(layer):
        return "the pass ended in the middle of its update"
    if tokens and not layer.is_croppable:
        return "it cannot be cropped"
    window = getattr(layer, "sliding_window", None)
    if tokens and window is not None and layer.get_seq_length() >= window and not records_past(layer):
        return "its window has moved on"
    return None
