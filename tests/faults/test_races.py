"""Late copies and poisoned buffers change nothing, and without the waits they do.

Each control removes one ordering rule and must give a wrong result: it shows that these tests can fail.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from hf_tiered_cache import KVCacheManager, TieredCache, TieredCacheConfig
from hf_tiered_cache.loading.buffers import GatherBuffers, LoadBuffer
from hf_tiered_cache.loading.reader import BlockReader, Split
from hf_tiered_cache.loading.split_load import SplitLoader
from hf_tiered_cache.manager.resources import EngineFactory
from hf_tiered_cache.transfer.engine import Event
from hf_tiered_cache.transfer.staging import SlotRing

from ..fakes import LateEngine, StagedLateEngine, UnorderedEngine
from ..models import generate, prompt_ids, tiny_llama

# For controls: delays that a busy machine cannot hide, and few steps, so that they do not take long.
FAR_TOO_LATE = {"max_delay_seconds": 0.05}
FEW_STEPS = {"max_new_tokens": 6}


def matches(engine_factory: EngineFactory, generation: dict[str, Any], **options: Any) -> bool:
    """Return true if generation with this engine gives the logits of DynamicCache, bit for bit."""
    model = tiny_llama()
    batch = 1 if "prompt_lookup_num_tokens" in generation else 2
    input_ids = prompt_ids(120, batch)
    expected_tokens, expected_logits = generate(model, input_ids, DynamicCache(config=model.config), **generation)
    settings = TieredCacheConfig(window_tokens=32, block_tokens=16, **options)
    with (
        KVCacheManager(settings, engine_factory=engine_factory) as manager,
        TieredCache(config=model.config, manager=manager) as cache,
    ):
        tokens, logits = generate(model, input_ids, cache, **generation)
        assert manager.stats().blocks_sealed > 0
    return torch.equal(tokens, expected_tokens) and torch.equal(logits, expected_logits)


GENERATIONS = {
    "greedy": {},
    "beams": {"num_beams": 3, "num_return_sequences": 2},
    "chunked": {"prefill_chunk_size": 17},
    "lookup": {"prompt_lookup_num_tokens": 5},
}


@pytest.mark.parametrize("generation", GENERATIONS.values(), ids=GENERATIONS.keys())
@pytest.mark.parametrize("prefetch_layers", [1, 3, 6])
def test_late_copies_change_nothing(generation: dict[str, Any], prefetch_layers: int, tmp_path: Path) -> None:
    assert matches(
        LateEngine,
        generation,
        prefetch_layers=prefetch_layers,
        l1_capacity=6 * 4096,
        l2_url=tmp_path,
        staging_blocks=2,
    )


def test_control_attention_that_does_not_wait_for_its_blocks() -> None:
    assert not matches(functools.partial(UnorderedEngine, **FAR_TOO_LATE), FEW_STEPS)


def test_control_buffer_released_before_attention_has_read_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def use(buffers: GatherBuffers, buffer: LoadBuffer) -> None:
        buffers.give_back(buffer)

    monkeypatch.setattr(GatherBuffers, "use", use)
    assert not matches(LateEngine, {})


def test_control_pack_buffer_reused_before_it_was_copied_out(monkeypatch: pytest.MonkeyPatch) -> None:
    original = SlotRing.next

    def next_without_waiting(ring: SlotRing, nbytes: int) -> torch.Tensor:
        ring._wait = lambda event: None
        return original(ring, nbytes)

    monkeypatch.setattr(SlotRing, "next", next_without_waiting)
    assert not matches(functools.partial(LateEngine, **FAR_TOO_LATE), FEW_STEPS)


class TestStreaming:
    """The same for streaming attention."""

    @staticmethod
    def matches(engine_factory: EngineFactory, generation: dict[str, Any], **options: Any) -> bool:
        """Return true if streaming attention gives DynamicCache's tokens, and its logits up to rounding."""
        model = tiny_llama()
        batch = 1 if "prompt_lookup_num_tokens" in generation else 2
        input_ids = prompt_ids(120, batch)
        expected_tokens, expected_logits = generate(
            model, input_ids, DynamicCache(config=model.config), **generation
        )
        settings = TieredCacheConfig(window_tokens=32, block_tokens=16, **options)
        try:
            with (
                KVCacheManager(settings, engine_factory=engine_factory) as manager,
                TieredCache.for_model(model, manager=manager) as cache,
            ):
                tokens, logits = generate(model, input_ids, cache, **generation)
                assert manager.stats().blocks_sealed > 0
        finally:
            model.set_attn_implementation("sdpa")
        return torch.equal(tokens, expected_tokens) and bool((logits - expected_logits).abs().max() < 1e-5)

    @pytest.mark.parametrize("generation", GENERATIONS.values(), ids=GENERATIONS.keys())
    @pytest.mark.parametrize("buffers", [2, 5])
    @pytest.mark.parametrize("engine", [LateEngine, StagedLateEngine])
    def test_late_copies_change_nothing(
        self, engine: EngineFactory, buffers: int, generation: dict[str, Any], tmp_path: Path
    ) -> None:
        assert self.matches(
            engine,
            generation,
            stream_buffers=buffers,
            stream_buffer_size=2 * 8192,
            l1_capacity=6 * 8192,
            l2_url=tmp_path,
            staging_blocks=2,
        )

    def test_control_attention_that_does_not_wait_for_its_blocks(self) -> None:
        assert not self.matches(functools.partial(UnorderedEngine, **FAR_TOO_LATE), FEW_STEPS)

    def test_control_attention_that_does_not_wait_for_the_read(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Each split is read from storage only after attention has used it."""
        ended = threading.Semaphore(0)
        original_end, original_run = BlockReader._end, SplitLoader.run

        def end(stream: BlockReader, load: Any) -> None:
            original_end(stream, load)
            ended.release()

        def run(loader: SplitLoader, load: Any) -> Event | None:
            ended.acquire(timeout=1)  # loads that are read ahead when the cache is closed never end
            return original_run(loader, load)

        monkeypatch.setattr(BlockReader, "_end", end)
        monkeypatch.setattr(SplitLoader, "run", run)
        monkeypatch.setattr(BlockReader, "_wait", lambda stream, load: None)
        assert not self.matches(LateEngine, FEW_STEPS)

    @pytest.mark.parametrize("engine", [LateEngine, StagedLateEngine])
    def test_control_buffer_released_before_attention_has_read_it(
        self, engine: EngineFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        original = BlockReader._splits

        def splits(stream: BlockReader, load: Any) -> Iterator[Split]:
            stream._pipeline.engine.recycled(load.buffer.storage)  # as the end of the load does
            yield from original(stream, load)

        monkeypatch.setattr(BlockReader, "_splits", splits)
        assert not self.matches(engine, {})
