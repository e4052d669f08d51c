"""The snapshot for `stats()`, from the counters, the layers and the tiers."""

from __future__ import annotations

from collections.abc import Sequence

from ..core.metrics import CacheStats, TierStats
from ..sequence.layer_state import LayerState
from ..sequence.window_sizing import WindowSizing
from .resources import Resources


def snapshot(resources: Resources, window_sizing: WindowSizing, layers: Sequence[LayerState]) -> CacheStats:
    """The state of a manager with these layers."""
    metrics, config = resources.metrics, resources.config
    share = 1 / max(1, len(layers))
    tiers = {
        "L0": TierStats(
            tokens=sum(layer.window.tokens for layer in layers) * share,
            blocks=resources.resident_blocks,
            used_bytes=metrics.l0_bytes,
            capacity_bytes=None,
            bytes_written=metrics["L0_written"],
            bytes_read=metrics["L0_read"],
            blocks_served=metrics["L0_hits"],
        )
    }
    for name, configured in (
        ("host", config.host_capacity_bytes),
        ("L1", config.l1_capacity_bytes),
        ("L2", None),
    ):
        tier = resources.tiers.get(name)
        tiers[name] = TierStats(
            tokens=sum(layer.tokens_in(name) for layer in layers) * share,
            blocks=tier.blocks if tier else 0,
            used_bytes=tier.used_bytes if tier else 0,
            capacity_bytes=tier.capacity_bytes if tier else configured,
            bytes_written=metrics[f"{name}_written"],
            bytes_read=metrics[f"{name}_read"],
            blocks_served=metrics[f"{name}_hits"],
        )
    l1 = resources.tiers.get("L1")
    return metrics.snapshot(
        sequence_tokens=max((layer.count_tokens() for layer in layers), default=0),
        window_tokens=window_sizing.tokens,
        window_changes=window_sizing.changes,
        tiers=tiers,
        l1_io_mode=l1.io_mode if l1 else None,
    )
