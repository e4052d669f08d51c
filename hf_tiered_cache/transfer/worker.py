"""A background thread that belongs to one object."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import TypeVar

# How far a thread yields to the model's own. What attention will wait for yields a little, the rest much: on a
# machine whose CPU also computes, a prefetch that yields much is late.
AWAITED_NICENESS = 1
BACKGROUND_NICENESS = 10

T = TypeVar("T")


class Worker:
    """Runs tasks one after the other, in order, on a low-priority thread that starts with the first task.

    Args:
        name: of the thread.
        niceness: by how much its priority is lowered, on Linux.
    """

    def __init__(self, name: str, niceness: int) -> None:
        self._niceness = niceness
        self._thread: threading.Thread | None = None
        self._executor = ThreadPoolExecutor(1, f"hf-tiered-{name}", initializer=self._enter)

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task; its result or exception is in the future."""
        return self._executor.submit(task)

    def close(self) -> None:
        """Drop the tasks that have not begun, finish the one that has, end the thread. May be called twice."""
        # The garbage collector may close an owner from this very thread, which cannot wait for itself.
        wait = threading.current_thread() is not self._thread
        self._executor.shutdown(wait=wait, cancel_futures=True)

    def _enter(self) -> None:
        self._thread = threading.current_thread()
        if sys.platform == "linux":  # only there a thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
