"""A closed or dropped cache frees all its memory at once, and logs nothing."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from hf_tiered_cache import KVCacheManager, TieredCache, TieredCacheConfig, TierReadError
from hf_tiered_cache.transfer.engine import CopyEngine, CpuCopyEngine
from hf_tiered_cache.transfer.worker import AwaitedFirst, Worker

from ...fakes import FAULTS, LateEngine, StagedLateEngine, random_kv
from ...models import CACHE_NAME, prompt_ids, tiny_llama

LAYERS, BLOCK_TOKENS = 3, 16
BLOCK_BYTES = 2 * 2 * BLOCK_TOKENS * 8 * 4


@pytest.fixture
def no_collector() -> Iterator[None]:
    """Turn the garbage collector off: only reference counts free memory."""
    FAULTS.reset()
    gc.collect()
    gc.disable()
    yield
    gc.enable()
    FAULTS.reset()


class Storages:
    """The memory that engines allocated and that is not freed yet."""

    def __init__(self) -> None:
        self._references: list[weakref.ref[Any]] = []

    def engine(self, base: type[CpuCopyEngine]) -> Callable[..., CopyEngine]:
        references = self._references

        class Watched(base):  # type: ignore[misc, valid-type]
            def _allocate(self, nbytes: int) -> torch.Tensor:
                buffer = super()._allocate(nbytes)
                if nbytes:
                    references.append(weakref.ref(buffer.untyped_storage()))
                return buffer

        return Watched

    @property
    def made(self) -> int:
        return len(self._references)

    @property
    def alive_bytes(self) -> list[int]:
        return [storage.nbytes() for reference in self._references if (storage := reference()) is not None]


def _use(manager: KVCacheManager, form: str, request: str = "a", steps: int = 2) -> None:
    for _ in range(steps):
        for layer_id in range(LAYERS):
            key, value = random_kv(1)
            if form == "gather":
                manager.update(request, layer_id, key, value)
            else:
                manager.attend(request, layer_id, torch.randn(1, 4, 1, 8), key, value)


def _config(**options: Any) -> TieredCacheConfig:
    return TieredCacheConfig(
        window_tokens=32,
        block_tokens=BLOCK_TOKENS,
        stream_buffer_size=2 * BLOCK_BYTES,
        l1_tier="faulty",
        **options,
    )


def _fill(manager: KVCacheManager, request: str = "a") -> None:
    manager.allocate(request)
    for layer_id in range(LAYERS):
        manager.append(request, layer_id, *random_kv(200))
    manager.flush()


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("engine", [CpuCopyEngine, LateEngine, StagedLateEngine])
@pytest.mark.parametrize("form", ["gather", "stream"])
class TestMemoryIsFreed:
    def test_by_close_with_loads_under_way(self, form: str, engine: type[CpuCopyEngine]) -> None:
        storages = Storages()
        with KVCacheManager(
            _config(resident_capacity=4 * BLOCK_BYTES), engine_factory=storages.engine(engine)
        ) as manager:
            _fill(manager)
            _use(manager, form)
        assert storages.made and not storages.alive_bytes

    def test_by_close_after_loads_were_given_up(self, form: str, engine: type[CpuCopyEngine]) -> None:
        storages = Storages()
        with KVCacheManager(_config(), engine_factory=storages.engine(engine)) as manager:
            for request in "abc":
                _fill(manager, request)
            for _ in range(3):
                for request in "abc":  # whose loads give way to those of the others
                    _use(manager, form, request, steps=1)
            manager.free("b")
            manager.crop("a", 0, 100)
        assert storages.made and not storages.alive_bytes

    def test_by_close_after_a_read_that_failed(self, form: str, engine: type[CpuCopyEngine]) -> None:
        storages = Storages()
        with KVCacheManager(_config(), engine_factory=storages.engine(engine)) as manager:
            _fill(manager)
            _use(manager, form)
            FAULTS.read_error = "DATA_LOSS: injected"
            for _ in range(3):
                with pytest.raises(TierReadError):
                    _use(manager, form)
            with pytest.raises(TierReadError):
                manager.fetch("a", 1, range(50))
        assert storages.made and not storages.alive_bytes


def test_control_a_cycle_would_be_seen(no_collector: None) -> None:
    storages = Storages()
    with KVCacheManager(_config(), engine_factory=storages.engine(CpuCopyEngine)) as manager:
        _fill(manager)
        cycle: list[Any] = [manager._resources.engine(torch.device("cpu")).allocate(1000)]
        cycle.append(cycle)
        del cycle
    assert storages.alive_bytes == [1000]


@pytest.mark.usefixtures("no_collector")
def test_a_task_that_failed_is_freed() -> None:
    class Held:
        pass

    def fail(held: Held) -> None:
        raise ValueError("injected")

    worker = AwaitedFirst(Worker("test", 0))
    held = Held()
    alive = weakref.ref(held)
    future = worker.submit(lambda held=held: fail(held))
    del held
    with pytest.raises(ValueError, match="injected"):
        future.result()
    del future
    worker.close()
    assert alive() is None


@pytest.mark.parametrize("form", ["gather", "stream"])
def test_a_cache_that_is_dropped_says_nothing(
    form: str, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Writes and loads under way are abandoned without a message."""
    model = tiny_llama()
    monkeypatch.setattr(LateEngine.__init__, "__defaults__", (0.01,))
    with caplog.at_level(logging.WARNING):
        for tokens in range(4):
            manager = KVCacheManager(_config(), engine_factory=LateEngine)
            kind = TieredCache.for_model if form == "stream" else TieredCache
            source = {"model": model} if form == "stream" else {"config": model.config}
            cache = kind(**source, manager=manager)
            with torch.no_grad():
                model(prompt_ids(300 + tokens), **{CACHE_NAME: cache})
            model.set_attn_implementation("sdpa")
            del cache, manager
            gc.collect()
    assert not caplog.records
    assert capfd.readouterr().err == ""
