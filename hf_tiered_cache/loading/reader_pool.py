"""Whose turn it is to attend part by part: each at a time with buffers and scratch memory of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from ..core.locks import ThreadReference, TimedCondition, this_thread
from ..core.metrics import L0Account, Metrics
from ..sequence.layer_state import LayerState
from ..transfer.engine import CopyEngine, Event
from .reader import BlockStream


@dataclass(eq=False)
class Seat:
    """What one attention needs. `stream` is made when the first block is streamed; `owner` has used it last, up to
    `left`, an event of its compute stream."""

    account: L0Account
    owner: object = None
    stream: BlockStream | None = None
    left: Event | None = None


class Seats:
    """The seats of one device: as many as attend at a time, up to a limit; who comes first sits first.

    A request gets the seat that it had before, whose buffers hold what was loaded for it. Another's makes it start
    over, so a new one is made before a busy one is waited for. Any thread may call.

    Args:
        engine: of the device.
        metrics: counts waits.
        limit: of seats.
    """

    def __init__(self, engine: CopyEngine, metrics: Metrics, limit: int) -> None:
        self._engine = engine
        self._metrics = metrics
        self._limit = limit
        self._changed = TimedCondition(metrics)
        self._idle: list[Seat] = []
        self._waiting: deque[ThreadReference] = deque()
        self._sitting: dict[ThreadReference, Seat] = {}

    @contextmanager
    def seat(self, owner: object) -> Iterator[Seat]:
        """A seat for as long as the context lasts; blocks while all are taken, which counts as lock wait."""
        seat = self._take(owner)
        try:
            if seat.left is not None:  # scratch memory is used again, maybe on another stream
                self._engine.compute_waits(seat.left)
            if seat.owner is not owner:
                if seat.stream is not None:
                    seat.stream.start_over()
                seat.owner = owner
            yield seat
        finally:
            seat.left = self._engine.record_compute()
            self._give_back(seat)

    def try_own(self, owner: object, use: Callable[[Seat], bool]) -> bool:
        """Do something with the seat that a request had last, if nobody sits there: whether it was done."""
        with self._changed:
            seat = next((seat for seat in self._idle if seat.owner is owner), None)
            if seat is None:
                return False
            self._sit_down(seat)
        try:
            return use(seat)
        finally:
            self._give_back(seat)

    def forget(self, layer: LayerState) -> None:
        """A layer goes away: drop what is being loaded of it. (Who takes a seat from its request does so, too.)"""
        with self._changed:
            for seat in self._idle:
                if seat.stream is not None:
                    seat.stream.discard(layer)

    def close(self) -> None:
        """Give the memory up. Nobody attends."""
        for seat in self._idle:
            if seat.stream is not None:
                seat.stream.close()
            seat.account.close()
        self._idle.clear()

    def _take(self, owner: object) -> Seat:
        ticket = this_thread().reference
        with self._changed:
            self._forget_interrupted(ticket)
            self._waiting.append(ticket)
            try:
                while True:
                    seat = self._choose(owner) if self._waiting[0] is ticket else None
                    if seat is not None:
                        return seat
                    with self._metrics.lock_wait():
                        self._changed.wait()
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()

    def _choose(self, owner: object) -> Seat | None:
        """The request's own, else the one that was given back first, else a new one."""
        if self._idle:
            return self._sit_down(next((seat for seat in self._idle if seat.owner is owner), self._idle[0]))
        ended = next((reference for reference in self._sitting if reference() is None), None)
        if ended is not None:  # by an interrupt, in its seat
            self._idle.append(self._sitting.pop(ended))
            return self._choose(owner)
        if len(self._sitting) < self._limit:
            return self._sit_down(Seat(L0Account(self._metrics)))
        return None

    def _sit_down(self, seat: Seat) -> Seat:
        self._sitting[this_thread().reference] = seat
        if seat in self._idle:
            self._idle.remove(seat)
        return seat

    def _forget_interrupted(self, ticket: ThreadReference) -> None:
        """A thread that comes does not wait or sit yet, unless an interrupt has thrown it out of its seat."""
        if ticket in self._waiting:
            self._waiting.remove(ticket)
        lost = self._sitting.pop(ticket, None)
        if lost is not None and lost not in self._idle:
            self._idle.append(lost)

    def _give_back(self, seat: Seat) -> None:
        with self._changed:
            self._idle.append(seat)
            self._sitting.pop(this_thread().reference, None)
            self._changed.notify_all()
