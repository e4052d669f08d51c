"""Accepted and refused settings, and the error messages."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import os
import pickle
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch

from hf_tiered_cache import ConfigError, TieredCacheConfig
from hf_tiered_cache.core.config import parse_bytes


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        *[
            (0, 0),
            (4096, 4096),
            ("6GiB", 6 << 30),
            ("1.5 MiB", 3 << 19),
            ("200GB", 200 * 10**9),
            ("12", 12),
            ("7b", 7),
        ],
        *[("4G", 4 * 10**9), ("4Gi", 4 << 30), ("512K", 512_000), ("1e9", 10**9), ("9007199254740993", 2**53 + 1)],
        *[(1e9, 10**9), (np.int64(5), 5), (np.float32(4096), 4096), (np.array(7), 7), (torch.tensor(8), 8)],
    ],
)
def test_sizes(size: object, expected: int) -> None:
    assert parse_bytes(size) == expected
    assert type(parse_bytes(size)) is int


NONSENSE = [-1, "-1", "6 gigs", "", "GiB", 1.5, "0.5", "0.0001K", "1e999", True, None]
NONSENSE += [
    math.nan,
    math.inf,
    "nan",
    np.float64(0.5),
    np.bool_(True),
    np.array([1]),
    torch.tensor(1.5),
    b"1",
    1j,
]
NONSENSE += [torch.tensor(1, device="meta"), Fraction(10**400, 3)]


@pytest.mark.parametrize("size", NONSENSE)
def test_nonsense_sizes(size: object) -> None:
    with pytest.raises(ConfigError, match="l1_capacity"):
        parse_bytes(size, "l1_capacity")


COUNTS = ["window_tokens", "sink_tokens", "block_tokens", "prefetch_layers", "stream_buffers"]
COUNTS += ["concurrent_streams", "staging_blocks", "protection_steps", "warmup_steps"]
SIZES = ["host_capacity", "l1_capacity", "resident_capacity", "stream_buffer_size"]
FRACTIONS = ["memory_reserve", "high_watermark", "low_watermark", "prefetch_threshold"]


def test_every_number_is_covered_here() -> None:
    default = TieredCacheConfig(l1_capacity=1, host_capacity=1)
    numbers = {name for name, value in dataclasses.asdict(default).items() if type(value) in (int, float)}
    assert numbers == {*COUNTS, *SIZES, *FRACTIONS}


@pytest.mark.parametrize(
    "given", [np.int64(4096), 4096.0, np.float32(4096), "4096", "4.096K", "4Ki", torch.tensor(4096)]
)
@pytest.mark.parametrize("name", [*COUNTS, *SIZES])
def test_whole_numbers_of_any_type(name: str, given: object) -> None:
    others = {} if name == "window_tokens" else {"window_tokens": 1 << 20}
    value = getattr(TieredCacheConfig(**others, **{name: given}), name)  # type: ignore[arg-type]
    assert value == 4096 and type(value) is int


@pytest.mark.parametrize(
    "given", [math.nan, math.inf, 0.5, "0.5", True, np.bool_(True), np.array([4096]), [4096], "4096B?"]
)
@pytest.mark.parametrize("name", [*COUNTS, *SIZES, "window_min_tokens", "window_max_tokens"])
def test_what_is_no_whole_number(name: str, given: object) -> None:
    settings: dict[str, object] = {"window_tokens": "auto"} if name.startswith("window_m") else {}
    with pytest.raises(ConfigError, match=f"^{name}="):
        TieredCacheConfig(**settings | {name: given})  # type: ignore[arg-type]


def test_bounds_of_a_window_are_counts_too() -> None:
    config = TieredCacheConfig(window_tokens="auto", window_min_tokens=np.int32(512), window_max_tokens=1e6)  # type: ignore[arg-type]
    assert (config.window_min_tokens, config.window_max_tokens) == (512, 1_000_000)
    assert type(config.window_min_tokens) is type(config.window_max_tokens) is int


@pytest.mark.parametrize("name", FRACTIONS)
def test_shares_of_any_type(name: str) -> None:
    for given in (np.float32(0.8125), Fraction(13, 16), torch.tensor(0.8125)):
        value = getattr(TieredCacheConfig(**{name: given}), name)  # type: ignore[arg-type]
        assert value == 0.8125 and type(value) is float
    for given in (math.nan, math.inf, "0.8", True, None, np.array([0.8])):
        with pytest.raises(ConfigError, match=name):
            TieredCacheConfig(**{name: given})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["mode", "l1_io_mode", "window_tokens", "selection", "l1_path", "eviction"])
def test_an_array_where_text_belongs(name: str) -> None:
    with pytest.raises(ConfigError, match=name):
        TieredCacheConfig(**{name: np.array(["exact", "auto"])})  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["l1_path", "l2_url"])
def test_paths_are_absolute_from_the_start(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    for given, absolute in (
        ("kv", tmp_path / "kv"),
        (Path("kv"), tmp_path / "kv"),
        ("~", tmp_path / "home"),
        ("~/kv", tmp_path / "home/kv"),
        (Path("~/kv"), tmp_path / "home/kv"),
        ("/data/a b", Path("/data/a b")),
        ("file:///data/a%20b", Path("/data/a b")),
        ("file://localhost/data", Path("/data")),
    ):
        config = TieredCacheConfig(**{name: given})  # type: ignore[arg-type]
        monkeypatch.chdir("/")
        assert getattr(config, name) == str(absolute)
        assert getattr(dataclasses.replace(config, sink_tokens=1), name) == str(absolute)
        monkeypatch.chdir(tmp_path)


def test_parent_directories_are_left_to_the_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a symbolic link, `..` is the parent of the link's target."""
    (tmp_path / "far/deep").mkdir(parents=True)
    (tmp_path / "near").mkdir()
    (tmp_path / "near/link").symlink_to(tmp_path / "far/deep")
    monkeypatch.chdir(tmp_path / "near")
    path = TieredCacheConfig(l1_path="link/../kv").l1_path
    assert path is not None and os.path.realpath(path) == str(tmp_path / "far/kv")


