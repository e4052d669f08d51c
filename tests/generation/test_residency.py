"""The output stays the same while windows shrink and grow, and while blocks move through tiny tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedConfig

from hf_tiered_cache import KVCacheManager, TieredCache, TieredCacheConfig
from hf_tiered_cache.residency import table as residency
from hf_tiered_cache.residency.replay import RecordingTable, Trace, replay
from hf_tiered_cache.sequence import window_sizing
from hf_tiered_cache.sequence.pressure import MemoryState

from ..fakes import LateEngine, RandomGovernor, StagedLateEngine
from ..models import generate, prompt_ids, tiny_llama
from .modes import BLOCK_TOKENS, MODES
from .test_equality import expected_outcome
from .zoo import ZOO, model_of

ROW_BYTES = 4096  # of a block of `tiny_llama`
# In each step, other blocks are worth keeping than in the previous one.
RESTLESS = {
    "eviction": "random",
    "protection_steps": 0,
    "warmup_steps": 0,
    "high_watermark": 0.7,
    "low_watermark": 0.4,
}
MODELS = ["llama", "gemma2", "deepseekv3", "qwen3next", "gptoss", "gemma3n", "falcon"]
MATRIX = [(name, mode) for name in MODELS for mode in MODES if ZOO[name].refusal(mode) is None]


@pytest.fixture
def random_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(window_sizing, "WindowGovernor", RandomGovernor)


@pytest.mark.usefixtures("random_windows")
@pytest.mark.parametrize(("name", "mode"), MATRIX)
def test_windows_of_random_size(name: str, mode: str, tmp_path: Path) -> None:
    def make_cache(config: PreTrainedConfig) -> TieredCache:
        return TieredCache(config=config, window_tokens="auto", block_tokens=BLOCK_TOKENS, l2_url=tmp_path)

    expected = expected_outcome(name, mode)
    outcome = MODES[mode](model_of(name), make_cache)
    with outcome.cache as cache:
        outcome.assert_same(expected)
        assert len(cache.stats().window_changes) > 5


@pytest.mark.parametrize(("name", "mode"), MATRIX)
def test_blocks_that_never_rest(name: str, mode: str, tmp_path: Path) -> None:
    def make_cache(config: PreTrainedConfig) -> TieredCache:
        return TieredCache(
            config=config,
            window_tokens=2 * BLOCK_TOKENS,
            block_tokens=BLOCK_TOKENS,
            host_capacity="24KiB",
            l1_capacity="56KiB",
            l2_url=tmp_path,
            resident_capacity="16KiB",
            **RESTLESS,
        )

    expected = expected_outcome(name, mode)
    outcome = MODES[mode](model_of(name), make_cache)
    with outcome.cache:
        outcome.assert_same(expected)


@pytest.mark.parametrize("engine", [LateEngine, StagedLateEngine])
@pytest.mark.parametrize("streaming", [False, True], ids=["gather", "streaming"])
@pytest.mark.parametrize(
    "generation", [{}, {"num_beams": 3, "num_return_sequences": 2}, {"prefill_chunk_size": 17}]
)
@pytest.mark.usefixtures("random_windows")
def test_everything_moves_and_is_late(
    engine: type[LateEngine], streaming: bool, generation: dict[str, Any], tmp_path: Path
) -> None:
    model = tiny_llama()
    input_ids = prompt_ids(120, 2)
    expected_tokens, expected_logits = generate(model, input_ids, DynamicCache(config=model.config), **generation)
    block_bytes = 2 * generation.get("num_beams", 1) * ROW_BYTES
    settings = TieredCacheConfig(
        window_tokens="auto",
        block_tokens=BLOCK_TOKENS,
        host_capacity=3 * block_bytes,
        l1_capacity=7 * block_bytes,
        l2_url=tmp_path,
        resident_capacity=2 * block_bytes,
        **RESTLESS,
    )
    try:
        with KVCacheManager(settings, engine_factory=engine) as manager:
            make = TieredCache.for_model if streaming else TieredCache
            subject = {"model": model} if streaming else {"config": model.config}
            with make(**subject, manager=manager) as cache:
                tokens, logits = generate(model, input_ids, cache, **generation)
                stats = manager.stats()
    finally:
        model.set_attn_implementation("sdpa")
    assert torch.equal(tokens, expected_tokens)
    assert torch.equal(logits, expected_logits) or (streaming and (logits - expected_logits).abs().max() < 1e-5)
    assert min(stats.blocks_promoted, stats.blocks_demoted) > 0
    assert all(stats.tiers[name].blocks_served > 0 for name in ("L0", "host", "L1", "L2"))


def test_every_block_moves_several_times(tmp_path: Path) -> None:
    """Every block moves several times: the tiers are balanced before each step as well, without reads."""
    model = tiny_llama()
    input_ids = prompt_ids(120)
    expected_tokens, expected_logits = generate(
        model, input_ids, DynamicCache(config=model.config), max_new_tokens=48
    )
    options = {"host_capacity": 3 * ROW_BYTES, "l1_capacity": 7 * ROW_BYTES, "l2_url": tmp_path}
    with TieredCache(config=model.config, window_tokens=32, block_tokens=16, **options, **RESTLESS) as cache:

        def balance(*arguments: Any) -> None:
            write_back = cache.manager._resources.write_back
            if write_back is not None:
                write_back.balance_soon()
                cache.flush()

        handle = model.register_forward_pre_hook(balance)
        try:
            tokens, logits = generate(model, input_ids, cache, max_new_tokens=48)
        finally:
            handle.remove()
        stats = cache.stats()
    assert torch.equal(tokens, expected_tokens) and torch.equal(logits, expected_logits)
    assert stats.blocks_promoted > 3 * stats.blocks_sealed, stats
    assert stats.blocks_demoted > 3 * stats.blocks_sealed, stats


def test_default_policy_on_a_recorded_decode(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Exact decoding reads in a cycle: the default policy matches an oracle, at any capacity."""
    monkeypatch.setattr(residency, "HeatTable", RecordingTable)
    model = tiny_llama()
    with TieredCache(config=model.config, window_tokens=32, block_tokens=16) as cache:
        generate(model, prompt_ids(200), cache, max_new_tokens=60)
        opened = cache.manager._resources.residency
        assert opened is not None and isinstance(opened.heat, RecordingTable)
        opened.heat.trace.save(tmp_path / "decode.npz")
    trace = Trace.load(tmp_path / "decode.npz")
    assert trace.steps >= 59 and trace.most_blocks >= 4 * 13
    for share in (0.25, 0.5, 0.75):
        capacity = int(share * trace.most_blocks)
        found, best = (replay(trace, policy, capacity).hit_rate for policy in ("pinned", "belady"))
        assert found is not None and best is not None and found >= 0.95 * best


