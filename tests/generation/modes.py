"""Decoding modes, each a function that runs a model with a cache made by a factory.

A mode is a pure function of model and factory: prompts and seeds are fixed. So two runs that differ only in
their cache must give the same tokens and, bit for bit, the same logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ..models import CACHE_NAME as CACHE_ARGUMENT
from .zoo import VOCABULARY

WINDOW_TOKENS = 32
BLOCK_TOKENS = 16
PROMPT_TOKENS = 100
NEW_TOKENS = 24

CacheFactory = Callable[[PreTrainedConfig], Cache]
"""The name under which `forward` and `generate` take a cache; 5.24 renamed it."""


@dataclass(frozen=True)
class Outcome:
    """The result of a run: tokens `[rows, tokens]`, the logits of each step, and its cache.

    If some tokens are padding, `real` marks those that are not, `[rows, tokens]`.
    """

    tokens: torch.Tensor
    logits: tuple[torch.Tensor, ...]
    cache: Cache
    real: torch.Tensor | None = None

    def assert_same(self, expected: Outcome) -> None:
        """Fail unless tokens are equal and logits bit-equal; deliberately without tolerance."""
        assert len(self.logits) == len(expected.logits)
        for step, (mine, theirs) in enumerate(zip(self.logits, expected.logits, strict=True)):
            assert mine.dtype == theirs.dtype and mine.shape == theirs.shape, f"step {step}"
            if not torch.equal(mine, theirs):
                worst = (mine - theirs).abs().max().item()
                raise AssertionError(
                    f"logits differ first at step {step} of {len(self.logits)}, by up to {worst:.3g}"
                )
        assert torch.equal(self.tokens, expected.tokens), "tokens differ although logits do not"


def cache_argument(cache: Cache) -> dict[str, Cache]:
    """Return `cache` as the keyword argument that the installed transformers expects."""
    return {CACHE_ARGUMENT: cache}


def prompt(*lengths: int, seed: int = 0, period: int | None = None) -> dict[str, torch.Tensor]:
    """Make left-padded random prompts, one row per length; `period` makes them repeat themselves."""
    generator = torch.Generator().manual_seed(seed)
    longest = max(lengths)
    input_ids = torch.zeros(len(lengths), longest, dtype=torch.long)
    attention_mask = torch.zeros_like(input_ids)
    for row, length in enumerate(lengths):
        tokens = torch.randint(3, VOCABULARY, (period or length,), generator=generator)
        input_ids[row, longest - length :] = tokens.repeat(-(-length // len(tokens)))[:length]
        attention_mask[row, longest - length :] = 1
    return {"input_ids": input_ids, "attention_mask": attention_mask}


def extend(
    inputs: Mapping[str, torch.Tensor], sequences: torch.Tensor, new: int, seed: int
) -> dict[str, torch.Tensor]:
    """Return the full ids of a conversation: `sequences` so far, then `new` random tokens in every row."""
    rows = len(sequences)
    generator = torch.Generator().manual_seed(seed)
    added = torch.randint(3, VOCABULARY, (rows, new), generator=generator)
    input_ids = torch.cat([sequences, added], dim=1)
    mask = inputs["attention_mask"][:, : input_ids.shape[1]]
    ones = mask.new_ones(rows, input_ids.shape[1] - mask.shape[1])
    return {"input_ids": input_ids, "attention_mask": torch.cat([mask, ones], dim=1)}


def generate(
    model: PreTrainedModel, inputs: Mapping[str, torch.Tensor], cache: Cache, **options: Any
) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Call `model.generate` with a user's cache, greedy by default; return sequences and raw logits."""
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | options
    output = model.generate(  # type: ignore[operator]
        **inputs, **cache_argument(cache), **settings, return_dict_in_generate=True, output_logits=True
    )
    return output.sequences, tuple(output.logits)


def left_padded_greedy(model: PreTrainedModel, make_cache: CacheFactory) -> Outcome:
    """Greedy decoding of three prompts of different lengths."""
    cache = make_cache(model.config)
    tokens, logits = generate(model, prompt(PROMPT_TOKENS, 83, 41), cache)
    return Outcome(tokens, logits, cache)


def beam_search(model: PreTrainedModel, make_cache: CacheFactory) -> Outcome:
    """Beam search with three beams, two of them returned: the cache is reordered at every step."""
    cache = make_cache(model.config)
    options = {"num_beams": 3, "num_return_sequences": 2, "max_new_tokens": 20}
    tokens, logits = generate(model, prompt(PROMPT_TOKENS - 4, 70), cache, **options)
    return Outcome(tokens, logits, cache)


