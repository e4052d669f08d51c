"""Contexts that accelerator memory could not hold: memory must not grow with length, and outputs must be exact.

`model`: a small random Llama (2 layers, 4 query and 2 KV heads of 64, float32: 2 KiB per token) reads a long
prompt through `generate`, in chunks, and decodes. `manager`: K and V of a larger shape (4 layers, 8 KV heads of
128, bfloat16: 16 KiB per token) are appended and decoded without a model.

The table gives, at several lengths, the size of K and V, the accelerator memory that the package has held at
most, and how much the process's resident memory has grown since its first row. Limits: at the end L0 has held
less than 5 % of K and V, no more than at the first row, and resident memory has grown by less than 5 % of K and
V. Outputs of sampled queries are compared with attention in float64 over K and V that never went through the
package. The command fails if a limit is missed; its last line is JSON.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import math
import tempfile
import time
from collections.abc import Hashable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from ..attention.online import AttentionRule
from ..core.config import TieredCacheConfig
from ..core.metrics import format_bytes
from ..integration.cache import TieredCache
from ..manager.manager import KVCacheManager
from ._models import CACHE_ARGUMENT

_LIMIT = 0.05
# Relative to the largest element of an output; bfloat16 rounds by up to 2^-9.
_TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2**-8}
_MODEL_HEADS, _MODEL_KV_HEADS, _MODEL_DIM, _MODEL_LAYERS = 4, 2, 64, 2
_HEADS, _KV_HEADS, _DIM, _LAYERS = 32, 8, 128, 4
_PIECE_TOKENS = 4096
_REQUEST = "bench"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--model-tokens", type=int, default=131_072, help="prompt of the model; 0: leave it out")
    parser.add_argument("--manager-tokens", type=int, default=262_144, help="tokens to append; 0: leave it out")
    parser.add_argument("--chunk", type=int, default=1024, help="prefill_chunk_size (default %(default)s)")
    parser.add_argument("--steps", type=int, default=16, help="decode steps at the end (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")


@dataclass
class Row:
    """Memory at one length."""

    tokens: int
    kv_bytes: int
    peak_l0_bytes: int
    grown_rss_bytes: int


@dataclass
class Report:
    """The result of one of the two runs."""

    rows: list[Row] = field(default_factory=list)
    errors: list[float] = field(default_factory=list)
    seconds: float = 0.0
    first_rss_bytes: int = 0

    def note(self, tokens: int, token_bytes: int, manager: KVCacheManager) -> None:
        """Add a row."""
        gc.collect()
        _give_free_memory_back()
        rss = psutil.Process().memory_info().rss
        self.first_rss_bytes = self.first_rss_bytes or rss
        stats = manager.stats()
        self.rows.append(Row(tokens, tokens * token_bytes, stats.peak_l0_bytes, rss - self.first_rss_bytes))

    def missed(self, dtype: torch.dtype) -> list[str]:
        """Return the limits that were not kept."""
        first, last = self.rows[0], self.rows[-1]
        limits = {
            "L0 holds less than 5 % of K and V": last.peak_l0_bytes < _LIMIT * last.kv_bytes,
            "L0 does not grow with length": last.peak_l0_bytes <= first.peak_l0_bytes,
            "resident memory does not grow with length": last.grown_rss_bytes < _LIMIT * last.kv_bytes,
            "outputs equal the reference": bool(self.errors) and max(self.errors) <= _TOLERANCE[dtype],
        }
        return [what for what, kept in limits.items() if not kept]


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    torch.manual_seed(0)
    results: dict[str, Any] = {}
    failures: list[str] = []
    for name, tokens, measure, dtype in (
        ("model", arguments.model_tokens, _run_model, torch.float32),
        ("manager", arguments.manager_tokens, _run_manager, torch.bfloat16),
    ):
        if not tokens:
            continue
        started = time.perf_counter()
        report = measure(arguments)
        report.seconds = time.perf_counter() - started
        missed = report.missed(dtype)
        failures += [f"{name}: {limit}" for limit in missed]
        print(f"{name}\n{'tokens':>10}{'K and V':>14}{'L0 at most':>14}{'share':>9}{'resident':>14}")
        for row in report.rows:
            grown = ("-" if row.grown_rss_bytes < 0 else "+") + format_bytes(abs(row.grown_rss_bytes))
            print(
                f"{row.tokens:>10,}{format_bytes(row.kv_bytes):>14}{format_bytes(row.peak_l0_bytes):>14}"
                f"{row.peak_l0_bytes / row.kv_bytes:>9.2%}{grown:>14}"
            )
        print(
            f"{len(report.errors)} sampled outputs: relative error to float64 at most {max(report.errors):.2g}; "
            f"{report.seconds:.0f} s\n"
        )
        results[name] = {"max_error": max(report.errors), "missed": missed, **asdict(report)}
    print(json.dumps({"benchmark": "longcontext", "device": arguments.device, **results}))
    if failures:
        raise SystemExit("limits missed: " + "; ".join(failures))


# -- a model ---------------------------------------------------------------------------------------------------


class _Journal(KVCacheManager):
    """A manager that also writes all K and V to files of its own, and checks outputs against them.

    Args:
        directory: for the files.
        check_from: outputs are checked once a layer has this many tokens.
        options: of `TieredCacheConfig`.
    """

    def __init__(self, directory: Path, check_from: int, **options: Any) -> None:
        super().__init__(TieredCacheConfig(**options))
        self._directory = directory
        self._check_from = check_from
        self.errors: list[float] = []

    def update(
        self, request_id: Hashable, layer_id: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        self._write(layer_id, key, value)
        return super().update(request_id, layer_id, key, value)

    def attend(
        self,
        request_id: Hashable,
        layer_id: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule | None = None,
    ) -> torch.Tensor:
        self._write(layer_id, key, value)
        output = super().attend(request_id, layer_id, query, key, value, rule)
        tokens = self.tokens(request_id, layer_id)
        if tokens >= self._check_from:
            for position in {0, query.shape[2] // 2, query.shape[2] - 1}:
                visible = tokens - query.shape[2] + 1 + position
                expected = reference(query[0, :, position].cpu(), self._read(layer_id, visible))
                self.errors.append(relative_error(output[0, position], expected))
        return output

    def _write(self, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> None:
        for name, states in (("k", key), ("v", value)):  # [T, H, D], appended
            with (self._directory / f"{name}{layer_id}").open("ab") as file:
                file.write(states[0].transpose(0, 1).contiguous().cpu().numpy().tobytes())

    def _read(self, layer_id: int, tokens: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        token_bytes = _MODEL_KV_HEADS * _MODEL_DIM * 4
        for first in range(0, tokens, _PIECE_TOKENS):
            count = min(_PIECE_TOKENS, tokens - first)
            pieces = []
            for name in "kv":
                with (self._directory / f"{name}{layer_id}").open("rb") as file:
                    file.seek(first * token_bytes)
                    flat = np.frombuffer(file.read(count * token_bytes), dtype=np.float32)
                states = torch.from_numpy(flat.copy()).view(count, _MODEL_KV_HEADS, _MODEL_DIM)
                pieces.append(states.transpose(0, 1))
            yield pieces[0], pieces[1]


def _run_model(arguments: argparse.Namespace) -> Report:
    tokens = arguments.model_tokens
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=_MODEL_HEADS * _MODEL_DIM,
        intermediate_size=512,
        num_hidden_layers=_MODEL_LAYERS,
        num_attention_heads=_MODEL_HEADS,
        num_key_value_heads=_MODEL_KV_HEADS,
        max_position_embeddings=1 << 20,
    )
    model = LlamaForCausalLM(config).eval().to(arguments.device)
    model.generation_config.eos_token_id = None
    input_ids = torch.randint(1, 1024, (1, tokens), device=arguments.device)
    token_bytes = 2 * _MODEL_LAYERS * _MODEL_KV_HEADS * _MODEL_DIM * 4
    report, milestones = Report(), _milestones(tokens)
    options = {"window_tokens": 512, "block_tokens": 128, "stream_buffer_size": "1MiB", "host_capacity": 0}
    with tempfile.TemporaryDirectory() as directory:
        manager = _Journal(Path(directory), check_from=tokens, **options)
        with manager, TieredCache.for_model(model, manager=manager) as cache:

            def watch(module: Any, positional: Any) -> None:
                while milestones and cache.get_seq_length() >= milestones[0]:
                    report.note(milestones.pop(0), token_bytes, manager)

            model.register_forward_pre_hook(watch)
            model.generate(
                input_ids,
                **{CACHE_ARGUMENT: cache},
                prefill_chunk_size=arguments.chunk,
                max_new_tokens=arguments.steps + 1,
                do_sample=False,
            )
            report.note(cache.get_seq_length(), token_bytes, manager)
            report.errors = manager.errors
    return report


# -- the manager alone -----------------------------------------------------------------------------------------


def _run_manager(arguments: argparse.Namespace) -> Report:
    device = torch.device(arguments.device)
    report, milestones = Report(), _milestones(arguments.manager_tokens)
    token_bytes = 2 * _LAYERS * _KV_HEADS * _DIM * 2
    steps = 0
    with KVCacheManager(TieredCacheConfig(window_tokens=1024, block_tokens=256, host_capacity=0)) as manager:
        manager.allocate(_REQUEST)
        for piece in range(math.ceil(arguments.manager_tokens / _PIECE_TOKENS)):
            for layer in range(_LAYERS):
                keys, values = _random(layer, piece, _KV_HEADS, _PIECE_TOKENS)
                manager.append(_REQUEST, layer, keys.to(device), values.to(device))
            at_milestone = (piece + 1) * _PIECE_TOKENS >= milestones[0]
            if at_milestone:
                milestones.pop(0)
            elif (piece + 1) * _PIECE_TOKENS > 1 << 15:
                continue
            # Decode after every piece while that is cheap, so that the window is seen in all its states.
            for _ in range(1 if milestones else arguments.steps):
                outputs = [_decode(manager, layer, steps, device) for layer in range(_LAYERS)]
                steps += 1
            if not at_milestone:
                continue
            report.note((piece + 1) * _PIECE_TOKENS + steps, token_bytes, manager)
            for layer in (0, _LAYERS - 1):
                query = _random(layer, -steps, _HEADS, 1)[0]
                expected = reference(query[0, :, 0], _everything(layer, piece + 1, steps))
                report.errors.append(relative_error(outputs[layer][0, 0], expected))
    return report


def _decode(manager: KVCacheManager, layer: int, step: int, device: torch.device) -> torch.Tensor:
    """Decode one token of one layer; its query is drawn like K of a wider layer of that step."""
    query = _random(layer, -(step + 1), _HEADS, 1)[0]
    key, value = _random(layer, -(step + 1), _KV_HEADS, 1)
    return manager.attend(_REQUEST, layer, query.to(device), key.to(device), value.to(device))


def _random(layer: int, piece: int, heads: int, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return K and V `[1, heads, tokens, D]`, the same each time; negative pieces are decode steps."""
    generator = torch.Generator("cpu").manual_seed(((piece + 1_000_000) * _LAYERS + layer) * 64 + heads)
    keys, values = (
        torch.randn(1, heads, tokens, _DIM, generator=generator, device="cpu").bfloat16() for _ in range(2)
    )
    return keys, values


