"""Publicly reported faults of caches that move their data: one test per report, against `DynamicCache`.

The first part has the twelve cases of the project's list (10, layers over two devices, is in `test_devices.py`);
the rest are promises of `TieredCache` that no equality matrix covers.
"""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    Cache,
    DynamicCache,
    EncoderDecoderCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    T5Config,
    T5ForConditionalGeneration,
)
from transformers.cache_utils import DynamicLayer

from hf_tiered_cache import TieredCache
from hf_tiered_cache.core.errors import CacheClosedError, TieredCacheError, UnsupportedModelError

from ..fakes import eventually
from .modes import (
    BLOCK_TOKENS,
    CACHE_ARGUMENT,
    WINDOW_TOKENS,
    cache_argument,
    extend,
    generate,
    prompt,
)
from .zoo import SLIDING_TOKENS, VOCABULARY, ZOO, ZooEntry, model_of

LENGTH = 100
SMALL = {"window_tokens": WINDOW_TOKENS, "block_tokens": BLOCK_TOKENS}
STORAGES = ("l1", "l2")

Make = Callable[[PreTrainedConfig], Cache]


def storage_options(storage: str, directory: Path) -> dict[str, Any]:
    """Return settings that put every sealed block into L1, or into L2."""
    return {} if storage == "l1" else {"l1_capacity": 0, "l2_url": str(directory)}


def stock(config: PreTrainedConfig) -> Cache:
    """Make the oracle's cache."""
    return DynamicCache(config=config)


def tiered(config: PreTrainedConfig, **options: Any) -> TieredCache:
    """Make a cache with a small window, so that most of its tokens are in blocks."""
    return TieredCache(config=config, **(SMALL | options))


def logits_of(model: PreTrainedModel, input_ids: torch.Tensor, mask: torch.Tensor, cache: Cache) -> torch.Tensor:
    """Run a forward pass that appends to `cache`; return the logits of every new token."""
    with torch.no_grad():
        output = model(input_ids=input_ids, attention_mask=mask, use_cache=True, **cache_argument(cache))
    logits: torch.Tensor = output.logits
    return logits


def forward_pieces(
    model: PreTrainedModel, inputs: dict[str, torch.Tensor], cache: Cache, pieces: list[int]
) -> list[torch.Tensor]:
    """Run forward passes over consecutive pieces of the prompt; return the logits of each."""
    ends = torch.tensor(pieces).cumsum(0).tolist()
    return [
        logits_of(model, inputs["input_ids"][:, end - size : end], inputs["attention_mask"][:, :end], cache)
        for size, end in zip(pieces, ends, strict=True)
    ]


def assert_all_equal(actual: list[torch.Tensor], expected: list[torch.Tensor]) -> None:
    """Fail unless both have the same number of tensors, equal bit for bit."""
    assert len(actual) == len(expected)
    for step, (mine, theirs) in enumerate(zip(actual, expected, strict=True)):
        assert torch.equal(mine, theirs), f"step {step} differs by {(mine - theirs).abs().max().item():.3g}"


def bare_config(layers: int = 2) -> PreTrainedConfig:
    """Return a config for caches that are used without a model."""
    return LlamaConfig(num_hidden_layers=layers, hidden_size=32, num_attention_heads=4)


