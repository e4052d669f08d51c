"""Demotion and promotion between the tiers: choice, timing, and failures of storage meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hf_tiered_cache import KVCacheManager, TieredCacheConfig, TierError
from hf_tiered_cache.core.blocks import Block
from hf_tiered_cache.residency.table import ResidencyTable
from hf_tiered_cache.residency.writeback import WriteBack

from ...fakes import FAULTS, eventually, random_kv

SHAPE = (4, 8)
BLOCK_BYTES = 2 * 4 * 8 * 16 * 4  # K and V in float32: one page
SETTINGS = {
    "window_tokens": 16,
    "block_tokens": 16,
    "host_capacity": 10 * BLOCK_BYTES,
    "l1_tier": "faulty",
    "eviction": "lru",
    "protection_steps": 1,
    "warmup_steps": 0,
}
BLOCKS = 24
TOKENS = 16 * (BLOCKS + 2)


@pytest.fixture(autouse=True)
def faults() -> Iterator[None]:
    FAULTS.reset()
    yield
    FAULTS.reset()


class Filled:
    """A manager with one layer of 24 blocks: those that do not fit into host memory are in L1."""

    def __init__(self, **options: Any) -> None:
        self.manager = KVCacheManager(TieredCacheConfig(**(SETTINGS | options)))
        self.manager.allocate("a")
        self.key, self.value = random_kv(TOKENS, key_shape=SHAPE, value_shape=SHAPE)
        self.manager.append("a", 0, self.key, self.value)
        self.manager.flush()

    def __enter__(self) -> Filled:
        return self

    def __exit__(self, *exception: object) -> None:
        self.manager.close()

    @property
    def blocks(self) -> list[Block]:
        return self.manager._request_table.find("a").layers[0].table.blocks

    def in_tier(self, name: str) -> set[int]:
        """Return the blocks that have a copy in this tier."""
        return {index for index, block in enumerate(self.blocks) if name in block.copies}

    def read(self, *blocks: int) -> None:
        """Take a step that reads some blocks, and wait for all moves that follow."""
        positions = torch.tensor([16 * block + 3 for block in blocks])
        assert torch.equal(self.manager.fetch("a", 0, positions)[0], self.key[:, :, positions])
        self.balance()

    def balance(self, flush: bool = True) -> None:
        write_back = self.manager._resources.write_back
        assert write_back is not None
        write_back.balance_soon()
        write_back._background.submit(lambda: None).result()
        if flush:
            self.manager.flush()

    def check(self) -> None:
        """Fail unless all blocks are readable, and every tier is within its capacity."""
        found = self.manager.fetch("a", 0, range(TOKENS))
        assert torch.equal(found[0], self.key) and torch.equal(found[1], self.value)
        tiers = self.manager.stats().tiers
        for name in ("host", "L1"):
            assert tiers[name].capacity_bytes is None or tiers[name].used_bytes <= tiers[name].capacity_bytes


def test_watermarks() -> None:
    """R9: above the high watermark the coldest blocks are demoted, down to the low one."""
    with Filled(protection_steps=2, high_watermark=0.9, low_watermark=0.5) as filled:
        assert filled.in_tier("host") == set(range(10))
        filled.read(0, 1, 2)
        assert filled.in_tier("host") == set(range(10)), "all were sealed or read in the last two steps"
        filled.read(0)
        assert len(filled.in_tier("host")) == 5 and {0, 1, 2} <= filled.in_tier("host")
        assert filled.manager.stats().blocks_demoted == 5
        filled.check()


def test_protected_blocks_stay() -> None:
    """R10: blocks read in the last steps are not demoted, however much room is needed."""
    with Filled(protection_steps=4, high_watermark=0.5, low_watermark=0.1) as filled:
        for step in range(12):
            hot = {step % 3, 3 + step % 3}
            filled.read(*hot)
            read_lately = {(step - past) % 3 + offset for past in range(min(step + 1, 4)) for offset in (0, 3)}
            assert read_lately <= filled.in_tier("host")
        assert filled.manager.stats().blocks_demoted > 0
        filled.check()


def test_nothing_sinks_before_the_heat_table_is_warm() -> None:
    with Filled(eviction="heat", warmup_steps=6, high_watermark=0.5, low_watermark=0.1) as filled:
        while filled.manager._resources.residency.heat.now < 5:  # type: ignore[union-attr]
            filled.read(0)
            assert filled.manager.stats().blocks_demoted == 0
        for _ in range(4):
            filled.read(0)
        assert filled.manager.stats().blocks_demoted > 0


def test_blocks_that_are_being_read_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, go_on = threading.Event(), threading.Event()
    original = ResidencyTable._read_pinned

    def slow(residency: ResidencyTable, blocks: list[Block], *arguments: Any) -> None:
        if not go_on.is_set() and blocks[0].key.block_idx == 0:
            reading.set()
            go_on.wait(20)
        original(residency, blocks, *arguments)

    monkeypatch.setattr(ResidencyTable, "_read_pinned", slow)
    with Filled(high_watermark=0.5, low_watermark=0.1) as filled:
        with monkeypatch.context() as patch:  # nothing moves before the read
            patch.setattr(WriteBack, "balance_soon", lambda write_back: None)
            thread = threading.Thread(target=filled.manager.fetch, args=("a", 0, [0, 16]))
            thread.start()
            assert reading.wait(20)
        residency = filled.manager._resources.residency
        assert residency is not None
        for _ in range(3):
            residency.step()  # so that they are not protected
        filled.balance(flush=False)
        assert filled.in_tier("host") & {0, 1} == {0, 1} and filled.manager.stats().blocks_demoted > 0
        go_on.set()
        thread.join()
        filled.check()


def test_what_is_read_from_afar_rises() -> None:
    """A promoted block keeps its lower copy, so that it can be demoted again without a write."""
    with Filled(high_watermark=1.0, low_watermark=1.0) as filled:
        assert filled.in_tier("L1") == set(range(10, 24))
        written = FAULTS.writes
        filled.read(0)
        filled.read(20, 21)
        assert {20, 21} <= filled.in_tier("host") and {20, 21} <= filled.in_tier("L1")
        assert filled.manager.stats().blocks_promoted == 2
        for block in range(8):
            filled.read(block)
        filled.read(12, 13, 14, 15)
        filled.read(12, 13, 14, 15, 16, 17, 18)
        assert {20, 21} & filled.in_tier("host") == set() and {20, 21} <= filled.in_tier("L1")
        hits = filled.manager.stats().tiers["host"].blocks_served
        filled.read(12)
        assert filled.manager.stats().tiers["host"].blocks_served == hits + 1
        dirty = {block for block in range(10) if filled.in_tier("L1") >= {block}}
        assert FAULTS.writes - written == len(dirty), "only what had no copy below was written"
        filled.check()


def test_pinned_fills_what_is_free_and_moves_nothing_else() -> None:
    with Filled(eviction="pinned") as filled:
        for _ in range(20):
            filled.read(*range(BLOCKS))
        stats = filled.manager.stats()
        assert (stats.blocks_promoted, stats.blocks_demoted) == (0, 0)
        filled.manager.crop("a", 0, 0)
        filled.manager.allocate("b")
        filled.manager.append("b", 0, filled.key, filled.value)
        filled.manager.free("a")
        filled.manager.flush()
        filled.manager.fetch("b", 0, range(TOKENS))
        write_back = filled.manager._resources.write_back
        assert write_back is not None
        write_back.balance_soon()
        filled.manager.flush()
        assert filled.manager.stats().blocks_promoted > 0, "what the other request left is free"
        assert torch.equal(filled.manager.fetch("b", 0, range(TOKENS))[0], filled.key)


@pytest.mark.parametrize("fault", ["write_error", "read_error"])
def test_a_move_that_fails_changes_nothing(fault: str) -> None:
    with Filled(high_watermark=0.9, low_watermark=0.5) as filled:
        before = filled.in_tier("host"), filled.in_tier("L1")
        setattr(FAULTS, fault, "INTERNAL: cable pulled")
        if fault == "read_error":
            with pytest.raises(TierError, match="cable pulled"):
                filled.read(0, 20)
        else:
            filled.read(0, 1)
        filled.balance()
        assert (filled.in_tier("host") | filled.in_tier("L1")) == set(range(BLOCKS))
        if fault == "write_error":
            assert (filled.in_tier("host"), filled.in_tier("L1")) == before
        setattr(FAULTS, fault, None)
        filled.read(0, 1)
        filled.balance()
        assert len(filled.in_tier("host")) <= 9
        filled.check()


def test_a_copy_that_could_not_be_deleted_is_not_written_over(tmp_path: Path) -> None:
    """The deletion of the old copy, when it succeeds, would also delete a new copy under the same name."""
    options = {"host_capacity": 0, "l1_capacity": 10 * BLOCK_BYTES, "l2_url": tmp_path}
    with Filled(**options, protection_steps=0, high_watermark=0.9, low_watermark=0.5) as filled:
        FAULTS.delete_error = "PERMISSION_DENIED: not now"
        with pytest.raises(OSError, match="not now"):
            filled.read(9)
        left = [block for block in filled.blocks if block.leaving]
        assert left
        for _ in range(3):
            with pytest.raises(OSError, match="not now"):
                filled.read(*(block.key.block_idx for block in left))
        assert all("L1" not in block.copies for block in left)
        FAULTS.delete_error = None
        assert eventually(lambda: (filled.balance(), not any(block.leaving for block in filled.blocks))[1])
        filled.read(*(block.key.block_idx for block in left))
        filled.check()


def test_resident_blocks_serve_reads_and_leave_with_their_request() -> None:
    with Filled(host_capacity=0, resident_capacity=6 * BLOCK_BYTES, eviction="pinned") as filled:
        stats = filled.manager.stats()
        assert stats.tiers["L0"].blocks == 6
        FAULTS.reads.clear()
        filled.read(0, 1, 5)
        assert FAULTS.reads == [] and filled.manager.stats().tiers["L0"].blocks_served == 3
        filled.check()
        l0_bytes = filled.manager.stats().l0_bytes
        filled.manager.free("a")
        filled.manager.flush()
        assert filled.manager.stats().tiers["L0"].blocks == 0
        # Their memory is freed after the copies enqueued before, on the thread that makes those.
        assert eventually(lambda: filled.manager.stats().l0_bytes <= l0_bytes - 6 * BLOCK_BYTES)
        filled.manager.allocate("b")
        filled.manager.append("b", 0, filled.key, filled.value)
        assert filled.manager.stats().tiers["L0"].blocks == 6
        assert torch.equal(filled.manager.fetch("b", 0, range(TOKENS))[1], filled.value)
