"""Settings: what is accepted, what is refused, and with which words."""

from __future__ import annotations

import dataclasses

import pytest

from hf_tiered_cache import ConfigError, TieredCacheConfig
from hf_tiered_cache.config import parse_bytes


@pytest.mark.parametrize(
    ("size", "expected"),
    [(0, 0), (4096, 4096), ("6GiB", 6 << 30), ("1.5 MiB", 3 << 19), ("200GB", 200 * 10**9), ("12", 12), ("7b", 7)],
)
def test_sizes(size: int | str, expected: int) -> None:
    assert parse_bytes(size) == expected


@pytest.mark.parametrize("size", [-1, "-1", "6 gigs", "", "GiB", 1.5, True, None])
def test_nonsense_sizes(size: object) -> None:
    with pytest.raises(ConfigError, match="l1_capacity"):
        parse_bytes(size, "l1_capacity")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"window_tokens": 100, "block_tokens": 128}, "smaller than block_tokens"),
        ({"block_tokens": 100}, "multiple of the attention tile"),
        ({"block_tokens": 0}, "block_tokens"),
        ({"window_tokens": "automatic"}, "window_tokens"),
        ({"window_min_tokens": 512}, "window_tokens='auto'"),
        ({"window_tokens": "auto", "window_min_tokens": 100}, "smaller than block_tokens"),
        (
            {"window_tokens": "auto", "window_min_tokens": 1024, "window_max_tokens": 512},
            "below window_min_tokens",
        ),
        ({"memory_reserve": 1}, "memory_reserve"),
        ({"memory_reserve": "10%"}, "memory_reserve"),
        ({"window_tokens": 0}, "window_tokens"),
        ({"sink_tokens": -1}, "sink_tokens"),
        ({"prefetch_layers": 0}, "prefetch_layers"),
        ({"staging_blocks": 0}, "staging_blocks"),
        ({"l1_capacity": "many"}, "l1_capacity"),
        ({"l1_capacity": 0}, "l2_url"),
        ({"l1_io_mode": "fast"}, "l1_io_mode"),
        ({"l1_path": 5}, "l1_path"),
        ({"l2_url": ""}, "l2_url"),
        ({"mode": "selective"}, "mode"),
        ({"l2_url": "s3://bucket/path"}, "l2_url"),
        ({"host_capacity": "some"}, "host_capacity"),
        ({"resident_capacity": -1}, "resident_capacity"),
        ({"high_watermark": 0.7}, "low_watermark=0.8 and high_watermark=0.7"),
        ({"low_watermark": 0}, "low_watermark"),
        ({"high_watermark": None}, "high_watermark"),
        ({"prefetch_threshold": 1.5}, "prefetch_threshold"),
        ({"eviction": 3}, "eviction"),
        ({"concurrent_streams": 0}, "concurrent_streams"),
        ({"protection_steps": -1}, "protection_steps"),
        ({"selection": "bounds"}, "not available yet"),
        ({"top_blocks": 64}, "not available yet"),
        ({"tolerance": 0.01}, "not available yet"),
        ({"verify": True}, "not available yet"),
    ],
)
def test_nonsense_settings(settings: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        TieredCacheConfig(**settings)  # type: ignore[arg-type]


def test_asking_a_missing_feature_for_nothing_is_fine() -> None:
    TieredCacheConfig(host_capacity=0, tolerance=None, verify=False, top_blocks=None)


def test_options_override_the_object() -> None:
    base = TieredCacheConfig(window_tokens=512, block_tokens=64)
    assert TieredCacheConfig.from_options(base, {"window_tokens": 1024}) == TieredCacheConfig(
        window_tokens=1024, block_tokens=64
    )
    assert TieredCacheConfig.from_options(None, {}) == TieredCacheConfig()
    with pytest.raises(ConfigError, match=r"'window_token': did you mean 'window_tokens'"):
        TieredCacheConfig.from_options(None, {"window_token": 1024})


def test_settings_as_a_dict_are_refused() -> None:
    with pytest.raises(ConfigError, match="as keywords"):
        TieredCacheConfig.from_options({"window_tokens": 64}, {})  # type: ignore[arg-type]


def test_settings_are_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        TieredCacheConfig().window_tokens = 1  # type: ignore[misc]
