"""The content of a window: its tokens, and their positions in its memory.

    |<- sink ->|<---------------- ring: whole blocks ---------------->|
    [ 0 1 .. s |  newest ..  |  free  | oldest block | next block | ..  ]
                                       ^ start (always on a block border)

The ring is a whole number of blocks and its start moves by whole blocks, so the block that leaves next, or the one
that comes back, is always one contiguous slice. While the start is 0, as it is until a block was sealed, sink and
ring are one slice.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from ..core.geometry import Geometry
from ..transfer.engine import CopyEngine


@dataclass(frozen=True)
class WindowContent:
    """Tokens of one layer, in memory of their own. Immutable but for the elements of the tensors.

    Args:
        geometry: of K and V.
        buffer: the memory.
        keys, values: views of it, `[B, H, memory_tokens, D]`.
        sink_tokens: size of the sink.
        sink_held: tokens in the sink.
        start: start of the ring, counted from the end of the sink; 0 while the ring is empty.
        held_tokens: tokens in the ring.
    """

    geometry: Geometry
    buffer: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sink_tokens: int
    sink_held: int = 0
    start: int = 0
    held_tokens: int = 0

    @classmethod
    def empty(cls, engine: CopyEngine, geometry: Geometry, sink_tokens: int, memory_tokens: int) -> WindowContent:
        """Allocate memory for some tokens, sink included.

        Raises:
            torch.OutOfMemoryError: the device has too little.
        """
        buffer = engine.allocate(geometry.nbytes(memory_tokens), compute_only=True)
        return cls(geometry, buffer, *geometry.carve(buffer, memory_tokens), sink_tokens)

    def with_ring(self, start: int, held_tokens: int, sink_held: int | None = None) -> WindowContent:
        """The same memory with other tokens in it. (Not by `replace`, which takes five times as long.)"""
        return WindowContent(
            self.geometry,
            self.buffer,
            self.keys,
            self.values,
            self.sink_tokens,
            self.sink_held if sink_held is None else sink_held,
            start if held_tokens else 0,
            held_tokens,
        )

    @property
    def tokens(self) -> int:
        """Tokens in sink and ring."""
        return self.sink_held + self.held_tokens

    @property
    def memory_tokens(self) -> int:
        """Tokens for which there is memory, sink included."""
        return self.keys.shape[2]

    @property
    def ring_tokens(self) -> int:
        """Size of the ring in tokens."""
        return max(0, self.keys.shape[2] - self.sink_tokens)

    def view(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a slice of the memory, `[B, H, T, D]`, as views."""
        return self.keys[:, :, tokens], self.values[:, :, tokens]

    def ring_view(self, start: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a contiguous slice of the ring, as views."""
        first = self.sink_tokens + start
        return self.view(slice(first, first + tokens))

    def held_slices(self) -> Iterator[slice]:
        """The slices of the memory that the ring's tokens occupy, in their order."""
        return self._ring_slices(self.start, self.held_tokens)

    def free_slices(self, new_tokens: int) -> Iterator[slice]:
        """The slices of the memory that take `new_tokens` more tokens, in order: first what the sink has room
        for."""
        to_sink = min(new_tokens, self.sink_tokens - self.sink_held)
        if to_sink:
            yield slice(self.sink_held, self.sink_held + to_sink)
        yield from self._ring_slices(self.start + self.held_tokens, new_tokens - to_sink)

    def copy_to(self, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """Copy the sink to the front of `[B, H, S, D]` tensors, and the ring so that it ends before `end`."""
        sink = slice(0, self.sink_held)
        keys[:, :, sink].copy_(self.keys[:, :, sink])
        values[:, :, sink].copy_(self.values[:, :, sink])
        position = end - self.held_tokens
        for source in self.held_slices():
            target = slice(position, position + source.stop - source.start)
            keys[:, :, target].copy_(self.keys[:, :, source])
            values[:, :, target].copy_(self.values[:, :, source])
            position = target.stop

    def select_tokens(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New tensors with some tokens; see `WindowBuffer.select_tokens`."""
        ring = self.sink_tokens + torch.remainder(indices + self.start, max(1, self.ring_tokens))
        offsets = torch.where(indices < 0, indices + self.sink_held, ring)
        return self.keys.index_select(2, offsets), self.values.index_select(2, offsets)

    def _ring_slices(self, first: int, count: int) -> Iterator[slice]:
        while count:
            first %= self.ring_tokens
            piece = min(count, self.ring_tokens - first)
            yield slice(self.sink_tokens + first, self.sink_tokens + first + piece)
            first, count = first + piece, count - piece
