"""L0 of one layer: the sink and the newest tokens, which stay on the accelerator.

The memory is as large as the tokens need, up to what the window's size asks for, and is replaced when it grows or
shrinks; `window_content` shows how tokens lie in it.

The size of a window may change at any time. After it shrank there are blocks to seal, then memory to release.
After it grew there is room for more tokens, or for sealed blocks to come back in front of the oldest token.

An interrupt (Ctrl-C) may strike between any two statements. So the whole state is one immutable object, and every
change makes a new one, after the tokens are in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import torch

from ..core.geometry import Geometry
from ..core.row_map import index_on
from ..transfer.engine import CopyEngine
from .window_content import WindowContent


def ring_tokens(window_tokens: int, block_tokens: int) -> int:
    """The largest size of a ring: a whole window, the block about to leave, and the one that is being filled."""
    return (-(-window_tokens // block_tokens) + 2) * block_tokens


class WindowBuffer:
    """Sink and newest tokens of one layer, K and V.

    Everything is enqueued on the compute stream; nothing blocks. Returned tensors are views, valid until the next
    call that changes the window. A call that finds no memory for a larger ring changes nothing.

    Invariants:
        - the ring holds tokens only when the sink is full;
        - `held_tokens` fit into the ring, which fits into the memory behind the sink;
        - an empty ring starts at 0.

    Args:
        engine: of the layer's device.
        geometry: of K and V.
        sink_tokens: tokens at the start of the sequence that never leave.
        window_tokens: tokens that remain when blocks are sealed.
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
        self._content = WindowContent.empty(engine, geometry, sink_tokens, 0)

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
        """Tokens in the ring, after the sink."""
        return self._content.held_tokens

    def follow(self) -> None:
        """Let the calling thread's compute stream wait for the one that used the window last."""
        stream = self._engine.compute_stream()
        if stream != self._stream:
            self._engine.compute_waits(self._engine.record_compute(self._stream))
            self._engine.computes_with(self._content.buffer)
            self._stream = stream

    @property
    def tokens(self) -> int:
        """Tokens in the window, sink included."""
        return self._content.tokens

    @property
    def nbytes(self) -> int:
        """Accelerator memory in bytes."""
        return self._content.buffer.numel()

    @property
    def window_tokens(self) -> int:
        """The present size: tokens that remain when blocks are sealed."""
        return self._window_tokens

    @property
    def has_block_to_seal(self) -> bool:
        """True if a whole window remains when a block is sealed."""
        return self.held_tokens > self._window_tokens + self._block_tokens

    @property
    def takes_block_back(self) -> bool:
        """Return true if the newest sealed block fits back into the window without exceeding its size."""
        return self.held_tokens + self._block_tokens <= self._window_tokens

    def fits(self, new_tokens: int) -> bool:
        """Return true if this many more tokens fit without sealing."""
        return self.tokens + new_tokens <= self._sink_tokens + self._window_tokens + self._block_tokens

    def room(self) -> int:
        """Return the tokens that `append` takes at once; 0 when blocks must be sealed first."""
        return max(0, self._most_tokens - self.tokens)

    def append(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Add tokens `[B, H, T, D]`, at most `room()`: to the sink while it has room, else to the ring."""
        new_tokens = keys.shape[-2]
        self._make_room(self.tokens + new_tokens)
        done, content = 0, self._content
        for target in content.free_slices(new_tokens):
            count = target.stop - target.start
            content.keys[:, :, target].copy_(keys[:, :, done : done + count])
            content.values[:, :, target].copy_(values[:, :, done : done + count])
            done += count
        to_sink = min(new_tokens, self._sink_tokens - content.sink_held)
        self._content = content.with_ring(
            content.start, content.held_tokens + new_tokens - to_sink, content.sink_held + to_sink
        )

    def views(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return all tokens as one slice `[B, H, tokens, D]`; only while nothing is sealed."""
        if self._content.start:  # blocks were sealed and have come back
            self._reallocate(self._content.memory_tokens)
        return self._content.view(slice(0, self.tokens))

    def splits(self, sealed_tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor, int]]:
        """Yield all tokens as slices K, V `[B, H, T, D]`, each with the position of its first token in the
        sequence, which has `sealed_tokens` between sink and ring."""
        if not sealed_tokens:
            if self.tokens:
                yield *self.views(), 0
            return
        content = self._content
        if content.sink_held:
            yield *content.view(slice(0, content.sink_held)), 0
        position = content.sink_held + sealed_tokens
        for held in content.held_slices():
            yield *content.view(held), position
            position += held.stop - held.start

    def copy_to(self, keys: torch.Tensor, values: torch.Tensor, end: int) -> None:
        """Copy the sink to the front of `[B, H, S, D]` tensors, and the ring so that it ends before `end`."""
        self._content.copy_to(keys, values, end)

    def select_tokens(self, indices: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return some tokens of the window as new tensors.

        Args:
            indices: 1-D int64 on the layer's device. 0 is the oldest token after the sink; -1 is the last token of
                the sink, -2 the one before.
        """
        return self._content.select_tokens(indices)

    def oldest_block(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the next block to leave, `[B, H, block_tokens, D]`."""
        return self._content.ring_view(self._content.start, self._block_tokens)

    def drop_oldest_block(self) -> None:
        """Drop the oldest block, which was sealed."""
        content = self._content
        start = (content.start + self._block_tokens) % content.ring_tokens
        self._content = content.with_ring(start, content.held_tokens - self._block_tokens)

    def make_room_for_block(self) -> None:
        """Allocate memory for one more block, unless there is room."""
        self._make_room(self.tokens + self._block_tokens)

    def prepend_block(self, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put the newest sealed block, `[B, H, block_tokens, D]`, back in front of the oldest token after the
        sink. Only while the window `takes_block_back`."""
        assert self.takes_block_back and self.sink_held == self._sink_tokens
        self.make_room_for_block()
        content = self._content
        start = (content.start - self._block_tokens) % content.ring_tokens if content.held_tokens else 0
        block_keys, block_values = content.ring_view(start, self._block_tokens)
        block_keys.copy_(keys)
        block_values.copy_(values)
        self._content = content.with_ring(start, content.held_tokens + self._block_tokens)

    def resize(self, window_tokens: int) -> None:
        """Set the size, at least one block. Moves nothing.

        After the window shrank, seal while it `has_block_to_seal`, then `release_surplus`. After it grew, sealed
        blocks can come back while it `takes_block_back`; memory grows on demand.
        """
        assert window_tokens >= self._block_tokens
        self._window_tokens = window_tokens

    def release_surplus(self) -> None:
        """Free memory beyond what the window's size asks for, once the tokens fit into the rest. For a moment both
        the old and the new memory are allocated."""
        if self._content.memory_tokens > self._most_tokens >= self.tokens:
            self._reallocate(self._most_tokens)

    def crop(self, tokens: int) -> None:
        """Drop the newest tokens, at most `self.tokens`; sink tokens go last."""
        content = self._content
        from_ring = min(tokens, content.held_tokens)
        self._content = content.with_ring(
            content.start, content.held_tokens - from_ring, content.sink_held - (tokens - from_ring)
        )

    def with_only(self, sink_tokens: int, keys: torch.Tensor, values: torch.Tensor) -> WindowContent:
        """Make a content of the first tokens of the sink, followed by these, `[B, H, T, D]`, at most a block. Does
        not change the window; pass the content to `become`."""
        old, new_tokens = self._content, keys.shape[2]
        content = self._new_content(old.geometry, self._sink_tokens + self._block_tokens)
        first, then = slice(0, sink_tokens), slice(self._sink_tokens, self._sink_tokens + new_tokens)
        for target, source, new in ((content.keys, old.keys, keys), (content.values, old.values, values)):
            target[:, :, first].copy_(source[:, :, first])
            target[:, :, then].copy_(new)
        return content.with_ring(0, new_tokens, sink_tokens)

    def become(self, content: WindowContent) -> None:
        """Replace the content; the former memory is freed."""
        old, self._content = self._content, content
        self._engine.free(old.buffer)

    def with_rows(self, rows: np.ndarray) -> WindowContent:
        """Make a content whose batch row `i` is row `rows[i]` of the window. Does not change the window; pass the
        content to `become`."""
        old = self._content
        index = index_on(rows, self.device)
        content = self._new_content(replace(old.geometry, batch=len(rows)), old.memory_tokens)
        if old.memory_tokens:
            content.keys.copy_(old.keys.index_select(0, index))
            content.values.copy_(old.values.index_select(0, index))
        return content.with_ring(old.start, old.held_tokens, old.sink_held)

    def shrink(self) -> None:
        """Free all memory that the tokens do not need, in whole blocks."""
        self._reallocate(self._whole_blocks(self.tokens))

    def copy(self) -> WindowBuffer:
        """Return a second window with the same tokens, in memory of its own."""
        twin = WindowBuffer(
            self._engine, self.geometry, self._sink_tokens, self._window_tokens, self._block_tokens
        )
        old = self._content
        content = self._new_content(old.geometry, old.memory_tokens)
        content.keys.copy_(old.keys)
        content.values.copy_(old.values)
        twin._content = content.with_ring(old.start, old.held_tokens, old.sink_held)
        return twin

    def free(self) -> None:
        """Free the memory; the window is empty afterwards."""
        self.become(self._new_content(self.geometry, 0))

    def _new_content(self, geometry: Geometry, memory_tokens: int) -> WindowContent:
        return WindowContent.empty(self._engine, geometry, self._sink_tokens, memory_tokens)

    @property
    def _most_tokens(self) -> int:
        """Tokens for which there is memory at most, sink included, at the present size."""
        return self._sink_tokens + ring_tokens(self._window_tokens, self._block_tokens)

    def _whole_blocks(self, tokens: int) -> int:
        """Round tokens up to a size of memory: the sink and whole blocks of ring, or a part of the sink."""
        return self._sink_tokens - (self._sink_tokens - tokens) // self._block_tokens * self._block_tokens

    def _make_room(self, tokens: int) -> None:
        """Have memory for `tokens`; grows by half at a time, up to what the window's size asks for."""
        assert tokens <= max(self._most_tokens, self.tokens)
        had_tokens = self._content.memory_tokens
        if tokens > had_tokens:
            comfortable = max(tokens, had_tokens + had_tokens // 2)
            self._reallocate(min(self._whole_blocks(comfortable), self._most_tokens))

    def _reallocate(self, memory_tokens: int) -> None:
        """Move the tokens to new memory, where the ring starts at 0."""
        old = self._content
        content = self._new_content(old.geometry, memory_tokens)
        old.copy_to(content.keys, content.values, end=old.tokens)
        self.become(content.with_ring(0, old.held_tokens, old.sink_held))
