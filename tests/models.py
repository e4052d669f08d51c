"""Small models and functions that run them, for tests that need a model but not the whole zoo."""

from __future__ import annotations

import functools
from typing import Any

import torch
import transformers
from packaging.version import Version
from transformers import Cache, LlamaConfig, LlamaForCausalLM

# `generate` and `forward` take the cache under this name; the older name warns from 5.24 on.
CACHE_NAME = "cache" if Version(transformers.__version__) >= Version("5.24") else "past_key_values"


@functools.cache
def tiny_llama(layers: int = 4) -> LlamaForCausalLM:
    """Return a random Llama with grouped queries, the same in every process."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=4096,
    )
    model = LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def prompt_ids(tokens: int, batch: int = 1) -> torch.Tensor:
    """Return a random prompt, the same each time."""
    return torch.randint(1, 97, (batch, tokens), generator=torch.Generator().manual_seed(tokens))


def generate(
    model: Any, input_ids: torch.Tensor, cache: Cache, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return greedy tokens and the logits that chose them, `[steps, B, vocabulary]`."""
    settings = {"max_new_tokens": 24, "do_sample": False} | options
    output = model.generate(
        input_ids, **{CACHE_NAME: cache}, **settings, return_dict_in_generate=True, output_logits=True
    )
    return output.sequences, torch.stack(output.logits)
