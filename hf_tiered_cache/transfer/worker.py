"""A background thread that belongs to one object, and the tasks that it runs."""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import CancelledError
from contextlib import suppress
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

logger = logging.getLogger(__name__)

# How far a thread yields to the model's own. Work that attention waits for yields a little, the rest much: where
# the CPU also computes, a prefetch that yields much is late.
AWAITED_NICENESS = 1
BACKGROUND_NICENESS = 10

T = TypeVar("T")


class Task(Generic[T]):
    """A function that another thread runs, and its result.

    Like `concurrent.futures.Future`, but without locks that an interrupt (Ctrl-C) may leave locked; see
    `core.locks`. A task that is taken from its queue must be run or failed.
    """

    def __init__(self, function: Callable[[], T]) -> None:
        self._function: Callable[[], T] | None = function
        self._result: T | None = None
        self._error: BaseException | None = None
        self._is_done = False
        self._callbacks: deque[Callable[[], object]] = deque()
        self._pending = threading.Lock()
        self._pending.acquire()

    def run(self) -> None:
        """Run the function on the calling thread."""
        function, self._function = self._function, None
        assert function is not None
        try:
            self._result = function()
        except BaseException as error:
            self._error = error
            self._end()
            # The error refers to this frame and its callers'. Break the cycle, which would keep alive all that the
            # function holds.
            del self, function
        else:
            self._end()

    def fail(self, error: BaseException) -> None:
        """End the task without running it: those who wait for it get this error."""
        self._function, self._error = None, error
        self._end()

    def done(self) -> bool:
        """Return true once the task has ended, in whatever way."""
        return self._is_done

    def result(self) -> T:
        """Return the result of the function. Blocks until it has ended.

        Raises:
            CancelledError: the task never began.
            BaseException: what the function raised.
        """
        with self._pending:  # taken until the end
            pass
        if self._error is None:
            return self._result  # type: ignore[return-value]  # `None` only if that is what T says
        try:
            raise self._error
        finally:
            del self  # as in `run`

    def add_done_callback(self, callback: Callable[[], object]) -> None:
        """Call a function when the task ends, on any thread, or now if it has ended."""
        self._callbacks.append(callback)
        if self._is_done:
            self._call_back()

    def _end(self) -> None:
        self._is_done = True
        self._pending.release()
        self._call_back()

    def _call_back(self) -> None:
        while self._callbacks:
            try:
                callback = self._callbacks.popleft()
            except IndexError:  # another thread has taken it
                return
            try:
                callback()
            except Exception:
                logger.exception("a callback of a background task failed")


class Worker:
    """Runs tasks one after the other, in order, on a low-priority thread that starts with the first task.

    The thread runs until `close`.

    Args:
        name: of the thread.
        niceness: by how much its priority is lowered, on Linux.
        enter: called first on the thread.
    """

    def __init__(self, name: str, niceness: int, enter: Callable[[], None] = lambda: None) -> None:
        self._name = name
        self._niceness = niceness
        self._enter = enter
        self._queue: SimpleQueue[Task[Any] | None] = SimpleQueue()  # `None` ends the thread
        self._entrance = threading.Lock()
        self._thread: threading.Thread | None = None
        self._serving = threading.Lock()
        self._until_ended = threading.Lock()
        self._until_ended.acquire()
        self._closed = self._dropping = False

    def submit(self, function: Callable[[], T]) -> Task[T]:
        """Queue a task.

        Raises:
            RuntimeError: the worker is closed.
        """
        task = Task(function)
        with self._entrance:
            if self._closed:
                raise RuntimeError(f"the thread {self._name!r} has ended: its owner is closed")
            self._queue.put(task)
            self._start()
        return task

    def close(self, finish: bool = False) -> None:
        """Drop the tasks that have not begun, finish the one that has, end the thread. May be called twice.

        Args:
            finish: whether to run all of them instead of dropping any.
        """
        self._dropping = self._dropping or not finish
        with self._entrance:
            if not self._closed:
                if self._queue.qsize():
                    self._start()  # an interrupt may have come before the start of the thread
                self._queue.put(None)
                self._closed = True
            thread = self._thread
        # The garbage collector may close an owner from this very thread, which cannot wait for itself.
        if thread is not None and thread is not threading.current_thread():
            with self._until_ended:
                pass

    def _start(self) -> None:
        if self._thread is None:
            thread = threading.Thread(target=self._serve, name=f"hf-tiered-{self._name}", daemon=True)
            thread.start()
            self._thread = thread  # after an interrupt before this line, a thread may or may not run

    def _serve(self) -> None:
        with self._serving:  # one at a time
            failure = self._prepare()
            while (task := self._queue.get()) is not None:
                if failure is not None:
                    task.fail(failure)
                elif self._dropping:
                    task.fail(CancelledError())
                else:
                    task.run()
                del task
            self._queue.put(None)  # for the other thread, if there are two
            if self._until_ended.locked():
                self._until_ended.release()

    def _prepare(self) -> BaseException | None:
        """Set up the thread. Return the error if that fails."""
        if sys.platform == "linux":  # only there does a thread have its own priority
            with suppress(OSError):
                os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), self._niceness)
        try:
            self._enter()
        except BaseException as error:
            return error
        return None


class AwaitedFirst:
    """Runs tasks on a worker: those that a thread waits for before those that look ahead, each kind in order.

    Args:
        worker: closed with this.
    """

    def __init__(self, worker: Worker) -> None:
        self._worker = worker
        self._lock = threading.Lock()
        self._closing = False
        self._awaited: deque[Task[Any]] = deque()
        self._ahead: deque[Task[Any]] = deque()

    def submit(self, function: Callable[[], T], awaited: bool = False) -> Task[T]:
        """Queue a task.

        Args:
            function: what to run.
            awaited: whether a thread waits for it; see also `hurry`.

        Raises:
            RuntimeError: this is closed.
        """
        task = Task(function)
        with self._lock:
            (self._awaited if awaited else self._ahead).append(task)
        self._worker.submit(self._run_queued)
        return task

    def hurry(self, task: Task[Any]) -> None:
        """Move a task to the awaited ones: a thread now waits for it."""
        with self._lock:
            if task in self._ahead:
                self._ahead.remove(task)
                self._awaited.append(task)

    def close(self) -> None:
        """Drop the tasks that have not begun, finish the one that has, end the thread. May be called twice."""
        self._closing = True
        self._worker.close()
        with self._lock:
            dropped = [*self._awaited, *self._ahead]
            self._awaited.clear()
            self._ahead.clear()
        for task in dropped:
            task.fail(CancelledError())

    def _run_queued(self) -> None:
        """Run all that is queued: an interrupt may have prevented the call of this for an earlier task."""
        while not self._closing and self._run_next():
            pass

    def _run_next(self) -> bool:
        with self._lock:
            queue = self._awaited or self._ahead
            if not queue:
                return False
            task = queue.popleft()
        task.run()
        del task  # an error holds this frame, too
        return True
