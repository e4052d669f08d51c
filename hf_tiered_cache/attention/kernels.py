"""Attention over one split of K and V: output and log-sum-exp, from which the results of splits are merged.

    split 1: K1, V1 ──▶ out1, lse1 ─┐
    split 2: K2, V2 ──▶ out2, lse2 ─┴─▶ lse = log(e^lse1 + e^lse2),  out = e^(lse1-lse) out1 + e^(lse2-lse) out2

PyTorch's fused kernels return the log-sum-exp through their aten operators, which its ring attention uses in the
same way. A kernel is chosen by what it supports, never by trying.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from ..core.metrics import L0Account

# Scores that the matmul kernel holds at a time; more queries are processed in pieces.
MATMUL_SCORE_ELEMENTS = 1 << 22
# Bytes of keys and values that are converted at a time.
CONVERTED_BYTES = 4 << 20

Result = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Scoring:
    """The computation of scores from queries and keys.

    Args:
        scale: factor on the scores.
        softcap: if given, the scores are then capped by `softcap * tanh(score / softcap)`.
        bias: if given, it is added last; `[N or 1, H or 1, R or 1, T]`, query's dtype, finite.
        causal: row `i` sees keys `0 .. i` only; there are as many rows as keys.
    """

    scale: float
    softcap: float | None = None
    bias: torch.Tensor | None = None
    causal: bool = False

    def over(self, piece: tuple[slice, slice]) -> Scoring:
        """Return the scoring of a piece of the batch and heads."""
        if self.bias is None:
            return self
        whole = slice(None)
        batch, heads = (whole if size == 1 else part for size, part in zip(self.bias.shape, piece, strict=False))
        return replace(self, bias=self.bias[batch, heads])


@dataclass(frozen=True)
class Problem:
    """The properties of a problem that decide which kernel runs it.

    Args:
        device_type: `"cpu"`, `"cuda"`, ...
        capability: CUDA compute capability; `(0, 0)` elsewhere.
        dtype: of query, key and value.
        key_dim, value_dim: widths of a head.
        biased, softcap: whether the scores are biased, and whether they are capped.
        flash: whether this PyTorch has CUDA's flash kernel.
    """

    device_type: str
    capability: tuple[int, int]
    dtype: torch.dtype
    key_dim: int
    value_dim: int
    biased: bool
    softcap: bool
    flash: bool

    @classmethod
    def of(cls, query: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> Problem:
        """Describe a call of `attend`."""
        device = query.device
        return cls(
            device.type,
            torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0),
            query.dtype,
            query.shape[-1],
            value.shape[-1],
            scoring.bias is not None,
            scoring.softcap is not None,
            torch.backends.cuda.is_flash_attention_available(),
        )


def _cpu_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, account: L0Account
) -> Result:
    """Run the CPU flash kernel, in float32 also for half precision.

    The kernel rounds its output to the query's dtype, and splits that were rounded before they are merged are less
    exact than one kernel over everything. The conversion costs little: a piece stays in the processor's cache.
    """
    exact = torch.promote_types(query.dtype, torch.float32)
    if query.dtype is exact:
        return _run_cpu_flash(query, key, value, scoring)
    output = torch.empty(*query.shape[:-1], value.shape[-1], dtype=exact, device=query.device)
    lse = torch.empty(query.shape[:-1], dtype=exact, device=query.device)
    batch, heads, tokens, dim = key.shape
    fitting_heads = max(1, CONVERTED_BYTES // (8 * tokens * dim))
    batch_step, head_step = max(1, fitting_heads // heads), min(heads, fitting_heads)
    queries = query.to(exact)
    for part in itertools.product(range(0, batch, batch_step), range(0, heads, head_step)):
        piece = slice(part[0], part[0] + batch_step), slice(part[1], part[1] + head_step)
        keys, values = (
            account.scratch(name, states[piece].shape, exact, states.device).copy_(states[piece])
            for name, states in (("keys", key), ("values", value))
        )
        results = _run_cpu_flash(queries[piece], keys, values, scoring.over(piece))
        with account.temporary(output, lse, queries, *results):
            output[piece], lse[piece] = results
    return output, lse


def _run_cpu_flash(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring) -> Result:
    bias = None if scoring.bias is None else scoring.bias.to(query.dtype)
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query, key, value, 0.0, scoring.causal, attn_mask=bias, scale=scoring.scale
    )
    return output, lse


def _cuda_flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, account: L0Account
) -> Result:
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, scoring.causal, False, scale=scoring.scale
    )
    return output, lse


def _cuda_efficient(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, account: L0Account
) -> Result:
    batch, heads, rows, _ = query.shape
    tokens, bias = key.shape[-2], scoring.bias
    padded = None
    if bias is not None:
        # The kernel reads bias rows in aligned vectors: their memory must be padded to a multiple of 16.
        padded = bias.new_zeros(*bias.shape[:-1], -(-tokens // 16) * 16)
        padded[..., :tokens] = bias
        bias = padded[..., :tokens].expand(batch, heads, rows, tokens)
    with account.temporary(padded):
        output, lse, *_ = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, bias, True, 0.0, scoring.causal, scale=scoring.scale
        )
    return output, lse[..., :rows]  # padded to a multiple of 32


def _matmul(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, account: L0Account
) -> Result:
    """Compute attention by its definition, in float32 or better, a piece of the queries at a time."""
    exact = torch.promote_types(query.dtype, torch.float32)
    batch, heads, rows, _ = query.shape
    tokens = key.shape[-2]
    keys, values = key.to(exact), value.to(exact)
    output = query.new_empty(batch, heads, rows, value.shape[-1], dtype=exact)
    lse = query.new_empty(batch, heads, rows, dtype=exact)
    step = max(1, MATMUL_SCORE_ELEMENTS // (batch * heads * tokens))
    with account.temporary(
        output, lse, keys if keys is not key else None, values if values is not value else None
    ):
        for first in range(0, rows, step):
            piece = slice(first, min(first + step, rows))
            visible = piece.stop if scoring.causal else tokens
            queries = query[:, :, piece].to(exact)
            scores = torch.matmul(queries, keys[..., :visible, :].transpose(-1, -2))
            with account.temporary(scores, queries if exact is not query.dtype else None):
                _finish_scores(scores, piece, scoring)
                lse[:, :, piece] = torch.logsumexp(scores, dim=-1)
                scores.sub_(lse[:, :, piece, None]).exp_()
                weighted = torch.matmul(scores, values[..., :visible, :])
                with account.temporary(weighted):
                    output[:, :, piece] = weighted
    return output, lse


def _finish_scores(scores: torch.Tensor, piece: slice, scoring: Scoring) -> None:
    """Scale, cap, bias and mask the products of some rows, in place."""
    visible = scores.shape[-1]
    scores.mul_(scoring.scale)
    if scoring.softcap is not None:
        scores.div_(scoring.softcap).tanh_().mul_(scoring.softcap)
    if scoring.bias is not None:
        rows = piece if scoring.bias.shape[-2] > 1 else slice(None)
        scores.add_(scoring.bias[..., rows, :visible])
    if scoring.causal:
        positions = torch.arange(visible, device=scores.device)
        scores.masked_fill_(positions > positions[piece, None], torch.finfo(scores.dtype).min)


@dataclass(frozen=True)
class Kernel:
    """A function that computes attention, and a predicate for the problems that it supports."""

    name: str
    run: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, Scoring, L0Account], Result]
    able: Callable[[Problem], bool]


def _cpu_flash_able(problem: Problem) -> bool:
    return problem.device_type == "cpu" and problem.key_dim == problem.value_dim and not problem.softcap


def _cuda_flash_able(problem: Problem) -> bool:
    return (
        problem.device_type == "cuda"
        and problem.flash
        and problem.capability >= (8, 0)
        and problem.dtype in (torch.float16, torch.bfloat16)
        and problem.key_dim == problem.value_dim <= 256
        and problem.key_dim % 8 == 0
        and not problem.biased
        and not problem.softcap
    )


def _cuda_efficient_able(problem: Problem) -> bool:
    lowest_capability = (8, 0) if problem.dtype is torch.bfloat16 else (5, 0)
    aligned = 4 if problem.dtype is torch.float32 else 8
    return (
        problem.device_type == "cuda"
        and problem.capability >= lowest_capability
        and problem.dtype in (torch.float16, torch.bfloat16, torch.float32)
        and problem.key_dim % aligned == problem.value_dim % aligned == 0
        and not problem.softcap
    )


# The first kernel that supports the problem runs; the last supports all.
KERNELS = (
    Kernel("cpu flash", _cpu_flash, _cpu_flash_able),
    Kernel("cuda flash", _cuda_flash, _cuda_flash_able),
    Kernel("cuda efficient", _cuda_efficient, _cuda_efficient_able),
    Kernel("matmul", _matmul, lambda problem: True),
)


def kernel_for(problem: Problem) -> Kernel:
    """Return the kernel that `attend` uses for a problem."""
    return next(kernel for kernel in KERNELS if kernel.able(problem))


def attend(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scoring: Scoring, account: L0Account
) -> Result:
    """Compute the attention of queries over one split, with the log-sum-exp for merging it with others.

    Args:
        query: `[N, H, R, Dk]`.
        key: `[N, H, T, Dk]`, same dtype.
        value: `[N, H, T, Dv]`.
        scoring: the computation of the scores.
        account: counts temporary memory, except the kernels' own scratch.

    Returns:
        Output `[N, H, R, Dv]`, in query's dtype or float32, and log-sum-exp `[N, H, R]` in float32 (float64 for
        float64 queries). New tensors.
    """
    # Kernels assume that the elements of a head are adjacent.
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    assert key.shape[-2] and (not scoring.causal or query.shape[-2] == key.shape[-2])
    return kernel_for(Problem.of(query, value, scoring)).run(query, key, value, scoring, account)
