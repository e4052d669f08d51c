"""Positions of tokens: checked, and found in a layer's window and blocks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core.errors import ConfigError
from ..sequence.layer_state import LayerState

Positions = np.ndarray[Any, np.dtype[np.int64]]


def as_positions(
    positions: torch.Tensor | Sequence[int] | np.ndarray[Any, Any], tokens: int, what: str = "positions"
) -> Positions:
    """Positions, or what else they are, as a 1-D int64 array.

    Raises:
        ConfigError: they are not 1-D, not integers, or not all in `[0, tokens)`.
    """
    try:
        array = positions.detach().cpu().numpy() if isinstance(positions, torch.Tensor) else np.asarray(positions)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, or a tensor that numpy does not know
        raise ConfigError(f"{what} must be a 1-D sequence of ints ({error})") from error
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ConfigError(f"{what} must be a 1-D sequence of ints, not {array.dtype} of shape {array.shape}")
    if array.size and (array.min() < 0 or array.max() >= tokens):
        raise ConfigError(f"{what} must lie in [0, {tokens}); got {array.min()} to {array.max()}")
    return array.astype(np.int64)


def blocks_of(layer: LayerState, positions: Positions) -> list[int]:
    """Return the indices of the sealed blocks that hold some of these positions, ascending."""
    blocks = (positions - layer.sink_tokens) // layer.block_tokens
    return [int(block) for block in np.unique(blocks[(blocks >= 0) & (blocks < len(layer.table))])]


def window_indices(layer: LayerState, positions: Positions) -> torch.Tensor:
    """Convert positions outside the sealed blocks to indices for `WindowBuffer.select_tokens`."""
    indices = np.where(
        positions < layer.window.sink_held,
        positions - layer.window.sink_held,
        positions - layer.window.sink_held - layer.sealed_tokens,
    )
    return torch.from_numpy(indices).to(layer.window.device)
