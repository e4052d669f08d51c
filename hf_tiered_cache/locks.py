"""Locks that tell how long their users waited."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from .metrics import Metrics


class TimedLock:
    """A lock whose waits are counted; free of cost while nobody waits.

    Args:
        metrics: where waits are counted.
        reentrant: whether its holder may take it again.
    """

    def __init__(self, metrics: Metrics, reentrant: bool = False) -> None:
        self._lock = threading.RLock() if reentrant else threading.Lock()
        self._metrics = metrics

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        """As of `threading.Lock`."""
        if self._lock.acquire(blocking=False):
            return True
        if not blocking:
            return False
        started = time.perf_counter()
        acquired = self._lock.acquire(timeout=timeout)
        self._metrics.waited_for_lock(time.perf_counter() - started)
        return acquired

    def release(self) -> None:
        """As of `threading.Lock`."""
        self._lock.release()

    def __enter__(self) -> None:
        self.acquire()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._lock.release()


def timed_condition(metrics: Metrics) -> threading.Condition:
    """A condition whose lock is a `TimedLock`. Waiting for the condition itself is not counted."""
    return threading.Condition(TimedLock(metrics))  # type: ignore[arg-type]  # any lock will do
