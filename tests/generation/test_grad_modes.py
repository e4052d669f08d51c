"""Buffers that were allocated in one of torch's grad modes work in the others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import AbstractContextManager

import pytest
import torch
from transformers import Cache, DynamicCache

from hf_tiered_cache import TieredCache, UnsupportedModelError

from ..models import CACHE_NAME, prompt_ids, tiny_llama

MODES: list[Callable[[], AbstractContextManager[object]]] = [torch.no_grad, torch.inference_mode]


@pytest.mark.parametrize("window_tokens", [32, 512])
def test_modes_may_alternate(window_tokens: int) -> None:
    model = tiny_llama()

    def run(cache: Cache) -> list[torch.Tensor]:
        outputs = []
        for first, mode in zip(range(0, 150, 30), itertools.cycle(MODES)):
            with mode():
                chunk = prompt_ids(150)[:, first : first + 30]
                outputs.append(model(chunk, **{CACHE_NAME: cache}).logits.clone())
        return outputs

    with TieredCache(config=model.config, window_tokens=window_tokens, block_tokens=16) as cache:
        found = run(cache)
    assert all(map(torch.equal, found, run(DynamicCache(config=model.config))))


def test_recording_gradients_is_refused_before_anything_is_stored() -> None:
    model = tiny_llama()
    with TieredCache(config=model.config, window_tokens=32, block_tokens=16) as cache:
        with pytest.raises(UnsupportedModelError, match=r"torch\.no_grad"):
            model(prompt_ids(40), **{CACHE_NAME: cache})
        assert cache.get_seq_length() == 0