def random_states(
    batch: int, tokens: int, generator: torch.Generator, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K `[B, 2, T, 8]` and V `[B, 3, T, 5]`: no code may assume that they have the same shape."""
    keys = torch.randn(batch, 2, tokens, 8, generator=generator)
    values = torch.randn(batch, 3, tokens, 5, generator=generator)
    return keys.to(dtype), values.to(dtype)


def append_and_compare(
    mine: Cache, theirs: Cache, states: tuple[torch.Tensor, torch.Tensor], layer_idx: int
) -> None:
    """Append the same tokens to both caches and compare what they return."""
    assert mine.get_mask_sizes(states[0].shape[2], layer_idx) == theirs.get_mask_sizes(
        states[0].shape[2], layer_idx
    )
    # Each cache gets its own tensors, so that neither profits from tensors that the other keeps alive.
    actual = mine.update(*(tensor.clone() for tensor in states), layer_idx)
    expected = theirs.update(*(tensor.clone() for tensor in states), layer_idx)
    for name, got, want in zip(("keys", "values"), actual, expected, strict=True):
        assert torch.equal(got, want), f"{name} of layer {layer_idx}"
    assert mine.get_seq_length(layer_idx) == theirs.get_seq_length(layer_idx)


# -- the twelve cases ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["jamba", "qwen3next", "bamba", "lfm2"])
def test_case_01_second_multi_token_forward_of_a_hybrid(name: str) -> None:
    """huggingface/transformers#48947: a second forward of many tokens on a reused cache of a hybrid model."""
    model, inputs = model_of(name), prompt(LENGTH, 83)
    with tiered(model.config) as cache:
        actual = forward_pieces(model, inputs, cache, [61, 39])
    assert_all_equal(actual, forward_pieces(model, inputs, stock(model.config), [61, 39]))


@pytest.mark.parametrize(
    "entry",
    [
        ZooEntry(
            name="lfm2-every-fourth",
            config_class="Lfm2Config",
            model_class="Lfm2ForCausalLM",
            options=dict(ZOO["lfm2"].options)
            | {"num_hidden_layers": 8, "layer_types": ["conv", "conv", "full_attention", "conv"] * 2},
        ),
        ZooEntry(
            name="gemma4-dummies-last",
            config_class="Gemma4TextConfig",
            model_class="Gemma4ForCausalLM",
            options=dict(ZOO["gemma4"].options)
            | {
                "num_hidden_layers": 9,
                "layer_types": ["full_attention", *["sliding_attention"] * 2] * 3,
                "num_kv_shared_layers": 3,
            },
        ),
    ],
    ids=lambda entry: entry.name,
)
def test_case_02_prefetch_skips_layers_without_kv(entry: ZooEntry) -> None:
    """#46748: only some layers have attention; prefetch crosses linear and dummy layers and the wrap-around."""
    model, inputs = entry.build(), prompt(LENGTH, 83)
    with tiered(model.config, prefetch_layers=2) as cache:
        tokens, logits = generate(model, inputs, cache, max_new_tokens=12)
        tiered_layers = [layer for layer in stock(model.config).layers if type(layer) is DynamicLayer]
        assert 1 < len(tiered_layers) < len(cache.layers) / 2
        assert cache.stats().prefetch_hits > 0
    expected_tokens, expected_logits = generate(model, inputs, stock(model.config), max_new_tokens=12)
    assert_all_equal([tokens, *logits], [expected_tokens, *expected_logits])


@pytest.mark.parametrize("name", ["deepseekv32", "glmmoedsa"])
def test_case_03_indexer_after_its_layer_was_offloaded(name: str) -> None:
    """#48763: the indexer of sparse attention reads its own keys after its layer's K, V were used; three steps."""
    model, inputs = model_of(name), prompt(LENGTH, 83)
    pieces = [LENGTH - 3, 1, 1, 1]
    with tiered(model.config) as cache:
        actual = forward_pieces(model, inputs, cache, pieces)
    assert_all_equal(actual, forward_pieces(model, inputs, stock(model.config), pieces))


@pytest.mark.parametrize("storage", STORAGES)
def test_case_04_reorder_with_every_block_cold(storage: str, tmp_path: Path) -> None:
    """#48700, #45510, #46612: four beams, hardly any window, several reorders between two updates."""
    generator = torch.Generator().manual_seed(4)
    mine = tiered(bare_config(), window_tokens=16, **storage_options(storage, tmp_path))
    theirs = DynamicCache(config=bare_config())
    with mine:
        for layer_idx in range(2):
            append_and_compare(mine, theirs, random_states(4, 150, generator), layer_idx)
        for step in range(12):
            for _ in range(step % 4):
                beam_idx = torch.randint(0, 4, (4,), generator=generator)
                mine.reorder_cache(beam_idx)
                theirs.reorder_cache(beam_idx)
            for layer_idx in range(2):
                append_and_compare(mine, theirs, random_states(4, 1 + step % 3 * 9, generator), layer_idx)

        model, inputs = model_of("llama"), prompt(60, 37)
        options = {"num_beams": 4, "num_return_sequences": 4, "max_new_tokens": 12}
        with tiered(model.config, window_tokens=16, **storage_options(storage, tmp_path)) as cache:
            tokens, logits = generate(model, inputs, cache, **options)
        expected_tokens, expected_logits = generate(model, inputs, stock(model.config), **options)
        assert_all_equal([tokens, *logits], [expected_tokens, *expected_logits])


@pytest.mark.parametrize("storage", STORAGES)
@pytest.mark.parametrize("removed", [0, 1, 15, 16, 17, 32, 33, 47, 48, 49, 64, 89, 99, 100, 107])
def test_case_05_crop_across_tiers(removed: int, storage: str, tmp_path: Path) -> None:
    """#47433: `crop(0)` changes nothing, `crop(-n)` reaches any tier, cropping too many leaves an empty cache."""
    generator = torch.Generator().manual_seed(5)
    theirs = DynamicCache(config=bare_config())
    with tiered(bare_config(), **storage_options(storage, tmp_path)) as mine:
        for layer_idx in range(2):
            append_and_compare(mine, theirs, random_states(2, LENGTH, generator), layer_idx)
        with pytest.raises(ValueError, match="crop"):
            mine.crop(5)
        assert mine.get_seq_length() == LENGTH
        mine.crop(torch.tensor(-removed))  # as assisted decoding calls it
        theirs.crop(-removed)
        assert isinstance(mine.get_seq_length(), int)
        assert mine.get_seq_length() == theirs.get_seq_length() == max(0, LENGTH - removed)
        for tokens in (1, 70, 1):
            for layer_idx in range(2):
                append_and_compare(mine, theirs, random_states(2, tokens, generator), layer_idx)


@pytest.mark.parametrize("size", [1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1])
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "deepseekv3"])
def test_case_06_prefill_in_pieces(name: str, size: int) -> None:
    """#43082, #46741: left-padded prompts in pieces around the size of a block.

    The logits are those of `DynamicCache` fed with the same pieces, bit for bit, and choose the same tokens as a
    single prefill (whose matrix products have other shapes, hence other rounding).
    """
    model, inputs = model_of(name), prompt(LENGTH, 83, 41)
    pieces = [min(size, LENGTH - start) for start in range(0, LENGTH, size)]
    with tiered(model.config) as cache:
        actual = forward_pieces(model, inputs, cache, pieces)
    assert_all_equal(actual, forward_pieces(model, inputs, stock(model.config), pieces))

    with tiered(model.config) as cache:
        tokens, _ = generate(model, inputs, cache, prefill_chunk_size=size, max_new_tokens=12)
    expected_tokens, _ = generate(model, inputs, stock(model.config), max_new_tokens=12)
    assert torch.equal(tokens, expected_tokens)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "lfm2"])
