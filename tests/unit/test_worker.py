"""What is awaited comes before what looks ahead."""

from __future__ import annotations

import threading
from concurrent.futures import CancelledError

import pytest

from hf_tiered_cache.transfer.worker import AwaitedFirst, Worker


class TestAwaitedFirst:
    @pytest.fixture
    def gate(self) -> threading.Event:
        return threading.Event()

    @pytest.fixture
    def worker(self, gate: threading.Event) -> AwaitedFirst:
        """Busy until the gate opens."""
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
            future.result(20)
        worker.hurry(awaited)  # done already
        worker.close()
        assert done == ["now", "b", "a", "c"]

    def test_errors_are_in_the_future(self, worker: AwaitedFirst, gate: threading.Event) -> None:
        gate.set()
        failing = worker.submit(lambda: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            failing.result(20)
        assert worker.submit(lambda: 5).result(20) == 5
        worker.close()

    def test_close_drops_what_has_not_begun(self, worker: AwaitedFirst, gate: threading.Event) -> None:
        dropped = [worker.submit(lambda: None, awaited=awaited) for awaited in (True, False)]
        closing = threading.Thread(target=worker.close)
        closing.start()
        gate.set()
        closing.join(20)
        for future in dropped:
            with pytest.raises(CancelledError):
                future.result(20)
        worker.close()
