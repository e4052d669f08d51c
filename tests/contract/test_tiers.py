"""What every tier does, and every storage tier; each implementation runs the same suite."""

from __future__ import annotations

import errno
import mmap
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from hf_tiered_cache import Tier, TieredCacheConfig, TierFullError, TierReadError
from hf_tiered_cache.blocks import Bits, BlockKey, BlockLayout, as_bits
from hf_tiered_cache.tiers import HostTier, NvmeTier, TierRegistry, ZarrTier

BF16 = BlockLayout(2, 2, 64, 2, 64, 16, torch.bfloat16)
LATENT = BlockLayout(1, 1, 24, 1, 8, 16, torch.float32)  # MLA: K and V differ
BYTES = BlockLayout(1, 2, 64, 2, 64, 16, torch.float8_e4m3fn)


def payload_of(layout: BlockLayout, seed: int) -> Bits:
    """Random content `[rows, row_elements]`."""
    info = np.iinfo(layout.bits_dtype)
    shape = (layout.rows, layout.row_elements)
    return np.random.default_rng(seed).integers(info.max, size=shape, dtype=layout.bits_dtype, endpoint=True)


def key(block_idx: int, layer_idx: int = 0, revision: int = 0, namespace: str = "r") -> BlockKey:
    return BlockKey(namespace, layer_idx, block_idx, revision)


