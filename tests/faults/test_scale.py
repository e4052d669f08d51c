"""The cost of very many small blocks, and of very many caches, counted rather than timed.

`HF_TIERED_SCALE_BLOCKS=65536` makes requests as long as those in which these costs were noticed.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from hf_tiered_cache import KVCacheManager, TieredCacheConfig
from hf_tiered_cache.tiers import NvmeTier, ZarrTier
from hf_tiered_cache.tiers.base import DELETED_TOGETHER

from ..fakes import eventually, random_kv

BLOCKS = int(os.environ.get("HF_TIERED_SCALE_BLOCKS", "2000"))
IS_LONG = BLOCKS >= 16_384
SETTINGS = {"window_tokens": 16, "block_tokens": 16, "host_capacity": 0}
# One head of one element.
KEY, VALUE = random_kv(16 * 64, key_shape=(1, 1), value_shape=(1, 1))

pytestmark = pytest.mark.timeout(1800 if IS_LONG else 300)


def make(**options: Any) -> KVCacheManager:
    return KVCacheManager(TieredCacheConfig(**(SETTINGS | options)))


def append(manager: KVCacheManager, request_id: str, blocks: int) -> None:
    for first in range(0, blocks, 64):
        tokens = 16 * min(64, blocks - first)
        manager.append(request_id, 0, KEY[:, :, :tokens], VALUE[:, :, :tokens])


class Operations:
    """The operations of L1, in order. Deletions wait for `go_on`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.deleting, self.go_on = threading.Event(), threading.Event()
        for name in ("start_write", "start_delete"):
            monkeypatch.setattr(NvmeTier, name, self._noted(name, getattr(NvmeTier, name)))

    def _noted(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def noted(tier: NvmeTier, *arguments: Any) -> Any:
            if name == "start_delete":
                self.deleting.set()
                assert self.go_on.wait(60)
            self.done.append(name)
            return original(tier, *arguments)

        return noted


@pytest.fixture
def operations(monkeypatch: pytest.MonkeyPatch) -> Iterator[Operations]:
    operations = Operations(monkeypatch)
    yield operations
    operations.go_on.set()


def test_close_does_not_delete_what_goes_with_its_directory(operations: Operations, cache_directory: Path) -> None:
    manager = make()
    manager.allocate("a")
    append(manager, "a", BLOCKS)
    manager.flush()
    manager.free("a")
    assert operations.deleting.wait(20)
    closing = threading.Thread(target=manager.close)
    closing.start()
    assert eventually(lambda: manager._resources.closed)
    operations.go_on.set()
    closing.join()
    assert operations.done.count("start_delete") <= DELETED_TOGETHER < BLOCKS / 4
    assert list(cache_directory.iterdir()) == []


def test_deletions_give_way_to_new_blocks(operations: Operations) -> None:
    with make() as manager:
        manager.allocate("a")
        append(manager, "a", BLOCKS)
        manager.flush()
        operations.done.clear()
        manager.free("a")
        assert operations.deleting.wait(20)
        manager.allocate("b")
        manager.append("b", 0, KEY[:, :, :64], VALUE[:, :, :64])
        operations.go_on.set()
        manager.flush()
        assert operations.done.index("start_write") <= 2 * DELETED_TOGETHER  # one of them is the step's balancing
        assert operations.done.count("start_delete") >= BLOCKS - 2, "the control: all were deleted in the end"
        assert manager.stats().tiers["L1"].blocks == 2


def test_append_costs_the_same_at_any_length() -> None:
    """The cost, in Python calls on the caller's thread, does not depend on the length."""

    def calls_of(task: Callable[[], None]) -> int:
        calls = 0

        def count(frame: object, event: str, argument: object) -> None:
            nonlocal calls
            calls += event in ("call", "c_call")

        sys.setprofile(count)
        try:
            task()
        finally:
            sys.setprofile(None)
        return calls

    with make(staging_blocks=64) as manager:
        manager.allocate("a")
        append(manager, "a", 128)
        manager.flush()
        few = calls_of(lambda: append(manager, "a", 32))
        append(manager, "a", BLOCKS)
        manager.flush()
        many = calls_of(lambda: append(manager, "a", 32))
        assert few > 32 * 50, "the control: calls are counted"
        assert many < 1.3 * few


def test_memory_per_block() -> None:
    with make() as manager:
        manager.allocate("a")
        append(manager, "a", 64)
        manager.flush()
        gc.collect()
        tracemalloc.start()
        try:
            append(manager, "a", BLOCKS)
            manager.flush()
            gc.collect()
            per_block = tracemalloc.get_traced_memory()[0] / BLOCKS
        finally:
            tracemalloc.stop()
        assert 100 < per_block < 2048


@pytest.mark.parametrize("l2", [False, True], ids=["L1", "L2"])
def test_a_request_that_was_freed_leaves_nothing(l2: bool, tmp_path: Path) -> None:
    """Nothing stays in memory or on disk while the manager is in use."""
    requests = 80 if IS_LONG else 30
    with make(l1_capacity=0 if l2 else None, l2_url=tmp_path if l2 else None) as manager:

        def use(request_id: str) -> None:
            manager.allocate(request_id)
            append(manager, request_id, 64)
            manager.flush()
            manager.free(request_id)
            manager.flush()

        tracemalloc.start()
        try:
            for number in range(4):  # leftovers of the last request are in both figures
                use(f"warm-up {number}")
            gc.collect()
            before = tracemalloc.get_traced_memory()[0]
            for number in range(requests):
                use(f"request {number}")

            def per_request() -> float:
                gc.collect()
                return (tracemalloc.get_traced_memory()[0] - before) / requests

            # Background threads may release their last task late; a leak would stay.
            assert eventually(lambda: per_request() < 4096), f"{per_request():.0f} bytes per request"
        finally:
            tracemalloc.stop()
        (tier,) = manager._resources.tiers.values()
        files = [path for path in tier.root.rglob("*") if path.is_file()]
        assert tier.used_bytes == tier.blocks == 0 and all(path.name == "zarr.json" for path in files)
        assert len(files) <= 1
        if isinstance(tier, ZarrTier):
            assert not tier._arrays and not tier._groups and not tier._blocks_in


def test_many_caches_leave_nothing(cache_directory: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Half of the caches are closed, half are dropped, in the middle of their writes."""

    def use(count: int) -> None:
        for number in range(count):
            manager = make()
            manager.allocate("a")
            append(manager, "a", 8)
            if number % 2:
                manager.close()
            del manager

    process = psutil.Process()

    def quiet() -> bool:
        gc.collect()
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("hf-tiered")]
        return not [*cache_directory.iterdir()] and not threads

    use(4)
    assert eventually(quiet, 20)
    files = process.num_fds()
    tracemalloc.start()
    try:
        use(600 if IS_LONG else 24)
        assert eventually(quiet, 20)
        grown = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert process.num_fds() <= files + 2
    assert caplog.records == []
    assert grown < 256 << 10