def test_case_07_continue_with_full_ids(name: str) -> None:
    """#36151, #38727, #32019: the second turn passes all ids, and only the new ones are fed."""
    model, inputs = model_of(name), prompt(80, 67)

    def two_turns(make: Make) -> tuple[int, list[torch.Tensor]]:
        cache = make(model.config)
        tokens, first = generate(model, inputs, cache, max_new_tokens=10)
        tokens, second = generate(model, extend(inputs, tokens, 5, seed=7), cache, max_new_tokens=10)
        length = cache.get_seq_length()
        if isinstance(cache, TieredCache):
            cache.close()
        return length, [tokens, *first, *second]

    (length, actual), (expected_length, expected) = two_turns(tiered), two_turns(stock)
    assert length == expected_length == 80 + 10 + 5 + 10 - 1
    assert_all_equal(actual, expected)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_case_07_fully_cached_prompt(name: str) -> None:
    """#37906: the cache holds the whole prompt. Stock `generate` silently feeds it a second time.

    `TieredCache` either raises and says what to do, or generates as without a cache.
    """
    model, inputs = model_of(name), prompt(80)
    with tiered(model.config) as cache:
        logits_of(model, inputs["input_ids"], inputs["attention_mask"], cache)
        try:
            tokens, _ = generate(model, inputs, cache, max_new_tokens=8)
        except (TieredCacheError, ValueError) as error:
            assert "crop" in str(error)
            cache.crop(-(cache.get_seq_length() - 79))
            tokens, _ = generate(model, inputs, cache, max_new_tokens=8)
        assert cache.get_seq_length() == 80 + 8 - 1
    expected_tokens, _ = generate(model, inputs, stock(model.config), max_new_tokens=8)
    assert torch.equal(tokens, expected_tokens)


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
def test_case_08_batched_prefix_with_several_suffixes(name: str) -> None:
    """#34232: a batched, left-padded prefix is computed once and continued by different suffixes.

    The report saves the prefix and loads it in a new process. There is no persistence yet: here the prefix is
    deep-copied instead, once per suffix.
    """
    model, inputs = model_of(name), prompt(84, 61)
    with tiered(model.config) as prefix:
        generate(model, inputs, prefix, max_new_tokens=1)  # feeds only the prompt
        assert prefix.get_seq_length() == 84
        for seed in (1, 2, 3):
            full = extend(inputs, inputs["input_ids"], 9, seed=seed)
            with copy.deepcopy(prefix) as cache:
                tokens, _ = generate(model, full, cache, max_new_tokens=10)
            without = {"max_new_tokens": 10, "do_sample": False, "use_cache": False}
            assert torch.equal(tokens, model.generate(**full, **without))  # type: ignore[operator]
        assert prefix.get_seq_length() == 84


