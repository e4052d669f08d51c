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
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import torch

from .blocks import BlockLayout
from .errors import ConfigError
from .row_map import index_on
from .transfer.engine import CopyEngine

# What vectorised kernels and copies like a tensor to begin at.
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Geometry:
    """Shape of one layer's K `[batch, key_heads, T, key_dim]` and V `[batch, value_heads, T, value_dim]`."""

    batch: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> Geometry:
        """The geometry of these tensors.

        Raises:
            ConfigError: they are not a K and V of one layer.
        """
        if key.ndim != 4 or value.ndim != 4 or key.shape[0] != value.shape[0] or key.shape[2] != value.shape[2]:
            raise ConfigError(
                f"key {tuple(key.shape)} and value {tuple(value.shape)} must be [B, H, T, D] with the same batch "
                "and the same number of tokens"
            )
        if key.dtype != value.dtype or key.device != value.device:
            raise ConfigError(
                f"key is {key.dtype} on {key.device}, value {value.dtype} on {value.device}: both must be the "
                "same. torch.autocast makes them differ; load the model in one dtype instead"
            )
        return cls(key.shape[0], key.shape[1], key.shape[3], value.shape[1], value.shape[3], key.dtype)

    def layout(self, block_tokens: int) -> BlockLayout:
        """The layout of a block of this shape."""
        return BlockLayout(
            self.batch,
            self.key_heads,
            self.key_dim,
            self.value_heads,
            self.value_dim,
            block_tokens,
            self.dtype,
        )

    def nbytes(self, tokens: int) -> int:
        """Bytes of a buffer for `carve`."""
        keys, values = self._part_bytes(tokens)
        return keys + values

    def tokens_in(self, nbytes: int) -> int:
        """Tokens for which a buffer of some bytes has room."""
        per_token = self.nbytes(_ALIGNMENT_BYTES) // _ALIGNMENT_BYTES
        return max(0, nbytes - 2 * _ALIGNMENT_BYTES) // per_token

    def carve(self, buffer: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View the start of a flat uint8 buffer as K and V `[batch, heads, tokens, dim]`."""
        key_bytes, _ = self._part_bytes(tokens)
        shapes = (
            (self.batch, self.key_heads, tokens, self.key_dim),
            (self.batch, self.value_heads, tokens, self.value_dim),
        )
        with torch.inference_mode(False):  # a change of dtype inside makes tensors that may not be mutated outside
            keys, values = (
                buffer[offset : offset + math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)
                for offset, shape in zip((0, key_bytes), shapes, strict=True)
            )
        return keys, values

    def _part_bytes(self, tokens: int) -> tuple[int, int]:
        """Bytes of K and V, each rounded up so that V begins aligned too."""
        per_token = self.batch * tokens * self.dtype.itemsize
        keys, values = (
            per_token * size for size in (self.key_heads * self.key_dim, self.value_heads * self.value_dim)
        )
        return -(-keys // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, -(-values // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES


def ring_tokens(window_tokens: int, block_tokens: int) -> int:
    """Tokens that a ring has room for at most: a whole window, the block about to leave, and the one that comes
    in."""
    return (-(-window_tokens // block_tokens) + 2) * block_tokens


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
        self.geometry = geometry
        self.sink_held = 0
        self.held_tokens = 0
        self._engine = engine
        self._sink_tokens = sink_tokens
        self._window_tokens = window_tokens
        self._block_tokens = block_tokens
        self._start = 0
        self._stream = engine.compute_stream()
        self._buffer = engine.allocate(0, compute_only=True)
        self._keys, self._values = geometry.carve(self._buffer, 0)

    @property
    def device(self) -> torch.device:
        """Where it lives."""
        return self._engine.device

    def follow(self) -> None:
        """The calling thread's compute stream goes on where another thread's left off."""
        stream = self._engine.compute_stream()
        if stream != self._stream:
            self._engine.compute_waits(self._engine.record_compute(self._stream))
            self._engine.computes_with(self._buffer)
            self._stream = stream

    @property
    def tokens(self) -> int:
        """Tokens held, sink included."""
        return self.sink_held + self.held_tokens

    @property
    def nbytes(self) -> int:
        """Bytes of accelerator memory that it occupies."""
        return self._buffer.numel()

    @property
    def window_tokens(self) -> int:
        """Tokens that `oldest_block` leaves behind, as it is set now."""
        return self._window_tokens

    @property
    def has_block_to_seal(self) -> bool:
        """Whether a block can leave and a whole window stays."""
        return self.held_tokens > self._window_tokens + self._block_tokens

    @property
    def takes_block_back(self) -> bool:
        """Whether the newest sealed block can come back, and the window is no larger than it should be."""
        return self.held_tokens + self._block_tokens <= self._window_tokens

    def fits(self, new_tokens: int) -> bool:
        """Whether so many more tokens can be held without sealing."""
        return self.tokens + new_tokens <= self._sink_tokens + self._window_tokens + self._block_tokens

    def room(self) -> int:
        """Tokens that `append` takes at once; 0 while so many more than a window are held that blocks must be
        sealed first."""
        return max(0, self._most_tokens - self.tokens)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add tokens `[B, H, T, D]`, at most `room()`: to the sink while it has room, else to the ring."""
        new_tokens = keys.shape[-2]
        self._make_room(self.tokens + new_tokens)
        done = 0
        for target in self._slices_for(new_tokens):
            count = target.stop - target.start
            self._keys[:, :, target].copy_(keys[:, :, done : done + count])
            self._values[:, :, target].copy_(values[:, :, done : done + count])
            done += count
        to_sink = min(new_tokens, self._sink_tokens - self.sink_held)
        self.sink_held += to_sink
        self.held_tokens += new_tokens - to_sink

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """All tokens as one slice `[B, H, tokens, D]`; only while nothing is sealed."""
        if self._start:  # blocks were sealed and have come back
            self._reallocate(self._memory_tokens)
        return self._keys[:, :, : self.tokens], self._values[:, :, : self.tokens]

    def parts(self, sealed_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """All tokens as slices K, V `[B, H, T, D]`, each with the position of its first token in a sequence that
        has so many sealed tokens between sink and ring."""
        if not sealed_tokens:
            if self.tokens:
                yield *self.views(), 0
            return
        position = 0
        if self.sink_held:
            sink = slice(0, self.sink_held)
            yield self._keys[:, :, sink], self._values[:, :, sink], 0
            position = self.sink_held
        position += sealed_tokens
        for held in self._held_slices():
            yield self._keys[:, :, held], self._values[:, :, held], position
            position += held.stop - held.start

    def copy_to(self, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """Write the sink to the front of `[B, H, S, D]` tensors, and the window so that it ends before `end`."""
        sink = slice(0, self.sink_held)
        keys[:, :, sink].copy_(self._keys[:, :, sink])
        values[:, :, sink].copy_(self._values[:, :, sink])
        position = end - self.held_tokens
        for source in self._held_slices():
            target = slice(position, position + source.stop - source.start)
            keys[:, :, target].copy_(self._keys[:, :, source])
            values[:, :, target].copy_(self._values[:, :, source])
            position = target.stop

    def select_tokens(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """New tensors with some tokens of the window: index 0 is the oldest after the sink, -1 the last of
        the sink, -2 the one before; `indices` is 1-D int64 on the layer's device."""
        ring = self._sink_tokens + torch.remainder(indices + self._start, max(1, self._ring_tokens))
        place = torch.where(indices < 0, indices + self.sink_held, ring)
        return self._keys.index_select(2, place), self._values.index_select(2, place)

    def oldest_block(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The next block to leave, `[B, H, block_tokens, D]`."""
        block = self._first_block()
        return self._keys[:, :, block], self._values[:, :, block]

    def drop_oldest_block(self) -> None:
        """Forget the oldest block; it is sealed."""
        self.held_tokens -= self._block_tokens
        self._start = (self._start + self._block_tokens) % self._ring_tokens if self.held_tokens else 0

    def prepend_block(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Take the newest sealed block back, `[B, H, block_tokens, D]`, in front of the oldest token after the
        sink, while the window `takes_block_back`."""
        assert self.takes_block_back and self.sink_held == self._sink_tokens
        self._make_room(self.tokens + self._block_tokens)
        if self.held_tokens:
            self._start = (self._start - self._block_tokens) % self._ring_tokens
        self.held_tokens += self._block_tokens
        block = self._first_block()
        self._keys[:, :, block].copy_(keys)
        self._values[:, :, block].copy_(values)

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
        from_ring = min(tokens, self.held_tokens)
        self.held_tokens -= from_ring
        self.sink_held -= tokens - from_ring
        if self.held_tokens == 0:
            self._start = 0

    def select_rows(self, rows: np.ndarray) -> None:
        """Let batch row `i` be what row `rows[i]` was. Copies the window."""
        index = index_on(rows, self.device)
        geometry, memory_tokens = replace(self.geometry, batch=len(rows)), self._memory_tokens
        buffer = self._engine.allocate(geometry.nbytes(memory_tokens), compute_only=True)
        keys, values = geometry.carve(buffer, memory_tokens)
        if memory_tokens:
            keys.copy_(self._keys.index_select(0, index))
            values.copy_(self._values.index_select(0, index))
        self._engine.free(self._buffer)
        self.geometry, self._buffer, self._keys, self._values = geometry, buffer, keys, values

    def shrink(self) -> None:
        """Keep no more memory than what is held needs, in whole blocks."""
        self._reallocate(self._whole_blocks(self.tokens))

    def copy(self) -> WindowBuffer:
        """A second window with the same content in memory of its own."""
        twin = WindowBuffer(
            self._engine, self.geometry, self._sink_tokens, self._window_tokens, self._block_tokens
        )
        twin.sink_held, twin.held_tokens, twin._start = self.sink_held, self.held_tokens, self._start
        twin._buffer = self._engine.allocate(self.geometry.nbytes(self._memory_tokens), compute_only=True)
        twin._keys, twin._values = self.geometry.carve(twin._buffer, self._memory_tokens)
        twin._keys.copy_(self._keys)
        twin._values.copy_(self._values)
        return twin

    def free(self) -> None:
        """Give the memory up; the window is empty afterwards."""
        self._engine.free(self._buffer)
        self._buffer = self._engine.allocate(0, compute_only=True)
        self._start = self.sink_held = self.held_tokens = 0
        self._keys, self._values = self.geometry.carve(self._buffer, 0)

    def _slices_for(self, new_tokens: int) -> Iterator[slice]:
        """Where `new_tokens` more tokens go, in order, as slices of the buffer."""
        to_sink = min(new_tokens, self._sink_tokens - self.sink_held)
        if to_sink:
            yield slice(self.sink_held, self.sink_held + to_sink)
        yield from self._ring_slices(self._start + self.held_tokens, new_tokens - to_sink)

    def _held_slices(self) -> Iterator[slice]:
        return self._ring_slices(self._start, self.held_tokens)

    def _ring_slices(self, first: int, count: int) -> Iterator[slice]:
        while count:
            first %= self._ring_tokens
            piece = min(count, self._ring_tokens - first)
            yield slice(self._sink_tokens + first, self._sink_tokens + first + piece)
            first, count = first + piece, count - piece

    def _first_block(self) -> slice:
        """Where the ring's oldest block is."""
        first = self._sink_tokens + self._start
        return slice(first, first + self._block_tokens)

    @property
    def _memory_tokens(self) -> int:
        """Tokens for which there is memory, sink included."""
        return self._keys.shape[2]

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
        buffer = self._engine.allocate(self.geometry.nbytes(memory_tokens), compute_only=True)
        keys, values = self.geometry.carve(buffer, memory_tokens)
        self.copy_to(keys, values, end=self.tokens)
        self._engine.free(self._buffer)
        self._buffer, self._keys, self._values = buffer, keys, values
        self._start = 0
