"""Attention over splits equals attention over everything, for all splits, shapes, masks and kernels."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hf_tiered_cache.attention import kernels
from hf_tiered_cache.attention.kernels import KERNELS, Problem, Scoring, attend, kernel_for
from hf_tiered_cache.attention.online import AttentionRule, OnlineAttention
from hf_tiered_cache.core.errors import ConfigError
from hf_tiered_cache.core.metrics import L0Account, Metrics
from hf_tiered_cache.core.row_map import RowMap

BLOCK_TOKENS, HEAD_DIM, KV_HEADS = 16, 8, 2


def reference(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, rule: AttentionRule) -> torch.Tensor:
    """Compute attention `[B, Q, Hq, D]` by its definition, in float64, with repeated K and V and a dense mask."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = query.double(), *(states.double().repeat_interleave(groups, 1) for states in (key, value))
    scores = query @ key.transpose(-1, -2) * (query.shape[-1] ** -0.5 if rule.scale is None else rule.scale)
    if rule.softcap is not None:
        scores = rule.softcap * torch.tanh(scores / rule.softcap)
    queries, tokens = scores.shape[-2:]
    scores = scores.masked_fill(torch.ones(queries, tokens).tril(tokens - queries) == 0, -torch.inf)
    if rule.mask is not None:
        is_bool = rule.mask.dtype is torch.bool
        scores = scores.masked_fill(~rule.mask, -torch.inf) if is_bool else scores + rule.mask.double()
    if rule.sinks is not None:
        sinks = rule.sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1)
    return (weights @ value).transpose(1, 2)


@settings(deadline=None, max_examples=150)
@given(data=st.data())
def test_any_parts(data: st.DataObject) -> None:
    """All inputs that `attend` may get: blocks with any row map, a window in one or two slices, new tokens."""
    torch.manual_seed(data.draw(st.integers(0, 1 << 16), "seed"))
    batch, queries = data.draw(st.integers(1, 3), "batch"), data.draw(st.sampled_from([1, 2, 17, 40]), "queries")
    groups, value_dim = (
        data.draw(st.sampled_from([1, 3]), "groups"),
        data.draw(st.sampled_from([8, 6]), "value_dim"),
    )
    blocks, window_tokens = data.draw(st.integers(1, 4), "blocks"), data.draw(st.integers(1, 20), "window")
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]), "dtype")
    stored_rows = data.draw(st.integers(1, 3), "stored rows")
    rows = np.array([data.draw(st.integers(0, stored_rows - 1)) for _ in range(batch)])
    if data.draw(st.booleans(), "own rows"):
        stored_rows, rows = batch, np.arange(batch)
    older = blocks * BLOCK_TOKENS + window_tokens
    tokens = older + queries

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape).to(dtype)

    stored = [random(blocks, stored_rows, KV_HEADS, BLOCK_TOKENS, dim) for dim in (HEAD_DIM, value_dim)]
    in_memory = [random(batch, KV_HEADS, window_tokens + queries, dim) for dim in (HEAD_DIM, value_dim)]
    query = random(batch, KV_HEADS * groups, queries, HEAD_DIM)
    rule = AttentionRule(
        scale=data.draw(st.sampled_from([None, 0.7]), "scale"),
        softcap=data.draw(st.sampled_from([None, 2.0]), "softcap"),
        sinks=torch.randn(KV_HEADS * groups) if data.draw(st.booleans(), "sinks") else None,
        **draw_mask(data, batch, KV_HEADS * groups, queries, tokens),
    )
    with OnlineAttention(query, KV_HEADS, value_dim, rule) as attention:
        attention.add(*(states[:, :, window_tokens:] for states in in_memory), older, newest=True)
        cut = data.draw(st.integers(0, window_tokens), "cut")
        for part in (slice(0, cut), slice(cut, window_tokens)):
            if part.stop > part.start:
                start = blocks * BLOCK_TOKENS + part.start
                attention.add(*(states[:, :, part] for states in in_memory), start)
        cut = data.draw(st.integers(0, blocks), "block cut")
        row_map = RowMap(rows)
        for part in (slice(0, cut), slice(cut, blocks)):
            if part.stop > part.start:
                attention.add_blocks(stored[0][part], stored[1][part], part.start * BLOCK_TOKENS, row_map)
        output = attention.finish()
    whole = [
        torch.cat([old[:, rows].permute(1, 2, 0, 3, 4).flatten(2, 3), new], dim=2)
        for old, new in zip(stored, in_memory, strict=True)
    ]
    assert output.dtype is dtype and output.shape == (batch, queries, KV_HEADS * groups, value_dim)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 2e-2, torch.float64: 1e-12}[dtype]
    assert (output.double() - reference(query, *whole, rule)).abs().max() < tolerance


def draw_mask(data: st.DataObject, batch: int, heads: int, queries: int, tokens: int) -> dict[str, Any]:
    """Draw a mask of one of the allowed kinds; every query sees at least itself."""
    kind = data.draw(
        st.sampled_from(["none", "padding", "padding, end known", "per row", "per head, added"]), "mask"
    )
    if kind == "none":
        return {}
    if kind.startswith("padding"):
        hidden = data.draw(st.integers(0, tokens - queries), "hidden")
        mask = torch.ones(batch, 1, 1, tokens, dtype=torch.bool)
        mask[0, ..., :hidden] = False
        return {"mask": mask, "masked_tokens": hidden if kind.endswith("known") else None}
    shape = (batch, 1, queries, tokens) if kind == "per row" else (1, heads, queries, tokens)
    causal = torch.ones(queries, tokens).tril(tokens - queries).bool()
    mask = (torch.rand(shape) > 0.3) & causal
    mask |= torch.eye(queries, tokens, dtype=torch.bool).roll(tokens - queries, 1)
    if kind == "per row":
        return {"mask": mask}
    return {"mask": torch.where(mask, torch.randn(shape), -torch.inf)}


