"""The copy engine: moves bytes between one accelerator and the host, in order, while the caller goes on.

Two streams per device, each strictly first in, first out, and events between them and the compute stream:

    compute   ──pack──▶ E1            wait(ready) ──▶ attention ──▶ E2 (released)
    copy-out        wait(E1) ──copy──▶ E3 (slot readable on the host)
    copy-in                      wait(E2) ──copy, place──▶ ready
    copy-in, on the device       wait(E2, E4: the source is complete) ──place──▶ ready

`CpuCopyEngine` does this with threads, `CudaCopyEngine` with CUDA streams. Both are really asynchronous, so a
missing wait gives wrong results on any machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch

from ..blocks import as_bits
from ..errors import UnsupportedModelError
from ..metrics import Metrics
from .worker import AWAITED_NICENESS, BACKGROUND_NICENESS, Worker

Placement = Callable[[torch.Tensor], Iterable[tuple[torch.Tensor, torch.Tensor]]]


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Block the calling host thread until the stream has passed this point; re-raise a failed copy."""


class CopyEngine(ABC):
    """Copies for one device; see the module for the order that it keeps.

    All methods but `compute_waits` and `close` return at once. Tensors given to a copy must stay unchanged
    until its event. Memory comes from `allocate` and `allocate_host`.
    """

    def __init__(self, device: torch.device, metrics: Metrics) -> None:
        self.device = device
        self._metrics = metrics

    def allocate(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor on the device, uninitialised, accounted, usable on all streams of this engine.

        It may be mutated inside and outside of inference mode.
        """
        with torch.inference_mode(False):
            buffer = self._allocate(nbytes)
        self._metrics.allocated_l0(nbytes)
        self.recycled(buffer)
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Give up a tensor from `allocate`; the caller drops its references."""
        self._metrics.allocated_l0(-buffer.numel())
        self.recycled(buffer)

    @abstractmethod
    def _allocate(self, nbytes: int) -> torch.Tensor: ...

    @abstractmethod
    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """A flat uint8 tensor on the host, uninitialised; page-locked where that makes copies asynchronous."""

    def compute_stream(self) -> Any:
        """The calling thread's compute stream, for `record_compute` from another thread."""
        return None

    def computes_with(self, buffer: torch.Tensor) -> None:
        """The calling thread's compute stream uses a buffer that another one may have allocated, so that it is not
        given to anybody before both have passed its end."""

    @abstractmethod
    def record_compute(self, stream: Any = None) -> Event:
        """Mark a compute stream, the calling thread's when `None`, as it is now."""

    @abstractmethod
    def compute_waits(self, event: Event) -> None:
        """Let what is computed from now on wait for an event of a copy stream."""

    @abstractmethod
    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Event) -> Event:
        """Copy a flat device tensor to a flat host tensor of the same size, after an event of the compute
        stream. The event returned has fired when `target` is complete and `source` may be overwritten."""

    @abstractmethod
    def copy_in(
        self, source: torch.Tensor, placement: Placement, after: Event, ready: Event | None = None
    ) -> Event:
        """Put the parts of a contiguous tensor where they belong on the device.

        Args:
            source: on the host, where it may be read at once, or on the device.
            placement: called with a tensor on the device that equals `source`; yields `(target, part)` pairs
                of equal shape, `part` a view of its argument.
            after: event of the compute stream that must have passed before a target is overwritten.
            ready: event that must have passed before `source` is read; `None` for one on the host, and only then.

        Returns:
            An event that has fired when the targets are complete and `source` may be overwritten.
        """

    @abstractmethod
    def copy_in_whole(
        self, source: torch.Tensor, target: torch.Tensor, after: Event, ready: Event | None = None
    ) -> Event:
        """Copy a flat tensor to a flat device tensor of the same size; all else as `copy_in`."""

    @property
    def host_writes(self) -> bool:
        """Whether the device's memory is the host's, so that storage may be read straight into it."""
        return False

    @abstractmethod
    def free_after_copies(self, buffer: torch.Tensor) -> None:
        """Like `free`, for a buffer that copies asked for before may still read or write."""

    @abstractmethod
    def record_copy_in(self) -> Event:
        """Mark the copy-in stream as it is now: fires when all copies that were asked for have finished."""

    def recycled(self, buffer: torch.Tensor) -> None:
        """Called with a buffer, of either side, whose content nobody may read any more; tests poison it here."""

    def close(self) -> None:
        """Finish all copies and end. Blocks. May be called twice."""


class _PassedEvent:
    """The compute stream of the CPU is the calling thread: whatever it was asked to do, it has done."""

    def wait(self) -> None:
        return


class _TaskEvent:
    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait

    def wait(self) -> None:
        self._wait()