@pytest.mark.parametrize("storage", STORAGES)
def test_case_09_batch_one_cache_with_beams(storage: str, tmp_path: Path) -> None:
    """#25086: a cache of one row used with three beams raises and says what to do; the result is then exact."""
    model, inputs = model_of("llama"), prompt(80)
    full = extend(inputs, inputs["input_ids"], 6, seed=9)
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 10}
    with tiered(model.config, **storage_options(storage, tmp_path)) as cache:
        logits_of(model, inputs["input_ids"], inputs["attention_mask"], cache)
        with pytest.raises((TieredCacheError, ValueError), match="batch_repeat_interleave"):
            generate(model, full, cache, **options)

    with tiered(model.config, **storage_options(storage, tmp_path)) as cache:
        logits_of(model, inputs["input_ids"], inputs["attention_mask"], cache)
        cache.batch_repeat_interleave(3)
        tokens, logits = generate(model, full, cache, **options)
    oracle = stock(model.config)
    logits_of(model, inputs["input_ids"], inputs["attention_mask"], oracle)
    oracle.batch_repeat_interleave(3)
    expected_tokens, expected_logits = generate(model, full, oracle, **options)
    assert_all_equal([tokens, *logits], [expected_tokens, *expected_logits])


@pytest.mark.parametrize("storage", STORAGES)
def test_case_11_deepcopy_of_a_filled_cache(storage: str, tmp_path: Path) -> None:
    """#32159: a deep copy and its original are independent, and either may be closed first."""
    generator = torch.Generator().manual_seed(11)
    theirs = DynamicCache(config=bare_config())
    mine = tiered(bare_config(), **storage_options(storage, tmp_path))
    for layer_idx in range(2):
        append_and_compare(mine, theirs, random_states(2, LENGTH, generator), layer_idx)
    pairs = [(mine, theirs), (copy.deepcopy(mine), copy.deepcopy(theirs))]
    for turn in range(4):
        for number, (cache, oracle) in enumerate(pairs):
            for each in (cache, oracle):
                each.crop(-(9 + 30 * (turn % 2)))
                each.reorder_cache(torch.tensor([1, number]))
            for layer_idx in range(2):
                append_and_compare(cache, oracle, random_states(2, 25, generator), layer_idx)
    mine.close()
    twin, oracle = pairs[1]
    for layer_idx in range(2):
        append_and_compare(twin, oracle, random_states(2, 40, generator), layer_idx)
    twin.close()


