"""Forward passes and other changes of all layers that end half-way are detected, and undone exactly."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import nn
from transformers import (
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import CacheLayerMixin, LinearAttentionCacheLayerMixin

from hf_tiered_cache import ConfigError, TieredCache, TieredCacheError
from hf_tiered_cache.integration.layer import TieredLayer

from ..models import generate, prompt_ids, tiny_llama
from .modes import CACHE_ARGUMENT, cache_argument
from .zoo import TRANSFORMERS_VERSION, ZOO, model_of

SMALL = {"window_tokens": 32, "block_tokens": 16}
TOLERANCE = 1e-4
FORMS = ("gather", "streaming")


class InjectedError(Exception):
    """The error that a model raises in the middle of a pass."""


@contextmanager
def failing(module: nn.Module, after_calls: int = 0) -> Iterator[None]:
    """Make a module raise, after some calls that succeed."""
    calls = 0

    def fail(*_: object) -> None:
        nonlocal calls
        calls += 1
        if calls > after_calls:
            raise InjectedError

    hook = module.register_forward_pre_hook(fail)
    try:
        yield
    finally:
        hook.remove()


def make(form: str, model: PreTrainedModel, **options: Any) -> TieredCache:
    """Make a cache with small windows; streaming attention changes the model."""
    settings = SMALL | options
    return (
        TieredCache.for_model(model, **settings)
        if form == "streaming"
        else TieredCache(config=model.config, **settings)
    )


def feed(model: PreTrainedModel, ids: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Feed some tokens and return the logits of the last one."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=True, **cache_argument(cache)).logits[:, -1]
    return logits


def right(model: PreTrainedModel, ids: torch.Tensor) -> torch.Tensor:
    """Return the same logits, computed without a cache."""
    with torch.no_grad():
        logits: torch.Tensor = model(input_ids=ids, use_cache=False).logits[:, -1]
    return logits


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Fail unless equal up to rounding: the passes are split differently."""
    torch.testing.assert_close(actual, expected, atol=TOLERANCE, rtol=1e-4)


