"""Staging buffers: a few host buffers, which are reused; callers wait when all are in use."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch

from ..core.blocks import Bits, BlockLayout, as_bits
from ..core.locks import ThreadReference, TimedCondition, this_thread
from ..core.metrics import Metrics
from .engine import CopyEngine, Event

# One more block can be packed while the one before is copied out; likewise for loading.
SLOTS_PER_RING = 2


@dataclass(eq=False)
class StagingSlot:
    """A host buffer for one or more blocks. `ready` fires when a copy into it is complete."""

    pool: StagingPool
    buffer: torch.Tensor
    ready: Event | None = None

    def payload(self, layout: BlockLayout, blocks: int = 1) -> torch.Tensor:
        """View the start of the buffer as `[blocks, rows, row_elements]`."""
        return layout.over(self.buffer, blocks)

    def bits(self, layout: BlockLayout, blocks: int = 1) -> Bits:
        """View the same as numpy integers, for the tiers."""
        return as_bits(self.payload(layout, blocks))


class StagingPool:
    """A fixed number of host buffers of one engine, which grow to the largest block that they have held.

    Args:
        engine: allocates the buffers (page-locked on CUDA).
        slots: number of buffers.
        metrics: counts waits for the lock.
    """

    def __init__(self, engine: CopyEngine, slots: int, metrics: Metrics) -> None:
        self._engine = engine
        self._condition = TimedCondition(metrics)
        self._wakes = 0
        self._waiting: deque[ThreadReference] = deque()
        self._free = [StagingSlot(self, engine.allocate_host(0)) for _ in range(slots)]

    @property
    def awaited(self) -> bool:
        """True if any thread waits for a slot."""
        return bool(self._waiting)

    def acquire(self, nbytes: int, check: Callable[[], None] = lambda: None) -> StagingSlot:
        """Take a slot of at least `nbytes`. Blocks until there is one; threads are served in FIFO order.

        Args:
            nbytes: size needed.
            check: called before each wait, and again after `wake`; an exception from it ends the wait.
        """
        ticket = this_thread().reference
        try:
            with self._condition:
                self._leave_queue(ticket)  # an interrupt may have left it there
                self._waiting.append(ticket)
            while (slot := self._pop_for(ticket)) is None:
                wakes = self._wakes
                check()  # without the lock: it may look at what holds the slots
                with self._condition:
                    while not self._serves(ticket) and self._wakes == wakes:
                        self._condition.wait()
        finally:
            with self._condition:
                self._leave_queue(ticket)
        if slot.buffer.numel() < nbytes:
            try:
                slot.buffer = self._engine.allocate_host(nbytes)
            except BaseException:
                self.release(slot)
                raise
            self._engine.recycled(slot.buffer)
        return slot

    def release(self, slot: StagingSlot) -> None:
        """Give back a slot whose buffer is no longer read or written."""
        slot.ready = None
        self._engine.recycled(slot.buffer)
        with self._condition:
            self._free.append(slot)
            self._condition.notify_all()

    def _leave_queue(self, ticket: ThreadReference) -> None:
        if ticket in self._waiting:
            self._waiting.remove(ticket)
            self._condition.notify_all()

    def _serves(self, ticket: ThreadReference) -> bool:
        return bool(self._free) and self._waiting[0] is ticket

    def _pop_for(self, ticket: ThreadReference) -> StagingSlot | None:
        with self._condition:
            return self._free.pop() if self._serves(ticket) else None

    def wake(self) -> None:
        """Make all waiting threads call `check` again."""
        with self._condition:
            self._wakes += 1
            self._condition.notify_all()


class SlotRing:
    """A few buffers used in turn by one thread; the next use of each waits until its last copy has finished.

    Args:
        slots: number of buffers.
        allocate, free: allocate a buffer of some bytes, and free one.
        recycled: called with a buffer before it is used again.
        wait: waits for an event in the way that the user of the buffers needs.
    """

    def __init__(
        self,
        slots: int,
        *,
        allocate: Callable[[int], torch.Tensor],
        free: Callable[[torch.Tensor], None],
        recycled: Callable[[torch.Tensor], None],
        wait: Callable[[Event], None],
    ) -> None:
        self._allocate = allocate
        self._free = free
        self._recycled = recycled
        self._wait = wait
        self._slots: deque[tuple[torch.Tensor, Event | None]] = deque((allocate(0), None) for _ in range(slots))

    def next(self, nbytes: int) -> torch.Tensor:
        """Return the next buffer, free to be overwritten, cut to `nbytes`. May block; see `wait`."""
        buffer, copied = self._slots[0]
        if copied is not None:
            try:
                self._wait(copied)
            except Exception:  # not an interrupt, after which the copy is still running
                self._slots[0] = (buffer, None)  # a copy that failed is reported once
                raise
            self._slots[0] = (buffer, None)
            self._recycled(buffer)
        if buffer.numel() < nbytes:
            self.retire()
            buffer = self._allocate(nbytes)
            self._slots[0] = (buffer, None)
        return buffer[:nbytes]

    def retire(self) -> None:
        """Free the next buffer: it is too small, or a read that failed may still write to it."""
        self._free(self._slots[0][0])
        self._slots[0] = (self._allocate(0), None)

    def busy_until(self, event: Event) -> None:
        """Mark the buffer from `next` as being copied until `event`, and go on to the following one."""
        buffer, _ = self._slots[0]
        self._slots[0] = (buffer, event)
        self._slots.rotate(-1)

    def close(self) -> None:
        """Free the memory. All copies must have finished."""
        for buffer, _ in self._slots:
            self._free(buffer)
        self._slots.clear()
