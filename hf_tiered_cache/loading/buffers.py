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
    """K and V of one whole layer `[B, H, capacity, D]`, or a few blocks as they are stored. It may be overwritten
    after `released`, an event of the compute stream that read it last."""

    engine: CopyEngine
    storage: torch.Tensor
    released: Event

    @classmethod
    def empty(cls, engine: CopyEngine) -> LoadBuffer:
        """A buffer that has no memory yet."""
        return cls(engine, engine.allocate(0), engine.record_compute())

    def reallocate(self, nbytes: int) -> None:
        """Take other memory, losing the content."""
        self.engine.free(self.storage)
        self.storage = self.engine.allocate(0)
        self.storage = self.engine.allocate(nbytes)
        # The allocator may have given memory that the compute stream is not done with.
        self.released = self.engine.record_compute()

    def fit(self, geometry: Geometry, tokens: int) -> int:
        """Have room for `tokens` of a layer, losing the content. Returns the tokens there is room for."""
        if self.storage.numel() < geometry.nbytes(tokens):
            # A sequence grows by one token at a time; not so its buffers.
            self.reallocate(geometry.nbytes(tokens + tokens // 8))
        return max(tokens, geometry.tokens_in(self.storage.numel()))


@dataclass(eq=False)
class _Reader:
    """A thread whose attention reads a buffer, or is about to; `compute` is the stream that it computes on."""

    compute: Any = None
    buffer: LoadBuffer | None = None


class GatherBuffers:
    """The buffers of one device that hold whole layers: one for each thread whose attention reads, and a few for
    loads that look ahead. Made when they are needed; those of threads that have ended are used again.

    All methods may be called from any thread; none blocks.

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
        """Release the buffer that the calling thread's attention has read; it will read another."""
        with self._lock:
            reader = self._readers.setdefault(this_thread().reference, _Reader())
            buffer, reader.buffer = reader.buffer, None
            read_on, reader.compute = reader.compute, self._engine.compute_stream()
        if buffer is not None:
            self.give_back(buffer, read_on)

    def use(self, buffer: LoadBuffer) -> None:
        """The calling thread's attention is about to read this buffer, until its next `enter` or `leave`."""
        reader = self._readers[this_thread().reference]
        assert reader.buffer is None
        self._engine.computes_with(buffer.storage)
        reader.buffer = buffer

    def leave(self) -> None:
        """The attention of the calling thread that read a buffer has been enqueued: it may be overwritten then."""
        with self._lock:
            reader = self._readers.pop(this_thread().reference, None)
        if reader is not None and reader.buffer is not None:
            self.give_back(reader.buffer, reader.compute)

    def take(self, beyond: bool = False) -> LoadBuffer | None:
        """A buffer to load into; `None` when as many as there should be are taken, unless `beyond` that."""
        self.leave_for_ended_threads()
        with self._lock:
            if self._free:
                return self._free.pop()
            if self._made >= self._should_be and not beyond:
                return None
            self._made += 1
        return LoadBuffer.empty(self._engine)

    def give_back(self, buffer: LoadBuffer, compute: Any = None) -> None:
        """Nothing that is enqueued from now on reads this buffer; what has read it was enqueued on `compute`, or
        on the calling thread's stream (`None`)."""
        self._engine.recycled(buffer.storage)
        buffer.released = self._engine.record_compute(compute)
        self.put_back(buffer)

    def put_back(self, buffer: LoadBuffer) -> None:
        """Nobody has read this buffer since it was taken."""
        with self._lock:
            surplus = self._made > self._should_be
            self._made -= surplus
            if not surplus:
                self._free.append(buffer)
        if surplus:
            self._engine.free(buffer.storage)

    def close(self) -> None:
        """Give the memory up. Nothing is being loaded, and nobody attends."""
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
        """Release the buffers that ended threads have read."""
        with self._lock:
            ended = [reference for reference in self._readers if reference() is None]
            readers = [self._readers.pop(reference) for reference in ended]
        for reader in readers:
            if reader.buffer is not None:
                self.give_back(reader.buffer, reader.compute)
