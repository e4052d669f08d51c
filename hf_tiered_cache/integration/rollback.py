"""Cropping of all layers of a cache, also after a forward pass that was not completed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from transformers.cache_utils import CacheLayerMixin

from ..core.errors import TieredCacheError
from .layer import TieredLayer
from .passes import ForwardPasses
from .stock_layers import records_past, why_not_back


def crop_layers(layers: Sequence[Any], tokens_to_remove: int, passes: ForwardPasses) -> None:
    """Remove the newest tokens of every layer; see `TieredCache.crop`.

    Stock layers go first: one that cannot forget tokens raises before anything was changed.

    Raises:
        TieredCacheError: after an incomplete pass: a layer never held as many tokens as would be left, or cannot
            take tokens back. Nothing was removed.
    """
    passes.check_changes()
    stock = {i: layer for i, layer in enumerate(layers) if not isinstance(layer, TieredLayer)}
    held = {i: layer.get_seq_length() for i, layer in enumerate(layers) if isinstance(layer, CacheLayerMixin)}
    if passes.is_complete(layers):
        targets = {layer_idx: max(0, tokens - tokens_to_remove) for layer_idx, tokens in held.items()}
        # A layer that records its past has tokens to drop even if nothing is removed.
        removals = {i: tokens_to_remove for i, layer in stock.items() if tokens_to_remove or records_past(layer)}
    else:
        targets = _targets(held, tokens_to_remove, passes)
        removals = {
            i: held[i] - targets[i]
            for i in stock
            if i in held and (held[i] > targets[i] or records_past(layers[i]))
        }
        for layer_idx, layer in stock.items():
            obstacle = why_not_back(layer, removals.get(layer_idx, 0), passes.is_torn(layer_idx))
            if obstacle is not None:
                raise TieredCacheError(
                    f"the last forward pass ended half-way, and layer {layer_idx} ({type(layer).__name__}) "
                    f"cannot take back what it did: {obstacle}. reset() the cache and begin anew"
                )
    for layer in layers:
        if isinstance(layer, TieredLayer):
            layer.check_intact()
    with passes.cropping(targets):
        _crop_stock(layers, removals, passes)
        for layer_idx, layer in enumerate(layers):
            if isinstance(layer, TieredLayer) and held[layer_idx] > targets[layer_idx]:
                layer.crop(targets[layer_idx] - held[layer_idx])


def _targets(held: dict[int, int], tokens_to_remove: int, passes: ForwardPasses) -> dict[int, int]:
    """Return the tokens that each layer keeps after an incomplete pass or crop."""
    if not tokens_to_remove:
        return {layer_idx: passes.tokens_before(layer_idx, tokens) for layer_idx, tokens in held.items()}
    length = max(0, next(iter(held.values())) - tokens_to_remove)
    for layer_idx, tokens in held.items():
        if tokens < length:
            raise TieredCacheError(
                f"crop(-{tokens_to_remove}) would leave {length} tokens, and layer {layer_idx} never held more "
                f"than {tokens}, since the last forward pass ended before it: crop(0) takes back what it has added"
            )
    return dict.fromkeys(held, length)


def _crop_stock(layers: Sequence[Any], removals: dict[int, int], passes: ForwardPasses) -> None:
    for position, (layer_idx, tokens) in enumerate(removals.items()):
        with passes.changing("crop()"):
            try:
                layers[layer_idx].crop(-tokens)
            except Exception:
                if position == 0:  # it refused, and nothing was changed
                    passes.unchanged()
                raise