@pytest.mark.parametrize("name", ["l1_path", "l2_url"])
@pytest.mark.parametrize(
    "given", ["", 5, b"/data", "file://kv", "file://host/kv", "~no-such-user/kv", "a\0b", ["/data"]]
)
def test_what_is_no_path(name: str, given: object) -> None:
    with pytest.raises(ConfigError, match=f"^{name}="):
        TieredCacheConfig(**{name: given})  # type: ignore[arg-type]


def test_a_working_directory_that_is_gone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(ConfigError, match="working directory is gone"):
        TieredCacheConfig(l1_path="kv")
    assert TieredCacheConfig(l1_path="/data").l1_path == "/data"


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


def test_an_unknown_setting_is_told_by_the_class_too() -> None:
    with pytest.raises(ConfigError, match=r"'window_size': did you mean 'window_tokens'"):
        TieredCacheConfig(window_size=512)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="did you mean 'block_tokens'"):
        dataclasses.replace(TieredCacheConfig(), block_token=64)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="'zzz': the settings are block_tokens, "):
        TieredCacheConfig(zzz=1)  # type: ignore[call-arg]
    with pytest.raises(ConfigError, match="pass settings as keywords"):
        TieredCacheConfig(512)  # type: ignore[misc]


def test_it_is_a_dataclass_all_the_same() -> None:
    config = TieredCacheConfig(window_tokens=512)
    assert dataclasses.replace(config, sink_tokens=4) == TieredCacheConfig(window_tokens=512, sink_tokens=4)
    assert hash(config) == hash(TieredCacheConfig(**dataclasses.asdict(config)))
    parameters = inspect.signature(TieredCacheConfig).parameters
    assert list(parameters) == [field.name for field in dataclasses.fields(TieredCacheConfig)]
    assert parameters["window_tokens"].default == 4096
    assert pickle.loads(pickle.dumps(config)) == copy.deepcopy(config) == config
    assert "window_tokens=512" in repr(config)


def test_a_kind_of_settings_stays_what_it_is() -> None:
    class Mine(TieredCacheConfig):
        pass

    assert type(TieredCacheConfig.from_options(Mine(sink_tokens=4), {"window_tokens": 512})) is Mine
