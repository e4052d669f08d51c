"""A background thread that belongs to one object."""

from __future__ import annotations

import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

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
        enter: called first on the thread.
    """

    def __init__(self, name: str, niceness: int, enter: Callable[[], None] = lambda: None) -> None:
        self._niceness = niceness
        self._on_enter = enter
        self._thread: threading.Thread | None = None
        self._entering = threading.Lock()
        self._executor = ThreadPoolExecutor(1, f"hf-tiered-{name}", initializer=self._enter)

    def submit(self, task: Callable[[], T]) -> Future[T]:
        """Queue a task; its result or exception is in the future."""
        return self._executor.submit(task)

    def close(self, finish: bool = False) -> None:
        """Drop the tasks that have not begun, finish the one that has, end the thread. May be called twice.

        Args:
            finish: drop none of them, run all.
        """
        # The garbage collector may close an owner from this very thread, which cannot wait for itself.
        wait = threading.current_thread() is not self._thread
        self._executor.shutdown(wait=wait, cancel_futures=not finish)

    def _enter(self) -> None:
        with self._entering:
            first, self._thread = self._thread, self._thread or threading.current_thread()
        if first is not None:  # an interrupt has let the executor forget it: two would mix up the order
            first.join()
        if sys.platform == "linux":  # only there a thread has a priority of its own
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        self._on_enter()


class AwaitedFirst:
    """Runs tasks on a worker, those that somebody waits for before those that look ahead; each kind in order.

    Args:
        worker: closed with this.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._closing = False
        self._awaited: deque[tuple[Future[Any], Callable[[], Any]]] = deque()
        self._ahead: deque[tuple[Future[Any], Callable[[], Any]]] = deque()

    def submit(self, task: Callable[[], T], awaited: bool = False) -> Future[T]:
        """Queue a task; its result or exception is in the future.

        Args:
            task: what to run.
            awaited: whether somebody waits for it; see also `hurry`.
        """
        future: Future[T] = Future()
        with self._lock:
            (self._awaited if awaited else self._ahead).append((future, task))
        self._worker.submit(self._run_queued)
        return future

    def hurry(self, future: Future[Any]) -> None:
        """Somebody waits for this task now."""
        with self._lock:
            queued = next((entry for entry in self._ahead if entry[0] is future), None)
            if queued is not None:
                self._ahead.remove(queued)
                self._awaited.append(queued)

    def close(self) -> None:
        """Drop the tasks that have not begun, finish the one that has, end the thread. May be called twice."""
        self._closing = True
        self._worker.close()
        with self._lock:
            dropped = [*self._awaited, *self._ahead]
            self._awaited.clear()
            self._ahead.clear()
        for future, _ in dropped:
            future.cancel()
            future.set_running_or_notify_cancel()

    def _run_queued(self) -> None:
        """Run all that is queued: an interrupt may have come between a task and the call of this for it."""
        while not self._closing and self._run_next():
            pass

    def _run_next(self) -> bool:
        with self._lock:
            queue = self._awaited or self._ahead
            if not queue:
                return False
            future, task = queue.popleft()
        if future.set_running_or_notify_cancel():
            try:
                result = task()
            except BaseException as error:
                future.set_exception(error)
                # The error holds this frame: no cycle, which would keep all that the task holds.
                del future, task
            else:
                future.set_result(result)
        return True
