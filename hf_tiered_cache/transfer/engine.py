"""The copy engine: moves bytes between one accelerator and the host, in order and asynchronously.

Two streams per device, each strictly first in, first out, and events between them and the compute stream:

    compute   ──pack──▶ E1            wait(ready) ──▶ attention ──▶ E2 (released)
    copy-out        wait(E1) ──copy──▶ E3 (slot readable on the host)
    copy-in                      wait(E2) ──copy, place──▶ ready
    copy-in, on the device       wait(E2, E4: the source is complete) ──place──▶ ready

`CpuCopyEngine` does this with threads, `transfer.cuda` with CUDA streams. Both are really asynchronous, so a
missing wait gives wrong results on any machine.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import numpy as np
import torch

from ..core.blocks import as_bits
from ..core.metrics import Metrics
from .worker import AWAITED_NICENESS, BACKGROUND_NICENESS, Worker

ScatterFunction = Callable[[torch.Tensor], Iterable[tuple[torch.Tensor, torch.Tensor]]]


class Event(Protocol):
    """A point in a stream."""

    def wait(self) -> None:
        """Block the calling host thread until the stream has passed this point; re-raise a failed copy."""


class CopyEngine(ABC):
    """Copies for one device; see the module for the order that it keeps.

    All methods but `finish_copies_in` and `close` return at once, on CUDA also `compute_waits`. Tensors given to a
    copy must stay unchanged until its event. Memory comes from `allocate` and `allocate_host`.
    """

    def __init__(self, device: torch.device, metrics: Metrics) -> None:
        self.device = device
        self._metrics = metrics

    def allocate(self, nbytes: int, compute_only: bool = False) -> torch.Tensor:
        """Return a flat uint8 tensor on the device, uninitialised and counted.

        It may be mutated inside and outside of inference mode.

        Args:
            nbytes: its size.
            compute_only: whether only the compute stream will use it; else all streams of this engine may.
        """
        with torch.inference_mode(False):
            buffer = self._allocate(nbytes)
        if not compute_only:
            self._copies_use(buffer)
        self._metrics.allocated_l0(nbytes)
        self.recycled(buffer)
        return buffer

    def free(self, buffer: torch.Tensor) -> None:
        """Free a tensor from `allocate`; the caller drops its references."""
        self._metrics.allocated_l0(-buffer.numel())
        self.recycled(buffer)

    def enter_thread(self) -> None:
        """Prepare the calling thread, a new one, to work for this device only."""

    @abstractmethod
    def _allocate(self, nbytes: int) -> torch.Tensor: ...

    def _copies_use(self, buffer: torch.Tensor) -> None:
        """Prevent reuse of this memory, once it is freed, until the copy streams have passed that point."""

    @property
    def wants_page_locks(self) -> bool:
        """True if copies from the host are asynchronous only from page-locked memory."""
        return False

    @abstractmethod
    def allocate_host(self, nbytes: int) -> torch.Tensor:
        """Return a flat uint8 tensor on the host, uninitialised.

        It is page-locked where that makes copies asynchronous and the system allows it.
        """

    def compute_stream(self) -> Any:
        """Return the calling thread's compute stream, for `record_compute` from another thread."""
        return None

    def computes_with(self, buffer: torch.Tensor) -> None:
        """Record that the calling thread's compute stream uses a buffer, which another one may have allocated.

        Once freed, the buffer is not reused before both streams have passed that point.
        """

    @abstractmethod
    def record_compute(self, stream: Any = None) -> Event:
        """Record an event on a compute stream, the calling thread's if `None`."""

    @abstractmethod
    def compute_waits(self, event: Event) -> None:
        """Make later computation wait for an event of a copy stream."""

    @abstractmethod
    def copy_out(self, source: torch.Tensor, target: torch.Tensor, after: Event) -> Event:
        """Copy a flat device tensor to a flat host tensor of the same size, after an event of the compute stream.

        Returns:
            An event that fires when `target` is complete and `source` may be overwritten.
        """

    @abstractmethod
    def copy_in(
        self, source: torch.Tensor, scatter: ScatterFunction, after: Event, ready: Event | None = None
    ) -> Event:
        """Scatter the parts of a contiguous tensor to their targets on the device.

        Args:
            source: on the host, where it may be read at once, or on the device.
            scatter: called with a tensor on the device that equals `source`; yields `(target, part)` pairs
                of equal shape, `part` a view of its argument.
            after: event of the compute stream that must have passed before a target is overwritten.
            ready: event that must have passed before `source` is read; `None` for one on the host, and only then.

        Returns:
            An event that fires when the targets are complete and `source` may be overwritten.
        """

    @abstractmethod
    def copy_in_whole(
        self, source: torch.Tensor, target: torch.Tensor, after: Event, ready: Event | None = None
    ) -> Event:
        """Copy a flat tensor to a flat device tensor of the same size; all else as `copy_in`."""

    @property
    def host_writes(self) -> bool:
        """True if the device's memory is host memory, so that storage may be read directly into it."""
        return False

    @abstractmethod
    def free_after_copies(self, buffer: torch.Tensor) -> None:
        """Like `free`, for a buffer that copies requested earlier may still read or write."""

    @abstractmethod
    def record_copy_in(self) -> Event:
        """Record an event on the copy-in stream, for `compute_waits`.

        It fires when all copies that were requested have finished.
        """

    @abstractmethod
    def finish_copies_in(self) -> None:
        """Block the calling host thread until all requested copies to the device have finished."""

    def recycled(self, buffer: torch.Tensor) -> None:
        """Take note of a buffer, on device or host, whose content must not be read any more. Tests poison it."""

    def close(self) -> None:
        """Finish all copies and end. Blocks. May be called twice."""


class _PassedEvent:
    """An event of the CPU's compute stream: that is the calling thread, so the event has always fired."""

    def wait(self) -> None:
        return


class _TaskEvent:
    def __init__(self, wait: Callable[[], object]) -> None:
        self._wait = wait

    def wait(self) -> None:
        self._wait()


class CpuCopyEngine(CopyEngine):
    """Copies on two threads, one per direction; the counterpart of the CUDA engine for models on the CPU."""

    def __init__(self, device: torch.device, metrics: Metrics) -> None:
        super().__init__(device, metrics)
        self._out = Worker("copy-out", BACKGROUND_NICENESS)
        self._in = Worker("copy-in", AWAITED_NICENESS)

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        with torch.inference_mode(False):
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")

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
        self, source: torch.Tensor, scatter: ScatterFunction, after: Event, ready: Event | None = None
    ) -> Event:
        def run() -> None:
            if ready is not None:
                ready.wait()
            after.wait()
            for target, part in scatter(source):
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

    def finish_copies_in(self) -> None:
        self._in.submit(lambda: None).result()

    def close(self) -> None:
        # Finish all copies, so that those who wait for one, such as write-back, do not see it fail.
        self._out.close(finish=True)
        self._in.close(finish=True)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        # numpy copies on this thread alone and without the GIL; torch would wake a pool of threads per caller.
        np.copyto(as_bits(target), as_bits(source))