@pytest.mark.parametrize("explicitly", [True, False], ids=["closed", "collected"])
def test_case_12_memory_is_freed(explicitly: bool, cache_directory: Path) -> None:
    """#31717, #25930: closed or merely dropped, a cache leaves no tensors and no directory behind."""
    odd_size = 43  # a head dimension that no other tensor of the process has

    def tensors() -> int:
        gc.collect()
        with warnings.catch_warnings():
            # Some lazy module attributes among the objects of gc warn when they are accessed.
            warnings.simplefilter("ignore")
            return sum(
                1
                for thing in gc.get_objects()
                if type(thing) is torch.Tensor and thing.ndim and thing.shape[-1] == odd_size
            )

    before = tensors()
    cache = tiered(bare_config())
    for _ in range(4):
        for layer_idx in range(2):
            states = torch.randn(2, 2, 50, odd_size)
            cache.update(states, states.clone(), layer_idx)
    del states
    cache.layers[0].keys.sum()
    assert tensors() > before
    assert any(cache_directory.iterdir())
    alive = weakref.ref(cache)
    if explicitly:
        cache.close()
    else:
        del cache
        gc.collect()
        assert alive() is None
    # After a collection, a separate thread closes threads and files.
    assert eventually(lambda: tensors() == before)
    assert eventually(lambda: not any(cache_directory.iterdir()))


def test_case_12_no_doubling() -> None:
    """#25930: accelerator memory does not grow with each step's concatenation.

    Two layers of 2,000 tokens and hardly any window take at most one buffer of a whole layer each (prefetch),
    where concatenation would need old and new at once.
    """
    generator = torch.Generator().manual_seed(12)
    token_bytes = (2 * 8 + 3 * 5) * 4
    with tiered(bare_config(), prefetch_layers=1) as cache:
        for layer_idx in range(2):
            cache.update(*random_states(1, 2000, generator), layer_idx)
        for _ in range(40):
            for layer_idx in range(2):
                cache.update(*random_states(1, 1, generator), layer_idx)
        held = 2 * 2040 + 2 * (WINDOW_TOKENS + 2 * BLOCK_TOKENS)
        assert cache.stats().peak_l0_bytes < 1.5 * held * token_bytes


# -- other ways to use a cache ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3", "gptneox"])
def test_assisted_decoding(name: str) -> None:
    """A small assistant drafts; rejected tokens are cropped at every step."""
    model, inputs = model_of(name), prompt(LENGTH)
    assistant = ZooEntry(
        name="assistant",
        config_class="LlamaConfig",
        model_class="LlamaForCausalLM",
        options=dict(ZOO["llama"].options) | {"num_hidden_layers": 1},
    ).build()
    with tiered(model.config) as cache:
        tokens, logits = generate(model, inputs, cache, assistant_model=assistant)
        assert cache.stats().tiers["L1"].blocks > 0
    expected_tokens, expected_logits = generate(model, inputs, stock(model.config), assistant_model=assistant)
    assert_all_equal([tokens, *logits], [expected_tokens, *expected_logits])


def test_assisted_by_itself() -> None:
    """The model drafts for itself: every draft is right, so many tokens are appended at once."""
    model, inputs = model_of("llama"), prompt(LENGTH)
    with tiered(model.config) as cache:
        tokens, logits = generate(model, inputs, cache, assistant_model=model)
    expected_tokens, expected_logits = generate(model, inputs, stock(model.config), assistant_model=model)
    assert_all_equal([tokens, *logits], [expected_tokens, *expected_logits])


