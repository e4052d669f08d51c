"""The copy engine of CUDA devices: two streams, and a pool of events."""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ..core.metrics import Metrics
from .engine import CopyEngine, Event, ScatterFunction

logger = logging.getLogger(__name__)


class CudaCopyEngine(CopyEngine):
    """Copies on two CUDA streams with page-locked host buffers.

    Host data is copied to the device in one piece, into a landing buffer that only the copy-in stream uses,
    and scattered from there by kernels on that stream: a strided copy from the host would be one transfer per
    fragment. Data that is already on the device is scattered from where it is.

    Where the system refuses to lock pages, host memory stays pageable. Copies remain correct, since the same
    events tell when they have finished, but the thread that starts a copy may wait for it.
    """

    def __init__(self, device: torch.device, metrics: Metrics) -> None:
        super().__init__(device, metrics)
        self._out = torch.cuda.Stream(device)
        self._in = torch.cuda.Stream(device)
        self._events = _EventPool(device)
        self._landing = self._empty(0)
        self._refusal_told = False

    def enter_thread(self) -> None:
        # A new thread starts on the first device, and its first operation there would take memory.
        torch.cuda.set_device(self.device)

    def _empty(self, nbytes: int) -> torch.Tensor:
        """Return memory of the current stream, neither counted nor marked for other streams."""
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return self._empty(nbytes)

    def _copies_use(self, buffer: torch.Tensor) -> None:
        buffer.record_stream(self._in)
        buffer.record_stream(self._out)

    @property
    def wants_page_locks(self) -> bool:
        return True

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        # Page-locking happens in the context of the current device, which would be the first one on a new thread.
        with torch.inference_mode(False), torch.cuda.device(self.device):
            try:
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
            except RuntimeError as error:
                if not self._refusal_told:
                    logger.warning("%d bytes cannot be page-locked, copies will be slower: %s", nbytes, error)
                self._refusal_told = True
                return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def compute_stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def computes_with(self, buffer: torch.Tensor) -> None:
        buffer.record_stream(torch.cuda.current_stream(self.device))

    def record_compute(self, stream: Any = None) -> Event:
        return self._events.record(stream or torch.cuda.current_stream(self.device))

    def compute_waits(self, event: Event) -> None:
        _wait_on(torch.cuda.current_stream(self.device), event)

    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Event) -> Event:
        with self._on(self._out):
            _wait_on(self._out, after)
            target.copy_(source, non_blocking=True)
            return self._events.record(self._out, host_waits=True)

    def copy_in(
        self, source: torch.Tensor, scatter: ScatterFunction, after: Event, ready: Event | None = None
    ) -> Event:
        with self._on(self._in):
            if ready is None:
                # Before the wait: the transfer overlaps with the attention that still reads the targets.
                source = self._land(source)
            else:
                _wait_on(self._in, ready)
            _wait_on(self._in, after)
            for target, part in scatter(source):
                target.copy_(part, non_blocking=True)
            # Host threads wait for it before they fill a host buffer again.
            return self._events.record(self._in, host_waits=ready is None)

    def _land(self, source: torch.Tensor) -> torch.Tensor:
        """Copy a host tensor to the landing buffer, on the copy-in stream. Valid until the next call."""
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
        with self._on(self._in):
            if ready is not None:
                _wait_on(self._in, ready)
            _wait_on(self._in, after)
            target.copy_(source, non_blocking=True)
            return self._events.record(self._in, host_waits=ready is None)

    def free_after_copies(self, buffer: torch.Tensor) -> None:
        with self._on(self._in):  # the caching allocator waits for it anyway; see `_copies_use`
            self.free(buffer)

    def record_copy_in(self) -> Event:
        return self._events.record(self._in)

    def finish_copies_in(self) -> None:
        self._events.record(self._in, host_waits=True).wait()

    def close(self) -> None:
        with torch.cuda.device(self.device):
            self._out.synchronize()
            self._in.synchronize()
        self._metrics.allocated_l0(-self._landing.numel())
        self._landing = self._empty(0)  # not a view, which would keep the memory

    @contextmanager
    def _on(self, stream: torch.cuda.Stream) -> Iterator[None]:
        """Enqueue everything inside on a copy stream.

        Leaving `torch.cuda.stream` makes the device of the previous stream current, the first one on most threads,
        and takes memory there; hence the device context around it.
        """
        with torch.cuda.device(self.device), torch.cuda.stream(stream), torch.inference_mode(False):
            yield


class _CudaEvent:
    """A point in a stream.

    Its CUDA event is reused once nothing refers to this object. That is safe: a stream that was told to wait for
    the event waits for what was recorded at that time, and a host thread that waits for it refers to this object.
    """

    __slots__ = ("_device", "_idle", "event")

    def __init__(self, event: torch.cuda.Event, device: torch.device, idle: deque[torch.cuda.Event]) -> None:
        self.event = event
        self._device = device
        self._idle = idle

    def wait(self) -> None:
        with torch.cuda.device(self._device):  # else it takes memory on the thread's device
            self.event.synchronize()

    def __del__(self) -> None:
        # Takes no lock: the garbage collector may call this in the middle of anything.
        self._idle.append(self.event)


class _EventPool:
    """The CUDA events of one engine. Any thread may record.

    Args:
        device: of the engine.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._idle: dict[bool, deque[torch.cuda.Event]] = {False: deque(), True: deque()}

    def record(self, stream: torch.cuda.Stream, host_waits: bool = False) -> _CudaEvent:
        """Record an event on a stream. A host thread that waits for it sleeps if `host_waits`, else it spins."""
        idle = self._idle[host_waits]
        try:
            event = idle.pop()
        except IndexError:
            event = torch.cuda.Event(blocking=host_waits)
        event.record(stream)
        return _CudaEvent(event, self._device, idle)


def _wait_on(stream: torch.cuda.Stream, event: Event) -> None:
    assert isinstance(event, _CudaEvent)
    stream.wait_event(event.event)
