"""Streaming attention against eager attention with `DynamicCache`, once for each model that is not in the zoo."""

from __future__ import annotations

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from hf_tiered_cache import TieredCache
from hf_tiered_cache.integration.attention import TIERED
from hf_tiered_cache.integration.streaming_models import STREAMING_MODELS

from .modes import BLOCK_TOKENS, PROMPT_TOKENS, WINDOW_TOKENS, generate, prompt
from .more_models import MORE_MODELS, more_model

TOLERANCE = 2e-5  # as in test_streaming.py


def chunked_greedy(model: PreTrainedModel, cache: Cache) -> tuple[torch.Tensor, torch.Tensor]:
    """Return tokens and logits `[steps, rows, vocabulary]` of some steps after two padded prompts in chunks."""
    tokens, logits = generate(
        model, prompt(PROMPT_TOKENS, 57), cache, max_new_tokens=8, prefill_chunk_size=BLOCK_TOKENS + 3
    )
    return tokens, torch.stack(logits)


@pytest.mark.parametrize("model_type", MORE_MODELS)
def test_same_as_eager(model_type: str, streamed_layers: list[int]) -> None:
    model = more_model(model_type)
    assert model.config.get_text_config(decoder=True).model_type == model_type
    assert model_type in STREAMING_MODELS
    model.set_attn_implementation("eager")
    expected_tokens, expected_logits = chunked_greedy(model, DynamicCache(config=model.config))
    with TieredCache.for_model(
        model,
        window_tokens=WINDOW_TOKENS,
        block_tokens=BLOCK_TOKENS,
        stream_buffers=2,
        stream_buffer_size="8KiB",
    ) as cache:
        assert model.config._attn_implementation == TIERED
        tokens, logits = chunked_greedy(model, cache)
        assert cache.stats().tiers["L1"].blocks > 0
    assert streamed_layers, "nothing was streamed"
    assert torch.equal(tokens, expected_tokens)
    torch.testing.assert_close(logits, expected_logits, atol=TOLERANCE, rtol=0)
