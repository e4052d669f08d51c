"""Tasks run in order on their own threads; awaited tasks come before look-ahead ones."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from concurrent.futures import CancelledError

import pytest

from hf_tiered_cache.transfer.worker import AwaitedFirst, Worker

from ...interrupts import CtrlC


class TestWorker:
    def test_close_runs_all_if_told_to(self) -> None:
        worker = Worker("test", 0)
        done: list[int] = []
        for number in range(20):
            worker.submit(lambda number=number: done.append(number))  # type: ignore[misc]
        worker.close(finish=True)
        assert done == list(range(20))

    def test_close_of_one_that_did_nothing(self) -> None:
        worker = Worker("test", 0)
        worker.close()
        worker.close(finish=True)
        with pytest.raises(RuntimeError, match="'test' has ended"):
            worker.submit(int)

    def test_close_from_its_own_thread(self) -> None:
        worker = Worker("test", 0)
        worker.submit(worker.close).result()
        worker.close()

    def test_a_thread_that_could_not_be_set_up(self) -> None:
        def refuse() -> None:
            raise OSError("no such device")

        worker = Worker("test", 0, enter=refuse)
        for _ in range(2):
            with pytest.raises(OSError, match="no such device"):
                worker.submit(int).result()
        worker.close()

    def test_callbacks(self, caplog: pytest.LogCaptureFixture) -> None:
        worker, gate, called = Worker("test", 0), threading.Event(), list[str]()
        task = worker.submit(lambda: gate.wait(20))
        task.add_done_callback(lambda: called.append("while it ran"))
        task.add_done_callback(lambda: 1 / 0)
        gate.set()
        worker.close()
        task.add_done_callback(lambda: called.append("at once"))
        assert called == ["while it ran", "at once"] and task.done()
        assert "a callback of a background task failed" in caplog.text

    def test_tasks_survive_interrupts(self, send_ctrl_c: Callable[[float], CtrlC]) -> None:
        """After any interrupt the next task runs, in order, on one thread."""
        chance = random.Random(0)
        ran: list[tuple[int, int]] = []
        for _ in range(100):
            worker = Worker("test", 0)
            worker.submit(ran.clear).result()
            coming = send_ctrl_c(chance.random() * 0.002)
            submitted = 0
            try:
                coming.begin()
                while not coming.has_struck:
                    submitted += 1
                    worker.submit(lambda n=submitted: ran.append((n, threading.get_ident()))).result()  # type: ignore[misc]
            except KeyboardInterrupt:
                pass
            assert worker.submit(lambda: "still there").result() == "still there"
            worker.close(finish=True)
            numbers = [number for number, _ in ran]
            assert numbers == sorted(set(numbers)) and len({thread for _, thread in ran}) <= 1

    @pytest.mark.parametrize("has_begun", [True, False])
    def test_a_start_that_was_interrupted(self, has_begun: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        worker, ran, start = Worker("test", 0), list[tuple[int, int]](), threading.Thread.start

        def interrupted(thread: threading.Thread) -> None:
            monkeypatch.undo()
            if has_begun:
                start(thread)
            raise KeyboardInterrupt

        def submit(number: int) -> None:
            worker.submit(lambda: ran.append((number, threading.get_ident())))

        monkeypatch.setattr(threading.Thread, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            submit(0)
        for number in range(1, 30):
            submit(number)
        worker.close(finish=True)
        assert [number for number, _ in ran] == list(range(30)) and len({thread for _, thread in ran}) == 1


class TestAwaitedFirst:
    @pytest.fixture
    def gate(self) -> threading.Event:
        return threading.Event()

    @pytest.fixture
    def worker(self, gate: threading.Event) -> AwaitedFirst:
        """A worker that is busy until the gate opens."""
        worker = AwaitedFirst(Worker("test", 0))
        worker.submit(lambda: gate.wait(20))
        return worker

    def test_order(self, worker: AwaitedFirst, gate: threading.Event) -> None:
        done: list[str] = []
        ahead = [worker.submit(lambda name=name: done.append(name)) for name in ("a", "b", "c")]  # type: ignore[misc]
        awaited = worker.submit(lambda: done.append("now"), awaited=True)
        worker.hurry(ahead[1])
        gate.set()
        for future in (*ahead, awaited):
            future.result()
        worker.hurry(awaited)  # done already
        worker.close()
        assert done == ["now", "b", "a", "c"]

    def test_errors_are_in_the_future(self, worker: AwaitedFirst, gate: threading.Event) -> None:
        gate.set()
        failing = worker.submit(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failing.result()
        assert worker.submit(lambda: 5).result() == 5
        worker.close()

    def test_close_drops_what_has_not_begun(self, worker: AwaitedFirst, gate: threading.Event) -> None:
        dropped = [worker.submit(lambda: None, awaited=awaited) for awaited in (True, False)]
        closing = threading.Thread(target=worker.close)
        closing.start()
        gate.set()
        closing.join(20)
        for future in dropped:
            with pytest.raises(CancelledError):
                future.result()
        worker.close()
