"""Third-party tiers and policies that fail: one failure is retried, two raise a clear error, nothing is lost."""

from __future__ import annotations

import asyncio
import sqlite3
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_tiered_cache import (
    EvictionPolicy,
    HeatTable,
    KVCacheManager,
    Tier,
    TieredCacheConfig,
    TierError,
    TierFullError,
    TierReadError,
    register_eviction,
    register_tier,
)
from hf_tiered_cache.core.blocks import Bits, BlockKey, BlockLayout
from hf_tiered_cache.residency.eviction import POLICIES, Values
from hf_tiered_cache.residency.heat import Slots
from hf_tiered_cache.tiers import TierFuture, TierRegistry
from hf_tiered_cache.tiers import io as tier_io

from ..fakes import eventually, random_kv

LAYOUT = BlockLayout(1, 2, 8, 2, 8, 16, torch.float32)
SETTINGS = {"window_tokens": 32, "block_tokens": 16, "host_capacity": 0, "staging_blocks": 4}
BLOCK_BYTES = LAYOUT.nbytes
TOKENS = 300


class Failures:
    """The next errors of the shaky tier and policy, by operation, raised at once or in the future."""

    def __init__(self) -> None:
        self.planned: dict[str, list[tuple[str, BaseException]]] = {}
        self.calls: Counter[str] = Counter()

    def plan(self, doing: str, where: str, times: int, error: BaseException | None = None) -> None:
        error = error or sqlite3.OperationalError("database is locked")
        self.planned[doing] = [(where, error)] * times

    def begin(self, doing: str) -> list[TierFuture]:
        """Raise the planned error, or return what `start_...` returns."""
        self.calls[doing] += 1
        if not self.planned.get(doing):
            return []
        where, error = self.planned[doing].pop(0)
        if where == "call":
            raise error
        future: Future[None] = Future()
        future.set_exception(error)
        return [future]


FAILURES = Failures()


class ShakyTier(Tier):
    """Keeps blocks in a dict. A failed write leaves half of the block, which must not be overwritten."""

    needs_directory = False
    stores: list[dict[BlockKey, Bits]] = []  # noqa: RUF012

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.data: dict[BlockKey, Bits] = {}
        self.stores.append(self.data)

    def start_write(self, key: BlockKey, layout: BlockLayout, source: Bits) -> Sequence[TierFuture]:
        if key in self.data:
            raise AssertionError("UNIQUE constraint failed")
        self.data[key] = source[:0]
        futures = FAILURES.begin("write")
        if not futures:
            self.data[key] = source.copy()
        return futures

    def start_read(self, keys: Sequence[BlockKey], layout: BlockLayout, target: Bits) -> Sequence[TierFuture]:
        target.fill(7)
        futures = FAILURES.begin("read")
        for position, key in enumerate(keys):
            target[position] = self.data[key]
        return futures

    def start_delete(self, key: BlockKey) -> Sequence[TierFuture]:
        futures = FAILURES.begin("delete")
        if not futures:
            self.data.pop(key, None)
        return futures

    def flush(self) -> None:
        FAILURES.begin("flush")

    def close(self) -> None:
        FAILURES.begin("close")


@pytest.fixture(autouse=True)
def registered() -> Iterator[None]:
    FAILURES.__init__()  # type: ignore[misc]
    ShakyTier.stores.clear()
    register_tier("shaky")(ShakyTier)
    yield
    FAILURES.planned.clear()
    del TierRegistry.classes["shaky"]


def payload(seed: int = 0) -> Bits:
    shape = (LAYOUT.rows, LAYOUT.row_elements)
    return np.random.default_rng(seed).integers(1 << 32, size=shape, dtype=np.uint32)


def key(block_idx: int) -> BlockKey:
    return BlockKey("r", 0, block_idx, 0)


def make_tier(capacity_bytes: int | None = None) -> ShakyTier:
    return ShakyTier("L1", None, capacity_bytes, TieredCacheConfig())


WHERE = pytest.mark.parametrize("where", ["call", "future"])