def lengths(cache: TieredCache) -> list[int]:
    """Return the number of tokens of each tiered layer."""
    return [layer.get_seq_length() for layer in cache.layers if isinstance(layer, TieredLayer)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("fails_in", [0, 2])
@pytest.mark.parametrize("before_tokens", [0, 20, 90])
class TestAForwardPassThatFailed:
    """An error in an MLP, between the updates of two layers."""

    @pytest.fixture
    def model(self) -> PreTrainedModel:
        return copy.deepcopy(tiny_llama())

    @pytest.fixture
    def cache(self, model: PreTrainedModel, form: str, fails_in: int, before_tokens: int) -> Iterator[TieredCache]:
        with make(form, model) as cache:
            ids = prompt_ids(160)
            if before_tokens:
                feed(model, ids[:, :before_tokens], cache)
            with failing(model.model.layers[fails_in].mlp), pytest.raises(InjectedError):
                feed(model, ids[:, before_tokens : before_tokens + 40], cache)
            yield cache

    def test_going_on_raises(self, model: PreTrainedModel, cache: TieredCache, before_tokens: int) -> None:
        ids = prompt_ids(160)
        for _ in range(2):
            with pytest.raises(TieredCacheError, match=r"ended with an error before layer.*crop\(0\)"):
                feed(model, ids[:, before_tokens:120], cache)
        for use in (
            lambda: generate(model, ids, cache),
            lambda: cache.reorder_cache(torch.tensor([0])),
            lambda: cache.batch_repeat_interleave(2),
            lambda: cache.batch_select_indices(torch.tensor([0])),
            lambda: copy.deepcopy(cache),
        ):
            with pytest.raises(TieredCacheError, match=r"crop\(0\)"):
                use()

    @pytest.mark.parametrize("remedy", ["crop(0)", "crop to before", "crop further", "reset"])
    def test_is_taken_back(
        self, model: PreTrainedModel, cache: TieredCache, before_tokens: int, remedy: str
    ) -> None:
        ids, kept = prompt_ids(160), before_tokens
        if remedy == "crop(0)":
            cache.crop(0)
        elif remedy == "crop to before":
            cache.crop(before_tokens - cache.get_seq_length())
        elif remedy == "crop further":
            kept = before_tokens // 2
            cache.crop(kept - cache.get_seq_length())
        else:
            cache.reset()
            kept = 0
        assert lengths(cache) == [kept] * 4
        torch.testing.assert_close(
            feed(model, ids[:, kept:130], cache), right(model, ids[:, :130]), atol=TOLERANCE, rtol=0
        )

    def test_a_length_that_a_layer_never_had(self, cache: TieredCache, before_tokens: int) -> None:
        held = lengths(cache)
        with pytest.raises(TieredCacheError, match=r"never held more than.*crop\(0\)"):
            cache.crop(-1)
        assert lengths(cache) == held


def is_complete(cache: TieredCache, tokens: int) -> bool:
    """Return true if all layers hold this many tokens, in a cache without recurrent layers."""
    return not any(isinstance(layer, LinearAttentionCacheLayerMixin) for layer in cache.layers) and all(
        layer.get_seq_length() == tokens for layer in cache.layers if isinstance(layer, CacheLayerMixin)
    )


@pytest.mark.parametrize("form", FORMS)
def test_generate_can_be_called_again(form: str) -> None:
    """A chunk of the prompt runs out of memory; the program retries with smaller chunks."""
    model, ids = copy.deepcopy(tiny_llama()), prompt_ids(200)
    expected, _ = generate(tiny_llama(), ids, DynamicCache(config=model.config))
    with make(form, model) as cache:
        with failing(model.model.layers[1].mlp, after_calls=1), pytest.raises(InjectedError):
            generate(model, ids, cache, prefill_chunk_size=80)
        with pytest.raises(TieredCacheError, match=r"crop\(0\)"):
            generate(model, ids, cache, prefill_chunk_size=40)
        cache.crop(0)
        assert lengths(cache) == [80] * 4
        chunks = {"prefill_chunk_size": 40}
        if Version("5.23") > TRANSFORMERS_VERSION:  # which feeds the first 80 tokens again
            with pytest.raises(ConfigError, match="prefill_chunk_size"):
                generate(model, ids, cache, **chunks)
            chunks = {}
        tokens, _ = generate(model, ids, cache, **chunks)
        assert torch.equal(tokens, expected)


@pytest.mark.parametrize(
    "name", ["gemma3", "gptoss", "llama4", "jamba", "qwen3next", "lfm2", "falconh1", "deepseekv32", "gemma4"]
)
@pytest.mark.parametrize("tokens", [1, 30])
def test_stock_layers_beside(name: str, tokens: int) -> None:
    """Wherever the pass fails, `crop(0)` restores all layers, or says that only a reset does, which then works."""
    whole = model_of(name)
    decoder = whole.model if hasattr(whole, "model") else whole
    ids = prompt_ids(120) % 90 + 3
    for position, layer in enumerate(decoder.layers):
        with TieredCache(config=whole.config, **SMALL) as cache:
            feed(whole, ids[:, :70], cache)
            with failing(layer), pytest.raises(InjectedError):
                feed(whole, ids[:, 70 : 70 + tokens], cache)
            kept = cache.get_seq_length()  # all layers have them if the following ones share those of others
            if position and not is_complete(cache, kept):
                with pytest.raises(TieredCacheError, match="forward pass"):
                    feed(whole, ids[:, 70:110], cache)
                kept = 70
            try:
                cache.crop(0)
            except TieredCacheError as error:
                assert "reset()" in str(error)
                cache.reset()
                kept = 0
            stock = DynamicCache(config=whole.config)  # its result depends on the pieces (jamba)
            if kept:
                feed(whole, ids[:, :70], stock)
                if kept > 70:
                    feed(whole, ids[:, 70:kept], stock)
            assert_close(feed(whole, ids[:, kept:110], cache), feed(whole, ids[:, kept:110], stock))


def test_a_recurrent_layer_at_the_end() -> None:
    """A pass in which all attention layers were updated, but not the recurrent layer after them."""
    entry = ZOO["jamba"]
    options = dict(entry.options) | {"num_hidden_layers": 5, "attn_layer_period": 2, "attn_layer_offset": 1}
    model, ids = replace(entry, name="jamba-recurrent-last", options=options).build(), prompt_ids(120) % 90 + 3
    with TieredCache(config=model.config, **SMALL) as cache:
        assert cache.is_linear == [True, False, True, False, True]
        feed(model, ids[:, :70], cache)
        feed(model, ids[:, 70:71], cache)
        with failing(model.model.layers[4]), pytest.raises(InjectedError):
            feed(model, ids[:, 71:72], cache)
        with pytest.raises(TieredCacheError, match="before layer 4"):
            feed(model, ids[:, 71:72], cache)
        with pytest.raises(TieredCacheError, match=r"reset\(\)"):
            cache.crop(0)
        cache.reset()
        assert_close(feed(model, ids, cache), right(model, ids))


class TestChangesOfAllLayers:
    """A crop, a reorder, or a reset that ends between two layers."""

    @pytest.fixture
    def cache(self) -> Iterator[TieredCache]:
        model = copy.deepcopy(tiny_llama())
        with make("gather", model) as cache:
            feed(model, prompt_ids(120, batch=2), cache)
            yield cache

    @staticmethod
    def fail_in_layer(monkeypatch: pytest.MonkeyPatch, layer: TieredLayer, method: str) -> None:
        def fail(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(layer, method, fail, raising=True)

    def test_crop(self, cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
        model, ids = tiny_llama(), prompt_ids(120, batch=2)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            self.fail_in_layer(patch, cache.layers[2], "crop")
            cache.crop(-50)
        assert lengths(cache) == [70, 70, 120, 120]
        with pytest.raises(TieredCacheError, match=r"crop\(0\)"):
            feed(model, ids[:, 70:], cache)
        cache.crop(0)
        assert lengths(cache) == [70] * 4
        assert_close(feed(model, ids[:, 70:], cache), right(model, ids))

    @pytest.mark.parametrize(
        ("method", "argument"),
        [
            ("reorder_cache", torch.tensor([1, 0])),
            ("batch_repeat_interleave", 2),
            ("batch_select_indices", torch.tensor([1])),
        ],
    )
    def test_rows(self, cache: TieredCache, monkeypatch: pytest.MonkeyPatch, method: str, argument: Any) -> None:
        model, ids = tiny_llama(), prompt_ids(120, batch=2)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            self.fail_in_layer(patch, cache.layers[2], method)
            getattr(cache, method)(argument)
        for use in (lambda: feed(model, ids[:, :1], cache), lambda: cache.crop(0), lambda: copy.deepcopy(cache)):
            with pytest.raises(TieredCacheError, match=r"reset\(\)"):
                use()
        cache.reset()
        assert_close(feed(model, ids, cache), right(model, ids))

    def test_rows_that_are_refused_change_nothing(self, cache: TieredCache) -> None:
        model, ids = tiny_llama(), prompt_ids(121, batch=2)
        with pytest.raises(TieredCacheError):
            cache.reorder_cache(torch.tensor([0, 7]))
        feed(model, ids[:, 120:], cache)

    def test_reset(self, cache: TieredCache, monkeypatch: pytest.MonkeyPatch) -> None:
        model, ids = tiny_llama(), prompt_ids(120, batch=2)
        with monkeypatch.context() as patch, suppress(KeyboardInterrupt):
            patch.setattr(cache._binding, "renew", lambda: (_ for _ in ()).throw(KeyboardInterrupt()))
            cache.reset()
        with pytest.raises(TieredCacheError, match=r"reset\(\)"):
            feed(model, ids, cache)
        cache.reset()
        assert_close(feed(model, ids, cache), right(model, ids))

    def test_a_torn_layer(self, cache: TieredCache) -> None:
        """After an interrupt between window and block table, the place of the tokens is not certain."""
        model, ids = tiny_llama(), prompt_ids(130, batch=2)
        request = cache.manager._request_table.find(cache._binding.request_id)
        request.layers[1].torn = True
        for use in (
            lambda: feed(model, ids[:, 120:], cache),
            lambda: cache.crop(-70),
            lambda: cache.reorder_cache(torch.tensor([1, 0])),
            lambda: cache.layers[1].keys,
        ):
            with pytest.raises(TieredCacheError, match=r"reset\(\)"):
                use()
        cache.reset()
        assert_close(feed(model, ids, cache), right(model, ids))


class TestLayersThatAreNeverUpdated:
    """A config that lists more layers than the model updates: the cache learns which ones from generation."""

    def test_generate(self) -> None:
        model, ids = tiny_llama(), prompt_ids(100)
        config = LlamaConfig(**{**model.config.to_dict(), "num_hidden_layers": 6})
        expected, _ = generate(model, ids, DynamicCache(config=config))
        with TieredCache(config=config, **SMALL) as cache:
            tokens, _ = generate(model, ids, cache)
            assert torch.equal(tokens, expected)
            feed(model, tokens[:, cache.get_seq_length() :], cache)
            feed(model, tokens[:, :1], cache)
            with failing(model.model.layers[2].mlp), pytest.raises(InjectedError):
                feed(model, tokens[:, :3], cache)
            with pytest.raises(TieredCacheError, match="before layer 3"):
                feed(model, tokens[:, :3], cache)

    @pytest.mark.parametrize("encoder_layers", [3, 5])
    def test_decoder_of_another_depth(self, encoder_layers: int) -> None:
        config = T5Config(
            vocab_size=97,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=encoder_layers,
            num_decoder_layers=3,
            num_heads=4,
            pad_token_id=0,
            eos_token_id=None,
            decoder_start_token_id=0,
        )
        torch.manual_seed(0)
        model = T5ForConditionalGeneration(config).eval()
        options = {"max_new_tokens": 60, "do_sample": False}
        expected = model.generate(prompt_ids(20), **options)
        with TieredCache(config=config, **SMALL) as cache:
            wrapped = EncoderDecoderCache(cache, DynamicCache(config=config))
            actual = model.generate(prompt_ids(20), **{CACHE_ARGUMENT: wrapped}, **options)
            assert torch.equal(actual, expected)
            assert cache.stats().tiers["L1"].blocks > 0


class TestFilledByHand:
    """A cache that `update` calls have filled, not a model."""

    @staticmethod
    def states(layers: int, tokens: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
        generator = torch.Generator().manual_seed(0)
        shape = (1, 2, tokens, 16)
        return [
            (torch.randn(shape, generator=generator), torch.randn(shape, generator=generator))
            for _ in range(layers)
        ]

    @pytest.mark.parametrize("form", FORMS)
    @pytest.mark.parametrize("order", ["by layer", "by piece"])
    def test_then_a_model_goes_on(self, form: str, order: str) -> None:
        model, ids, states = copy.deepcopy(tiny_llama()), prompt_ids(9), self.states(4, 90)
        stock = DynamicCache(config=model.config)
        with make(form, model) as cache:
            for filled in (stock, cache):
                steps = [(piece, layer) for piece in (slice(0, 60), slice(60, 90)) for layer in range(4)]
                for piece, layer in sorted(steps, key=lambda step: step[1]) if order == "by layer" else steps:
                    keys, values = filled.update(*(state[:, :, piece] for state in states[layer]), layer)
                    assert torch.equal(keys, states[layer][0][:, :, : piece.stop])
                    assert torch.equal(values, states[layer][1][:, :, : piece.stop])
            torch.testing.assert_close(
                feed(model, ids, cache), feed(tiny_llama(), ids, stock), atol=TOLERANCE, rtol=0
            )

    def test_layers_of_different_lengths(self) -> None:
        model, states = tiny_llama(), self.states(4, 90)
        with make("gather", model) as cache:
            for layer, (keys, values) in enumerate(states):
                cache.update(keys[:, :, layer:], values[:, :, layer:], layer)
            with pytest.raises(TieredCacheError, match="as many in each layer"):
                feed(model, prompt_ids(9), cache)
