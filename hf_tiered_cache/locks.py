"""Locks that tell how long their users waited, and threads that can be told apart."""

from __future__ import annotations

import threading
import weakref
from types import TracebackType
from typing import Any

from .metrics import Metrics


class TimedLock:
    """A lock whose waits are counted; free of cost while nobody waits. Not to be taken twice by one thread.

    An interrupt (Ctrl-C) may strike between taking the lock and the code that it guards, so that nobody releases
    it. The thread that holds it by accident takes it over the next time that it wants it.

    Args:
        metrics: where waits are counted.
    """

    def __init__(self, metrics: Metrics) -> None:
        self._lock: Any = threading.RLock()  # it knows its owner
        self._metrics = metrics

    def acquire(self, blocking: bool = True) -> bool:
        """Take the lock; whether that succeeded. Blocks unless told not to."""
        if self._lock._is_owned() or self._lock.acquire(blocking=False):
            return True
        if blocking:
            with self._metrics.lock_wait():
                self._lock.acquire()
        return blocking

    def release(self) -> None:
        """Let go of the lock."""
        if self._lock._is_owned():
            self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    # What `Condition` wants of a lock that knows its owner.

    def _is_owned(self) -> bool:
        owned: bool = self._lock._is_owned()
        return owned

    def _release_save(self) -> Any:
        return self._lock._release_save()

    def _acquire_restore(self, state: Any) -> None:
        self._lock._acquire_restore(state)


def timed_condition(metrics: Metrics) -> threading.Condition:
    """A condition whose lock is a `TimedLock`. Waiting for the condition itself is not counted."""
    return threading.Condition(TimedLock(metrics))  # type: ignore[arg-type]  # any lock will do


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
