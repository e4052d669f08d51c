"""Streaming attention against eager attention with `DynamicCache`, for every model that supports it and every
decoding mode.

Window 32, blocks of 16 tokens, two buffers of one to four blocks: a prompt of 100 tokens streams in several
splits.
"""

from __future__ import annotations

import copy
import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch.nn.functional import scaled_dot_product_attention
from transformers import (
    AttentionInterface,
    CLIPVisionConfig,
    DynamicCache,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.masking_utils import sdpa_mask, sliding_window_causal_mask_function

from hf_tiered_cache import KVCacheManager, TieredCache, TieredCacheError, TierReadError, UnsupportedModelError
from hf_tiered_cache.attention.online import AttentionRule, OnlineAttention
from hf_tiered_cache.core.row_map import RowMap
from hf_tiered_cache.integration.attention import TIERED, PendingAttention, tiered_attention_forward, tiered_mask
from hf_tiered_cache.integration.cache import _say_once_that_layers_are_gathered
from hf_tiered_cache.integration.streaming_models import STREAMING_MODELS

from .modes import BLOCK_TOKENS, MODES, WINDOW_TOKENS, Outcome, cache_argument, prompt
from .more_models import MORE_MODELS
from .zoo import TRANSFORMERS_VERSION, ZOO, model_of

# For logits between -8 and 8; sdpa with everything in memory differs from eager by up to 1e-5 on these models.
TOLERANCE = 2e-5
# A recurrent model amplifies rounding: here sdpa itself is 2.2e-5 away from eager, streaming 2.8e-5.
EXCEPTIONS = {("qwen3next", "beam_search"): 4e-5}


def text_config(model: PreTrainedModel) -> PreTrainedConfig:
    """Return the part of the config that describes the decoder."""
    return model.config.get_text_config(decoder=True)


@contextmanager
def attention(model: PreTrainedModel, implementation: str) -> Iterator[None]:
    """Use another attention within a context: models are shared between tests."""
    before = model.config._attn_implementation
    model.set_attn_implementation(implementation)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


def can_be_set(name: str) -> bool:
    """Return true if this version of the model has a choice of attention; a few older ones do not."""
    with attention(model_of(name), TIERED):
        return bool(text_config(model_of(name))._attn_implementation == TIERED)


STREAMED = [
    name for name in ZOO if text_config(model_of(name)).model_type in STREAMING_MODELS and can_be_set(name)
]
GATHERED = [name for name in ZOO if name not in STREAMED]
EXACT = [name for name in STREAMED if ZOO[name].dtype is torch.float32]


@functools.cache
def expected_outcome(name: str, mode: str) -> Outcome:
    """Return the outcome of eager attention with everything in memory."""
    with attention(model_of(name), "eager"):
        return MODES[mode](model_of(name), lambda config: DynamicCache(config=config))


def deviation(outcome: Outcome, expected: Outcome) -> float:
    """Return the largest difference of a logit, where tokens are the same. Logits of padding tokens do not count:
    sdpa and eager differ there as well."""
    real = torch.ones_like(expected.tokens, dtype=torch.bool) if expected.real is None else expected.real
    assert torch.equal(outcome.tokens[real], expected.tokens[real])
    worst = 0.0
    for step, (mine, theirs) in enumerate(zip(outcome.logits, expected.logits, strict=True)):
        rows = slice(None) if expected.real is None else expected.real[:, step]
        if len(mine[rows]):
            worst = max(worst, (mine[rows] - theirs[rows]).abs().amax().item())
    return worst


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, id=f"{name}-{mode}")
        for name in EXACT
        for mode in MODES
        if ZOO[name].refusal(mode) is None
    ],
)
def test_same_as_eager(name: str, mode: str, streamed_layers: list[int]) -> None:
    model = model_of(name)
    expected = expected_outcome(name, mode)

    def make_cache(config: PreTrainedConfig) -> TieredCache:
        return TieredCache(
            config=config,
            window_tokens=WINDOW_TOKENS,
            block_tokens=BLOCK_TOKENS,
            stream_buffers=2,
            stream_buffer_size="8KiB",
        )

    with attention(model, TIERED):
        outcome = MODES[mode](model, make_cache)
    with outcome.cache as cache:
        assert deviation(outcome, expected) <= EXCEPTIONS.get((name, mode), TOLERANCE)
        assert cache.stats().tiers["L1"].blocks > 0
    assert streamed_layers, "nothing was streamed"


def test_the_list_is_what_was_tested() -> None:
    """Every model on the list is tested."""
    tested = {text_config(model_of(name)).model_type for name in EXACT} | set(MORE_MODELS)
    if Version("5.24") <= TRANSFORMERS_VERSION:
        assert tested == STREAMING_MODELS
    assert tested <= STREAMING_MODELS


