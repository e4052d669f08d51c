"""R1: only the window stays on the accelerator, whatever the length."""

from __future__ import annotations

import torch

from hf_tiered_cache import KVCacheManager, TieredCache, TieredCacheConfig
from hf_tiered_cache.core.metrics import Metrics

from ..fakes import LateEngine, random_kv
from ..models import generate, prompt_ids, tiny_llama

LAYERS, TOKEN_BYTES = 12, 2 * 2 * 16 * 4  # K and V, 2 heads of 16, float32


class CountingEngine(LateEngine):
    """An engine that adds up real allocations, beside those that the package accounts."""

    def __init__(self, device: torch.device, metrics: Metrics) -> None:
        super().__init__(device, metrics, max_delay_seconds=0.0)
        self.live_bytes = self.peak_bytes = 0

    def _allocate(self, nbytes: int) -> torch.Tensor:
        self.live_bytes += nbytes
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return super()._allocate(nbytes)

    def free(self, buffer: torch.Tensor) -> None:
        self.live_bytes -= buffer.numel()
        super().free(buffer)


def _peak(tokens: int, prefetch_layers: int = 2) -> tuple[int, int]:
    """Return the peak of L0, accounted and allocated, for a model of 12 layers after prefill and some steps."""
    engines = []

    def make_engine(device: torch.device, metrics: Metrics) -> CountingEngine:
        engines.append(CountingEngine(device, metrics))
        return engines[-1]

    config = TieredCacheConfig(window_tokens=64, block_tokens=32, prefetch_layers=prefetch_layers)
    with KVCacheManager(config, engine_factory=make_engine) as manager:
        manager.allocate("a")
        for step_tokens in (tokens, 1, 1, 1):
            for layer_id in range(LAYERS):
                manager.update("a", layer_id, *random_kv(step_tokens, key_shape=(2, 16), value_shape=(2, 16)))
        peak = manager.stats().peak_l0_bytes
    assert engines[0].live_bytes == 0, "everything is given back"
    return peak, engines[0].peak_bytes


def test_peak_is_windows_and_a_few_layers() -> None:
    """The peak is each layer's window, and one whole layer per gather buffer."""
    for tokens in (1000, 4000):
        for prefetch_layers in (1, 2, 4):
            accounted, allocated = _peak(tokens, prefetch_layers)
            assert accounted == allocated
            windows = LAYERS * (64 + 2 * 32) * TOKEN_BYTES
            buffers = (prefetch_layers + 1) * (tokens + 64) * TOKEN_BYTES * 9 // 8
            packing = 2 * 32 * TOKEN_BYTES
            assert accounted <= windows + buffers + packing + 64 * 1024
            if tokens == 4000 and prefetch_layers < 4:
                assert accounted < LAYERS * tokens * TOKEN_BYTES / 2


def test_wider_window_more_memory_same_output() -> None:
    """R1: a wider window takes more memory and gives the same output."""
    model, peaks, outputs = tiny_llama(), [], []
    for window_tokens in (16, 32, 64, 128, 1024):
        with TieredCache(config=model.config, window_tokens=window_tokens, block_tokens=16) as cache:
            outputs.append(generate(model, prompt_ids(500), cache, max_new_tokens=8)[1])
            assert cache.stats().tiers["L0"].tokens <= window_tokens + 16
            peaks.append(cache.stats().peak_l0_bytes)
    assert peaks[:-1] == sorted(peaks[:-1]) and len(set(peaks)) == len(peaks)
    assert all(torch.equal(output, outputs[-1]) for output in outputs)
