"""The cost of TieredCache per decode step, against DynamicCache in the same process, in interleaved runs.

Regime: a random Llama with the shape of a 135M-parameter model (30 layers, 9 query and 3 KV heads of 64), batch
1, greedy. `fits` keeps the whole context in the window, so nothing is sealed: any ratio above 1 is bookkeeping.
`tiers` has a window of an eighth of the context, so each step loads seven eighths of K and V from storage.

The ceiling is the peer itself: attention and the rest of the model are the same work on both sides. DynamicCache
concatenates K and V anew in each step, TieredCache writes one token in place while all fits, so a ratio below 1 is
possible. Ratios are medians over interleaved pairs of runs; the last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import torch
from transformers import Cache, DynamicCache, LlamaConfig, LlamaForCausalLM

from ..integration.cache import TieredCache
from ._models import CACHE_ARGUMENT


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this benchmark."""
    parser.add_argument("--context", type=int, default=1024, help="tokens of the prompt (default %(default)s)")
    parser.add_argument("--steps", type=int, default=64, help="decode steps per run (default %(default)s)")
    parser.add_argument("--pairs", type=int, default=7, help="pairs of runs (default %(default)s)")
    parser.add_argument("--layers", type=int, default=30, help="layers of the model (default %(default)s)")
    parser.add_argument("--case", choices=("fits", "tiers"), help="run only this case (default both)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default %(default)s)")
    parser.add_argument("--dtype", default="float32", help="of the model (default %(default)s)")


def run(arguments: argparse.Namespace) -> None:
    """Measure and print."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=arguments.layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=1 << 20,
        dtype=arguments.dtype,
    )
    model = LlamaForCausalLM(config).eval().to(arguments.device, getattr(torch, arguments.dtype))
    input_ids = torch.randint(1, 4096, (1, arguments.context), device=arguments.device)
    small = max(64, arguments.context // 8 // 64 * 64)
    cases = {
        "fits": {"window_tokens": arguments.context + arguments.steps, "block_tokens": 64},
        "tiers": {"window_tokens": small, "block_tokens": 64, "host_capacity": 0},
    }
    results = {}
    for name, options in cases.items():
        if arguments.case not in (None, name):
            continue
        ratios, prefill_ratios, stall_shares = [], [], []
        for pair in range(arguments.pairs + 1):
            runs = {}
            for side in ("peer", "own") if pair % 2 else ("own", "peer"):  # neither is always the second
                if side == "peer":
                    runs[side] = _run_once(model, input_ids, arguments.steps, DynamicCache(config=config))
                    continue
                with TieredCache(config=config, **options) as cache:
                    runs[side] = _run_once(model, input_ids, arguments.steps, cache)
                    stall = cache.stats().read_stall_seconds
            own, peer = runs["own"], runs["peer"]
            assert torch.equal(own["tokens"], peer["tokens"]), "the outputs differ"
            if pair:  # the first pair warms up
                ratios.append(own["step_seconds"] / peer["step_seconds"])
                prefill_ratios.append(own["prefill_seconds"] / peer["prefill_seconds"])
                stall_shares.append(stall / (own["step_seconds"] * arguments.steps))
        results[name] = {
            "step_ratio": round(statistics.median(ratios), 3),
            "step_ratio_range": [round(min(ratios), 3), round(max(ratios), 3)],
            "prefill_ratio": round(statistics.median(prefill_ratios), 3),
            "read_stall_share": round(statistics.median(stall_shares), 3),
        }
    print(f"{'case':<8}{'step / DynamicCache':>21}{'range':>16}{'prefill':>10}{'waiting for reads':>20}")
    for name, result in results.items():
        low, high = result["step_ratio_range"]
        print(
            f"{name:<8}{result['step_ratio']:>21.3f}{f'{low:.2f} to {high:.2f}':>16}"
            f"{result['prefill_ratio']:>10.3f}{result['read_stall_share']:>20.1%}"
        )
    settings = {"context": arguments.context, "steps": arguments.steps, "layers": arguments.layers}
    print(json.dumps({"benchmark": "overhead", "device": arguments.device, **settings, **results}))


@torch.no_grad()
def _run_once(model: Any, input_ids: torch.Tensor, steps: int, cache: Cache) -> dict[str, Any]:
    """Prefill and decode greedily by plain forward calls, so that nothing else is timed."""
    started = time.perf_counter()
    logits = model(input_ids, **{CACHE_ARGUMENT: cache}, use_cache=True, logits_to_keep=1).logits
    token = logits[:, -1:].argmax(-1)
    tokens = [token.cpu()]
    decoding = time.perf_counter()
    for _ in range(steps):
        token = model(token, **{CACHE_ARGUMENT: cache}, use_cache=True).logits.argmax(-1)
        tokens.append(token.cpu())
    ended = time.perf_counter()
    return {
        "tokens": torch.cat(tokens, 1),
        "prefill_seconds": decoding - started,
        "step_seconds": (ended - decoding) / steps,
    }