def test_bfloat16_is_as_exact_as_the_fused_kernel() -> None:
    """Against attention in float64, the error over many splits is at most that of sdpa over everything at once."""
    ratios = []
    for seed in range(8):
        torch.manual_seed(seed)
        keys, values = (torch.randn(1, 2, 1024, 64).bfloat16() for _ in range(2))
        for queries in (1, 96):
            query = torch.randn(1, 8, queries, 64).bfloat16()
            repeated = [states.repeat_interleave(4, dim=1) for states in (keys, values)]
            visible = torch.ones(queries, 1024, dtype=torch.bool).tril(1024 - queries)
            exact = scaled_dot_product_attention(
                query.double(), *(states.double() for states in repeated), attn_mask=visible
            )
            fused = scaled_dot_product_attention(query, *repeated, attn_mask=visible)
            streamed = _in_parts(query, keys, values, block_tokens=64).transpose(1, 2)
            errors = [(output.double() - exact).square().mean().sqrt() for output in (streamed, fused)]
            ratios.append((errors[0] / errors[1]).item())
    assert max(ratios) <= 1.0, ratios


def _in_parts(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, block_tokens: int) -> torch.Tensor:
    older = keys.shape[2] - query.shape[2]
    blocks = older // block_tokens
    with OnlineAttention(query, keys.shape[1], values.shape[3], AttentionRule()) as online:
        online.add(keys[:, :, older:], values[:, :, older:], older, newest=True)
        cut = blocks * block_tokens
        if older > cut:
            online.add(keys[:, :, cut:older], values[:, :, cut:older], cut)
        stored = [
            states[:, :, :cut].unflatten(2, (blocks, -1)).permute(2, 0, 1, 3, 4) for states in (keys, values)
        ]
        online.add_blocks(stored[0].contiguous(), stored[1].contiguous(), 0, RowMap([0]))
        return online.finish()