def _tiny_bart() -> PreTrainedModel:
    config = BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=256,
        dropout=0.0,
        init_std=0.2,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        forced_eos_token_id=None,
    )
    return BartForConditionalGeneration(config)


def _tiny_t5() -> PreTrainedModel:
    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=8,
        d_ff=48,
        num_layers=2,  # for both halves: stock caches, too, take the number of T5's layers from the encoder
        num_heads=4,
        dropout_rate=0.0,
        pad_token_id=0,
        eos_token_id=2,
        decoder_start_token_id=1,
    )
    return T5ForConditionalGeneration(config)


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("build", [_tiny_bart, _tiny_t5], ids=["bart", "t5"])
def test_encoder_decoder(build: Callable[[], PreTrainedModel], beams: int) -> None:
    """The self-attention half of an `EncoderDecoderCache` may be tiered; the cross-attention half stays stock."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = build().eval().requires_grad_(False)
    generation_config = model.generation_config
    assert generation_config is not None
    generation_config.eos_token_id = None
    inputs = prompt(40, 29) | {"decoder_input_ids": prompt(70, 70, seed=1)["input_ids"]}

    def run(self_attention: Cache) -> list[torch.Tensor]:
        cache = EncoderDecoderCache(self_attention, DynamicCache(config=model.config))
        tokens, logits = generate(model, inputs, cache, num_beams=beams, max_new_tokens=16)
        return [tokens, *logits]

    with tiered(model.config) as cache:
        actual = run(cache)
        assert cache.stats().tiers["L1"].blocks > 0
    assert_all_equal(actual, run(DynamicCache(config=model.config)))


def test_former_name_of_the_argument() -> None:
    """`past_key_values=` works everywhere; from 5.24 on with transformers' own FutureWarning."""
    model, inputs = model_of("llama"), prompt(LENGTH, 83)
    with tiered(model.config) as cache:
        call = {"max_new_tokens": 6, "do_sample": False, "past_key_values": cache}
        if CACHE_ARGUMENT == "cache":
            with pytest.warns(FutureWarning, match="past_key_values"):
                tokens = model.generate(**inputs, **call)  # type: ignore[operator]
        else:
            tokens = model.generate(**inputs, **call)  # type: ignore[operator]
        assert cache.get_seq_length() == LENGTH + 5
    expected_tokens, _ = generate(model, inputs, stock(model.config), max_new_tokens=6)
    assert torch.equal(tokens, expected_tokens)


def test_output_names_the_cache() -> None:
    """`generate` and `forward` hand the very same cache back."""
    model, inputs = model_of("llama"), prompt(LENGTH)
    with tiered(model.config) as cache:
        with torch.no_grad():
            output = model(**inputs, use_cache=True, **cache_argument(cache))
        assert output[CACHE_ARGUMENT] is cache
        assert isinstance(cache, DynamicCache)


def test_gradients_are_refused() -> None:
    """Reused buffers would corrupt a backward pass."""
    config = dict(ZOO["llama"].options)
    model = LlamaForCausalLM(LlamaConfig(**config))
    inputs = prompt(20)
    with tiered(model.config) as cache:
        with pytest.raises(UnsupportedModelError, match="gradients"):
            model(**inputs, use_cache=True, **cache_argument(cache))
        with torch.no_grad():
            model(**inputs, use_cache=True, **cache_argument(cache))
        assert cache.get_seq_length() == 20


def test_minimax_is_refused() -> None:
    """The original MiniMax accepts only its own cache, so the error comes before the model fails inside."""
    with pytest.raises(UnsupportedModelError, match="minimax"):
        tiered(transformers.MiniMaxConfig(num_hidden_layers=2))