class CpuCopyEngine(CopyEngine):
    """Copies on two threads, single-threaded each; the twin of the CUDA engine for models on the CPU."""

    def __init__(self, device: torch.device, metrics: Metrics) -> None:
        super().__init__(device, metrics)
        self._out = Worker("copy-out", BACKGROUND_NICENESS)
        self._in = Worker("copy-in", AWAITED_NICENESS)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8)

    def record_compute(self, stream: Any = None) -> Event:
        return _PassedEvent()

    def compute_waits(self, event: Event) -> None:
        event.wait()

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Event) -> Event:
        def run() -> None:
            after.wait()
            self._copy(target, source)

        return _TaskEvent(self._out.submit(run).result)

    def copy_in(
        self, source: torch.Tensor, placement: Placement, after: Event, ready: Event | None = None
    ) -> Event:
        def run() -> None:
            if ready is not None:
                ready.wait()
            after.wait()
            for target, part in placement(source):
                self._copy(target, part)

        return _TaskEvent(self._in.submit(run).result)

    def copy_in_whole(
        self, source: torch.Tensor, target: torch.Tensor, after: Event, ready: Event | None = None
    ) -> Event:
        return self.copy_in(source, lambda landed: [(target, landed)], after, ready)

    @property
    def host_writes(self) -> bool:
        return True

    def free_after_copies(self, buffer: torch.Tensor) -> None:
        try:
            self._in.submit(lambda: self.free(buffer))
        except RuntimeError:  # closed: nothing is being copied any more
            self.free(buffer)

    def record_copy_in(self) -> Event:
        return _TaskEvent(self._in.submit(lambda: None).result)

    def close(self) -> None:
        # To the last: who waits for a copy, such as write-back, is not told that it failed.
        self._out.close(finish=True)
        self._in.close(finish=True)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # numpy copies on this thread alone and without the GIL; torch would wake a pool of threads per caller.
        np.copyto(as_bits(target), as_bits(source))


class CudaCopyEngine(CopyEngine):
    """Copies on two CUDA streams with page-locked host buffers.

    Host data is copied to the device in one piece, into a landing buffer that only the copy-in stream uses,
    and put into place by kernels on that stream: a strided copy from the host would be one transfer per fragment.
    What is on the device is put into place from where it is.
    """

    def __init__(self, device: torch.device, metrics: Metrics) -> None:
        super().__init__(device, metrics)
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._landing = self._empty(0)

    def _empty(self, nbytes: int) -> torch.Tensor:
        """Memory of the current stream, neither accounted nor marked for other streams."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        buffer = self._empty(nbytes)
        # The caching allocator then holds a freed buffer back until the copy streams have passed it too.
        buffer.record_stream(self._in)
        buffer.record_stream(self._out)
        return buffer

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        # Page-locking happens in the context of the current device, which would be the first one on a new thread.
        with torch.inference_mode(False), torch.cuda.device(self.device):
            return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def compute_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def computes_with(self, buffer: torch.Tensor) -> None:
        buffer.record_stream(torch.cuda.current_stream(self.device))

    def record_compute(self, stream: Any = None) -> Event:
        return _CudaEvent(stream or torch.cuda.current_stream(self.device))

    def compute_waits(self, event: Event) -> None:
        _wait_on(torch.cuda.current_stream(self.device), event)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Event) -> Event:
        with torch.cuda.stream(self._out), torch.inference_mode(False):
            _wait_on(self._out, after)
            target.copy_(source, non_blocking=True)
            return _CudaEvent(self._out)

    def copy_in(
        self, source: torch.Tensor, placement: Placement, after: Event, ready: Event | None = None
    ) -> Event:
        with torch.cuda.stream(self._in), torch.inference_mode(False):
            if ready is None:
                # Before the wait: the transfer overlaps with the attention that still reads the targets.
                source = self._land(source)
            else:
                _wait_on(self._in, ready)
            _wait_on(self._in, after)
            for target, part in placement(source):
                target.copy_(part, non_blocking=True)
            return _CudaEvent(self._in)

    def _land(self, source: torch.Tensor) -> torch.Tensor:
        """A copy of a host tensor on the device, until the next one; on the copy-in stream."""
        nbytes = source.numel() * source.element_size()
        if self._landing.numel() < nbytes:
            # Allocated on the copy-in stream: a smaller one, still in use there, is recycled in stream order.
            landing = self._empty(nbytes)
            self._metrics.allocated_l0(nbytes - self._landing.numel())
            self._landing = landing
        landed = self._landing[:nbytes].view(source.dtype).view(source.shape)
        return landed.copy_(source, non_blocking=True)

    def copy_in_whole(
        self, source: torch.Tensor, target: torch.Tensor, after: Event, ready: Event | None = None
    ) -> Event:
        with torch.cuda.stream(self._in), torch.inference_mode(False):
            if ready is not None:
                _wait_on(self._in, ready)
            _wait_on(self._in, after)
            target.copy_(source, non_blocking=True)
            return _CudaEvent(self._in)

    def free_after_copies(self, buffer: torch.Tensor) -> None:
        with torch.cuda.stream(self._in):  # the caching allocator waits for it anyway; see `_allocate`
            self.free(buffer)

    def record_copy_in(self) -> Event:
        return _CudaEvent(self._in)

    def close(self) -> None:
        self._out.synchronize()
        self._in.synchronize()
        self._metrics.allocated_l0(-self._landing.numel())
        self._landing = self._empty(0)  # not a view, which would keep the memory


class _CudaEvent:
    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.event = torch.cuda.Event(blocking=True)  # a host thread that waits for it sleeps
        self.event.record(stream)

    def wait(self) -> None:
        self.event.synchronize()


def _wait_on(stream: torch.cuda.Stream, event: Event) -> None:
    assert isinstance(event, _CudaEvent)
    stream.wait_event(event.event)


def make_engine(device: torch.device, metrics: Metrics) -> CopyEngine:
    """The engine for a device.

    Raises:
        UnsupportedModelError: the device is neither a CUDA device nor the CPU.
    """
    if device.type == "cuda":
        return CudaCopyEngine(device, metrics)
    if device.type == "cpu":
        return CpuCopyEngine(device, metrics)
    raise UnsupportedModelError(f"the model's layers are on {device}: only CUDA devices and the CPU are supported")