def _everything(layer: int, pieces: int, steps: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield all K and V `[H, T, D]` of a layer, made anew; their order does not matter to the newest query."""
    for piece in [*range(pieces), *(-(step + 1) for step in range(steps))]:
        keys, values = _random(layer, piece, _KV_HEADS, _PIECE_TOKENS if piece >= 0 else 1)
        yield keys[0], values[0]


# -- both --------------------------------------------------------------------------------------------------------


def _milestones(tokens: int) -> list[int]:
    """Return 32k, 64k, ... up to the whole length."""
    return [*(length for length in (1 << 15 << power for power in range(20)) if length < tokens), tokens]


def _give_free_memory_back() -> None:
    """Return freed memory to the system: glibc keeps it, and it would count as resident."""
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL("libc.so.6").malloc_trim(0)


def relative_error(output: torch.Tensor, expected: torch.Tensor) -> float:
    """Return the largest difference, relative to the largest element."""
    return ((output.cpu().double() - expected).abs().max() / expected.abs().max()).item()


def reference(query: torch.Tensor, parts: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Compute the attention of one query `[Hq, D]` over parts of K, V `[Hkv, T, D]`, in float64: `[Hq, D]`.

    Scores are taken relative to the highest one so far.
    """
    heads, dim = query.shape
    exact = query.double()
    top = exact.new_full((heads, 1), -math.inf)
    total, weighted = exact.new_zeros(heads, 1), exact.new_zeros(heads, dim)
    for keys, values in parts:
        groups = heads // keys.shape[0]
        scores = torch.bmm(exact.view(-1, groups, dim), keys.double().transpose(1, 2)).flatten(0, 1) / math.sqrt(
            dim
        )
        higher = torch.maximum(top, scores.amax(dim=1, keepdim=True))
        shrink, weights = torch.exp(top - higher), torch.exp(scores - higher)
        total = total * shrink + weights.sum(dim=1, keepdim=True)
        added = torch.bmm(weights.view(-1, groups, weights.shape[1]), values.double()).flatten(0, 1)
        weighted, top = weighted * shrink + added, higher
    return weighted / total
