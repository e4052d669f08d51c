"""The equality matrix: models x decoding modes x storage, bit for bit against `DynamicCache`.

Window 32 and blocks of 16 tokens against prompts of 100: most of each sequence has left the window, and every
step reads it back from L1 or L2.
"""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from hf_tiered_cache import TieredCache

from .modes import BLOCK_TOKENS, MODES, WINDOW_TOKENS, Outcome, cache_argument, prompt
from .zoo import ENTRIES, ZOO, model_of

STORAGES = ("l1", "l2")


def _matrix() -> list[Any]:
    """List every model and mode that transformers itself can run; storage varies fastest, to share the oracle."""
    return [
        pytest.param(name, mode, storage, id=f"{name}-{mode}-{storage}")
        for name, entry in ZOO.items()
        for mode in MODES
        if entry.refusal(mode) is None
        for storage in STORAGES
    ]


def stock_cache(config: PreTrainedConfig) -> Cache:
    """Make the oracle's cache."""
    return DynamicCache(config=config)


@functools.cache
def expected_outcome(name: str, mode: str) -> Outcome:
    """Return the outcome with transformers' own cache, computed once per process."""
    outcome = MODES[mode](model_of(name), stock_cache)
    assert all(step.isfinite().all() for step in outcome.logits), "the oracle itself must be comparable"
    return outcome


def has_full_attention(config: PreTrainedConfig) -> bool:
    """Return true if the model has layers that `TieredCache` stores in tiers; all others stay as they are."""
    return any(type(layer) is DynamicLayer for layer in DynamicCache(config=config).layers)


@pytest.mark.parametrize(("name", "mode", "storage"), _matrix())
def test_same_as_dynamic_cache(name: str, mode: str, storage: str, tmp_path: Path) -> None:
    """Tokens are equal and logits bit-equal, with blocks that were really read from the tier under test."""
    options: dict[str, Any] = {} if storage == "l1" else {"l1_capacity": 0, "l2_url": str(tmp_path)}

    def make_cache(config: PreTrainedConfig) -> TieredCache:
        return TieredCache(config=config, window_tokens=WINDOW_TOKENS, block_tokens=BLOCK_TOKENS, **options)

    model = model_of(name)
    expected = expected_outcome(name, mode)
    outcome = MODES[mode](model, make_cache)
    with outcome.cache as cache:
        outcome.assert_same(expected)
        blocks = {tier: cache.stats().tiers[tier].blocks for tier in ("L1", "L2")}
        if has_full_attention(model.config):
            assert blocks[storage.upper()] > 0, f"nothing was sealed to the tier under test: {blocks}"
        else:
            assert not any(blocks.values())


@pytest.mark.parametrize("name", list(ZOO))
def test_outputs_depend_on_sealed_tokens(name: str) -> None:
    """The control of the matrix: an error outside the window of any one layer changes the logits."""
    model = model_of(name)
    inputs = prompt(100)
    last_token = inputs["input_ids"][:, -1:]
    mask = torch.ones(1, 101, dtype=torch.long)
    # GPT-Neo masks all but its last 24 tokens in layers that the cache takes for plain full attention.
    damaged_tokens = 90 if name == "gptneo" else BLOCK_TOKENS

    def logits_after(damaged_layer: int | None) -> torch.Tensor:
        cache = DynamicCache(config=model.config)
        with torch.no_grad():
            model(**inputs, use_cache=True, **cache_argument(cache))
            if damaged_layer is not None:
                cache.layers[damaged_layer].values[:, :, :damaged_tokens] *= -1.0
            output = model(input_ids=last_token, attention_mask=mask, use_cache=True, **cache_argument(cache))
        logits: torch.Tensor = output.logits
        return logits

    intact = logits_after(None)
    assert torch.equal(intact, logits_after(None)), "the model is not deterministic"
    for layer_idx, layer in enumerate(DynamicCache(config=model.config).layers):
        if type(layer) is DynamicLayer:
            assert not torch.equal(intact, logits_after(layer_idx)), f"layer {layer_idx} is not looked at"


def test_matrix_is_as_wide_as_promised() -> None:
    """The matrix has at least 25 architectures with full attention, and refusals name existing modes."""
    architectures = {ZOO[name].model_class for name in ZOO if has_full_attention(model_of(name).config)}
    assert len(architectures) >= 25
    assert {mode for entry in ENTRIES for mode in entry.stock_refuses} <= set(MODES)


@pytest.mark.parametrize(
    ("name", "mode"),
    [
        pytest.param(name, mode, id=f"{name}-{mode}")
        for name, entry in ZOO.items()
        for mode in MODES
        if entry.refusal(mode) is not None
    ],
)
def test_refusals_still_hold(name: str, mode: str) -> None:
    """Modes that the matrix leaves out do not work with transformers' own cache either."""
    try:
        outcome = MODES[mode](model_of(name), stock_cache)
    except (ValueError, RuntimeError):
        return
    assert not outcome.cache.is_croppable, f"transformers can run {mode} with {name}: add it to the matrix"