class TierContract:
    """Subclass with `make`; see `Tier` for what is tested here."""

    def make(self, root: Path, capacity_bytes: int | None = None) -> Tier:
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

    def test_close_twice(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        tier.close()
        tier.close()

    def test_several_threads(self, tmp_path: Path) -> None:
        """Each writes, reads and deletes blocks of its own, in a tier that is too small for all of them."""
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
        """Bytes that the tier takes from where it keeps blocks."""
        return tier.used_bytes


class StorageTierContract(TierContract):
    """Of tiers that keep blocks in files, below a directory."""

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
        return [path for path in tier.root.rglob("*") if path.is_file() and path.name != "zarr.json"]


class TestHostTier(TierContract):
    def make(self, root: Path, capacity_bytes: int | None = None) -> HostTier:
        return HostTier("host", None, capacity_bytes, TieredCacheConfig())

    def occupied(self, tier: Tier) -> int:
        assert isinstance(tier, HostTier)
        return max(tier.mapped_bytes, tier.used_bytes)

    def test_needs_no_directory(self) -> None:
        assert not HostTier.needs_directory
        assert TierRegistry.get("host") is HostTier

    def test_hands_out_the_block_itself(self, tmp_path: Path) -> None:
        tier = self.make(tmp_path)
        tier.write(key(0), LATENT, payload_of(LATENT, 0)).result()
        tensor = tier.tensor(key(0))
        assert tensor.shape == (LATENT.nbytes,) and tensor.dtype == torch.uint8
        assert np.array_equal(as_bits(LATENT.over(tensor, 1))[0], payload_of(LATENT, 0))
        assert tensor.data_ptr() == tier.tensor(key(0)).data_ptr()
        with pytest.raises(KeyError):
            tier.tensor(key(1))
        tier.close()

    def test_kept_buffers_count_and_give_way(self, tmp_path: Path) -> None:
        room, other = (self.make(tmp_path).occupied_bytes(layout) for layout in (BF16, BYTES))
        tier = self.make(tmp_path, capacity_bytes=16 * room)
        for index in range(16):
            tier.write(key(index), BF16, payload_of(BF16, index)).result()
        assert tier.mapped_bytes == 16 * room
        for index in range(16):
            tier.delete(key(index))
        assert tier.used_bytes == 0 and tier.mapped_bytes == 2 * room, "an eighth of the capacity is kept"
        tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        assert tier.mapped_bytes == 2 * room, "memory is used again"
        for index in range(1, 1 + 15 * room // other):
            tier.write(key(index), BYTES, payload_of(BYTES, index)).result()
            assert tier.mapped_bytes <= 16 * room
        assert tier.used_bytes == tier.mapped_bytes == 16 * room
        with pytest.raises(TierFullError):
            tier.write(key(1, revision=1), LATENT, payload_of(LATENT, 0))
        tier.close()
        assert tier.mapped_bytes == 0

    def test_memory_goes_back_to_the_system(self, tmp_path: Path) -> None:
        large = BlockLayout(1, 8, 128, 8, 128, 1024, torch.float32)  # 8 MiB
        tier = self.make(tmp_path, capacity_bytes=8 * large.nbytes)
        process = psutil.Process()
        before = process.memory_info().rss
        payload = payload_of(large, 0)
        for index in range(8):
            tier.write(key(index), large, payload).result()
        held = process.memory_info().rss
        for index in range(8):
            tier.delete(key(index))
        after = process.memory_info().rss
        assert held - before >= 7 * large.nbytes, "the control"
        assert held - after >= 6 * large.nbytes
        tier.close()

    def test_no_memory_is_a_full_tier(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*args: object, **kwargs: object) -> None:
            raise OSError(errno.ENOMEM, "Cannot allocate memory")

        tier = self.make(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(mmap, "mmap", refuse)
            with pytest.raises(TierFullError, match="cannot be mapped"):
                tier.write(key(0), BF16, payload_of(BF16, 0))
        assert tier.used_bytes == tier.mapped_bytes == tier.blocks == 0
        tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        tier.close()


class TestNvmeTier(StorageTierContract):
    def make(self, root: Path, capacity_bytes: int | None = None) -> Tier:
        root.mkdir(exist_ok=True)
        return NvmeTier("L1", root, capacity_bytes, TieredCacheConfig())

    def test_accounts_whole_file_system_blocks(self, tier: Tier) -> None:
        assert LATENT.nbytes % 4096
        tier.write(key(0), LATENT, payload_of(LATENT, 0)).result()
        assert tier.used_bytes % 4096 == 0
        (chunk,) = self.chunk_files(tier)
        assert tier.used_bytes >= chunk.stat().st_blocks * 512

    @pytest.mark.parametrize("mode", ["direct", "buffered", "auto"])
    def test_io_modes(self, tmp_path: Path, mode: str) -> None:
        tier = NvmeTier("L1", tmp_path, None, TieredCacheConfig(l1_io_mode=mode))  # type: ignore[arg-type]
        assert tier.io_mode is None
        tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        target = np.zeros((1, BF16.rows, BF16.row_elements), BF16.bits_dtype)
        tier.read_into([key(0)], BF16, target).result()
        assert np.array_equal(target[0], payload_of(BF16, 0))
        assert tier.io_mode == ("buffered" if mode == "auto" else mode)
        tier.close()


class TestZarrTier(StorageTierContract):
    def make(self, root: Path, capacity_bytes: int | None = None) -> Tier:
        root.mkdir(exist_ok=True)
        return ZarrTier("L2", root, capacity_bytes, TieredCacheConfig(sink_tokens=4))

    def test_plain_zarr_reads_it(self, tier: Tier) -> None:
        """R3: zarr-python, which knows nothing of this package, sees keys and values where they belong."""
        zarr = pytest.importorskip("zarr")
        for index in (0, 1, 70):
            tier.write(key(index), BF16, payload_of(BF16, index)).result()
        group = zarr.open_group(str(tier.root / "r.rows2.rev0"), mode="r")
        assert group.attrs["format"] == "hf_tiered_cache/kv"
        assert group.attrs["block_tokens"] == 16 and group.attrs["first_token"] == 4
        assert group.attrs["kv_dtype"] == "bfloat16"
        for index in (0, 1, 70):
            expected_keys, expected_values = BF16.split(
                torch.from_numpy(payload_of(BF16, index).view(np.int16)).view(torch.bfloat16).unsqueeze(0)
            )
            for name, expected in (("keys", expected_keys), ("values", expected_values)):
                array = group[f"layers/0/{name}"]
                assert array.metadata.dimension_names == ("batch", "head", "token", "dim")
                stored = array[:, :, index * 16 : (index + 1) * 16]
                found = torch.from_numpy(stored.view(np.int16)).view(torch.bfloat16)
                assert torch.equal(found.view(torch.int16), expected[0].view(torch.int16))

    def test_flipped_bit_is_an_error(self, tier: Tier) -> None:
        tier.write(key(0), BF16, payload_of(BF16, 0)).result()
        chunk = self.chunk_files(tier)[0]
        damaged = bytearray(chunk.read_bytes())
        damaged[len(damaged) // 2] ^= 1
        chunk.write_bytes(damaged)
        target = np.zeros((1, BF16.rows, BF16.row_elements), BF16.bits_dtype)
        with pytest.raises(TierReadError, match="missing or damaged"):
            tier.read_into([key(0)], BF16, target).result()
