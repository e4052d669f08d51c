"""The tiers without `generate`: store keys and values under a request's name, and fetch any positions.

    python examples/manager.py

For code with its own attention loop, such as a serving prototype or an experiment with sparse attention.
"""

from __future__ import annotations

import torch

from hf_tiered_cache import KVCacheManager, TieredCacheConfig

LAYERS, BATCH, HEADS, TOKENS, HEAD_DIM = 4, 1, 2, 2048, 64


def main() -> None:
    torch.manual_seed(0)
    keys = torch.randn(LAYERS, BATCH, HEADS, TOKENS, HEAD_DIM)
    values = torch.randn(LAYERS, BATCH, HEADS, TOKENS, HEAD_DIM)
    positions = torch.tensor([5, 1900, 3])  # any order, old and new

    with KVCacheManager(TieredCacheConfig(window_tokens=256, block_tokens=64)) as manager:
        manager.allocate("request", TOKENS)
        # A long prompt at once, then token by token, as a model would.
        append(manager, keys, values, 0, TOKENS - 8)
        for token in range(TOKENS - 8, TOKENS):
            append(manager, keys, values, token, token + 1)

        manager.prefetch("request", positions)  # returns at once; blocks are read in the background
        check(manager, keys, values, positions)
        print("fetched old and new positions: equal to what was appended")

        query = torch.randn(BATCH, 4 * HEADS, 1, HEAD_DIM)
        key, value = torch.randn(2, BATCH, HEADS, 1, HEAD_DIM)
        outputs = [manager.attend("request", layer_id, query, key, value) for layer_id in range(LAYERS)]
        print(f"streaming attention over {TOKENS + 1} tokens, a few blocks at a time: {tuple(outputs[0].shape)}")

        manager.evict("request")  # every full block leaves L0; nothing is lost
        check(manager, keys, values, positions)
        print("fetched again after evict: still equal\n")

        print(manager.stats())
        manager.free("request")


def append(manager: KVCacheManager, keys: torch.Tensor, values: torch.Tensor, start: int, stop: int) -> None:
    """Append tokens `start` to `stop` to every layer, each tensor `[batch, heads, tokens, head_dim]`."""
    for layer_id in range(LAYERS):
        manager.append("request", layer_id, keys[layer_id, :, :, start:stop], values[layer_id, :, :, start:stop])


def check(manager: KVCacheManager, keys: torch.Tensor, values: torch.Tensor, positions: torch.Tensor) -> None:
    """Compare what the manager returns, `[batch, heads, len(positions), head_dim]`, with the original."""
    for layer_id in range(LAYERS):
        fetched_keys, fetched_values = manager.fetch("request", layer_id, positions)
        if not torch.equal(fetched_keys, keys[layer_id, :, :, positions]):
            raise SystemExit(f"layer {layer_id}: keys differ")
        if not torch.equal(fetched_values, values[layer_id, :, :, positions]):
            raise SystemExit(f"layer {layer_id}: values differ")


if __name__ == "__main__":
    main()