def sampling(model: PreTrainedModel, make_cache: CacheFactory) -> Outcome:
    """Sampling from a fixed seed."""
    cache = make_cache(model.config)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(11)
        tokens, logits = generate(
            model, prompt(PROMPT_TOKENS, 57), cache, do_sample=True, temperature=1.5, top_k=0
        )
    return Outcome(tokens, logits, cache)


def chunked_prefill(model: PreTrainedModel, make_cache: CacheFactory) -> Outcome:
    """A `prefill_chunk_size` that does not divide block, window or prompt."""
    cache = make_cache(model.config)
    tokens, logits = generate(model, prompt(PROMPT_TOKENS, 83), cache, prefill_chunk_size=BLOCK_TOKENS + 3)
    return Outcome(tokens, logits, cache)


def forward_pieces(model: PreTrainedModel, make_cache: CacheFactory) -> Outcome:
    """Direct forward calls of 1, 7, block - 1, block and block + 1 tokens, then of single tokens."""
    cache = make_cache(model.config)
    inputs = prompt(PROMPT_TOKENS, 83)
    # Short pieces first: at lengths 1, 8 and 9 matrix products depend on the memory layout.
    pieces = [1, 7, *[1, BLOCK_TOKENS - 1, BLOCK_TOKENS, BLOCK_TOKENS + 1], 1, BLOCK_TOKENS - 1, BLOCK_TOKENS]
    logits: list[torch.Tensor] = []
    real: list[torch.Tensor] = []
    start = 0
    with torch.no_grad():
        for piece in [*pieces, *[1] * (PROMPT_TOKENS - sum(pieces))]:
            stop = start + piece
            output = model(
                input_ids=inputs["input_ids"][:, start:stop],
                attention_mask=inputs["attention_mask"][:, :stop],
                use_cache=True,
                **cache_argument(cache),
            )
            logits.append(output.logits[:, -1].clone())
            real.append(inputs["attention_mask"][:, stop - 1].bool())
            start = stop
    tokens = torch.stack([step.argmax(dim=-1) for step in logits], dim=1)
    return Outcome(tokens, tuple(logits), cache, torch.stack(real, dim=1))


def prompt_lookup(model: PreTrainedModel, make_cache: CacheFactory) -> Outcome:
    """Candidates from a prompt that repeats itself: several tokens per step, and crops of the rejected ones."""
    cache = make_cache(model.config)
    tokens, logits = generate(model, prompt(PROMPT_TOKENS, period=23), cache, prompt_lookup_num_tokens=5)
    return Outcome(tokens, logits, cache)


def continued(model: PreTrainedModel, make_cache: CacheFactory) -> Outcome:
    """Two turns of a conversation with one cache; the second passes the full ids."""
    cache = make_cache(model.config)
    inputs = prompt(84, 71)
    first_tokens, first_logits = generate(model, inputs, cache, max_new_tokens=12)
    second_tokens, second_logits = generate(
        model, extend(inputs, first_tokens, 7, seed=1), cache, max_new_tokens=12
    )
    return Outcome(second_tokens, first_logits + second_logits, cache)


def cropped(model: PreTrainedModel, make_cache: CacheFactory) -> Outcome:
    """Crops through the window into sealed blocks, then within the window; continues after each."""
    cache = make_cache(model.config)
    cache.activate_past_recording()  # makes sliding and convolution layers croppable, too
    inputs = prompt(PROMPT_TOKENS, 83)
    tokens, logits = generate(model, inputs, cache, max_new_tokens=12)
    for removed_tokens, seed in ((57, 2), (5, 3)):
        cache.crop(-removed_tokens)
        kept = tokens[:, : cache.get_seq_length()]
        tokens, more = generate(model, extend(inputs, kept, 6, seed=seed), cache, max_new_tokens=10)
        logits += more
    return Outcome(tokens, logits, cache)


Mode = Callable[[PreTrainedModel, CacheFactory], Outcome]

MODES: Mapping[str, Mode] = {
    "left_padded_greedy": left_padded_greedy,
    "beam_search": beam_search,
    "sampling": sampling,
    "chunked_prefill": chunked_prefill,
    "forward_pieces": forward_pieces,
    "prompt_lookup": prompt_lookup,
    "continued": continued,
    "cropped": cropped,
}
