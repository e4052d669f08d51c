"""Locks that count waiting times and that Ctrl-C cannot break, and tokens that identify threads.

An interrupt (Ctrl-C) strikes between two bytecodes. A lock whose methods are written in Python, such as those of
`threading.Condition` and `concurrent.futures`, may then stay locked forever. CPython checks for interrupts where a
function begins, after a call and where a loop jumps back, but not on entry to a `with` block. So `with` is safe on
a lock that is written in C, and on the locks below.
"""

from __future__ import annotations

import _thread
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

from .metrics import Metrics

# Has the methods that `threading.Condition` relies on. Type checkers know neither them nor that it can be a base.
_RLock: Any = _thread.RLock


class TimedLock(_RLock):
    """A lock that counts how long threads wait for it. One thread must not take it twice.

    If an interrupt leaves it locked, the thread that still owns it takes it over when it next enters. A `with`
    block ends in the base class's `__exit__`, before which no interrupt can strike.

    Args:
        metrics: where waits are counted.
    """

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics

    def __new__(cls, metrics: Metrics) -> Any:
        """Pass no arguments to the base class."""
        return super().__new__(cls)

    def __enter__(self) -> None:
        try:
            if not self._is_owned() and not _RLock.acquire(self, False):
                with self._metrics.lock_wait():
                    _RLock.acquire(self)
        except BaseException:
            self.release()
            raise

    def try_acquire(self) -> bool:
        """Take the lock if no other thread has it, and return whether that succeeded. Never blocks."""
        return bool(self._is_owned() or _RLock.acquire(self, False))

    def release(self) -> None:
        """Release the lock, if this thread has it."""
        if self._is_owned():
            _RLock.release(self)


class TimedCondition(TimedLock):
    """A lock that is also a condition variable. Time spent in `wait` and `wait_for` is not counted."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._sleepers: deque[threading.Lock] = deque()

    def wait(self, seconds: float | None = None) -> None:
        """Release the lock until `notify_all`, or for `seconds` at most; may return early. Requires the lock."""
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        state = (1, threading.get_ident())
        try:
            self.release()
            sleeper.acquire(timeout=-1 if seconds is None else seconds)
        finally:
            if not self._is_owned():
                self._acquire_restore(state)  # no interrupt ends this
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)

    def wait_for(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until `holds()`, for `seconds` at most, and return whether it does. Requires the lock."""
        end = time.monotonic() + seconds
        while not (done := holds()) and (left := end - time.monotonic()) > 0:
            self.wait(left)
        return done

    def notify_all(self) -> None:
        """Wake all waiting threads. Requires the lock."""
        while self._sleepers:
            self._sleepers.popleft().release()


class ThreadToken:
    """A token that exists for as long as its thread, whoever started the thread.

    Others hold its `reference`, which is dead once the thread has ended. (`Thread.is_alive` may be wrong after an
    interrupt.)
    """

    def __init__(self) -> None:
        self.reference: ThreadReference = weakref.ref(self)


ThreadReference = weakref.ref[ThreadToken]


class _This(threading.local):
    def __init__(self) -> None:
        self.token = ThreadToken()


_this = _This()


def this_thread() -> ThreadToken:
    """The token of the calling thread."""
    return _this.token
