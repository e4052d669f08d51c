"""R19: layers on different devices, each with an engine, streams and buffers of its own."""

from __future__ import annotations

from pathlib import Path

import torch
from accelerate import dispatch_model
from transformers import DynamicCache

from hf_tiered_cache import KVCacheManager, TieredCache, TieredCacheConfig
from hf_tiered_cache.metrics import Metrics
from hf_tiered_cache.transfer.engine import CopyEngine

from ..fakes import LateEngine, MetaEngine, pieces, random_kv
from ..models import generate, prompt_ids, tiny_llama


def test_layers_on_two_devices() -> None:
    """One device is the CPU, the other keeps the books without data: nothing may stray between them."""
    engines: dict[str, CopyEngine] = {}

    def make_engine(device: torch.device, metrics: Metrics) -> CopyEngine:
        assert device.type not in engines, "one engine per device"
        engines[device.type] = (LateEngine if device.type == "cpu" else MetaEngine)(device, metrics)
        return engines[device.type]

    devices = ["cpu", "cpu", "meta", "meta", "cpu"]
    layers = [random_kv(200) for _ in devices]
    config = TieredCacheConfig(window_tokens=32, block_tokens=16)
    with KVCacheManager(config, engine_factory=make_engine) as manager:
        manager.allocate("a")
        for piece in pieces(200, [90, 1, 1, 18]):
            for layer_id, ((key, value), device) in enumerate(zip(layers, devices, strict=True)):
                keys, values = manager.update(
                    "a", layer_id, key[:, :, piece].to(device), value[:, :, piece].to(device)
                )
                assert keys.device.type == values.device.type == device
                assert keys.shape[2] == values.shape[2] == piece.stop
                if device == "cpu":
                    assert torch.equal(keys, key[:, :, : piece.stop])
                    assert torch.equal(values, value[:, :, : piece.stop])
        assert set(engines) == {"cpu", "meta"}
        stats = manager.stats()
        assert stats.prefetch_misses == 0 and stats.prefetch_hits > 0


def test_accelerate_hooks_carry_the_cache_through(tmp_path: Path) -> None:
    """A model whose layers accelerate moves about gives what it gives with DynamicCache."""
    model = tiny_llama.__wrapped__()
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{index}": "cpu" if index < 2 else "disk" for index in range(4)}
    model = dispatch_model(model, device_map, offload_dir=str(tmp_path))
    expected = generate(model, prompt_ids(120), DynamicCache(config=model.config))
    with TieredCache(config=model.config, window_tokens=32, block_tokens=16) as cache:
        found = generate(model, prompt_ids(120), cache)
        assert cache.stats().blocks_sealed > 0
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
