"""Locks that an interrupt cannot leave taken, and conditions."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager

import pytest

from hf_tiered_cache.core.locks import TimedCondition, TimedLock
from hf_tiered_cache.core.metrics import Metrics

from ...interrupts import CtrlC
from ...threads.crew import in_threads

INTERRUPTS = 100


def left_taken(
    make_lock: Callable[[], AbstractContextManager[object]],
    is_free: Callable[[], bool],
    send_ctrl_c: Callable[[float], CtrlC],
) -> int:
    """Return how many interrupts, at any point while a lock is taken and released, left it taken."""
    times, chance = 0, random.Random(0)
    for _ in range(INTERRUPTS):
        lock = make_lock()
        coming = send_ctrl_c(chance.random() * 0.002)
        try:
            coming.begin()
            while not coming.has_struck:
                with lock:
                    pass
        except KeyboardInterrupt:
            pass
        except RuntimeError:  # cannot release un-acquired lock
            times += 1
            continue
        with ThreadPoolExecutor(1) as other:
            times += not other.submit(is_free).result()
    return times


class Holder:
    """Makes locks, and checks the last one."""

    def __init__(self, kind: type) -> None:
        self._kind = kind

    def make(self) -> AbstractContextManager[object]:
        """Make the next lock."""
        self._lock = self._kind(Metrics()) if issubclass(self._kind, TimedLock) else self._kind()
        lock: AbstractContextManager[object] = self._lock
        return lock

    def is_free(self) -> bool:
        """Return true if the calling thread can take the last lock."""
        return bool(self._lock.acquire(blocking=False))


@pytest.mark.parametrize("kind", [TimedLock, TimedCondition])
def test_an_interrupt_does_not_leave_it_taken(kind: type, send_ctrl_c: Callable[[float], CtrlC]) -> None:
    holder = Holder(kind)
    assert left_taken(holder.make, holder.is_free, send_ctrl_c) == 0


def test_control_a_condition_of_the_standard_library_stays_taken(send_ctrl_c: Callable[[float], CtrlC]) -> None:
    holder = Holder(threading.Condition)
    assert any(left_taken(holder.make, holder.is_free, send_ctrl_c) for _ in range(10))


class TestTimedCondition:
    @pytest.fixture
    def condition(self) -> TimedCondition:
        return TimedCondition(Metrics())

    def test_everybody_is_woken(self, condition: TimedCondition) -> None:
        news: list[str] = []
        heard: list[str] = []

        def listen() -> None:
            with condition:
                while not news:
                    condition.wait()
                heard.append(news[0])

        def tell() -> None:
            while len(condition._sleepers) < 3:
                time.sleep(0.001)
            with condition:
                news.append("now")
                condition.notify_all()

        in_threads(listen, listen, listen, tell)
        assert heard == ["now"] * 3

    def test_a_wait_ends_in_time_and_leaves_nothing(self, condition: TimedCondition) -> None:
        with condition:
            condition.wait(0.01)
            assert not condition.wait_for(lambda: False, 0.02)
            assert condition.wait_for(lambda: True, 0.0)
            assert not condition._sleepers
            condition.notify_all()
        in_threads(lambda: self._take_and_leave(condition))

    def test_an_interrupt_of_a_wait_gives_the_lock_back(
        self, condition: TimedCondition, send_ctrl_c: Callable[[float], CtrlC]
    ) -> None:
        chance = random.Random(0)
        for _ in range(30):
            coming = send_ctrl_c(chance.random() * 0.002)
            try:
                coming.begin()
                while not coming.has_struck:
                    with condition:
                        condition.wait(0.0001)
            except KeyboardInterrupt:
                pass
            in_threads(lambda: self._take_and_leave(condition))

    @staticmethod
    def _take_and_leave(condition: TimedCondition) -> None:
        assert condition.acquire(blocking=False)
        condition.release()