@pytest.mark.parametrize("kernel", [kernel for kernel in KERNELS if not kernel.name.startswith("cuda")])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_kernels(
    kernel: kernels.Kernel, causal: bool, biased: bool, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output and log-sum-exp agree with float64, for pieces of the queries, heads and batch."""
    monkeypatch.setattr(kernels, "MATMUL_SCORE_ELEMENTS", 500)
    monkeypatch.setattr(kernels, "CONVERTED_BYTES", 5000)
    torch.manual_seed(0)
    query, key, value = (torch.randn(3, 4, 24, 8).to(dtype) for _ in range(3))
    bias = torch.randn(3, 1, 1, 24).to(dtype) if biased else None
    output, lse = kernel.run(query, key, value, Scoring(0.4, None, bias, causal), L0Account())
    scores = query.double() @ key.double().transpose(-1, -2) * 0.4
    scores = scores if bias is None else scores + bias.double()
    if causal:
        scores = scores.masked_fill(torch.ones(24, 24).tril() == 0, -torch.inf)
    assert output.dtype is lse.dtype is torch.float32
    assert (output.double() - scores.softmax(-1) @ value.double()).abs().max() < 2e-6
    assert (lse.double() - scores.logsumexp(-1)).abs().max() < 2e-6


def problem(**changes: Any) -> Problem:
    """Describe a call on an H100 in bfloat16, with changes."""
    usual = {
        "device_type": "cuda",
        "capability": (9, 0),
        "dtype": torch.bfloat16,
        "key_dim": 128,
        "value_dim": 128,
        "biased": False,
        "softcap": False,
        "flash": True,
    }
    return Problem(**(usual | changes))


@pytest.mark.parametrize(
    ("changes", "chosen"),
    [
        ({}, "cuda flash"),
        ({"key_dim": 256, "value_dim": 256}, "cuda flash"),
        ({"dtype": torch.float32}, "cuda efficient"),
        ({"biased": True}, "cuda efficient"),
        ({"flash": False}, "cuda efficient"),
        ({"key_dim": 192}, "cuda efficient"),
        ({"key_dim": 512, "value_dim": 512}, "cuda efficient"),
        ({"capability": (7, 5), "dtype": torch.float16}, "cuda efficient"),
        ({"capability": (7, 5)}, "matmul"),
        ({"key_dim": 100, "value_dim": 100}, "matmul"),
        ({"dtype": torch.float64}, "matmul"),
        ({"softcap": True}, "matmul"),
        ({"device_type": "cpu", "capability": (0, 0)}, "cpu flash"),
        ({"device_type": "cpu", "capability": (0, 0), "biased": True}, "cpu flash"),
        ({"device_type": "cpu", "capability": (0, 0), "value_dim": 64}, "matmul"),
        ({"device_type": "cpu", "capability": (0, 0), "softcap": True}, "matmul"),
    ],
)
def test_kernel_by_capability(changes: dict[str, Any], chosen: str) -> None:
    assert kernel_for(problem(**changes)).name == chosen


def test_rows_without_a_visible_key_stay_numbers() -> None:
    """Outputs of padding tokens have no meaning, but NaN would spread."""
    query, key = torch.randn(1, 2, 20, 8), torch.randn(1, 2, 20, 8)
    mask = torch.zeros(1, 1, 1, 20, dtype=torch.bool)
    with OnlineAttention(query, 2, 8, AttentionRule(mask=mask)) as attention:
        attention.add(key, key, 0, newest=True)
        assert attention.finish().isfinite().all()


def test_memory_is_accounted_for() -> None:
    """All accounted memory is released, also after an error; the peak covers at least the permanent buffers."""
    metrics = Metrics()
    query, key = torch.randn(1, 8, 40, 64), torch.randn(1, 2, 40, 64)
    with OnlineAttention(query, 2, 64, AttentionRule(), L0Account(metrics)) as attention:
        attention.add(key, key, 0, newest=True)
        attention.finish()
    assert metrics.l0_bytes == 0 and metrics._peak_l0_bytes >= 8 * 40 * 65 * 4
    with (
        pytest.raises(RuntimeError),
        OnlineAttention(query, 2, 64, AttentionRule(), L0Account(metrics)) as attention,
    ):
        attention.add(key[..., :32], key, 0, newest=True)
    assert metrics.l0_bytes == 0


@pytest.mark.parametrize(
    ("query_shape", "mask_shape", "message"),
    [
        ((1, 3, 4, 8), None, "heads a multiple"),
        ((1, 4, 5, 8), None, "does not fit key"),
        ((1, 4, 4, 16), None, "does not fit key"),
        ((1, 4, 4, 8), (1, 1, 3, 20), "a mask of shape"),
        ((1, 4, 4, 8), (1, 1, 4, 19), "20 tokens"),
        ((1, 4, 4, 8), (4, 20), "a mask of shape"),
    ],
)
def test_what_does_not_fit(query_shape: tuple[int, ...], mask_shape: tuple[int, ...] | None, message: str) -> None:
    rule = AttentionRule(mask=None if mask_shape is None else torch.ones(mask_shape))
    with pytest.raises(ConfigError, match=message):
        rule.check_fits(torch.zeros(query_shape), torch.zeros(1, 2, 4, 8), torch.zeros(1, 2, 4, 6), tokens=20)


def test_empty_parts_are_a_mistake() -> None:
    with pytest.raises(AssertionError):
        attend(
            torch.zeros(1, 1, 1, 8), torch.zeros(1, 1, 0, 8), torch.zeros(1, 1, 0, 8), Scoring(1.0), L0Account()
        )
