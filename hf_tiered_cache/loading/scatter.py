"""The scatter of blocks to their positions in a buffer that holds a whole layer."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ..core.blocks import Block, BlockLayout
from ..core.row_map import RowMap
from ..sequence.layer_state import LayerState


@dataclass(frozen=True)
class ScatterRun:
    """Neighbouring blocks of one layout and row map, whose tokens go to consecutive positions from `first_token`
    on."""

    blocks: list[Block]
    row_map: RowMap
    first_token: int


def split_runs(layer: LayerState, block_indices: Sequence[int], starts: Sequence[int]) -> Iterator[ScatterRun]:
    """Group blocks that can be read together and go to consecutive positions.

    Args:
        layer: of the blocks.
        block_indices: ascending.
        starts: target position of each block, in tokens.
    """
    position = 0
    for indices, run in layer.table.runs(block_indices):
        group_starts = starts[position : position + len(indices)]
        position += len(indices)
        first = 0
        for end in range(1, len(indices) + 1):
            if end == len(indices) or group_starts[end] != group_starts[end - 1] + layer.block_tokens:
                blocks = [layer.table.blocks[index] for index in indices[first:end]]
                yield ScatterRun(blocks, run.row_map, group_starts[first])
                first = end


@dataclass(frozen=True)
class Scatter:
    """Scatter of blocks `[n, rows, row_elements]` into K and V `[B, H, capacity, D]`, with row maps applied.

    A call yields `(target, source)` pairs of equal shape, both views.
    """

    keys: torch.Tensor
    values: torch.Tensor
    layout: BlockLayout
    row_map: RowMap
    first_token: int

    def __call__(self, landed: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        blocks, tokens = landed.shape[0], self.layout.block_tokens
        place = slice(self.first_token, self.first_token + blocks * tokens)
        for whole, parts in zip((self.keys, self.values), self.layout.split(landed), strict=True):
            target = whole[:, :, place].unflatten(2, (blocks, tokens))  # [B, H, n, T, D]
            if self.row_map.is_identity(self.layout.rows):
                yield target, parts.permute(1, 2, 0, 3, 4)
            else:
                for batch_row, stored_row in enumerate(self.row_map.rows.tolist()):
                    yield target[batch_row], parts[:, stored_row].transpose(0, 1)


def packed_offsets(
    offsets: np.ndarray[Any, Any], block_indices: Sequence[int], block_tokens: int
) -> np.ndarray[Any, Any]:
    """Convert offsets into the sealed tokens to offsets into the given blocks, packed one after another."""
    position = np.searchsorted(np.asarray(block_indices), offsets // block_tokens)
    return np.asarray(position * block_tokens + offsets % block_tokens)
