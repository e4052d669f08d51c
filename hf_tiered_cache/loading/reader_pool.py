"""Leases of the buffers and scratch memory of streaming attention, one lease per attention at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..core.locks import ThreadReference, TimedCondition, this_thread
from ..core.metrics import L0Account, Metrics
from ..sequence.layer_state import LayerState
from ..transfer.engine import CopyEngine, Event
from .reader import BlockReader


@dataclass(eq=False)
class ReaderLease:
    """The buffers and scratch memory of one attention.

    `reader` is opened when the first block is streamed. `owner` is the request that used the lease last, up to
    `left`, an event of its compute stream.
    """

    account: L0Account
    owner: object = None
    reader: BlockReader | None = None
    left: Event | None = None


class ReaderPool:
    """The leases of one device: one for each attention that runs at a time, up to a limit, granted in FIFO order.

    A request gets its former lease if that is idle, since its buffers hold blocks loaded for it. Otherwise it gets
    the lease that is idle for longest, or a new one, and loads again. Any thread may call.

    Args:
        engine: of the device.
        metrics: counts waits.
        limit: number of leases.
    """

    def __init__(self, engine: CopyEngine, metrics: Metrics, limit: int) -> None:
        self._engine = engine
        self._metrics = metrics
        self._limit = limit
        self._changed = TimedCondition(metrics)
        self._idle: list[ReaderLease] = []
        self._waiting: deque[ThreadReference] = deque()
        self._leased: dict[ThreadReference, ReaderLease] = {}

    @contextmanager
    def lease(self, owner: object) -> Iterator[ReaderLease]:
        """Grant a lease for the duration of the context. Blocks while all are taken, which counts as lock wait."""
        lease = self._take(owner)
        try:
            if lease.left is not None:  # scratch memory is used again, maybe on another stream
                self._engine.compute_waits(lease.left)
            if lease.owner is not owner:
                if lease.reader is not None:
                    lease.reader.start_over()
                lease.owner = owner
            yield lease
        finally:
            lease.left = self._engine.record_compute()
            self._give_back(lease)

    def try_own(self, owner: object, use: Callable[[ReaderLease], bool]) -> bool:
        """Call `use` with the lease that a request had last, if it is idle; return its result, else false."""
        with self._changed:
            lease = next((lease for lease in self._idle if lease.owner is owner), None)
            if lease is None:
                return False
            self._lease(lease)
        try:
            return use(lease)
        finally:
            self._give_back(lease)

    def forget(self, layer: LayerState) -> None:
        """Cancel the loads of a layer that is about to be dropped, in idle leases. (A lease drops its loads anyway
        when it passes to another request.)"""
        with self._changed:
            for lease in self._idle:
                if lease.reader is not None:
                    lease.reader.discard(layer)

    def close(self) -> None:
        """Free the memory. No lease may be granted afterwards."""
        for lease in self._idle:
            if lease.reader is not None:
                lease.reader.close()
            lease.account.close()
        self._idle.clear()

    def _take(self, owner: object) -> ReaderLease:
        ticket = this_thread().reference
        with self._changed:
            self._forget_interrupted(ticket)
            self._waiting.append(ticket)
            try:
                while True:
                    lease = self._choose(owner) if self._waiting[0] is ticket else None
                    if lease is not None:
                        return lease
                    with self._metrics.lock_wait():
                        self._changed.wait()
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _choose(self, owner: object) -> ReaderLease | None:
        """Return the request's own lease, else the one idle for longest, else a new one, up to the limit."""
        if self._idle:
            return self._lease(next((lease for lease in self._idle if lease.owner is owner), self._idle[0]))
        ended = next((reference for reference in self._leased if reference() is None), None)
        if ended is not None:  # by an interrupt, with its lease
            self._idle.append(self._leased.pop(ended))
            return self._choose(owner)
        if len(self._leased) < self._limit:
            return self._lease(ReaderLease(L0Account(self._metrics)))
        return None

    def _lease(self, lease: ReaderLease) -> ReaderLease:
        self._leased[this_thread().reference] = lease
        if lease in self._idle:
            self._idle.remove(lease)
        return lease

    def _forget_interrupted(self, ticket: ThreadReference) -> None:
        """Take back what the calling thread was granted or waited for when an interrupt struck."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        lost = self._leased.pop(ticket, None)
        if lost is not None and lost not in self._idle:
            self._idle.append(lost)

    def _give_back(self, lease: ReaderLease) -> None:
        with self._changed:
            self._idle.append(lease)
            self._leased.pop(this_thread().reference, None)
            self._changed.notify_all()
