"""The package's tiers pass the contract suite, and keep the additional promises of each."""

from __future__ import annotations

import errno
import mmap
from pathlib import Path

import numpy as np
import psutil
import pytest
import torch

from hf_tiered_cache import Tier, TieredCacheConfig, TierFullError, TierReadError
from hf_tiered_cache.core.blocks import BlockLayout, as_bits
from hf_tiered_cache.testing import StorageTierContract, TierContract
from hf_tiered_cache.testing.tiers import BF16, BYTES, LATENT, key, payload_of
from hf_tiered_cache.tiers import HostTier, NvmeTier, TierRegistry, ZarrTier


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
        """R3: zarr-python, which knows nothing of this package, finds keys and values in their places."""
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

    def test_a_group_goes_with_its_last_block(self, tier: Tier) -> None:
        names = [key(0), key(1), key(0, revision=1), key(0, namespace="s")]
        for name in names:
            tier.write(name, BF16, payload_of(BF16, 0)).result()
        tier.delete(names[0])
        assert {path.name for path in tier.root.iterdir()} == {"r.rows2.rev0", "r.rows2.rev1", "s.rows2.rev0"}
        assert tier.delete_many(names[1:3]) == {}
        assert [path.name for path in tier.root.iterdir()] == ["s.rows2.rev0"]
        tier.write(names[0], BF16, payload_of(BF16, 0)).result()  # it may come back
        self.check(tier, 0)
