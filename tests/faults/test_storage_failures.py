"""Storage that is full, slow, broken or damaged raises clear errors, and nothing is lost."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_tiered_cache import (
    KVCacheManager,
    TieredCache,
    TieredCacheConfig,
    TieredCacheError,
    TierError,
    TierFullError,
    TierReadError,
)

from ..fakes import FAULTS, eventually, random_kv
from ..models import CACHE_NAME, generate, prompt_ids, tiny_llama

SETTINGS = {"window_tokens": 32, "block_tokens": 16, "l1_tier": "faulty", "staging_blocks": 4}
DISK_FULL = "RESOURCE_EXHAUSTED: Error writing local file: No space left on device"


@pytest.fixture(autouse=True)
def faults() -> Iterator[None]:
    FAULTS.reset()
    yield
    FAULTS.reset()


def make(**options: object) -> KVCacheManager:
    return KVCacheManager(TieredCacheConfig(**(SETTINGS | options)))  # type: ignore[arg-type]


def append_until_it_raises(manager: KVCacheManager, key: torch.Tensor, value: torch.Tensor) -> int:
    """Append token by token; return how many tokens the manager reports when storage fails."""
    for token in range(key.shape[2]):
        try:
            manager.append("a", 0, key[:, :, token : token + 1], value[:, :, token : token + 1])
        except TierError:
            break
    else:
        pytest.fail("storage failed and nobody said so")
    return manager.tokens("a", 0)


def test_full_disk_without_l2_is_said_and_nothing_is_lost() -> None:
    with make() as manager:
        manager.allocate("a")
        key, value = random_kv(400)
        manager.append("a", 0, key[:, :, :100], value[:, :, :100])
        manager.flush()
        FAULTS.write_error = DISK_FULL
        held = 100 + append_until_it_raises(manager, key[:, :, 100:], value[:, :, 100:]) - 100
        assert torch.equal(manager.fetch("a", 0, torch.arange(held))[0], key[:, :, :held])
        with pytest.raises(TierFullError, match="no space left on the device"):
            for _ in range(10):
                manager.flush()
        FAULTS.write_error = None
        manager.append("a", 0, key[:, :, held:], value[:, :, held:])
        manager.flush()
        assert torch.equal(manager.fetch("a", 0, torch.arange(400))[1], value)
        assert manager.stats().tiers["L1"].blocks == manager.stats().blocks_sealed


def test_append_does_not_hang_when_staging_is_full_of_what_cannot_be_written() -> None:
    FAULTS.write_error = DISK_FULL
    with make() as manager:
        manager.allocate("a")
        key, value = random_kv(600)
        held = append_until_it_raises(manager, key, value)
        assert 32 <= held <= 600
        while held < 300:  # each further call raises again, or finds a slot
            try:
                manager.append("a", 0, key[:, :, held : held + 1], value[:, :, held : held + 1])
            except TierFullError as error:
                assert "no space left" in str(error)
                if manager.stats().blocks_sealed >= SETTINGS["staging_blocks"]:  # type: ignore[operator]
                    break
            held = manager.tokens("a", 0)
        held = manager.tokens("a", 0)
        assert torch.equal(manager.fetch("a", 0, torch.arange(held))[0], key[:, :, :held])


def test_full_disk_goes_on_in_l2(tmp_path: Path) -> None:
    with make(l2_url=tmp_path) as manager:
        manager.allocate("a")
        key, value = random_kv(400)
        manager.append("a", 0, key[:, :, :100], value[:, :, :100])
        manager.flush()
        FAULTS.write_error = DISK_FULL
        manager.append("a", 0, key[:, :, 100:], value[:, :, 100:])
        manager.flush()
        stats = manager.stats()
        assert stats.tiers["L2"].blocks > 0 and stats.tiers["L1"].blocks <= 4
        assert torch.equal(manager.fetch("a", 0, torch.arange(400))[0], key)


def test_capacity_without_l2_names_the_settings_to_change() -> None:
    with make(l1_capacity=3 * 4096) as manager:
        manager.allocate("a")
        key, value = random_kv(400)
        with pytest.raises(
            TierFullError, match=r"no tier has room .*Raise l1_capacity or give an l2_url in a new"
        ):
            manager.append("a", 0, key, value)
            manager.flush()
        held = manager.tokens("a", 0)
        assert torch.equal(manager.fetch("a", 0, torch.arange(held))[0], key[:, :, :held])
        assert manager.stats().tiers["L1"].used_bytes <= 3 * 4096
        manager.free("a")
        manager.allocate("a")
        manager.append("a", 0, key[:, :, :70], value[:, :, :70])
        manager.flush()
        assert torch.equal(manager.fetch("a", 0, torch.arange(70))[0], key[:, :, :70])


def test_really_full_file_system(tmp_path: Path) -> None:
    """A tmpfs of 256 KiB runs full, if this user may mount one."""
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(tmp_path)], capture_output=True, check=False
    )
    if mounted.returncode:
        pytest.skip("may not mount a tmpfs")
    try:
        with make(l1_path=tmp_path, l1_capacity="1GiB", l1_tier="nvme") as manager:
            manager.allocate("a")
            key, value = random_kv(4000)
            with pytest.raises(TierFullError, match="no space left on the device"):
                manager.append("a", 0, key, value)
                manager.flush()
            held = manager.tokens("a", 0)
            assert held > 400
            assert torch.equal(manager.fetch("a", 0, torch.arange(held))[0], key[:, :, :held])
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_read_failure_is_raised_and_passes() -> None:
    model = tiny_llama()
    with TieredCache(config=model.config, **SETTINGS) as cache:
        tokens, _ = generate(model, prompt_ids(120), cache)
        cache.flush()
        FAULTS.read_error = "DATA_LOSS: bad sector"
        with torch.no_grad(), pytest.raises(TierReadError, match=r"L1: reading layer \d, blocks .*bad sector"):
            for layer_idx in range(4):  # a load that began before the fault may still succeed
                cache.layers[layer_idx].keys  # noqa: B018
        FAULTS.read_error = None
        model_keys = cache.layers[0].keys
        assert model_keys is not None and model_keys.shape[2] == tokens.shape[1] - 1


@pytest.mark.parametrize("new_tokens", [1, 90])
def test_a_forward_pass_that_failed_is_taken_back(new_tokens: int) -> None:
    """Only some layers have the tokens of the failed pass, so going on raises until `crop(0)`."""
    model = tiny_llama()
    input_ids = prompt_ids(200 + new_tokens)
    expected_tokens, expected_logits = generate(model, input_ids, DynamicCache(config=model.config))
    with TieredCache(config=model.config, **SETTINGS) as cache, torch.no_grad():
        model(input_ids[:, :200], **{CACHE_NAME: cache})
        cache.flush()
        original = KVCacheManager.update

        def failing_in_the_third_layer(manager: KVCacheManager, name: str, layer_id: int, *kv: Any) -> Any:
            if layer_id == 2:
                manager.append(name, layer_id, *(states[:, :, : max(1, new_tokens // 2)] for states in kv))
                raise TierFullError("no space left")
            return original(manager, name, layer_id, *kv)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(KVCacheManager, "update", failing_in_the_third_layer)
            with pytest.raises(TierFullError):
                model(input_ids[:, 200:], **{CACHE_NAME: cache})
        lengths = [layer.get_seq_length() for layer in cache.layers]
        assert lengths[0] == 200 + new_tokens and lengths[3] == 200
        with pytest.raises(TieredCacheError, match=r"ended with an error in layer 2.*crop\(0\)"):
            model(input_ids[:, 200:], **{CACHE_NAME: cache})
        cache.crop(0)
        assert {layer.get_seq_length() for layer in cache.layers} == {200}
        tokens, logits = generate(model, input_ids, cache)
        assert torch.equal(tokens, expected_tokens) and torch.allclose(logits, expected_logits, atol=1e-5)


def test_missing_file_is_an_error_not_zeros(cache_directory: Path) -> None:
    with make(l1_tier="nvme") as manager:
        manager.allocate("a")
        key, value = random_kv(200)
        manager.append("a", 0, key, value)
        manager.flush()
        chunks = list(cache_directory.glob("*/L000*/c.*"))
        assert len(chunks) == manager.stats().tiers["L1"].blocks
        chunks[0].unlink()
        with pytest.raises(TierReadError, match="missing or damaged"):
            manager.update("a", 0, *random_kv(1))
        with pytest.raises(TierReadError, match="missing or damaged"):
            manager.fetch("a", 0, torch.arange(200))
        assert torch.equal(manager.fetch("a", 0, torch.arange(190, 200))[0], key[:, :, 190:])


def test_failed_delete_is_raised_at_the_next_call() -> None:
    with make() as manager:
        manager.allocate("a")
        manager.append("a", 0, *random_kv(200))
        manager.flush()
        FAULTS.delete_error = "PERMISSION_DENIED: not yours"
        manager.free("a")
        with pytest.raises(TierError, match=r"deleting layer 0, block .*not yours"):
            manager.flush()
        FAULTS.delete_error = None
        manager.flush()


def test_forward_goes_on_while_storage_is_slow_until_staging_is_used_up() -> None:
    """R11: writes run in the background; waiting for a slot is the only stall, and it is counted."""
    FAULTS.gate = threading.Event()
    with make() as manager:
        manager.allocate("a")
        key, value = random_kv(400)
        free_run = 32 + 16 * (SETTINGS["staging_blocks"] + 1)  # type: ignore[operator]
        manager.append("a", 0, key[:, :, :free_run], value[:, :, :free_run])
        assert manager.stats().blocks_sealed == SETTINGS["staging_blocks"]
        assert manager.stats().write_stall_seconds < 0.5
        assert torch.equal(manager.fetch("a", 0, torch.arange(free_run))[0], key[:, :, :free_run])
        caller = threading.Thread(
            target=manager.append, args=("a", 0, key[:, :, free_run:], value[:, :, free_run:])
        )
        caller.start()
        time.sleep(0.3)
        assert caller.is_alive(), "no slot is free, so the caller waits"
        FAULTS.gate.set()
        caller.join(timeout=20)
        assert not caller.is_alive()
        assert manager.stats().write_stall_seconds > 0.2
        assert torch.equal(manager.fetch("a", 0, torch.arange(400))[1], value)


@pytest.mark.skipif(not hasattr(os, "getpriority"), reason="no thread priorities here")
def test_background_threads_have_low_priority() -> None:
    """R11: background threads yield to the threads of the model."""
    own = os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with make() as manager:
        manager.allocate("a")
        manager.append("a", 0, *random_kv(200))
        manager.fetch("a", 0, torch.arange(200))
        threads = [thread for thread in threading.enumerate() if thread.name.startswith("hf-tiered")]
        assert {thread.name.rsplit("_", 1)[0] for thread in threads} == {
            "hf-tiered-copy-in",
            "hf-tiered-copy-out",
            "hf-tiered-prefetch",
            "hf-tiered-write-back",
        }
        for thread in threads:
            assert thread.native_id is not None
            assert os.getpriority(os.PRIO_PROCESS, thread.native_id) > own


def test_close_while_everything_moves(tmp_path: Path) -> None:
    FAULTS.delay_seconds = 0.01
    manager = make(l1_capacity=3 * 4096, l2_url=tmp_path)
    manager.allocate("a")
    for layer_id in range(4):
        manager.append("a", layer_id, *random_kv(300))
    manager.prefetch("a", torch.arange(300))
    started = time.monotonic()
    manager.close()
    assert time.monotonic() - started < 10
    assert eventually(lambda: list(tmp_path.iterdir()) == [])