@pytest.mark.parametrize("name", ["smollm2-top-p", "smollm2-top-k"])
def test_heat_on_what_a_real_model_chose(name: str) -> None:
    """`heat` on the blocks of 64 tokens to which SmolLM2-135M attends most, in real text."""
    trace = Trace.load(Path(__file__).parents[2] / "docs" / "traces" / f"{name}.npz")
    for share in (0.1, 0.25, 0.5):
        capacity = int(share * trace.most_blocks)
        found, best = (replay(trace, policy, capacity).hit_rate for policy in ("heat", "belady"))
        assert found is not None and best is not None and found >= 0.85 * best


class Accelerator:
    """A device of 2 MiB, shared by the rest of the program and the cache."""

    total_bytes = 2 << 20

    def __init__(self) -> None:
        self.taken = 0.2
        self.manager: KVCacheManager

    def probe(self, device: torch.device) -> MemoryState:
        free_bytes = self.total_bytes * (1 - self.taken) - self.manager.stats().l0_bytes
        return MemoryState(int(free_bytes), self.total_bytes)


def test_windows_follow_the_free_memory() -> None:
    """R5: windows shrink when the rest of the program needs more, and grow back; the output stays the same."""
    model = tiny_llama()
    input_ids = prompt_ids(600)
    options = {"max_new_tokens": 150}
    expected_tokens, expected_logits = generate(model, input_ids, DynamicCache(config=model.config), **options)
    accelerator = Accelerator()
    settings = TieredCacheConfig(window_tokens="auto", block_tokens=BLOCK_TOKENS, window_max_tokens=640)
    sizes: list[int] = []

    def before_each_step(*arguments: Any) -> None:
        accelerator.taken = 0.7 if 60 <= len(sizes) < 90 else 0.2
        sizes.append(accelerator.manager.stats().window_tokens)

    with (
        KVCacheManager(settings, memory_probe=accelerator.probe) as accelerator.manager,
        TieredCache(config=model.config, manager=accelerator.manager) as cache,
    ):
        handle = model.register_forward_pre_hook(before_each_step)
        try:
            tokens, logits = generate(model, input_ids, cache, **options)
        finally:
            handle.remove()
    assert torch.equal(tokens, expected_tokens) and torch.equal(logits, expected_logits)
    before, during, after = sizes[59], sizes[89], sizes[-1]
    assert during < before / 2 and after > 2 * during, sizes
