"""Host memory is page-locked for copies of CUDA devices only, and works as well if locking fails."""

from __future__ import annotations

import gc
import logging
import mmap
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_tiered_cache import KVCacheManager, TieredCacheConfig
from hf_tiered_cache.core.blocks import BlockKey, BlockLayout, as_bits
from hf_tiered_cache.tiers.host import HostTier
from hf_tiered_cache.transfer.engine import CpuCopyEngine

from ...fakes import StagedLateEngine, random_kv

DEVICE = torch.device("cuda", 1)
LAYOUT = BlockLayout(2, 2, 8, 2, 8, 16, torch.float32)


class FakeDriver:
    """CUDA's calls to lock and unlock pages, with a limit. Computation on the device fails if the error of an
    earlier call was not cleared."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, limit_bytes: int = 1 << 30) -> None:
        self.limit_bytes = limit_bytes
        self.locked: dict[int, int] = {}
        self.registrations = 0
        self.unlocking_fails = False
        self.error = 0
        self.errors_forgotten = 0
        empty = torch.empty

        def empty_on(*arguments: Any, **options: Any) -> torch.Tensor:
            if options.get("device") == DEVICE:  # the first kernel after an error reports it
                assert self.error
                self.error = 0
                self.errors_forgotten += 1
                raise RuntimeError("CUDA error: out of memory")
            return empty(*arguments, **options)

        monkeypatch.setattr(torch, "empty", empty_on)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext(self._check_device(device)))
        monkeypatch.setattr(torch.cuda, "cudart", lambda: self)

    def _check_device(self, device: torch.device) -> None:
        assert device == DEVICE, "another device is not in use"

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:  # noqa: N802
        assert flags == 1 and address % mmap.PAGESIZE == 0 and nbytes % mmap.PAGESIZE == 0
        assert address not in self.locked
        self.registrations += 1
        if sum(self.locked.values()) + nbytes > self.limit_bytes:
            self.error = 2
            return 2
        self.locked[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        del self.locked[address]
        self.error = 713 if self.unlocking_fails else 0
        return self.error


def _tier() -> HostTier:
    return HostTier("host", None, 1 << 20, TieredCacheConfig())


def _key(index: int) -> BlockKey:
    return BlockKey("request", 0, index, 0)


def _payload(index: int) -> np.ndarray[Any, Any]:
    values = np.random.default_rng(index).integers(0, 1 << 32, (LAYOUT.rows, LAYOUT.row_elements))
    return values.astype(np.uint32)


def _write(tier: HostTier, *indices: int) -> None:
    for index in indices:
        tier.write(_key(index), LAYOUT, _payload(index)).result()


def _is_stored(tier: HostTier, index: int) -> bool:
    found = as_bits(LAYOUT.over(tier.tensor(_key(index)), 1))[0]
    return bool(np.array_equal(found, _payload(index)))


def test_nothing_is_locked_before_a_cuda_device_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)  # other code uses CUDA
    tier = _tier()
    _write(tier, 0, 1)
    assert not driver.registrations
    tier.delete(_key(1))
    tier.lock_pages(DEVICE)
    _write(tier, 2, 3)  # one of them in memory mapped earlier
    assert {tier.tensor(_key(index)).data_ptr() for index in (2, 3)} == set(driver.locked)
    assert all(_is_stored(tier, index) for index in (0, 2, 3))
    tier.close()
    assert not driver.locked


@pytest.mark.parametrize("used_in_inference_mode", [True, False])
def test_locked_memory_in_both_modes(monkeypatch: pytest.MonkeyPatch, used_in_inference_mode: bool) -> None:
    FakeDriver(monkeypatch)
    tier = _tier()
    tier.lock_pages(DEVICE)
    with torch.inference_mode(used_in_inference_mode):
        _write(tier, 0)
    assert not tier.tensor(_key(0)).is_inference()
    tier.close()


def test_where_locking_is_refused_memory_stays_unlocked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tier = _tier()
    driver = FakeDriver(monkeypatch, limit_bytes=2 * tier.occupied_bytes(LAYOUT))
    tier.lock_pages(DEVICE)
    with caplog.at_level(logging.WARNING):
        _write(tier, *range(6))
        tier.lock_pages(DEVICE)  # a second device
        _write(tier, 6)
    assert [record.getMessage()[:33] for record in caplog.records] == ["host memory cannot be page-locked"]
    assert len(driver.locked) == 2 and driver.registrations == 3 and driver.errors_forgotten == 1
    assert all(_is_stored(tier, index) for index in range(7))
    tier.close()
    assert not driver.locked


def test_unlocking_that_fails_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    driver = FakeDriver(monkeypatch)
    tier = _tier()
    tier.lock_pages(DEVICE)
    _write(tier, 0)
    driver.unlocking_fails = True
    with caplog.at_level(logging.WARNING):
        tier.close()
    assert "stay page-locked (CUDA error 713)" in caplog.text
    assert driver.errors_forgotten == 1


def test_a_forgotten_tier_unlocks_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    tier = _tier()
    tier.lock_pages(DEVICE)
    _write(tier, 0)
    assert driver.locked
    del tier
    gc.collect()
    assert not driver.locked


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTFORK"), reason="the system cannot keep memory from a child")
def test_locked_memory_is_not_inherited(monkeypatch: pytest.MonkeyPatch) -> None:
    FakeDriver(monkeypatch)
    tier = _tier()
    _write(tier, 0)
    tier.lock_pages(DEVICE)
    _write(tier, 1)
    inherited = [_flags_of(tier.tensor(_key(index)).data_ptr()) for index in range(2)]
    assert "dc" not in inherited[0] and "dc" in inherited[1]
    tier.close()


def _flags_of(address: int) -> list[str]:
    """Return the flags of the mapping that holds an address, as reported by Linux."""
    inside = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, _, rest = line.partition(" ")
        if "-" in first and not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            inside = start <= address < end
        elif inside and first == "VmFlags:":
            return rest.split()
    raise AssertionError("no such mapping")


class _LockingEngine(StagedLateEngine):
    wants_page_locks = True


@pytest.mark.parametrize(("engine", "locks"), [(CpuCopyEngine, False), (_LockingEngine, True)])
def test_a_pipeline_asks_for_locked_pages_if_its_copies_want_them(
    engine: Callable[..., CpuCopyEngine], locks: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[torch.device] = []
    monkeypatch.setattr(HostTier, "lock_pages", lambda tier, device: asked.append(device))
    config = TieredCacheConfig(window_tokens=32, block_tokens=16, host_capacity="1MiB")
    with KVCacheManager(config, engine_factory=engine) as manager:
        manager.allocate("a")
        manager.append("a", 0, *random_kv(20))
        assert not asked
        manager.append("a", 0, *random_kv(100))
        assert asked == ([torch.device("cpu")] if locks else [])