class TestTier:
    """A tier by itself, one operation at a time."""

    @WHERE
    def test_a_write_that_fails_once(self, where: str) -> None:
        tier = make_tier()
        FAILURES.plan("write", where, 1)
        tier.write(key(0), LAYOUT, payload()).result()
        assert np.array_equal(tier.data[key(0)], payload()) and tier.used_bytes == BLOCK_BYTES

    @WHERE
    @pytest.mark.parametrize(
        "error",
        [sqlite3.OperationalError("database is locked"), SystemExit(3), asyncio.CancelledError(), KeyError("x")],
        ids=lambda error: type(error).__name__,
    )
    def test_a_write_that_fails_twice_gives_room_and_key_back(self, where: str, error: BaseException) -> None:
        tier = make_tier(capacity_bytes=BLOCK_BYTES)
        FAILURES.plan("write", where, 2, error)
        expected = TierError if isinstance(error, Exception) else type(error)
        with pytest.raises(expected) as raised:
            tier.write(key(0), LAYOUT, payload()).result()
        if expected is TierError:
            assert raised.value.__cause__ is error and not isinstance(raised.value, (TierFullError, TierReadError))
            assert "L1: writing layer 0, block 0" in str(raised.value)
        assert tier.used_bytes == tier.blocks == len(tier.data) == 0
        FAILURES.planned.clear()
        tier.write(key(0), LAYOUT, payload()).result()
        assert tier.used_bytes == BLOCK_BYTES

    def test_room_comes_back_when_what_is_left_cannot_be_removed(self) -> None:
        tier = make_tier(capacity_bytes=BLOCK_BYTES)
        FAILURES.plan("write", "future", 2)
        FAILURES.plan("delete", "call", 9)
        with pytest.raises(TierError, match="database is locked"):
            tier.write(key(0), LAYOUT, payload()).result()
        assert FAILURES.calls["write"] == 1, "no second try over what the first has left"
        assert tier.used_bytes == tier.blocks == 0
        FAILURES.planned.clear()
        tier.write(key(0), LAYOUT, payload(1)).result()  # which removes the half block first
        assert np.array_equal(tier.data[key(0)], payload(1))

    @WHERE
    def test_reads(self, where: str) -> None:
        tier = make_tier()
        tier.write(key(0), LAYOUT, payload()).result()
        target = np.zeros((1, *payload().shape), np.uint32)
        FAILURES.plan("read", where, 1)
        tier.read_into([key(0)], LAYOUT, target).result()
        assert np.array_equal(target[0], payload())
        FAILURES.plan("read", where, 2)
        with pytest.raises(TierError, match=r"reading layer 0, blocks 0 to 0.*database is locked") as raised:
            tier.read_into([key(0)], LAYOUT, target).result()
        assert type(raised.value) is TierError and isinstance(raised.value.__cause__, sqlite3.OperationalError)
        tier.read_into([key(0)], LAYOUT, target).result()
        assert np.array_equal(target[0], payload())

    @WHERE
    @pytest.mark.parametrize("error", [sqlite3.OperationalError("database is locked"), SystemExit(3)])
    def test_deletions(self, where: str, error: BaseException) -> None:
        tier = make_tier()
        for index in range(4):
            tier.write(key(index), LAYOUT, payload()).result()
        if isinstance(error, Exception):
            FAILURES.plan("delete", where, 1, error)
            assert tier.delete_many([key(0)]) == {} and tier.blocks == 3
        FAILURES.plan("delete", where, 4, error)
        failures = tier.delete_many([key(1), key(2), key(3)])
        assert failures and all(failure.__cause__ is error for failure in failures.values())
        assert tier.used_bytes == len(tier.data) * BLOCK_BYTES and set(failures) == set(tier.data) - {key(0)}
        FAILURES.planned.clear()
        assert tier.delete_many(list(failures)) == {}
        tier.delete(key(0))
        tier.delete(key(0))
        assert tier.used_bytes == tier.blocks == len(tier.data) == 0

    def test_a_full_tier_says_so_and_is_not_asked_again(self) -> None:
        tier = make_tier()
        for error in (TierFullError("quota used up"), OSError(28, "No space left on device")):
            FAILURES.plan("write", "call", 2, error)
            calls = FAILURES.calls["write"]
            with pytest.raises(TierFullError):
                tier.write(key(0), LAYOUT, payload())
            assert FAILURES.calls["write"] == calls + 1 and tier.used_bytes == 0
        FAILURES.plan("write", "call", 2, RuntimeError("RESOURCE_EXHAUSTED: too many requests, No space left"))
        with pytest.raises(TierError) as raised:
            tier.write(key(0), LAYOUT, payload())
        assert not isinstance(raised.value, TierFullError), "an error of a library says nothing about capacity"

    def test_no_answer_is_not_tried_again(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A write without an answer is not retried: the first try may still be writing."""
        monkeypatch.setattr(tier_io, "IO_TIMEOUT_SECONDS", 0.02)
        tier = make_tier()
        started: list[BlockKey] = []

        def never(key: BlockKey, layout: BlockLayout, source: Bits) -> Sequence[TierFuture]:
            started.append(key)
            return [Future()]

        monkeypatch.setattr(tier, "start_write", never)
        with pytest.raises(TierError, match=r"no answer within .*reachable"):
            tier.write(key(0), LAYOUT, payload()).result()
        assert len(started) == 1 and tier.used_bytes == 0
        monkeypatch.undo()
        FAILURES.plan("write", "future", 1, TimeoutError("the socket timed out"))
        tier.write(key(0), LAYOUT, payload()).result()  # an ordinary error, which is retried

    def test_a_method_without_return_value_is_told(self, monkeypatch: pytest.MonkeyPatch) -> None:
        tier = make_tier()
        monkeypatch.setattr(tier, "start_write", lambda key, layout, source: None)
        with pytest.raises(TierError, match="None was returned: return a sequence of futures"):
            tier.write(key(0), LAYOUT, payload())


def make(**options: Any) -> KVCacheManager:
    return KVCacheManager(TieredCacheConfig(**{"l1_tier": "shaky", **SETTINGS, **options}))


def fill(manager: KVCacheManager, request_id: str = "a") -> tuple[torch.Tensor, torch.Tensor, list[TierError]]:
    """Append until everything is stored; return K, V and the errors on the way."""
    manager.allocate(request_id)
    keys, values = random_kv(TOKENS)
    errors = []
    for end in range(50, TOKENS + 1, 50):
        while (held := manager.tokens(request_id, 0)) < end:
            try:
                manager.append(request_id, 0, keys[:, :, held:end], values[:, :, held:end])
            except TierError as error:
                errors.append(error)
    return keys, values, errors


def check(manager: KVCacheManager, request_id: str, keys: torch.Tensor, values: torch.Tensor) -> None:
    found = manager.fetch(request_id, 0, range(TOKENS))
    assert torch.equal(found[0], keys) and torch.equal(found[1], values)


def stored_blocks() -> int:
    return sum(len(store) for store in ShakyTier.stores)


class TestManager:
    """A tier under a manager, while other threads wait."""

    @WHERE
    @pytest.mark.parametrize("doing", ["write", "read", "delete"])
    def test_one_passing_error_is_not_noticed(self, doing: str, where: str) -> None:
        with make() as manager:
            FAILURES.plan(doing, where, 1)
            keys, values, errors = fill(manager)
            manager.flush()
            check(manager, "a", keys, values)
            manager.free("a")
            manager.flush()
            assert errors == [] and not FAILURES.planned[doing]
            assert manager.stats().tiers["L1"].used_bytes == 0 == stored_blocks()

    @WHERE
    @pytest.mark.parametrize("error", [sqlite3.OperationalError("disk I/O error"), SystemExit(3)])
    def test_writes_that_fail_for_good_for_a_while(self, where: str, error: BaseException) -> None:
        with make(l1_capacity=20 * BLOCK_BYTES) as manager:
            manager.allocate("a")
            keys, values = random_kv(TOKENS)
            FAILURES.plan("write", where, 1000, error)
            with pytest.raises(TierError) as raised:
                manager.append("a", 0, keys, values)
            assert raised.value.__cause__ is error and not isinstance(raised.value, TierFullError)
            held = manager.tokens("a", 0)
            assert held and torch.equal(manager.fetch("a", 0, range(held))[0], keys[:, :, :held])
            assert eventually(lambda: manager.stats().tiers["L1"].used_bytes == 0 == stored_blocks())
            FAILURES.planned.clear()
            with suppress(TierError):  # an error of another block meanwhile
                manager.append("a", 0, keys[:, :, held:held], values[:, :, held:held])
            manager.append("a", 0, keys[:, :, held:], values[:, :, held:])
            manager.flush()
            check(manager, "a", keys, values)
            stats = manager.stats()
            assert stats.tiers["L1"].blocks == stats.blocks_sealed == stored_blocks()

    @WHERE
    @pytest.mark.parametrize("error", [sqlite3.OperationalError("disk I/O error"), SystemExit(3)])
    def test_a_read_that_fails_for_good_once(self, where: str, error: BaseException) -> None:
        with make() as manager:
            keys, values, _ = fill(manager)
            manager.flush()
            FAILURES.plan("read", where, 2, error)
            with pytest.raises(TierError) as raised:
                check(manager, "a", keys, values)
            assert raised.value.__cause__ is error
            FAILURES.planned.clear()
            check(manager, "a", keys, values)
            update = manager.update("a", 0, *random_kv(1))
            assert torch.equal(update[0][:, :, :TOKENS], keys)

    @WHERE
    @pytest.mark.parametrize("error", [sqlite3.OperationalError("disk I/O error"), SystemExit(3)])
    def test_a_deletion_that_fails_for_good_for_a_while(self, where: str, error: BaseException) -> None:
        """A block that cannot be deleted keeps its room, which others must not use, and is deleted in the end."""
        with make(l1_capacity=20 * BLOCK_BYTES) as manager:
            fill(manager)
            manager.flush()
            blocks = manager.stats().blocks_sealed
            FAILURES.plan("delete", where, 1000, error)
            manager.free("a")
            with pytest.raises(TierError) as raised:
                manager.flush()
            assert raised.value.__cause__ is error
            assert manager.stats().tiers["L1"].used_bytes == blocks * BLOCK_BYTES == stored_blocks() * BLOCK_BYTES
            FAILURES.plan("delete", where, blocks + 3, error)  # some go, some stay
            with pytest.raises(TierError):
                manager.flush()
            assert manager.stats().tiers["L1"].used_bytes == stored_blocks() * BLOCK_BYTES
            FAILURES.planned.clear()
            keys, values, errors = fill(manager, "b")
            manager.flush()
            assert errors == []
            check(manager, "b", keys, values)
            assert manager.stats().tiers["L1"].used_bytes == stored_blocks() * BLOCK_BYTES == blocks * BLOCK_BYTES

    def test_a_full_tier_sends_blocks_on(self, tmp_path: Path) -> None:
        with make(l2_url=tmp_path) as manager:
            FAILURES.plan("write", "call", 1000, TierFullError("quota used up"))
            keys, values, errors = fill(manager)
            manager.flush()
            stats = manager.stats()
            assert errors == [] and stats.tiers["L2"].blocks == stats.blocks_sealed
            check(manager, "a", keys, values)

    def test_nothing_is_left_where_there_is_no_directory(self, cache_directory: Path) -> None:
        manager = make()
        fill(manager)
        manager.flush()
        assert stored_blocks() > 0 and list(cache_directory.iterdir()) == [], "no directory for nothing"
        manager.close()
        assert stored_blocks() == 0

    @pytest.mark.parametrize("doing", ["flush", "close", "delete"])
    def test_the_end_fails(self, doing: str) -> None:
        threads = set(threading.enumerate())
        manager = make()
        fill(manager)
        manager.flush()
        FAILURES.plan(doing, "call", 1000)
        with pytest.raises(TierError, match="database is locked") as raised:
            (manager.flush if doing == "flush" else manager.close)()
        assert isinstance(raised.value.__cause__, sqlite3.OperationalError)
        manager.close()
        assert eventually(lambda: set(threading.enumerate()) <= threads)

    def test_a_tier_that_cannot_be_opened(self, cache_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Tiers that were opened before it are closed again, and the next call tries again."""
        monkeypatch.setattr(ShakyTier, "__init__", lambda self, *arguments: FAILURES.begin("open"))
        with make(l1_tier="nvme", l2_tier="shaky") as manager:
            FAILURES.plan("open", "call", 1)
            manager.allocate("a")
            keys, values = random_kv(TOKENS)
            with pytest.raises(TierError, match="ShakyTier cannot be opened: OperationalError"):
                manager.append("a", 0, keys, values)
            assert list(cache_directory.iterdir()) == []
            held = manager.tokens("a", 0)
            assert held > 0
            monkeypatch.undo()
            register_tier("shaky")(ShakyTier)
            manager.append("a", 0, keys[:, :, held:], values[:, :, held:])
            check(manager, "a", keys, values)


class ShakyPolicy(EvictionPolicy):
    """LRU, except when it fails."""

    acts_on_accesses = False

    def keep_values(self, slots: Slots) -> Values:
        FAILURES.begin("policy")
        return self.table.order_of_access(slots).astype(np.float64)


@pytest.fixture
def shaky_policy() -> Iterator[None]:
    register_eviction("shaky")(ShakyPolicy)
    yield
    del POLICIES["shaky"]


@pytest.mark.usefixtures("shaky_policy")
class TestPolicy:
    """Policies that fail where they are used: to make room, to balance, to promote, and for resident blocks."""

    OPTIONS: dict[str, Any] = {  # noqa: RUF012
        "l1_tier": "nvme",
        "eviction": "shaky",
        "protection_steps": 0,
        "warmup_steps": 0,
    }

    def run(self, manager: KVCacheManager) -> list[TierError]:
        """Use a manager until everything was read several times; return the errors on the way."""
        keys, values, errors = fill(manager)
        for _ in range(4):
            for call in (
                lambda: check(manager, "a", keys, values),
                lambda: manager.update("a", 0, *random_kv(1)),
                manager.flush,
            ):
                try:
                    call()
                except TierError as error:
                    errors.append(error)
            manager.crop("a", 0, manager.tokens("a", 0) - TOKENS)
        check(manager, "a", keys, values)
        return errors

    @pytest.mark.parametrize(
        "options",
        [
            {"l1_capacity": 4 * 4096, "high_watermark": 1.0, "low_watermark": 1.0},
            {"host_capacity": 6 * 4096, "high_watermark": 0.5, "low_watermark": 0.3},
            {"resident_capacity": 4 * BLOCK_BYTES},
        ],
        ids=["make room", "balance", "resident"],
    )
    @pytest.mark.parametrize("times", [1, 2, 100_000])
    @pytest.mark.parametrize("kind", [ZeroDivisionError, SystemExit])
    def test_failures(
        self, tmp_path: Path, options: dict[str, Any], times: int, kind: type[BaseException]
    ) -> None:
        threads = set(threading.enumerate())
        with make(**self.OPTIONS, **{"l2_url": tmp_path, **options}) as manager:
            FAILURES.plan("policy", "call", times, kind("no heat"))
            errors = self.run(manager)
            assert bool(errors) == (times > 1), "one failure is not noticed"
            for error in errors:
                assert "the eviction policy ShakyPolicy failed" in str(error)
                assert isinstance(error.__cause__, kind) and not isinstance(error, TierFullError)
            FAILURES.planned.clear()
            assert FAILURES.calls["policy"] > 2, "the control: it was asked"
        assert eventually(lambda: set(threading.enumerate()) <= threads)

    def test_nonsense_is_an_error_as_well(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(ShakyPolicy, "victims", lambda self, candidates, count: np.array([10**6]))
        with make(**self.OPTIONS, l2_url=tmp_path, host_capacity=6 * 4096) as manager:
            errors = self.run(manager)
            assert errors and isinstance(errors[0].__cause__, IndexError)

    def test_a_policy_that_cannot_be_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: EvictionPolicy, table: HeatTable, config: TieredCacheConfig) -> None:
            raise ImportError("no sklearn")

        monkeypatch.setattr(ShakyPolicy, "__init__", refuse)
        with pytest.raises(TierError, match="eviction policy 'shaky' cannot be made: ImportError: no sklearn"):
            make(eviction="shaky")
