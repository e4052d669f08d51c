"""Locks that tell how long their users waited and that Ctrl-C cannot break, and threads that can be told apart.

An interrupt (Ctrl-C) strikes between two bytecodes. A lock whose methods are written in Python, such as those of
`threading.Condition` and `concurrent.futures`, may then stay taken for good. CPython looks for interrupts where a
function begins, after a call and where a loop goes back, but not on the way into a `with` block. So a `with` on a
lock that is written in C is safe, and so is one on these.
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

# With the methods that `threading.Condition` relies on; type checkers do not know them, nor that it may be a base.
_RLock: Any = _thread.RLock


class TimedLock(_RLock):
    """A lock whose waits are counted. Not to be taken twice by one thread.

    Should an interrupt leave it taken, the thread that holds it by accident takes it over the next time that it
    wants it. Leaving the `with` block is the base class's `__exit__`, which no interrupt can come before.

    Args:
        metrics: where waits are counted.
    """

    def __init__(self, metrics: Metrics) -> None:
        super().__init__()
        self._metrics = metrics

    def __new__(cls, metrics: Metrics) -> Any:
        """The base class wants no arguments."""
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
        """Take the lock if no other thread has it: whether that succeeded. Never blocks."""
        return bool(self._is_owned() or _RLock.acquire(self, False))

    def release(self) -> None:
        """Let go of the lock, if this thread has it."""
        if self._is_owned():
            _RLock.release(self)


class TimedCondition(TimedLock):
    """A lock with which to wait for what other threads do. Waiting for that is not counted."""

    def __init__(self, metrics: Metrics) -> None:
        super().__init__(metrics)
        self._sleepers: deque[threading.Lock] = deque()

    def wait(self, seconds: float | None = None) -> None:
        """Let go of the lock until `notify_all`, or for so long at most; may return early. With the lock held."""
        sleeper = threading.Lock()
        sleeper.acquire()
        self._sleepers.append(sleeper)
        state = (1, threading.get_ident())
        try:
            self.release()
            sleeper.acquire(timeout=-1 if seconds is None else seconds)
        finally:
            if not self._is_owned():
                self._acquire_restore(state)  # which no interrupt ends
            if sleeper in self._sleepers:
                self._sleepers.remove(sleeper)

    def wait_for(self, holds: Callable[[], bool], seconds: float) -> bool:
        """Wait until something holds, for so long at most: whether it does. With the lock held."""
        end = time.monotonic() + seconds
        while not (done := holds()) and (left := end - time.monotonic()) > 0:
            self.wait(left)
        return done

    def notify_all(self) -> None:
        """Wake everybody who waits. With the lock held."""
        while self._sleepers:
            self._sleepers.popleft().release()


class ThreadToken:
    """Stands for a thread and goes with it, whoever started the thread. Others hold its `reference`, which leads
    nowhere once the thread has ended. (`Thread.is_alive` may be wrong after an interrupt.)"""

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
