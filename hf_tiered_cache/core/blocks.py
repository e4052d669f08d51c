"""Sealed blocks: their names, their memory layout, the places of their copies, and the rows that they hold.

One layer of one request:

    token 0                                                             sequence length
    |<- sink ->|<- block 0 ->|<- block 1 ->| ... |<- block n-1 ->|<- window ->|
                `---------------- the layer's BlockTable --------'

A sealed block never changes. Reordering the batch changes only the table's row maps, which say what stored
row each batch row reads.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from .row_map import RowMap

_BITS_BY_ITEMSIZE: dict[int, tuple[torch.dtype, type[np.unsignedinteger[Any]]]] = {
    1: (torch.uint8, np.uint8),
    2: (torch.int16, np.uint16),
    4: (torch.int32, np.uint32),
    8: (torch.int64, np.uint64),
}

# The place of a block before a tier has stored it.
STAGING = "staging"

Bits = np.ndarray[Any, np.dtype[np.unsignedinteger[Any]]]


def as_bits(tensor: torch.Tensor) -> Bits:
    """View a CPU tensor as a numpy array of unsigned integers of the same width; shares memory.

    numpy has neither bfloat16 nor float8, and storage does not need them: it moves bits.
    """
    torch_bits, numpy_bits = _BITS_BY_ITEMSIZE[tensor.element_size()]
    return tensor.detach().view(torch_bits).numpy().view(numpy_bits)


class BlockKey(NamedTuple):
    """The permanent name of one sealed block; a block sealed again after a crop has the next revision."""

    namespace: str
    layer_idx: int
    block_idx: int
    revision: int


@dataclass(frozen=True)
class BlockLayout:
    """The memory layout of a block: per stored row K `[heads, tokens, dim]`, then V likewise, row after row.

        row 0: |<- key_heads * block_tokens * key_dim ->|<- value_heads * block_tokens * value_dim ->|
        row 1: ...

    Rows of consecutive blocks thus form one batch dimension, without a copy. K and V may differ in shape (MLA).
    """

    rows: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    block_tokens: int
    dtype: torch.dtype

    @cached_property
    def key_elements(self) -> int:
        """Elements of K in one row."""
        return self.key_heads * self.block_tokens * self.key_dim

    @cached_property
    def row_elements(self) -> int:
        """Elements of K and V in one row."""
        return self.key_elements + self.value_heads * self.block_tokens * self.value_dim

    @cached_property
    def nbytes(self) -> int:
        """Bytes of one block."""
        return self.rows * self.row_elements * self.dtype.itemsize

    @property
    def bits_dtype(self) -> np.dtype[Any]:
        """The unsigned integer type under which the elements are stored."""
        return np.dtype(_BITS_BY_ITEMSIZE[self.dtype.itemsize][1])

    def over(self, storage: torch.Tensor, blocks: int) -> torch.Tensor:
        """View the start of a flat uint8 buffer as `[blocks, rows, row_elements]` of this layout's dtype."""
        elements = storage[: blocks * self.nbytes].view(self.dtype)
        return elements.view(blocks, self.rows, self.row_elements)

    def split(self, payload: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """View a payload `[blocks, rows, row_elements]` as K and V, each `[blocks, rows, heads, tokens, dim]`."""
        keys, values = payload[..., : self.key_elements], payload[..., self.key_elements :]
        return (
            keys.unflatten(-1, (self.key_heads, self.block_tokens, self.key_dim)),
            values.unflatten(-1, (self.value_heads, self.block_tokens, self.value_dim)),
        )


@dataclass(eq=False)
class BlockCopy:
    """One copy of a block in one place. Deleted when it is doomed and nothing pins it.

    `origin` is the tier, or the staging buffer, that holds the copy.
    """

    origin: Any
    pins: int = 0
    doomed: bool = False


@dataclass(eq=False)
class Block:
    """A sealed block, shared by the tables and loads that `references` counts.

    `copies` maps a place ("staging", "host", "L1", "L2") to the copy there, the nearest first. It is never empty
    while the block is referenced. To change it or `references`, hold the lock of the residency table. `slot` is
    the block's slot in the heat table, -1 before and after it has one. `leaving` has the places where a copy that
    is no longer in `copies` waits for its deletion: no new one may be written there until then. `resident` is the
    copy on the accelerator beside the window, if there is one.
    """

    key: BlockKey
    layout: BlockLayout
    references: int = 1
    slot: int = -1
    copies: dict[str, BlockCopy] = field(default_factory=dict)
    leaving: set[str] = field(default_factory=set)
    resident: Any = None

    @property
    def stored_in(self) -> str | None:
        """The nearest tier that has it; `None` while it is only in staging. Safe to read without the lock."""
        return next((place for place in tuple(self.copies) if place != STAGING), None)


class RowRun(NamedTuple):
    """The blocks from `first_block` to the next run, which have one layout and one row map."""

    first_block: int
    row_map: RowMap
    layout: BlockLayout


class BlockTable:
    """The sealed blocks of one layer of one request, in order.

    Invariants:
        - `blocks[i]` covers tokens `sink + i * block_tokens` up to `sink + (i + 1) * block_tokens`;
        - runs are ascending, the first begins at block 0 and all have the batch size as length;
        - `rows_version` changes whenever a row map does.
    """

    def __init__(self, namespace: str, layer_idx: int) -> None:
        self.namespace = namespace
        self.layer_idx = layer_idx
        self.blocks: list[Block] = []
        self.rows_version = 0
        self._runs: list[RowRun] = []
        self._next_revision: dict[int, int] = {}
        self._slots = np.empty(0, np.int64)
        self._slots_known = 0

    def __len__(self) -> int:
        return len(self.blocks)

    def seal(self, layout: BlockLayout) -> Block:
        """Append a new block, whose stored rows are the current batch rows, and return it."""
        block_idx = len(self.blocks)
        if self._runs and self._runs[-1].layout == layout:
            layout = self._runs[-1].layout  # one object, so that comparing the layouts of many blocks is cheap
        key = BlockKey(self.namespace, self.layer_idx, block_idx, self._next_revision.get(block_idx, 0))
        block = Block(key, layout)
        last = self._runs[-1] if self._runs else None
        if last is None or last.layout != layout or not last.row_map.is_identity(layout.rows):
            self._runs.append(RowRun(block_idx, RowMap(range(layout.rows)), layout))
        self.blocks.append(block)
        return block

    def truncate(self, keep_blocks: int) -> list[Block]:
        """Drop all blocks from `keep_blocks` on and return them; the caller drops their references."""
        dropped = self.blocks[keep_blocks:]
        for block in dropped:
            if block.key.namespace == self.namespace:
                self._next_revision[block.key.block_idx] = block.key.revision + 1
        del self.blocks[keep_blocks:]
        self._slots_known = min(self._slots_known, keep_blocks)
        while self._runs and self._runs[-1].first_block >= keep_blocks:
            self._runs.pop()
        return dropped

    def select_rows(self, rows: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Let batch row `i` read what row `rows[i]` read before (reorder, repeat or select; moves no data)."""
        self._runs = [run._replace(row_map=run.row_map.select(rows)) for run in self._runs]
        self.rows_version += 1

    @property
    def slots(self) -> np.ndarray[Any, np.dtype[np.int64]]:
        """The slots of the blocks in the heat table."""
        blocks = len(self.blocks)
        if self._slots_known < blocks:
            if len(self._slots) < blocks:
                self._slots = np.concatenate([self._slots, np.empty(blocks, np.int64)])
            self._slots[self._slots_known : blocks] = [block.slot for block in self.blocks[self._slots_known :]]
            self._slots_known = blocks
        return self._slots[:blocks]

    def runs(self, block_indices: Sequence[int]) -> Iterator[tuple[Sequence[int], RowRun]]:
        """Split ascending block indices into groups of one run, which share row map and layout."""
        ends = [*(run.first_block for run in self._runs[1:]), len(self.blocks)][: len(self._runs)]
        first = 0
        for run, end in zip(self._runs, ends, strict=True):
            last = bisect_left(block_indices, end, lo=first)
            if last > first:
                yield block_indices[first:last], run
            first = last

    def fork(self, namespace: str, layer_idx: int) -> BlockTable:
        """Return a second table over the same blocks; the caller adds a reference to each of them."""
        twin = BlockTable(namespace, layer_idx)
        twin.blocks = list(self.blocks)
        twin._runs = list(self._runs)
        return twin
