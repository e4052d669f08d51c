"""The engine of CUDA devices, on CPU tensors under the model of CUDA."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_tiered_cache.core.metrics import Metrics
from hf_tiered_cache.transfer.cuda import CudaCopyEngine

from ...stream_order.model import GPU, CudaModel, ModelEngine
from ...stream_order.scenarios import Scenario

CPU = torch.device("cpu")


@pytest.fixture
def cuda() -> Iterator[CudaModel]:
    with pytest.MonkeyPatch.context() as patch:
        yield CudaModel(patch)


@pytest.fixture
def engine(cuda: CudaModel) -> ModelEngine:
    return ModelEngine(CPU, Metrics(), cuda)


def test_the_landing_buffer_is_accounted_and_goes_with_close(cuda: CudaModel, engine: ModelEngine) -> None:
    source, target = torch.arange(1000.0), torch.zeros(1000)
    engine.copy_in(source, lambda landed: [(target, landed)], engine.record_compute())
    assert torch.equal(target, source)
    assert engine._metrics.l0_bytes == 4000
    alive = weakref.ref(engine._landing.untyped_storage())
    assert alive() is not None
    engine.close()
    assert alive() is None and engine._metrics.l0_bytes == 0
    engine.close()
    assert engine._metrics.l0_bytes == 0


def test_what_is_on_the_device_needs_no_landing(cuda: CudaModel, engine: ModelEngine) -> None:
    source, target = engine.allocate(64).fill_(7), engine.allocate(64)
    ready = engine.record_compute()
    engine.copy_in(source, lambda landed: [(target, landed)], ready, ready)
    assert torch.equal(target, source) and engine._landing.numel() == 0


class TestEvents:
    def test_they_are_used_again(self, cuda: CudaModel, engine: ModelEngine) -> None:
        for _ in range(50):
            engine.compute_waits(engine.record_copy_in())
            engine.finish_copies_in()
        assert cuda.counts["events"] == 2  # one of each kind

    def test_but_not_while_anybody_holds_them(self, cuda: CudaModel, engine: ModelEngine) -> None:
        held = [engine.record_compute() for _ in range(5)]
        assert len({id(event.event) for event in held}) == 5  # type: ignore[attr-defined]
        del held
        engine.record_compute()
        assert cuda.counts["events"] == 5

    def test_only_what_the_host_waits_for_lets_it_sleep(self, cuda: CudaModel, engine: ModelEngine) -> None:
        buffer, host = engine.allocate(64), engine.allocate_host(64)
        compute = engine.record_compute()
        slept_on = [
            engine.copy_out(buffer, host, compute),
            engine.copy_in_whole(host, buffer, compute),
            engine.copy_in(host, lambda landed: [(buffer, landed)], compute),
        ]
        others = [
            compute,
            engine.record_copy_in(),
            engine.copy_in_whole(engine.allocate(64), buffer, compute, ready=compute),
        ]
        assert [event.event.blocking for event in slept_on] == [True] * 3  # type: ignore[attr-defined]
        assert [event.event.blocking for event in others] == [False] * 3  # type: ignore[attr-defined]


class TestDevices:
    def test_calls_leave_the_current_device_alone(self, cuda: CudaModel, engine: ModelEngine) -> None:
        def call() -> None:
            buffer, host = engine.allocate(64), engine.allocate_host(64)
            engine.copy_out(buffer, host, engine.record_compute())
            engine.copy_in(host, lambda landed: [(buffer, landed)], engine.record_compute())
            engine.copy_in_whole(host, buffer, engine.record_compute())
            engine.free_after_copies(buffer)
            engine.finish_copies_in()
            engine.record_copy_in().wait()
            devices.append(cuda.current_device)

        devices: list[int] = []
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        engine.close()
        assert devices == [0] and cuda.contexts == {GPU}

    def test_control_a_stream_alone_uses_the_first_device(self, cuda: CudaModel) -> None:
        with torch.cuda.stream(cuda.new_stream()):  # type: ignore[arg-type]
            assert cuda.current_device == GPU
        assert cuda.contexts == {0, GPU}

    def test_control_so_does_a_wait_for_an_event(self, cuda: CudaModel) -> None:
        event = torch.cuda.Event()
        event.record(cuda.new_stream())  # type: ignore[arg-type]
        event.synchronize()
        assert cuda.contexts == {0}

    def test_a_thread_of_the_engine_stays_on_its_device(self, cuda: CudaModel, engine: ModelEngine) -> None:
        devices: list[int] = []

        def work() -> None:
            CudaCopyEngine.enter_thread(engine)
            devices.append(cuda.current_device)

        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
        assert devices == [GPU] and cuda.contexts == {GPU}


class TestMemoryThatIsNotLocked:
    def test_staging_goes_on_without(
        self,
        cuda: CudaModel,
        engine: ModelEngine,
        monkeypatch: pytest.MonkeyPatch,
        caplog: pytest.LogCaptureFixture,
    ) -> None:
        empty = torch.empty

        def refuse(*arguments: Any, pin_memory: bool = False, **options: Any) -> torch.Tensor:
            if pin_memory:
                raise torch.AcceleratorError("CUDA error: out of memory")
            return empty(*arguments, **options)

        monkeypatch.setattr(torch, "empty", refuse)
        with caplog.at_level(logging.WARNING):
            buffers = [CudaCopyEngine.allocate_host(engine, nbytes) for nbytes in (100, 200)]
        assert [buffer.numel() for buffer in buffers] == [100, 200]
        assert [record.getMessage()[:30] for record in caplog.records] == ["100 bytes cannot be page-locke"]

    @pytest.mark.parametrize("form", ["gather", "stream"])
    def test_host_tier_goes_on_without(
        self, form: Any, cuda: CudaModel, tmp_path: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        cuda.refuses_to_lock = True
        with caplog.at_level(logging.WARNING):
            assert Scenario(cuda, tmp_path).generation(form)
        assert not cuda.violations, cuda.report()
        assert sum("cannot be page-locked" in message for message in caplog.messages) == 1


def test_windows_are_not_held_back_for_copies(cuda: CudaModel, engine: ModelEngine) -> None:
    with cuda.watch():
        window, other = engine.allocate(64, compute_only=True), engine.allocate(64)
    recorded = [cuda._memory[buffer.untyped_storage().data_ptr()].recorded for buffer in (window, other)]
    assert recorded == [set(), {engine._in, engine._out}]
