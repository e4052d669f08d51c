"""Faults found in the past, each with the smallest case that showed it."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_tiered_cache import CacheClosedError, KVCacheManager, TieredCacheConfig, TierError
from hf_tiered_cache.core.locks import TimedLock, this_thread
from hf_tiered_cache.core.metrics import Metrics
from hf_tiered_cache.residency.device_pool import DevicePool
from hf_tiered_cache.sequence.pressure import MemoryState

from ..fakes import FAULTS, LateEngine, eventually, random_kv
from ..interrupts import CtrlC
from .crew import Crew, in_threads, opened

BLOCK_BYTES = 2 * 2 * 16 * 8 * 4


def test_loads_of_two_threads_need_no_new_memory_each_time(tmp_path: Path) -> None:
    """Buffers that a thread returns at its next update are reused, not replaced as one too many."""
    allocations: list[int] = []

    class Counting(LateEngine):
        def _allocate(self, nbytes: int) -> torch.Tensor:
            if nbytes:
                allocations.append(nbytes)
            return super()._allocate(nbytes)

    with opened(tmp_path, engine=Counting) as manager:
        turns = threading.Barrier(2)
        for request_id in ("a", "b"):
            manager.allocate(request_id, seq_len=400)
            manager.append(request_id, 0, *random_kv(300))

        def update(request_id: str) -> None:
            for _ in range(20):
                turns.wait(20)
                manager.update(request_id, 0, *random_kv(1))

        in_threads(functools.partial(update, "a"), functools.partial(update, "b"))
        assert sum(nbytes > 10 * BLOCK_BYTES for nbytes in allocations) < 8


def test_close_waits_for_a_request_that_is_being_freed(tmp_path: Path) -> None:
    with opened(tmp_path, l1_tier="faulty", staging_blocks=1) as manager:
        FAULTS.gate = threading.Event()
        manager.allocate("a")
        crew = Crew()
        crew.start(manager.append, "a", 0, *random_kv(200))
        assert eventually(lambda: FAULTS.writes > 0)
        time.sleep(0.05)
        crew.start(manager.free, "a")
        time.sleep(0.05)
        closing = crew.start(manager.close)
        time.sleep(0.1)
        assert closing.is_alive(), "the append still runs"
        FAULTS.gate.set()
        crew.join()
        with pytest.raises(CacheClosedError):
            manager.allocate("b")


def test_a_copy_that_finds_no_room_does_not_end_the_wait_for_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """Blocks on their way into the pool are not read from a buffer that is in use again."""
    original = DevicePool._reserve
    calls = 0

    def every_second(pool: DevicePool, nbytes: int) -> torch.Tensor | None:
        nonlocal calls
        calls += 1
        return original(pool, nbytes) if calls % 2 else None

    monkeypatch.setattr(DevicePool, "copy_of", lambda pool, packed: None)  # at first nothing is resident
    monkeypatch.setattr(DevicePool, "_reserve", every_second)
    config = TieredCacheConfig(
        window_tokens=16,
        block_tokens=16,
        host_capacity=0,
        resident_capacity=8 * BLOCK_BYTES,
        stream_buffers=2,
        stream_buffer_size=4 * BLOCK_BYTES,
    )
    with KVCacheManager(config, engine_factory=LateEngine) as manager:
        manager.allocate("a")
        key, value = random_kv(400)
        manager.append("a", 0, key, value)
        for _ in range(12):
            query = torch.randn(1, 2, 1, 8)
            output = manager.attend("a", 0, query, *random_kv(1))
            assert output.isfinite().all()
            manager.crop("a", 0, 1)
        assert manager.stats().tiers["L0"].blocks > 0
        found = manager.fetch("a", 0, range(400))
        assert torch.equal(found[0], key) and torch.equal(found[1], value)


def test_a_failed_deletion_is_tried_again(tmp_path: Path) -> None:
    """A failed deletion keeps its room until a retry has deleted the file."""
    with opened(tmp_path, l1_path=tmp_path) as manager:
        manager.allocate("a")
        manager.append("a", 0, *random_kv(200))
        manager.flush()
        chunks = list(tmp_path.glob("*/L000*/c.*"))
        assert len(chunks) > 5
        tier = manager._resources.tiers["L1"]
        original = tier.start_delete

        def failing(key: Any) -> Any:
            original(key)  # the storage fails only afterwards
            chunk = tmp_path / "gone"
            raise ValueError(f"PERMISSION_DENIED: {chunk}")

        tier.start_delete = failing  # type: ignore[method-assign]
        manager.free("a")
        with pytest.raises(TierError):
            manager.flush()
        assert tier.used_bytes > 0
        tier.start_delete = original  # type: ignore[method-assign]
        manager.flush()
        assert tier.used_bytes == 0 and list(tmp_path.glob("*/L000*/c.*")) == []


class TestWindowsOfOthers:
    """An automatic window that shrinks while its request is idle."""

    @pytest.fixture
    def free_share(self) -> list[float]:
        return [0.9]

    @pytest.fixture
    def manager(self, free_share: list[float]) -> KVCacheManager:
        def probe(device: torch.device) -> MemoryState:
            return MemoryState(int(free_share[0] * (1 << 20)), 1 << 20)

        return KVCacheManager(
            TieredCacheConfig(window_tokens="auto", block_tokens=16, host_capacity=0, l1_tier="faulty"),
            memory_probe=probe,
        )

    def grow(self, manager: KVCacheManager) -> None:
        manager.allocate("idle")
        manager.append("idle", 0, *random_kv(300))
        assert manager._request_table.find("idle").layers[0].window.held_tokens == 300
        manager.allocate("busy")

    def test_it_shrinks_at_last_although_storage_failed_at_first(
        self, manager: KVCacheManager, free_share: list[float]
    ) -> None:
        with manager:
            self.grow(manager)
            FAULTS.write_error = "INTERNAL: cable pulled"
            free_share[0] = 0.0
            idle = manager._request_table.find("idle").layers[0]
            for _ in range(12):
                try:
                    manager.append("busy", 0, *random_kv(1))
                except TierError:
                    continue
            FAULTS.write_error = None
            for _ in range(40):
                try:
                    manager.append("busy", 0, *random_kv(1))
                except TierError:
                    continue
            assert idle.window.held_tokens <= 48

    def test_a_monitor_does_not_keep_it_from_shrinking(
        self, manager: KVCacheManager, free_share: list[float]
    ) -> None:
        with manager:
            self.grow(manager)
            stop = threading.Event()
            crew = Crew()

            def watch() -> None:
                while not stop.is_set():
                    assert manager.tokens("idle", 0) == 300

            crew.start(watch)
            free_share[0] = 0.0
            for _ in range(5):
                manager.append("busy", 0, *random_kv(1))
            stop.set()
            crew.join()
            assert manager._request_table.find("idle").layers[0].window.held_tokens <= 48

    def test_memory_goes_back_when_there_is_nothing_to_seal(
        self, manager: KVCacheManager, free_share: list[float]
    ) -> None:
        with manager:
            self.grow(manager)
            manager.crop("idle", 0, 290)
            window = manager._request_table.find("idle").layers[0].window
            before = window.nbytes
            free_share[0] = 0.0
            manager.append("busy", 0, *random_kv(1))
            assert window.nbytes < before / 4


def test_what_was_loaded_for_the_other_form_is_given_up(tmp_path: Path) -> None:
    with opened(tmp_path) as manager:
        manager.allocate("a")
        for layer_id in range(3):
            manager.append("a", layer_id, *random_kv(300))
        for layer_id in range(3):
            manager.update("a", layer_id, *random_kv(1))
        for layer_id in range(3):
            manager.attend("a", layer_id, torch.randn(1, 2, 1, 8), *random_kv(1))
        prefetcher = manager._resources.prefetcher
        assert prefetcher is not None and not prefetcher._loads
        for layer_id in range(3):
            manager.crop("a", layer_id, 250)
        manager.flush()
        tables = sum(len(layer.table) for layer in manager._request_table.find("a").layers.values())
        assert manager.stats().tiers["L1"].blocks == tables


class TestInterrupts:
    """After Ctrl-C at any moment, the next call works."""

    # Python itself reports an interrupt in a weak reference's callback.
    @pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
    def test_at_random_moments(self, tmp_path: Path, send_ctrl_c: Callable[[float], CtrlC]) -> None:
        config = TieredCacheConfig(window_tokens=32, block_tokens=16, host_capacity=0, l1_path=tmp_path)
        interrupted = 0
        with KVCacheManager(config, engine_factory=LateEngine) as manager:
            manager.allocate("a")
            for layer_id in range(3):
                manager.append("a", layer_id, *random_kv(100))
            for attempt in range(60):
                coming = send_ctrl_c(0.002 + 0.0005 * (attempt % 7))
                try:
                    coming.begin()
                    while not coming.has_struck:
                        for layer_id in range(3):
                            manager.fetch("a", layer_id, [1, 50])
                            manager.prefetch("a", [30])
                except KeyboardInterrupt:
                    interrupted += 1
                worked = threading.Thread(target=manager.stats)
                worked.start()
                manager.fetch("a", 0, [5])
                worked.join(20)
                assert not worked.is_alive()
        assert interrupted > 50

    def test_a_lock_that_an_interrupt_left_behind(self) -> None:
        lock = TimedLock(Metrics())
        lock.acquire()  # and never released
        with lock:
            pass
        taken: list[bool] = []
        in_threads(lambda: taken.append(lock.acquire(blocking=False)))
        assert taken == [True]


def test_a_thread_is_told_from_its_successor() -> None:
    references: list[Callable[[], object]] = []
    in_threads(lambda: references.append(this_thread().reference))
    assert references[0]() is None and this_thread().reference() is this_thread()
