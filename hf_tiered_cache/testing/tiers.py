"""Contract suite of tiers, to subclass."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
import torch

from ..core.blocks import Bits, BlockKey, BlockLayout
from ..core.errors import TierError, TierFullError, TierReadError
from ..tiers import Tier, TierFuture

BF16 = BlockLayout(2, 2, 64, 2, 64, 16, torch.bfloat16)
LATENT = BlockLayout(1, 1, 24, 1, 8, 16, torch.float32)  # MLA: K and V differ
BYTES = BlockLayout(1, 2, 64, 2, 64, 16, torch.float8_e4m3fn)


def payload_of(layout: BlockLayout, seed: int) -> Bits:
    """Return random content `[rows, row_elements]`."""
    info = np.iinfo(layout.bits_dtype)
    shape = (layout.rows, layout.row_elements)
    return np.random.default_rng(seed).integers(info.max, size=shape, dtype=layout.bits_dtype, endpoint=True)


def key(block_idx: int, layer_idx: int = 0, revision: int = 0, namespace: str = "r") -> BlockKey:
    """Return the name of a block."""
    return BlockKey(namespace, layer_idx, block_idx, revision)


class TierContract:
    """The contract of a tier; see `Tier` for its rules. Subclass it in a test module:

    ```python
    class TestMyTier(TierContract):
        def make(self, root, capacity_bytes=None):
            return MyTier("L2", None, capacity_bytes, TieredCacheConfig(l2_tier="mine"))
    ```
    """

    def make(self, root: Path, capacity_bytes: int | None = None) -> Tier:
        """Return a new, empty tier.

        Args:
            root: a directory for this tier alone, which does not exist yet in some tests.
            capacity_bytes: as of `Tier`.
        """
        raise NotImplementedError

    @pytest.fixture
    def tier(self, tmp_path: Path) -> Iterator[Tier]:
        tier = self.make(tmp_path)
        yield tier
        tier.close()

    @pytest.mark.parametrize("layout", [BF16, LATENT, BYTES], ids=["bf16", "latent", "8-bit"])
    def test_round_trip(self, tier: Tier, layout: BlockLayout) -> None:
        blocks = {index: payload_of(layout, index) for index in (0, 1, 5, 200)}
        writes = [tier.write(key(index), layout, payload) for index, payload in blocks.items()]
        for write in writes:
            write.result()
        order = [5, 0, 200, 1]
        target = np.zeros((4, layout.rows, layout.row_elements), layout.bits_dtype)
        tier.read_into([key(index) for index in order], layout, target).result()
        for position, index in enumerate(order):
            assert np.array_equal(target[position], blocks[index])

    def test_all_zero_blocks_are_stored(self, tier: Tier) -> None:
        zeros = np.zeros((BF16.rows, BF16.row_elements), BF16.bits_dtype)
        tier.write(key(0), BF16, zeros).result()
        target = np.ones((1, *zeros.shape), zeros.dtype)
        tier.read_into([key(0)], BF16, target).result()
        assert not target.any()

    def test_keys_are_kept_apart(self, tier: Tier) -> None:
        keys = [key(3), key(3, layer_idx=1), key(3, revision=1), key(3, namespace="s")]
        for seed, name in enumerate(keys):
            tier.write(name, LATENT, payload_of(LATENT, seed)).result()
        for seed, name in enumerate(keys):
            target = np.zeros((1, LATENT.rows, LATENT.row_elements), LATENT.bits_dtype)
            tier.read_into([name], LATENT, target).result()
            assert np.array_equal(target[0], payload_of(LATENT, seed))

    def test_one_read_across_layers(self, tier: Tier) -> None:
        names = [key(index, layer_idx=layer) for index in range(3) for layer in (0, 1, 2)]
        for seed, name in enumerate(names):
            tier.write(name, LATENT, payload_of(LATENT, seed)).result()
        order = [4, 0, 3, 6, 1, 8, 5]
        target = np.zeros((len(order), LATENT.rows, LATENT.row_elements), LATENT.bits_dtype)
        tier.read_into([names[seed] for seed in order], LATENT, target).result()
        for position, seed in enumerate(order):
            assert np.array_equal(target[position], payload_of(LATENT, seed))

    def test_one_layer_with_several_batch_sizes(self, tier: Tier) -> None:
        wide = BlockLayout(3, 1, 24, 1, 8, 16, torch.float32)
        tier.write(key(0), LATENT, payload_of(LATENT, 0)).result()
        tier.write(key(1), wide, payload_of(wide, 1)).result()
        target = np.zeros((1, wide.rows, wide.row_elements), wide.bits_dtype)
        tier.read_into([key(1)], wide, target).result()
        assert np.array_equal(target[0], payload_of(wide, 1))

    def test_missing_block_is_an_error(self, tier: Tier) -> None:
        tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        target = np.zeros((2, BF16.rows, BF16.row_elements), BF16.bits_dtype)
        with pytest.raises(TierReadError, match=f"{tier.name}: reading layer 0, blocks 0 to 1"):
            tier.read_into([key(0), key(1)], BF16, target).result()

    def test_delete_frees_room(self, tier: Tier) -> None:
        tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        assert tier.blocks == 1 and tier.used_bytes >= BF16.nbytes
        tier.delete(key(0))
        assert tier.blocks == 0 and tier.used_bytes == 0
        target = np.zeros((1, BF16.rows, BF16.row_elements), BF16.bits_dtype)
        with pytest.raises(TierReadError, match="missing"):
            tier.read_into([key(0)], BF16, target).result()

    def test_capacity_is_never_exceeded(self, tmp_path: Path) -> None:
        probe = self.make(tmp_path / "probe")
        room = probe.occupied_bytes(BF16)
        tier = self.make(tmp_path / "tier", capacity_bytes=2 * room + 1)
        writes = [tier.write(key(index), BF16, payload_of(BF16, index)) for index in range(2)]
        with pytest.raises(TierFullError, match="full"):
            tier.write(key(2), BF16, payload_of(BF16, 2))
        assert tier.used_bytes <= 2 * room + 1
        for write in writes:
            write.result()
        tier.delete(key(0))
        tier.write(key(2), BF16, payload_of(BF16, 2)).result()
        assert tier.used_bytes == 2 * room
        tier.close()

    def test_failed_write_gives_its_room_back(self, tier: Tier) -> None:
        wrong = np.zeros((7, 3), BF16.bits_dtype)
        with pytest.raises((OSError, ValueError)):
            tier.write(key(0), BF16, wrong).result()
        assert tier.used_bytes == 0 and tier.blocks == 0

    def test_source_may_change_after_the_write(self, tier: Tier) -> None:
        source = payload_of(BF16, 0)
        tier.write(key(0), BF16, source).result()
        source.fill(0)
        self.check(tier, 0)

    def test_what_a_failed_try_left_is_no_obstacle(self, tier: Tier, monkeypatch: pytest.MonkeyPatch) -> None:
        """Let the first try fail after all is written: the second has to store the block again."""
        original, tries = tier.start_write, 0

        def failing_once(key: BlockKey, layout: BlockLayout, source: Bits) -> Sequence[TierFuture]:
            nonlocal tries
            tries += 1
            futures = original(key, layout, source)
            if tries > 1:
                return futures
            for future in futures:
                future.result(timeout=60)
            raise RuntimeError("connection lost")

        monkeypatch.setattr(tier, "start_write", failing_once)
        tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        assert tries == 2 and tier.blocks == 1 and self.occupied(tier) == tier.occupied_bytes(BF16)
        self.check(tier, 0)
        tier.delete(key(0))
        assert tier.blocks == 0 == tier.used_bytes

    def test_a_write_that_fails_for_good_can_be_made_again(
        self, tier: Tier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = tier.start_write

        def failing(key: BlockKey, layout: BlockLayout, source: Bits) -> Sequence[TierFuture]:
            for future in original(key, layout, source):
                future.result(timeout=60)
            raise RuntimeError("connection lost")

        with monkeypatch.context() as patch:
            patch.setattr(tier, "start_write", failing)
            with pytest.raises(TierError, match="connection lost") as raised:
                tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        assert isinstance(raised.value.__cause__, RuntimeError) and not isinstance(raised.value, TierFullError)
        assert tier.blocks == 0 == tier.used_bytes
        tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        self.check(tier, 0)

    def test_delete_many(self, tier: Tier) -> None:
        for index in range(40):
            tier.write(key(index), BF16, payload_of(BF16, index)).result()
        assert tier.delete_many([key(index) for index in range(40) if index % 3]) == {}
        assert tier.blocks == 14 and tier.used_bytes == 14 * tier.occupied_bytes(BF16)
        for index in range(0, 40, 3):
            self.check(tier, index)

    def test_removing_what_is_not_there_is_no_error(self, tier: Tier) -> None:
        tier.delete(key(5))
        tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        for _ in range(2):
            tier.delete(key(0))
        assert tier.blocks == 0 == tier.used_bytes

    def test_clear_removes_everything(self, tier: Tier) -> None:
        for index in range(3):
            tier.write(key(index), BF16, payload_of(BF16, index)).result()
        tier.clear()
        tier.close()

    def check(self, tier: Tier, index: int) -> None:
        """Check that the block of an index is what was written."""
        target = np.zeros((1, BF16.rows, BF16.row_elements), BF16.bits_dtype)
        tier.read_into([key(index)], BF16, target).result()
        assert np.array_equal(target[0], payload_of(BF16, index))

    def test_close_twice(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        tier.close()
        tier.close()

    def test_several_threads(self, tmp_path: Path) -> None:
        """Write, read and delete blocks in each thread, in a tier that is too small for all of them."""
        room = self.make(tmp_path / "probe").occupied_bytes(BF16)
        tier = self.make(tmp_path / "tier", capacity_bytes=6 * room)

        def work(thread: int) -> int:
            refused = 0
            for index in range(thread * 100, thread * 100 + 20):
                try:
                    tier.write(key(index), BF16, payload_of(BF16, index)).result()
                    tier.write(key(index, layer_idx=1), LATENT, payload_of(LATENT, index)).result()
                except TierFullError:
                    refused += 1
                for name, layout in ((key(index), BF16), (key(index, layer_idx=1), LATENT)):
                    target = np.zeros((1, layout.rows, layout.row_elements), layout.bits_dtype)
                    with suppress(TierReadError):
                        tier.read_into([name], layout, target).result()
                        assert np.array_equal(target[0], payload_of(layout, index))
                    assert self.occupied(tier) <= 6 * room
                    tier.delete(name)
            return refused

        with ThreadPoolExecutor(8) as threads:
            refused = sum(threads.map(work, range(8)))
        assert refused < 8 * 20
        assert tier.used_bytes == 0 and tier.blocks == 0
        tier.close()

    def occupied(self, tier: Tier) -> int:
        """Return the bytes that the tier takes of its storage."""
        return tier.used_bytes


class StorageTierContract(TierContract):
    """The contract of tiers that keep blocks in files, below a directory."""

    def test_lost_block_is_an_error_not_zeros(self, tier: Tier) -> None:
        tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        tier.write(key(1), BF16, payload_of(BF16, 1)).result()
        for path in self.chunk_files(tier):
            path.unlink()
        target = np.zeros((2, BF16.rows, BF16.row_elements), BF16.bits_dtype)
        with pytest.raises(TierReadError, match=f"{tier.name}: reading layer 0, blocks 0 to 1"):
            tier.read_into([key(0), key(1)], BF16, target).result()

    def test_truncated_block_is_an_error(self, tier: Tier) -> None:
        tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        for path in self.chunk_files(tier):
            path.write_bytes(path.read_bytes()[:-7])
        target = np.zeros((1, BF16.rows, BF16.row_elements), BF16.bits_dtype)
        with pytest.raises(TierReadError, match="missing or damaged"):
            tier.read_into([key(0)], BF16, target).result()

    def test_delete_removes_files(self, tier: Tier) -> None:
        tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        assert self.chunk_files(tier)
        tier.delete(key(0))
        assert not self.chunk_files(tier)

    @staticmethod
    def chunk_files(tier: Tier) -> list[Path]:
        """Return the files that hold blocks."""
        return [path for path in tier.root.rglob("*") if path.is_file() and path.name != "zarr.json"]
