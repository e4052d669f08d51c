"""The examples of CONTRIBUTING.md work."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from hf_tiered_cache import KVCacheManager, TieredCacheConfig
from hf_tiered_cache.residency.eviction import EVICTIONS
from hf_tiered_cache.tiers import TierRegistry

from ..pages import code_blocks

PAGE = Path(__file__).parents[2] / "CONTRIBUTING.md"


def test_the_policy_and_the_tier_serve_a_manager() -> None:
    blocks = code_blocks(PAGE, "python")
    assert len(blocks) == 2
    names: dict[str, Any] = {"__name__": "contributing"}
    try:
        for block in blocks:
            exec(compile(block, str(PAGE), "exec"), names)
        config = TieredCacheConfig(
            window_tokens=16,
            block_tokens=16,
            host_capacity=1 << 15,
            l1_capacity=0,
            l2_tier="dict",
            eviction="newest",
        )
        keys, values = torch.randn(2, 1, 2, 300, 8, device="cpu")
        with KVCacheManager(config) as manager:
            manager.allocate("a")
            manager.append("a", 0, keys, values)
            manager.flush()
            assert manager.stats().tiers["L2"].blocks > 0
            found = manager.fetch("a", 0, range(300))
        assert torch.equal(found[0], keys) and torch.equal(found[1], values)
    finally:
        EVICTIONS.classes.pop("newest", None)
        TierRegistry.classes.pop("dict", None)