def test_closed_cache_raises(cache_directory: Path) -> None:
    """After `close()` every use raises `CacheClosedError`, and closing again is allowed."""
    states = random_states(1, 80, torch.Generator().manual_seed(0))
    cache = tiered(bare_config())
    cache.update(*states, 0)
    cache.close()
    cache.close()
    assert not any(cache_directory.iterdir())
    uses: list[Callable[[], object]] = [
        lambda: cache.update(*states, 0),
        lambda: cache.crop(-1),
        lambda: cache.reorder_cache(torch.tensor([0])),
        lambda: cache.batch_repeat_interleave(2),
        lambda: cache.batch_select_indices(torch.tensor([0])),
        lambda: copy.deepcopy(cache),
    ]
    for use in uses:
        with pytest.raises(CacheClosedError):
            use()


def test_close_on_leaving_with_even_after_an_error(cache_directory: Path) -> None:
    """`with` closes the cache when its body raises, and lets the error through."""
    with pytest.raises(KeyError), tiered(bare_config()) as cache:
        cache.update(*random_states(1, 80, torch.Generator().manual_seed(0)), 0)
        raise KeyError("body")
    assert not any(cache_directory.iterdir())


def test_reset_and_reuse() -> None:
    """After `reset()` the cache works like a new one, also for another batch size."""
    generator = torch.Generator().manual_seed(6)
    with tiered(bare_config()) as mine:
        for batch in (3, 1, 2):
            theirs = DynamicCache(config=bare_config())  # a new one: before 5.20, stock caches cannot be reused
            for tokens in (90, 1, 20):
                for layer_idx in range(2):
                    append_and_compare(mine, theirs, random_states(batch, tokens, generator), layer_idx)
            mine.reset()
            assert mine.get_seq_length() == 0


def test_layers_need_not_be_updated_in_order() -> None:
    """The order in which layers are used is learnt, not assumed, and may change."""
    generator = torch.Generator().manual_seed(8)
    config = bare_config(layers=4)
    theirs = DynamicCache(config=config)
    with tiered(config) as mine:
        for order in ([0, 1, 2, 3], [3, 2, 1, 0], [3, 2, 1, 0], [1, 3, 0, 2], [2, 2, 0, 1, 3], [0, 1, 2, 3]):
            for layer_idx in order:
                append_and_compare(mine, theirs, random_states(2, 30, generator), layer_idx)


def test_whole_layer_can_be_read() -> None:
    """`keys` and `values` of a layer return it as a whole, as some models and users expect."""
    generator = torch.Generator().manual_seed(10)
    theirs = DynamicCache(config=bare_config())
    with tiered(bare_config()) as mine:
        assert all(hasattr(layer, name) for layer in mine.layers for name in ("keys", "values"))
        for layer_idx in range(2):
            append_and_compare(mine, theirs, random_states(2, LENGTH, generator), layer_idx)
        for (keys, values, *_), (expected_keys, expected_values, *_) in zip(mine, theirs, strict=True):
            assert torch.equal(keys, expected_keys) and torch.equal(values, expected_values)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_memory_layout_does_not_show(dtype: torch.dtype) -> None:
    """A linear layer over latents of one head rounds as it does for `DynamicCache`.

    oneDNN and MKL choose their kernels by strides, even where `is_contiguous()` is true: a slice
    `[B, 1, :S, D]` of a longer buffer rounds differently from a tensor of just that shape.
    """
    generator = torch.Generator().manual_seed(13)
    weight = torch.randn(256, 512, generator=generator).to(dtype)
    config = bare_config(layers=1)
    for batch in (1, 2):
        theirs = DynamicCache(config=config)
        with tiered(config) as mine:
            for tokens in (1, 7, 1, 5, 1, 18, 1, 30, 1, 35, 1, 26):
                latents = torch.randn(batch, 1, tokens, 512, generator=generator).to(dtype)
                rotary = torch.randn(batch, 1, tokens, 64, generator=generator).to(dtype)
                actual, _ = mine.update(latents, rotary, 0)
                expected, _ = theirs.update(latents, rotary, 0)
                assert torch.equal(actual, expected)
                projected = torch.nn.functional.linear(actual, weight)
                length = mine.get_seq_length()
                assert torch.equal(projected, torch.nn.functional.linear(expected, weight)), (batch, length)


