"""Measures how well streaming hides storage behind computation, against limits and peers.

`overlap`: decode steps over layers whose blocks are in L1. A layer's computation is simulated by a sleep, which
leaves the processor free as a GPU would. The limit is the slower of two runs: computation alone (everything in
the window) and storage alone (the same reads, no sleeps). Three regimes: computation takes half of the storage's
time, as long, and twice as long. By default the sleep comes after the attention; `slow attention` has half of it
inside, spread over the splits as they arrive. With `few buffers` the limit is out of reach: what can be
read during a computation is bounded by the buffers, here a quarter of a layer.

`real attention`: the same, with the attention computed by the same processor that reads; the computation alone is
sdpa over everything in memory, plus the sleeps. A machine with few cores cannot do both at once.

`decode`: streaming against gathered attention with sdpa, no sleeps. `prefill`: a random Llama reads a prompt
in one forward pass, streaming against stock sdpa with everything in memory.

Ratios are medians of interleaved runs; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from ..core.config import TieredCacheConfig
from ..integration.cache import TieredCache
from ..manager.manager import KVCacheManager
from ._models import CACHE_ARGUMENT

_LAYERS, _QUERY_HEADS, _KV_HEADS, _HEAD_DIM = 8, 8, 2, 64
_WINDOW_TOKENS = 1024
_REQUEST = "bench"
_SHORTEST_SLEEP_SECONDS = 5e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--context", type=int, default=32768, help="tokens while decoding (default %(default)s)")
    parser.add_argument("--prompt", type=int, default=16384, help="tokens of the prompt (default %(default)s)")
    parser.add_argument("--steps", type=int, default=6, help="decode steps per run (default %(default)s)")
    parser.add_argument("--runs", type=int, default=5, help="interleaved runs (default %(default)s)")
    parser.add_argument("--prefill-runs", type=int, default=3, help="runs of the prefill (default %(default)s)")
    parser.add_argument("--block-tokens", type=int, default=256, help="tokens per block (default %(default)s)")
    parser.add_argument("--dtype", default="bfloat16", help="of K and V while decoding (default %(default)s)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")


@torch.inference_mode()
def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    torch.manual_seed(0)
    results = {**_overlap(arguments), "decode": _decode(arguments), "prefill": _prefill(arguments)}
    print(f"{'case':<26}{'ratio':>8}{'range':>16}   of")
    for name, result in results.items():
        low, high = result["range"]
        print(f"{name:<26}{result['ratio']:>8.3f}{f'{low:.2f} to {high:.2f}':>16}   {result['of']}")
    settings = {name: getattr(arguments, name) for name in ("device", "context", "prompt", "dtype")}
    print(json.dumps({"benchmark": "overlap", **settings, **results}))


class _Decoder:
    """A manager filled with random K and V, and ways to take one decode step over its layers."""

    def __init__(self, arguments: argparse.Namespace, window_tokens: int, **options: Any) -> None:
        self._arguments = arguments
        self._dtype, self._device = getattr(torch, arguments.dtype), arguments.device
        settings = {"block_tokens": arguments.block_tokens, "host_capacity": 0, **options}
        self.manager = KVCacheManager(TieredCacheConfig(window_tokens=window_tokens, **settings))
        self.manager.allocate(_REQUEST, arguments.context + 4096)
        for first in range(0, arguments.context, 4096):
            for layer in range(_LAYERS):
                tokens = min(4096, arguments.context - first)
                self.manager.append(_REQUEST, layer, self._states(tokens), self._states(tokens))
        self.manager.flush()
        self._query, self._key = self._states(1, _QUERY_HEADS), self._states(1)

    def stream(self, layer: int) -> None:
        """Run streaming attention."""
        self.manager.attend(_REQUEST, layer, self._query, self._key, self._key)

    def gather(self, layer: int) -> None:
        """Run gathered attention, by sdpa."""
        keys, values = self.manager.update(_REQUEST, layer, self._key, self._key)
        scaled_dot_product_attention(
            self._query.view(1, _KV_HEADS, -1, _HEAD_DIM), keys, values
        )  # the heads of a group packed, as transformers does

    def simulate(self, layer: int, attention_seconds: float = 0.0) -> None:
        """Run the reads of streaming attention, with sleeps in place of its computation."""
        sleeping: Any = _SleepingAttention(attention_seconds / self._arguments.context)
        with (
            self.manager._using(_REQUEST) as request,
            self.manager._resources.reader_pool(self._key.device).lease(request) as lease,
        ):
            self.manager._operations.attend(request, request.layers[layer], self._key, self._key, sleeping, lease)

    def step_seconds(self, attend: Callable[[int], None], layer_seconds: float = 0.0) -> float:
        """Return the mean time of a step over all layers, each of which also computes for `layer_seconds`."""
        for layer in range(_LAYERS):
            attend(layer)  # learn the order, fill the buffers
        self._synchronize()
        steps: int = self._arguments.steps
        started = time.perf_counter()
        for _ in range(steps):
            for layer in range(_LAYERS):
                attend(layer)
                if layer_seconds:
                    time.sleep(layer_seconds)
        self._synchronize()
        return (time.perf_counter() - started) / steps

    def _states(self, tokens: int, heads: int = _KV_HEADS) -> torch.Tensor:
        return torch.randn(1, heads, tokens, _HEAD_DIM, device=self._device).to(self._dtype)

    def _synchronize(self) -> None:
        if self._device == "cuda":
            torch.cuda.synchronize()


class _SleepingAttention:
    """Takes splits as `OnlineAttention` does, but sleeps. Short sleeps are merged: each costs a wake-up."""

    def __init__(self, token_seconds: float) -> None:
        self._token_seconds = token_seconds
        self._owed_seconds = 0.0

    def add(self, key: torch.Tensor, value: torch.Tensor, start: int, newest: bool = False) -> None:
        self._sleep(key.shape[2])

    def add_blocks(self, keys: torch.Tensor, values: torch.Tensor, start: int, rows: Any) -> None:
        self._sleep(keys.shape[0] * keys.shape[3])

    def _sleep(self, tokens: int) -> None:
        self._owed_seconds += tokens * self._token_seconds
        if self._owed_seconds > _SHORTEST_SLEEP_SECONDS:
            time.sleep(self._owed_seconds)
            self._owed_seconds = 0.0


@contextmanager
def _decoder(
    arguments: argparse.Namespace, window_tokens: int = _WINDOW_TOKENS, **options: Any
) -> Iterator[_Decoder]:
    decoder = _Decoder(arguments, window_tokens, **options)
    with decoder.manager:
        yield decoder


def _overlap(arguments: argparse.Namespace) -> dict[str, Any]:
    layer_bytes = 2 * _KV_HEADS * _HEAD_DIM * getattr(torch, arguments.dtype).itemsize * arguments.context
    few_buffers = {"stream_buffers": 2, "stream_buffer_size": layer_bytes // 8}
    results = {}
    for name, options in {
        "overlap": {},
        "slow attention": {},
        "few buffers": few_buffers,
        "real attention": {},
    }.items():
        with (
            _decoder(arguments, **options) as tiers,
            _decoder(arguments, window_tokens=2 * arguments.context) as memory,
        ):
            storage = statistics.median(tiers.step_seconds(tiers.simulate) for _ in range(3))
            for share in (0.5, 1.0, 2.0):
                seconds = share * storage / _LAYERS
                inside = seconds / 2 if name == "slow attention" else 0.0
                in_memory, streamed = (
                    (memory.gather, tiers.stream)
                    if name == "real attention"
                    else (partial(side.simulate, attention_seconds=inside) for side in (memory, tiers))
                )
                ratios = []
                for _ in range(arguments.runs):
                    alone = tiers.step_seconds(tiers.simulate), memory.step_seconds(in_memory, seconds - inside)
                    ratios.append(tiers.step_seconds(streamed, seconds - inside) / max(alone))
                what = f"max(compute alone, storage alone); compute {share:g} x storage"
                results[f"{name}, {share:g}"] = _result(ratios, what)
    return results


def _decode(arguments: argparse.Namespace) -> dict[str, Any]:
    with _decoder(arguments) as streamed, _decoder(arguments) as gathered:
        ratios = [
            streamed.step_seconds(streamed.stream) / gathered.step_seconds(gathered.gather)
            for _ in range(arguments.runs)
        ]
    return _result(ratios, "gathered attention")


def _prefill(arguments: argparse.Namespace) -> dict[str, Any]:
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=4,
        num_attention_heads=_QUERY_HEADS,
        num_key_value_heads=_KV_HEADS,
        max_position_embeddings=1 << 20,
    )
    model = LlamaForCausalLM(config).eval().to(arguments.device)
    input_ids = torch.randint(1, 1024, (1, arguments.prompt), device=arguments.device)

    def seconds(cache: Any) -> float:
        started = time.perf_counter()
        logits = model(input_ids, use_cache=True, logits_to_keep=1, **{CACHE_ARGUMENT: cache}).logits
        logits.sum().item()  # waits for an accelerator
        return time.perf_counter() - started

    ratios = []
    for turn in range(arguments.prefill_runs + 1):
        model.set_attn_implementation("sdpa")
        stock = seconds(DynamicCache(config=config))
        with TieredCache.for_model(
            model, window_tokens=_WINDOW_TOKENS, block_tokens=arguments.block_tokens, host_capacity=0
        ) as cache:
            streamed = seconds(cache)
        if turn:  # the first warms up
            ratios.append(streamed / stock)
    return _result(ratios, "sdpa with everything in memory")


def _result(ratios: list[float], of: str) -> dict[str, Any]:
    return {
        "ratio": round(statistics.median(ratios), 3),
        "range": [round(min(ratios), 3), round(max(ratios), 3)],
        "of": of,
    }