class TestForModel:
    """`TieredCache.for_model` and its messages."""

    def test_sets_the_attention(self) -> None:
        model = model_of("llama")
        with attention(model, "sdpa"):
            with TieredCache.for_model(model):
                assert model.config._attn_implementation == TIERED
            MODES["continued"](model, lambda config: DynamicCache(config=config))  # serves other caches as well

    @pytest.mark.parametrize("name", GATHERED)
    def test_others_stay_as_they_are_and_it_says_so_once(
        self, name: str, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = model_of(name)
        before = model.config._attn_implementation
        _say_once_that_layers_are_gathered.cache_clear()
        with caplog.at_level(logging.WARNING, logger="hf_tiered_cache"):
            for _ in range(2):
                TieredCache.for_model(model).close()
        notices = [record for record in caplog.records if "not known to work with streaming" in record.message]
        assert len(notices) == 1 and text_config(model).model_type in notices[0].message
        assert model.config._attn_implementation == before

    @pytest.mark.parametrize("change", ["bidirectional", "another config"])
    def test_a_model_that_is_not_what_its_type_says(self, change: str) -> None:
        model = copy.deepcopy(model_of("gemma"))
        for module in model.modules():
            if hasattr(module, "is_causal"):
                if change == "bidirectional":
                    module.is_causal = False
                else:
                    module.config = copy.deepcopy(module.config)
        before = model.config._attn_implementation
        with TieredCache.for_model(model):
            assert model.config._attn_implementation == before != TIERED

    def test_the_rest_of_a_composite_model_keeps_its_attention(self) -> None:
        model = LlavaForConditionalGeneration(
            LlavaConfig(
                vision_config=CLIPVisionConfig(
                    hidden_size=16,
                    intermediate_size=16,
                    num_hidden_layers=1,
                    num_attention_heads=2,
                    image_size=16,
                    patch_size=8,
                ),
                text_config=LlamaConfig(
                    vocab_size=97, hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
                ),
            )
        )
        before = model.config.vision_config._attn_implementation
        with TieredCache.for_model(model):
            assert model.config.text_config._attn_implementation == TIERED
            assert model.config.vision_config._attn_implementation == before


class Layers(torch.nn.Module):
    """The calls of a model that a cache sees: masks are made for "tiered" attention, then layers are updated."""

    def forward(
        self, cache: TieredCache, states: torch.Tensor, layer_idx: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Update one layer with K and V of these states; layer 0 begins a pass."""
        if layer_idx == 0:
            queries = states.shape[2]
            kv_length, kv_offset = cache.get_mask_sizes(queries, 0)
            tiered_mask(1, queries, kv_length, q_offset=cache.get_query_offset(0), kv_offset=kv_offset)
        return cache.update(states, states, layer_idx)


class TestWhatCannotBeStreamed:
    """Partial K and V never silently reach another attention function."""

    def test_unconsumed_update_raises_at_the_next(self) -> None:
        model = model_of("llama")
        with (
            attention(model, TIERED),
            TieredCache(config=model.config, window_tokens=32, block_tokens=16) as cache,
        ):
            states = torch.randn(1, text_config(model).num_key_value_heads, 100, 8)
            key, value = Layers()(cache, states, 0)
            assert key.shape[2] == 100 and PendingAttention.of(key, value) is not None
            for _ in range(2):
                with pytest.raises(UnsupportedModelError, match=r"layer 0 did not pass on"):
                    Layers()(cache, states, 1)
            with pytest.raises(UnsupportedModelError, match="layer 0"):
                copy.deepcopy(cache)
            cache.reset()
            cache.update(states, states, 1)

    def test_changed_states_are_not_taken_for_the_caches(self) -> None:
        """As in diffllama, tensors derived from K and V carry no mark, so the update stays unconsumed."""
        model = model_of("diffllama")
        attn = model.config._attn_implementation
        with attention(model, TIERED), pytest.MonkeyPatch.context() as patch:
            patch.setattr("hf_tiered_cache.integration.layer.can_stream", lambda config: True)
            with (
                TieredCache(config=model.config, window_tokens=32, block_tokens=16) as cache,
                pytest.raises(UnsupportedModelError, match="did not pass on"),
                torch.no_grad(),
            ):
                model(**prompt(100), use_cache=True, **cache_argument(cache))
        assert model.config._attn_implementation == attn

    @pytest.mark.parametrize(
        "changed", [{"dropout": 0.1}, {"is_causal": False}, {"position_bias": torch.zeros(1)}]
    )
    def test_unsupported_arguments(self, changed: dict[str, Any]) -> None:
        model = model_of("llama")
        states = torch.randn(1, text_config(model).num_key_value_heads, 100, 8)
        with (
            attention(model, TIERED),
            TieredCache(config=model.config, window_tokens=32, block_tokens=16) as cache,
        ):
            key, value = Layers()(cache, states, 0)
            with pytest.raises(UnsupportedModelError, match=r"which streaming attention does not do"):
                tiered_attention_forward(torch.nn.Module(), states, key, value, None, **changed)

    def test_one_update_one_attention(self) -> None:
        model = model_of("llama")
        states = torch.randn(1, text_config(model).num_key_value_heads, 100, 8)
        with (
            attention(model, TIERED),
            TieredCache(config=model.config, window_tokens=32, block_tokens=16) as cache,
        ):
            key, value = Layers()(cache, states, 0)
            tiered_attention_forward(torch.nn.Module(), states, key, value, None)
            with pytest.raises(UnsupportedModelError, match="twice"):
                tiered_attention_forward(torch.nn.Module(), states, key, value, None)

    def test_no_training(self) -> None:
        """The log-sum-exp of the kernels has no gradient, so training raises instead of giving wrong ones."""
        model = copy.deepcopy(model_of("gptoss")).requires_grad_()
        with attention(model, TIERED), pytest.raises(UnsupportedModelError, match="no gradients"):
            model(**prompt(20), labels=prompt(20)["input_ids"])

    def test_sparse_attention_is_refused(self) -> None:
        """Models with an indexer pass indices instead of a mask to an attention that they do not know."""
        model = model_of("deepseekv32")
        with attention(model, TIERED), pytest.raises(UnsupportedModelError, match="indices"), torch.no_grad():
            model(**prompt(20))


class TestAfterAnError:
    """A forward pass that ends in the middle leaves layers of different lengths, which is detected and undone."""

    @pytest.fixture
    def interrupted(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[PreTrainedModel, TieredCache]]:
        """A conversation of 101 tokens, then one forward pass that failed in layer 1."""
        model = model_of("llama")
        with (
            attention(model, TIERED),
            TieredCache(config=model.config, window_tokens=32, block_tokens=16) as cache,
            torch.no_grad(),
        ):
            model(**prompt(101), use_cache=True, **cache_argument(cache))
            with monkeypatch.context() as patch, pytest.raises(TierReadError):
                attend = KVCacheManager.attend

                def failing(manager: KVCacheManager, request_id: Any, layer_id: int, *rest: Any) -> torch.Tensor:
                    if layer_id == 1:
                        raise TierReadError("gone")
                    return attend(manager, request_id, layer_id, *rest)

                patch.setattr(KVCacheManager, "attend", failing)
                model(torch.tensor([[5]]), use_cache=True, **cache_argument(cache))
            assert [layer.get_seq_length() for layer in cache.layers] == [102, 101]
            yield model, cache

    def test_it_does_not_go_on_silently(self, interrupted: tuple[PreTrainedModel, TieredCache]) -> None:
        model, cache = interrupted
        for _ in range(2):
            with pytest.raises(TieredCacheError, match=r"layer 1.*crop\(0\)"):
                model(torch.tensor([[5]]), use_cache=True, **cache_argument(cache))
        with pytest.raises(TieredCacheError, match="layer 1"):
            cache.reorder_cache(torch.tensor([0]))

    def test_crop_takes_back_what_was_added(self, interrupted: tuple[PreTrainedModel, TieredCache]) -> None:
        model, cache = interrupted
        cache.crop(0)
        assert [layer.get_seq_length() for layer in cache.layers] == [101, 101]
        output = model(torch.tensor([[5]]), use_cache=True, **cache_argument(cache))
        stock = DynamicCache(config=model.config)
        model(**prompt(101), use_cache=True, **cache_argument(stock))
        expected = model(torch.tensor([[5]]), use_cache=True, **cache_argument(stock))
        assert (output.logits - expected.logits).abs().max() <= TOLERANCE

    def test_reset_begins_anew(self, interrupted: tuple[PreTrainedModel, TieredCache]) -> None:
        model, cache = interrupted
        cache.reset()
        model(**prompt(101), use_cache=True, **cache_argument(cache))


class TestMask:
    """Plain causal attention needs no `[q, kv]` mask."""

    def test_none_of_it_is_made(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """No such mask is made in prefill, in chunks or in decoding, with or without padding."""
        made: list[torch.Size] = []

        def forbidden(**arguments: Any) -> None:
            raise AssertionError("a dense mask")

        monkeypatch.setattr("hf_tiered_cache.integration.attention.sdpa_mask", forbidden)
        forward = tiered_attention_forward

        def watching(module: Any, query: Any, key: Any, value: Any, mask: torch.Tensor | None, **rest: Any) -> Any:
            if mask is not None:
                made.append(mask.shape)
            return forward(module, query, key, value, mask, **rest)

        monkeypatch.setitem(AttentionInterface._global_mapping, TIERED, watching)
        model = model_of("llama")
        with attention(model, TIERED):
            for mode in ("left_padded_greedy", "chunked_prefill", "beam_search", "prompt_lookup"):
                MODES[mode](
                    model, lambda config: TieredCache(config=config, window_tokens=32, block_tokens=16)
                ).cache.close()
        assert made and all(shape[1] == shape[2] == 1 for shape in made)

    def test_padding_is_told_with_its_end(self) -> None:
        padding = torch.tensor([[0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1]])
        mask = tiered_mask(batch_size=2, q_length=2, kv_length=6, q_offset=4, attention_mask=padding.bool())
        assert mask is not None and mask.shape == (2, 1, 1, 6) and mask._tiered_masked_tokens == 3
        no_padding = torch.ones(2, 6, dtype=torch.bool)
        assert tiered_mask(batch_size=2, q_length=2, kv_length=6, q_offset=4, attention_mask=no_padding) is None

    @pytest.mark.parametrize(
        "special",
        [
            {"local_size": 4, "mask_function": sliding_window_causal_mask_function(4)},
            {"allow_is_causal_skip": False},
            {"q_offset": 0},  # a static cache, whose end is still empty
        ],
        ids=["sliding", "packed or compiled", "static"],
    )
    def test_all_else_is_as_for_sdpa(self, special: dict[str, Any]) -> None:
        arguments: dict[str, Any] = {"batch_size": 1, "q_length": 2, "kv_length": 6, "q_offset": 4} | special
        mask = tiered_mask(**arguments)
        assert mask is not None
        assert torch.equal(mask, sdpa_mask(**(arguments | {"allow_is_causal_skip": False})))


def test_what_fits_the_window_is_left_to_sdpa() -> None:
    """No tier is opened, and logits are those of sdpa with DynamicCache, bit for bit."""
    model = model_of("llama")
    with attention(model, "sdpa"):
        expected = MODES["sampling"](model, lambda config: DynamicCache(config=config))
    with attention(model, TIERED):
        outcome = MODES["sampling"](model, lambda config: TieredCache(config=config, window_tokens=1024))
    with outcome.cache as cache:
        assert not cache.manager._resources.tiers
        assert deviation(outcome, expected) <= TOLERANCE


@pytest.mark.parametrize("name", ["llama", "gptoss", "gemma2"])
def test_other_caches_work_under_this_attention(name: str) -> None:
    model = model_of(name)
    for mode in ("left_padded_greedy", "chunked_prefill", "cropped"):
        if ZOO[name].refusal(mode) is None:
            with attention(model, TIERED):
                outcome = MODES[mode](model, lambda config: DynamicCache(config=config))
            assert deviation(outcome, expected_outcome(name, mode)) <= TOLERANCE