def test_sliding_layers_stay_stock() -> None:
    """Only plain full-attention layers are replaced; all others keep the classes of transformers."""
    for name in ("gemma3", "gptoss", "jamba", "falconh1", "deepseekv32", "gemma4"):
        config = model_of(name).config
        with tiered(config) as cache:
            for mine, theirs in zip(cache.layers, DynamicCache(config=config).layers, strict=True):
                if type(theirs) is DynamicLayer:
                    assert type(mine).__name__ == "TieredLayer"
                else:
                    assert type(mine) is type(theirs)
            assert not cache.is_compileable
            assert cache.is_sliding == DynamicCache(config=config).is_sliding
    assert SLIDING_TOKENS < WINDOW_TOKENS


# -- any order of operations --------------------------------------------------------------------------------------

ROWS = 8
_operations = st.lists(
    st.one_of(
        st.tuples(st.just("append"), st.sampled_from([1, 1, 1, 2, 15, 16, 17, 31, 33, 48, 70])),
        st.tuples(st.just("crop"), st.sampled_from([0, 1, 3, 15, 16, 17, 40, 65, 1000])),
        st.tuples(st.just("reorder"), st.integers(0, 2**16)),
        st.tuples(st.just("repeat"), st.sampled_from([1, 2, 3])),
        st.tuples(st.just("select"), st.integers(1, 2**ROWS - 1)),
    ),
    min_size=3,
    max_size=14,
)


@settings(max_examples=40, deadline=None)
@given(
    operations=_operations,
    batch=st.sampled_from([1, 2, 3]),
    prefix=st.sampled_from([1, 47, 48, 49, 64, 100]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    storage=st.sampled_from(STORAGES),
)
def test_any_interleaving(
    tmp_path_factory: pytest.TempPathFactory,
    operations: list[tuple[str, int]],
    batch: int,
    prefix: int,
    dtype: torch.dtype,
    storage: str,
) -> None:
    """Appends, crops and changes of the batch, in any order, return what `DynamicCache` returns."""
    generator = torch.Generator().manual_seed(14)
    directory = tmp_path_factory.mktemp("l2")
    theirs = DynamicCache(config=bare_config())
    with tiered(bare_config(), **storage_options(storage, directory)) as mine:
        for name, argument in [("append", prefix), *operations, ("append", 1)]:
            if name == "append":
                for layer_idx in range(2):
                    append_and_compare(mine, theirs, random_states(batch, argument, generator, dtype), layer_idx)
            elif name == "crop":
                mine.crop(-argument)
                theirs.crop(-argument)
            elif theirs.get_seq_length() == 0:
                continue  # an empty cache has no rows yet
            elif name == "reorder":
                rows = torch.randint(0, batch, (batch,), generator=torch.Generator().manual_seed(argument))
                mine.reorder_cache(rows)
                theirs.reorder_cache(rows)
            elif name == "repeat" and batch * argument <= ROWS:
                batch *= argument
                mine.batch_repeat_interleave(argument)
                theirs.batch_repeat_interleave(argument)
            elif name == "select":
                indices = torch.tensor([row for row in range(batch) if argument >> row & 1] or [batch - 1])
                batch = len(indices)
                mine.batch_select_indices(indices)
                theirs.batch_select_indices(indices)
            assert [mine.get_seq_length(i) for i in range(2)] == [theirs.get_seq_length(i) for i in range(2)]
        for mine_layer, their_layer in zip(mine.layers, theirs.layers, strict=True):
            assert torch.equal(mine_layer.keys, their_layer.keys)
            assert torch.equal(mine_layer.values, their_layer.values)
