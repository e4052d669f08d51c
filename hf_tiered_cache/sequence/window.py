"""L0 of one layer: the tokens that stay on the accelerator.

    |<- sink ->|<---------------- ring: whole blocks ---------------->|
    [ 0 1 .. s |  newest ..  |  free  | oldest block | next block | ..  ]
                                       ^ start (always on a block border)

The ring is a whole number of blocks and its start moves by whole blocks, so the block that leaves next, or the
one that comes back, is always one contiguous slice. The ring is as large as its memory, which grows with the
tokens up to what the window's size asks for, and is copied when it changes: in new memory the start is 0
again. While it is 0, as it is until a block was sealed, sink and ring are one slice.

How many tokens the window keeps may change at any time. Smaller: there are blocks to seal, then memory to
release. Larger: there is room for more tokens, or for sealed blocks to come back in front of the oldest token.

An interrupt (Ctrl-C) may strike between any two statements. So all that is known of a window is one immutable
object, and every change makes a new one, when the tokens are in place already.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from ..core.geometry import Geometry
from ..core.row_map import index_on
from ..transfer.engine import CopyEngine


def ring_tokens(window_tokens: int, block_tokens: int) -> int:
    """Tokens that a ring has room for at most: a whole window, the block about to leave, and the one that comes
    in."""
    return (-(-window_tokens // block_tokens) + 2) * block_tokens


@dataclass(frozen=True)
class _Content:
    """The tokens in a window and their positions in its buffers.

    Args:
        geometry: of K and V.
        buffer: its memory.
        keys, values: views of it, `[B, H, memory_tokens, D]`.
        sink_held: tokens in the sink.
        start: where the ring begins, counted behind the sink.
        held_tokens: tokens in the ring.
    """

    geometry: Geometry
    buffer: torch.Tensor
    keys: torch.Tensor
    values: torch.Tensor
    sink_held: int = 0
    start: int = 0
    held_tokens: int = 0

    @classmethod
    def empty(cls, engine: CopyEngine, geometry: Geometry, memory_tokens: int) -> _Content:
        """No tokens, and memory for so many."""
        buffer = engine.allocate(geometry.nbytes(memory_tokens), compute_only=True)
        return cls(geometry, buffer, *geometry.carve(buffer, memory_tokens))

    def with_ring(self, start: int, held_tokens: int, sink_held: int | None = None) -> _Content:
        """The same memory with other tokens in it. (Not by `replace`, which takes five times as long.)"""
        return _Content(
            self.geometry,
            self.buffer,
            self.keys,
            self.values,
            self.sink_held if sink_held is None else sink_held,
            start if held_tokens else 0,
            held_tokens,
        )


class WindowBuffer:
    """Sink and newest tokens of one layer, K and V; see the module for the map.

    Everything here is enqueued on the compute stream; nothing blocks. Tensors returned are views, valid until
    the next call that changes the window. A call that finds no memory for a larger ring changes nothing.

    Invariants:
        - the ring holds tokens only when the sink is full;
        - `held_tokens` fit into the ring, which fits into the memory behind the sink;
        - a ring that holds nothing starts at 0.

    Args:
        engine: of the layer's device.
        geometry: of K and V.
        sink_tokens: tokens at the start of the sequence that never leave.
        window_tokens: tokens that `oldest_block` leaves behind.
        block_tokens: tokens per block.
    """

    def __init__(
        self, engine: CopyEngine, geometry: Geometry, sink_tokens: int, window_tokens: int, block_tokens: int
    ) -> None:
        self._engine = engine
        self._sink_tokens = sink_tokens
        self._window_tokens = window_tokens
        self._block_tokens = block_tokens
        self._stream = engine.compute_stream()
        self._content = _Content.empty(engine, geometry, 0)

    @property
    def device(self) -> torch.device:
        """The device of the buffers."""
        return self._engine.device

    @property
    def geometry(self) -> Geometry:
        """Shape and dtype of K and V."""
        return self._content.geometry

    @property
    def sink_held(self) -> int:
        """Tokens in the sink."""
        return self._content.sink_held

    @property
    def held_tokens(self) -> int:
        """Tokens after the sink."""
        return self._content.held_tokens

    def follow(self) -> None:
        """The calling thread's compute stream goes on where another thread's left off."""
        stream = self._engine.compute_stream()
        if stream != self._stream:
            self._engine.compute_waits(self._engine.record_compute(self._stream))
            self._engine.computes_with(self._content.buffer)
            self._stream = stream

    @property
    def tokens(self) -> int:
        """Tokens held, sink included."""
        content = self._content
        return content.sink_held + content.held_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of accelerator memory that it occupies."""
        return self._content.buffer.numel()

    @property
    def window_tokens(self) -> int:
        """Tokens that `oldest_block` leaves behind, as it is set now."""
        return self._window_tokens

    @property
    def has_block_to_seal(self) -> bool:
        """True if a block can be sealed and a whole window remains."""
        return self.held_tokens > self._window_tokens + self._block_tokens

    @property
    def takes_block_back(self) -> bool:
        """Return true if the newest sealed block fits back into the window without exceeding its size."""
        return self.held_tokens + self._block_tokens <= self._window_tokens

    def fits(self, new_tokens: int) -> bool:
        """Return true if this many more tokens fit without sealing."""
        return self.tokens + new_tokens <= self._sink_tokens + self._window_tokens + self._block_tokens

    def room(self) -> int:
        """Tokens that `append` takes at once; 0 while so many more than a window are held that blocks must be
        sealed first."""
        return max(0, self._most_tokens - self.tokens)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add tokens `[B, H, T, D]`, at most `room()`: to the sink while it has room, else to the ring."""
        new_tokens = keys.shape[-2]
        self._make_room(self.tokens + new_tokens)
        done, content = 0, self._content
        for target in self._slices_for(new_tokens):
            count = target.stop - target.start
            content.keys[:, :, target].copy_(keys[:, :, done : done + count])
            content.values[:, :, target].copy_(values[:, :, done : done + count])
            done += count
        to_sink = min(new_tokens, self._sink_tokens - content.sink_held)
        self._content = content.with_ring(
            content.start, content.held_tokens + new_tokens - to_sink, content.sink_held + to_sink
        )

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens as one slice `[B, H, tokens, D]`; only while nothing is sealed."""
        if self._content.start:  # blocks were sealed and have come back
            self._reallocate(self._memory_tokens)
        return self._slice(slice(0, self.tokens))

    def splits(self, sealed_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """All tokens as slices K, V `[B, H, T, D]`, each with the position of its first token in a sequence that
        has so many sealed tokens between sink and ring."""
        if not sealed_tokens:
            if self.tokens:
                yield *self.views(), 0
            return
        position = 0
        if self.sink_held:
            yield *self._slice(slice(0, self.sink_held)), 0
            position = self.sink_held
        position += sealed_tokens
        for held in self._held_slices():
            yield *self._slice(held), position
            position += held.stop - held.start

    def copy_to(self, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """Write the sink to the front of `[B, H, S, D]` tensors, and the window so that it ends before `end`."""
        content = self._content
        sink = slice(0, content.sink_held)
        keys[:, :, sink].copy_(content.keys[:, :, sink])
        values[:, :, sink].copy_(content.values[:, :, sink])
        position = end - content.held_tokens
        for source in self._held_slices():
            target = slice(position, position + source.stop - source.start)
            keys[:, :, target].copy_(content.keys[:, :, source])
            values[:, :, target].copy_(content.values[:, :, source])
            position = target.stop

    def select_tokens(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New tensors with some tokens of the window: index 0 is the oldest after the sink, -1 the last of
        the sink, -2 the one before; `indices` is 1-D int64 on the layer's device."""
        content = self._content
        ring = self._sink_tokens + torch.remainder(indices + content.start, max(1, self._ring_tokens))
        place = torch.where(indices < 0, indices + content.sink_held, ring)
        return content.keys.index_select(2, place), content.values.index_select(2, place)

    def oldest_block(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next block to leave, `[B, H, block_tokens, D]`."""
        return self._slice(self._block_at(self._content.start))

    def drop_oldest_block(self) -> None:
        """Forget the oldest block; it is sealed."""
        content = self._content
        start = (content.start + self._block_tokens) % self._ring_tokens
        self._content = content.with_ring(start, content.held_tokens - self._block_tokens)

    def make_room_for_block(self) -> None:
        """Have memory for one more block; takes some if need be."""
        self._make_room(self.tokens + self._block_tokens)

    def prepend_block(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the newest sealed block back, `[B, H, block_tokens, D]`, in front of the oldest token after the
        sink, while the window `takes_block_back`."""
        assert self.takes_block_back and self.sink_held == self._sink_tokens
        self.make_room_for_block()
        content = self._content
        start = (content.start - self._block_tokens) % self._ring_tokens if content.held_tokens else 0
        block_keys, block_values = self._slice(self._block_at(start))
        block_keys.copy_(keys)
        block_values.copy_(values)
        self._content = content.with_ring(start, content.held_tokens + self._block_tokens)

    def resize(self, window_tokens: int) -> None:
        """Keep so many tokens from now on, at least one block. Moves nothing.

        After it became smaller, seal while there is a `has_block_to_seal`, then `release_surplus`. After it
        became larger, sealed blocks can come back while it `takes_block_back`; memory grows when it is needed.
        """
        assert window_tokens >= self._block_tokens
        self._window_tokens = window_tokens

    def release_surplus(self) -> None:
        """Give back memory beyond what the window's size asks for, once what is held fits into the rest. Old
        and new memory are both there for a moment."""
        if self._memory_tokens > self._most_tokens >= self.tokens:
            self._reallocate(self._most_tokens)

    def crop(self, tokens: int) -> None:
        """Forget the newest tokens, at most `self.tokens`; sink tokens go last."""
        content = self._content
        from_ring = min(tokens, content.held_tokens)
        self._content = content.with_ring(
            content.start, content.held_tokens - from_ring, content.sink_held - (tokens - from_ring)
        )

    def with_only(self, sink_tokens: int, keys: torch.Tensor, values: torch.Tensor) -> _Content:
        """A window's content, in memory of its own, that has the first tokens of the sink and then these, `[B,
        H, T, D]`, at most a block; for `become`. Changes nothing."""
        old, new_tokens = self._content, keys.shape[2]
        content = _Content.empty(self._engine, old.geometry, self._sink_tokens + self._block_tokens)
        first, then = slice(0, sink_tokens), slice(self._sink_tokens, self._sink_tokens + new_tokens)
        for target, source, new in ((content.keys, old.keys, keys), (content.values, old.values, values)):
            target[:, :, first].copy_(source[:, :, first])
            target[:, :, then].copy_(new)
        return content.with_ring(0, new_tokens, sink_tokens)

    def become(self, content: _Content) -> None:
        """Hold this from now on; the memory before is given up."""
        old, self._content = self._content, content
        self._engine.free(old.buffer)

    def with_rows(self, rows: np.ndarray) -> _Content:
        """A window's content, in memory of its own, whose batch row `i` is what row `rows[i]` is here; for
        `become`. Changes nothing."""
        old = self._content
        index = index_on(rows, self.device)
        content = _Content.empty(self._engine, replace(old.geometry, batch=len(rows)), self._memory_tokens)
        if self._memory_tokens:
            content.keys.copy_(old.keys.index_select(0, index))
            content.values.copy_(old.values.index_select(0, index))
        return content.with_ring(old.start, old.held_tokens, old.sink_held)

    def shrink(self) -> None:
        """Keep no more memory than what is held needs, in whole blocks."""
        self._reallocate(self._whole_blocks(self.tokens))

    def copy(self) -> WindowBuffer:
        """A second window with the same content in memory of its own."""
        twin = WindowBuffer(
            self._engine, self.geometry, self._sink_tokens, self._window_tokens, self._block_tokens
        )
        old = self._content
        content = _Content.empty(self._engine, old.geometry, self._memory_tokens)
        content.keys.copy_(old.keys)
        content.values.copy_(old.values)
        twin._content = content.with_ring(old.start, old.held_tokens, old.sink_held)
        return twin

    def free(self) -> None:
        """Give the memory up; the window is empty afterwards."""
        self.become(_Content.empty(self._engine, self.geometry, 0))

    def _slices_for(self, new_tokens: int) -> Iterator[slice]:
        """Return the slices of the buffer that take `new_tokens` more tokens, in order."""
        to_sink = min(new_tokens, self._sink_tokens - self.sink_held)
        if to_sink:
            yield slice(self.sink_held, self.sink_held + to_sink)
        yield from self._ring_slices(self._content.start + self.held_tokens, new_tokens - to_sink)

    def _held_slices(self) -> Iterator[slice]:
        return self._ring_slices(self._content.start, self.held_tokens)

    def _slice(self, tokens: slice) -> tuple[torch.Tensor, torch.Tensor]:
        return self._content.keys[:, :, tokens], self._content.values[:, :, tokens]

    def _ring_slices(self, first: int, count: int) -> Iterator[slice]:
        while count:
            first %= self._ring_tokens
            piece = min(count, self._ring_tokens - first)
            yield slice(self._sink_tokens + first, self._sink_tokens + first + piece)
            first, count = first + piece, count - piece

    def _block_at(self, start: int) -> slice:
        """Return the slices of the ring that hold the block which begins at an offset."""
        first = self._sink_tokens + start
        return slice(first, first + self._block_tokens)

    @property
    def _memory_tokens(self) -> int:
        """Tokens for which there is memory, sink included."""
        return self._content.keys.shape[2]

    @property
    def _ring_tokens(self) -> int:
        """Tokens after which the ring goes round."""
        return max(0, self._memory_tokens - self._sink_tokens)

    @property
    def _most_tokens(self) -> int:
        """Tokens for which there is memory at most, sink included, at the window's size of now."""
        return self._sink_tokens + ring_tokens(self._window_tokens, self._block_tokens)

    def _whole_blocks(self, tokens: int) -> int:
        """The next larger size of memory: sink and a ring of whole blocks, or a part of the sink."""
        return self._sink_tokens - (self._sink_tokens - tokens) // self._block_tokens * self._block_tokens

    def _make_room(self, tokens: int) -> None:
        """Have memory for `tokens`, by half more at a time, up to what the window's size asks for."""
        assert tokens <= max(self._most_tokens, self.tokens)
        if tokens > self._memory_tokens:
            comfortable = max(tokens, self._memory_tokens + self._memory_tokens // 2)
            self._reallocate(min(self._whole_blocks(comfortable), self._most_tokens))

    def _reallocate(self, memory_tokens: int) -> None:
        """Move what is held to other memory, where the ring starts at 0."""
        old = self._content
        content = _Content.empty(self._engine, old.geometry, memory_tokens)
        self.copy_to(content.keys, content.values, end=self.tokens)
        self.become(content.with_ring(0, old.held_tokens, old.sink_held))
