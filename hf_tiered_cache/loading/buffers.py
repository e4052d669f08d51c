"""Accelerator memory that loads fill and attention reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from ..core.geometry import Geometry
from ..core.locks import ThreadReference, TimedLock, this_thread
from ..core.metrics import Metrics
from ..transfer.engine import CopyEngine, Event


@dataclass(eq=False)
class LoadBuffer:
    """Memory for K and V of one whole layer `[B, H, capacity, D]`, or for a few blocks as they are stored.

    It may be overwritten after `released`, an event of the compute stream that read it last."""

    engine: CopyEngine
    storage: torch.Tensor
    released: Event

    @classmethod
    def empty(cls, engine: CopyEngine) -> LoadBuffer:
        """A buffer that has no memory yet."""
        return cls(engine, engine.allocate(0), engine.record_compute())

    def reallocate(self, nbytes: int) -> None:
        """Replace the memory; the content is lost."""
        self.engine.free(self.storage)
        self.storage = self.engine.allocate(0)
        self.storage = self.engine.allocate(nbytes)
        # The allocator may return memory that the compute stream still uses.
        self.released = self.engine.record_compute()

    def fit(self, geometry: Geometry, tokens: int) -> int:
        """Make room for `tokens` of a layer, and return the tokens that fit. The content is lost if it grows."""
        if self.storage.numel() < geometry.nbytes(tokens):
            # A sequence grows token by token; its buffers grow in larger steps.
            self.reallocate(geometry.nbytes(tokens + tokens // 8))
        return max(tokens, geometry.tokens_in(self.storage.numel()))


@dataclass(eq=False)
class _Reader:
    """A thread whose attention reads a buffer, or is about to, on the compute stream `compute`."""

    compute: Any = None
    buffer: LoadBuffer | None = None


class GatherBuffers:
    """The buffers of one device for gathered attention: one for each thread whose attention reads, and a few for
    loads ahead of time. Allocated on demand; buffers of ended threads are reused.

    Any thread may call; no method blocks.

    Args:
        engine: of the device.
        metrics: counts waits for the lock.
        ahead: buffers beside those that attention reads.
    """

    def __init__(self, engine: CopyEngine, metrics: Metrics, ahead: int) -> None:
        self._engine = engine
        self._ahead = ahead
        self._lock = TimedLock(metrics)
        self._free: list[LoadBuffer] = []
        self._made = 0
        self._readers: dict[ThreadReference, _Reader] = {}

    def enter(self) -> None:
        """Release the buffer that the calling thread's attention read last, before it reads another."""
        with self._lock:
            reader = self._readers.setdefault(this_thread().reference, _Reader())
            buffer, reader.buffer = reader.buffer, None
            read_on, reader.compute = reader.compute, self._engine.compute_stream()
        if buffer is not None:
            self.give_back(buffer, read_on)

    def use(self, buffer: LoadBuffer) -> None:
        """Let the calling thread's attention read this buffer until its next `enter` or `leave`."""
        reader = self._readers[this_thread().reference]
        assert reader.buffer is None
        self._engine.computes_with(buffer.storage)
        reader.buffer = buffer

    def leave(self) -> None:
        """Release the calling thread's buffer: the attention that reads it is enqueued."""
        with self._lock:
            reader = self._readers.pop(this_thread().reference, None)
        if reader is not None and reader.buffer is not None:
            self.give_back(reader.buffer, reader.compute)

    def take(self, beyond: bool = False) -> LoadBuffer | None:
        """Take a buffer to load into; `None` when all are taken. With `beyond`, allocate one more instead."""
        self.leave_for_ended_threads()
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made >= self._should_be and not beyond:
                return None
            self._made += 1
        return LoadBuffer.empty(self._engine)

    def give_back(self, buffer: LoadBuffer, compute: Any = None) -> None:
        """Release a buffer that no kernel enqueued from now on reads. Those that read it were enqueued on
        `compute`, or on the calling thread's stream (`None`)."""
        self._engine.recycled(buffer.storage)
        buffer.released = self._engine.record_compute(compute)
        self.put_back(buffer)

    def put_back(self, buffer: LoadBuffer) -> None:
        """Return a buffer that was not read since it was taken."""
        with self._lock:
            surplus = self._made > self._should_be
            self._made -= surplus
            if not surplus:
                self._free.append(buffer)
        if surplus:
            self._engine.free(buffer.storage)

    def close(self) -> None:
        """Free the memory. No load and no attention may be under way."""
        with self._lock:
            readers, self._readers = list(self._readers.values()), {}
        for reader in readers:
            if reader.buffer is not None:
                self.put_back(reader.buffer)
        for buffer in self._free:
            self._engine.free(buffer.storage)
        self._free.clear()

    @property
    def _should_be(self) -> int:
        return self._ahead + max(1, len(self._readers))

    def leave_for_ended_threads(self) -> None:
        """Release the buffers of ended threads."""
        with self._lock:
            ended = [reference for reference in self._readers if reference() is None]
            readers = [self._readers.pop(reference) for reference in ended]
        for reader in readers:
            if reader.buffer is not None:
                self.give_back(reader.buffer, reader.compute)
