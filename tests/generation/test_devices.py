"""R19: layers on different devices, each with its own engine, streams and buffers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from accelerate import dispatch_model
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache

from hf_tiered_cache import KVCacheManager, TieredCache, TieredCacheConfig
from hf_tiered_cache.core.metrics import Metrics
from hf_tiered_cache.transfer.engine import CopyEngine

from ..fakes import LateEngine, MetaEngine, pieces, random_kv
from ..models import generate, prompt_ids, tiny_llama


@pytest.mark.parametrize("streaming", [False, True])
def test_layers_on_two_devices(streaming: bool) -> None:
    """One device is the CPU, the other only accounts and has no data: nothing may stray between them."""
    engines: dict[str, CopyEngine] = {}

    def make_engine(device: torch.device, metrics: Metrics) -> CopyEngine:
        assert device.type not in engines, "one engine per device"
        engines[device.type] = (LateEngine if device.type == "cpu" else MetaEngine)(device, metrics)
        return engines[device.type]

    devices = ["cpu", "cpu", "meta", "meta", "cpu"]
    layers = [random_kv(200) for _ in devices]
    config = TieredCacheConfig(window_tokens=32, block_tokens=16, stream_buffer_size="8KiB")
    with KVCacheManager(config, engine_factory=make_engine) as manager:
        manager.allocate("a")
        for piece in pieces(200, [90, 1, 1, 18]):
            for layer_id, ((key, value), device) in enumerate(zip(layers, devices, strict=True)):
                new = key[:, :, piece].to(device), value[:, :, piece].to(device)
                if streaming:  # the keys are their own queries
                    output = manager.attend("a", layer_id, new[0], *new)
                    assert output.device.type == device
                    if device == "cpu":
                        visible = torch.ones(piece.stop, piece.stop, dtype=torch.bool).tril()[piece]
                        expected = scaled_dot_product_attention(
                            new[0], key[:, :, : piece.stop], value[:, :, : piece.stop], attn_mask=visible
                        )
                        assert (output.transpose(1, 2) - expected).abs().max() < 1e-5
                    continue
                keys, values = manager.update("a", layer_id, *new)
                assert keys.device.type == values.device.type == device
                assert keys.shape[2] == values.shape[2] == piece.stop
                if device == "cpu":
                    assert torch.equal(keys, key[:, :, : piece.stop])
                    assert torch.equal(values, value[:, :, : piece.stop])
        assert set(engines) == {"cpu", "meta"}
        stats = manager.stats()
        assert stats.prefetch_hits > 5 * stats.prefetch_misses
        assert streaming or stats.prefetch_misses == 0  # blocks that were sealed since are loaded last


@pytest.mark.parametrize("streaming", [False, True])
def test_accelerate_hooks_carry_the_cache_through(streaming: bool, tmp_path: Path) -> None:
    """A model whose layers accelerate moves between devices gives the same as with DynamicCache."""
    model = tiny_llama.__wrapped__()
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "model.rotary_emb": "cpu", "lm_head": "cpu"}
    device_map |= {f"model.layers.{index}": "cpu" if index < 2 else "disk" for index in range(4)}
    model = dispatch_model(model, device_map, offload_dir=str(tmp_path))
    expected = generate(model, prompt_ids(120), DynamicCache(config=model.config))
    options = {"window_tokens": 32, "block_tokens": 16}
    with TieredCache.for_model(model, **options) if streaming else TieredCache(model.config, **options) as cache:
        found = generate(model, prompt_ids(120), cache)
        assert cache.stats().blocks_sealed > 0
    assert torch.equal(found[0], expected[0])
    assert (found[1] - expected[1]).abs().max() <= (1e-5 if streaming else 0)
