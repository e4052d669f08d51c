"""Calls that are easily wrong without an error are right, or refused before anything is computed."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    LlamaForCausalLM,
    MambaConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.generation.streamers import BaseStreamer

from hf_tiered_cache import ConfigError, TieredCache, TieredCacheError, UnsupportedModelError

from ..models import CACHE_NAME, generate, prompt_ids, tiny_llama
from .test_passes import FORMS, SMALL, assert_close, feed, make, right

GREEDY = {"max_new_tokens": 8, "do_sample": False}


@pytest.fixture
def model() -> LlamaForCausalLM:
    """A copy of the model whose attention the test may change."""
    return copy.deepcopy(tiny_llama())


@pytest.fixture(params=FORMS)
def cache(model: LlamaForCausalLM, request: pytest.FixtureRequest) -> Iterator[TieredCache]:
    """A cache for gathered or streaming attention."""
    with make(request.param, model) as cache:
        yield cache


class TestGenerate:
    """Checks that inspect the frame of `generate`."""

    def test_embeddings_that_are_cached(self, model: LlamaForCausalLM, cache: TieredCache) -> None:
        embeddings = model.get_input_embeddings()(prompt_ids(120)).detach()
        mask = torch.ones(1, 120, dtype=torch.long)

        def again() -> torch.Tensor:
            output = model.generate(inputs_embeds=embeddings, attention_mask=mask, **{CACHE_NAME: cache}, **GREEDY)
            assert isinstance(output, torch.Tensor)
            return output

        expected = tiny_llama().generate(inputs_embeds=embeddings, attention_mask=mask, **GREEDY)
        assert torch.equal(again(), expected)
        with pytest.raises(ConfigError, match=r"holds 127 tokens.*sequence of 120"):
            again()
        cache.crop(-7)
        assert torch.equal(again(), expected)

    def test_use_cache_false(self, model: LlamaForCausalLM, cache: TieredCache) -> None:
        with pytest.raises(ConfigError, match="use_cache=False"):
            generate(model, prompt_ids(120), cache, use_cache=False)
        assert cache.get_seq_length() == 0

    def test_another_longer_prompt(self, model: LlamaForCausalLM, cache: TieredCache) -> None:
        first, _ = generate(model, prompt_ids(100), cache)
        other = prompt_ids(180)
        with pytest.raises(ConfigError, match=r"differs from the 123 cached tokens at token \d"):
            generate(model, other, cache)
        # The same beginning is accepted, and so is a cropped one.
        longer = torch.cat([first, other[:, :20]], dim=1)
        expected, _ = generate(tiny_llama(), longer, DynamicCache(config=model.config))
        assert torch.equal(generate(model, longer, cache)[0], expected)
        mixed = torch.cat([longer[:, :50], other], dim=1)
        with pytest.raises(ConfigError, match=r"at token 50\b.*crop\(-"):
            generate(model, mixed, cache)
        cache.crop(50 - cache.get_seq_length())
        expected, _ = generate(tiny_llama(), mixed, DynamicCache(config=model.config))
        assert torch.equal(generate(model, mixed, cache)[0], expected)

    def test_other_ids_under_the_padding(self, model: LlamaForCausalLM, cache: TieredCache) -> None:
        ids, mask = prompt_ids(100, batch=2), torch.ones(2, 100, dtype=torch.long)
        mask[1, :30] = 0
        first, _ = generate(model, ids, cache, attention_mask=mask)
        first[1, :30] = 0
        longer = torch.cat([mask, torch.ones(2, first.shape[1] - 100, dtype=torch.long)], dim=1)
        generate(model, first, cache, attention_mask=longer)

    def test_attention_weights(self, model: LlamaForCausalLM) -> None:
        with (
            make("streaming", model) as cache,
            pytest.raises(UnsupportedModelError, match="output_attentions"),
        ):
            generate(model, prompt_ids(100), cache, output_attentions=True)


class TestEncoderDecoder:
    """T5 and BART: with a bare cache, cross-attention would append to the same layers."""

    @pytest.fixture(params=["t5", "bart"])
    def seq2seq(self, request: pytest.FixtureRequest) -> PreTrainedModel:
        torch.manual_seed(0)
        tokens = {"vocab_size": 97, "pad_token_id": 0, "eos_token_id": None, "decoder_start_token_id": 0}
        if request.param == "t5":
            config = T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=1, num_heads=4, **tokens)
            return T5ForConditionalGeneration(config).eval()
        sizes = {f"{side}_{what}": 1 for side in ("encoder", "decoder") for what in ("layers", "attention_heads")}
        widths = {"d_model": 32, "encoder_ffn_dim": 48, "decoder_ffn_dim": 48, "forced_eos_token_id": None}
        return BartForConditionalGeneration(BartConfig(**sizes, **widths, **tokens)).eval()

    def test_bare(self, seq2seq: PreTrainedModel) -> None:
        with TieredCache(config=seq2seq.config, **SMALL) as cache:
            with pytest.raises(UnsupportedModelError, match="EncoderDecoderCache"):
                seq2seq.generate(prompt_ids(40), **{CACHE_NAME: cache}, **GREEDY)
            with pytest.raises(UnsupportedModelError, match="EncoderDecoderCache"), torch.no_grad():
                seq2seq(prompt_ids(40), decoder_input_ids=prompt_ids(5), **{CACHE_NAME: cache})
            assert cache.get_seq_length() == 0

    def test_wrapped(self, seq2seq: PreTrainedModel) -> None:
        options = GREEDY | {"max_new_tokens": 70}
        expected = seq2seq.generate(prompt_ids(40), **options)
        with TieredCache(config=seq2seq.config, **SMALL) as cache:
            wrapped = EncoderDecoderCache(cache, DynamicCache(config=seq2seq.config))
            assert torch.equal(seq2seq.generate(prompt_ids(40), **{CACHE_NAME: wrapped}, **options), expected)
            assert cache.stats().tiers["L1"].blocks > 0


class Paused(BaseStreamer):
    """A streamer that stops a generation between two passes."""

    def __init__(self, after_puts: int) -> None:
        self.reached, self.go_on = threading.Event(), threading.Event()
        self._puts = after_puts

    def put(self, value: torch.Tensor) -> None:
        """Wait for `go_on` at the call with the chosen number."""
        self._puts -= 1
        if self._puts == 0:
            self.reached.set()
            assert self.go_on.wait(60)

    def end(self) -> None:
        """Do nothing at the end."""


class TestTwoThreads:
    """Two threads in one cache: the second gets an error, the first a right result."""

    def test_between_passes_of_generate(self, model: LlamaForCausalLM, cache: TieredCache) -> None:
        expected, _ = generate(tiny_llama(), prompt_ids(100), DynamicCache(config=model.config))
        paused, tokens = Paused(after_puts=6), []
        thread = threading.Thread(
            target=lambda: tokens.append(generate(model, prompt_ids(100), cache, streamer=paused)[0])
        )
        thread.start()
        assert paused.reached.wait(60)
        for use in (
            lambda: generate(model, prompt_ids(100), cache),
            lambda: feed(model, prompt_ids(3), cache),
            lambda: cache.crop(-1),
            cache.reset,
        ):
            with pytest.raises(TieredCacheError, match="another thread"):
                use()
        paused.go_on.set()
        thread.join()
        assert torch.equal(tokens[0], expected)
        # Afterwards any thread may use it.
        cache.crop(100 - cache.get_seq_length())
        assert torch.equal(generate(model, prompt_ids(100), cache)[0], expected)

    def test_within_a_pass(self, model: LlamaForCausalLM, cache: TieredCache) -> None:
        ids, outputs = prompt_ids(120), []
        reached, go_on = threading.Event(), threading.Event()

        def pause(*_: object) -> None:
            if threading.current_thread() is thread:
                reached.set()
                assert go_on.wait(60)

        model.model.layers[2].mlp.register_forward_pre_hook(pause)
        thread = threading.Thread(target=lambda: outputs.append(feed(model, ids, cache)))
        thread.start()
        assert reached.wait(60)
        for use in (lambda: feed(model, ids[:, :5], cache), lambda: cache.crop(0), cache.reset):
            with pytest.raises(TieredCacheError, match="another thread"):
                use()
        go_on.set()
        thread.join()
        assert_close(outputs[0], right(tiny_llama(), ids))

    def test_one_after_the_other(self, model: LlamaForCausalLM, cache: TieredCache) -> None:
        ids, outputs = prompt_ids(120), []
        for piece in (slice(0, 90), slice(90, 119), slice(119, 120)):
            thread = threading.Thread(target=lambda piece=piece: outputs.append(feed(model, ids[:, piece], cache)))
            thread.start()
            thread.join()
        assert_close(outputs[-1], right(tiny_llama(), ids))


class TestWhoStreams:
    """Passes stream if the running model has had its masks made for streaming attention."""

    def test_another_instance_does_not(self, model: LlamaForCausalLM) -> None:
        ids = prompt_ids(130)
        with make("streaming", model) as cache:
            feed(model, ids[:, :100], cache)
            assert_close(feed(tiny_llama(), ids[:, 100:120], cache), right(tiny_llama(), ids[:, :120]))
            assert_close(feed(model, ids[:, 120:], cache), right(tiny_llama(), ids))

    @pytest.mark.parametrize("queries", [1, 7])
    def test_a_mask_of_the_callers_own(
        self, model: LlamaForCausalLM, streamed_layers: list[int], queries: int
    ) -> None:
        """With a 4-D mask, K and V are gathered and the mask is respected."""
        ids, total = prompt_ids(120), 100 + queries
        visible = torch.ones(queries, total, dtype=torch.bool).tril(100)
        visible[:, 10:20] = False
        mask = visible[None, None]
        stock = DynamicCache(config=model.config)
        with make("streaming", model) as cache:
            outputs = []
            for runner, filled in ((tiny_llama(), stock), (model, cache)):
                feed(runner, ids[:, :100], filled)
                streamed_layers.clear()
                with torch.no_grad():
                    output = runner(ids[:, 100:total], attention_mask=mask, **{CACHE_NAME: filled})
                outputs.append(output.logits)
            assert not streamed_layers
            assert_close(outputs[1], outputs[0])


class TestCompile:
    """`torch.compile` around the model, or around parts of it."""

    @pytest.fixture(autouse=True)
    def fresh(self) -> Iterator[None]:
        torch._dynamo.reset()
        yield
        torch._dynamo.reset()

    @pytest.mark.filterwarnings("ignore")
    @pytest.mark.parametrize("what", ["forward", "layers"])
    def test_same_logits(self, model: LlamaForCausalLM, cache: TieredCache, what: str) -> None:
        expected, expected_logits = generate(
            tiny_llama(), prompt_ids(90), DynamicCache(config=model.config), **GREEDY
        )
        if what == "forward":
            model.forward = torch.compile(model.forward, backend="aot_eager")
        else:
            for layer in model.model.layers:
                layer.forward = torch.compile(layer.forward, backend="aot_eager")
        tokens, logits = generate(model, prompt_ids(90), cache, **GREEDY)
        assert torch.equal(tokens, expected)
        assert_close(logits, expected_logits)

    def test_fullgraph_says_why_not(self, model: LlamaForCausalLM, cache: TieredCache) -> None:
        model.forward = torch.compile(model.forward, backend="aot_eager", fullgraph=True)
        with pytest.raises(torch._dynamo.exc.Unsupported, match="compile without fullgraph=True"):
            feed(model, prompt_ids(20), cache)


class TestAutocast:
    """float32 weights under `torch.autocast`: keys are float32, values bfloat16."""

    @pytest.mark.parametrize("storage", ["host", "L1", "L2"])
    def test_gathered_is_equal(self, model: LlamaForCausalLM, storage: str, tmp_path: Path) -> None:
        options = {
            "host": {"host_capacity": "64MiB"},
            "L1": {"host_capacity": 0},
            "L2": {"host_capacity": 0, "l1_capacity": 0, "l2_url": str(tmp_path)},
        }[storage]
        with make("gather", model, **options) as cache, torch.autocast("cpu", torch.bfloat16):
            stock = DynamicCache(config=model.config)
            expected, expected_logits = generate(model, prompt_ids(120), stock)
            tokens, logits = generate(model, prompt_ids(120), cache)
            assert torch.equal(tokens, expected) and torch.equal(logits, expected_logits)
            assert cache.stats().tiers[storage].blocks > 0
            assert torch.equal(cache.layers[1].keys, stock.layers[1].keys)
            assert torch.equal(cache.layers[1].values, stock.layers[1].values.to(torch.bfloat16))

    def test_streamed_is_as_exact_as_sdpa(self, model: LlamaForCausalLM) -> None:
        ids = prompt_ids(160)
        with torch.no_grad():
            exact = model.double()(ids, use_cache=False).logits[:, -1]
        model.float()
        with torch.autocast("cpu", torch.bfloat16):
            plain = (right(tiny_llama(), ids) - exact).norm()
            with make("streaming", model) as cache:
                feed(model, ids[:, :150], cache)
                streamed = (feed(model, ids[:, 150:], cache) - exact).norm()
        assert streamed < 1.5 * plain

    def test_on_and_off(self, model: LlamaForCausalLM) -> None:
        ids, outputs = prompt_ids(140), []
        with make("gather", model) as cache:
            caches: list[Cache] = [DynamicCache(config=model.config), cache]
            for filled in caches:
                with torch.autocast("cpu", torch.bfloat16):
                    feed(model, ids[:, :100], filled)
                outputs.append(feed(model, ids[:, 100:], filled))
            assert torch.equal(*outputs)


class TestSmallThings:
    """Copies, representations, arguments."""

    def test_a_shallow_copy_is_the_cache(self, cache: TieredCache) -> None:
        assert copy.copy(cache) is cache

    def test_repr_without_attention(self) -> None:
        assert "0 of 2 layers tiered" in repr(TieredCache(config=MambaConfig(num_hidden_layers=2)))

    @pytest.mark.parametrize("wrong", ["gpt2", None, object()])
    def test_no_model(self, wrong: Any) -> None:
        with pytest.raises(ConfigError, match="not a model"):
            TieredCache.for_model(wrong)

    def test_no_manager(self, model: LlamaForCausalLM) -> None:
        with pytest.raises(ConfigError, match="not a KVCacheManager"):
            TieredCache(config=model.config, manager=TieredCache(config=model.config))  # type: ignore[arg-type]
