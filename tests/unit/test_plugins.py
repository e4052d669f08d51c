"""Third-party tiers and policies: registration, arguments, and refusals."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hf_tiered_cache import (
    Bits,
    BlockKey,
    BlockLayout,
    ConfigError,
    EvictionPolicy,
    HeatTable,
    KVCacheManager,
    Slots,
    Tier,
    TieredCacheConfig,
    TierFuture,
    Values,
    register_eviction,
    register_tier,
)
from hf_tiered_cache.residency.eviction import EVICTIONS, make_eviction_policy
from hf_tiered_cache.tiers import TierRegistry

from ..fakes import random_kv

SETTINGS = {"window_tokens": 32, "block_tokens": 16, "host_capacity": 0}


@pytest.fixture(autouse=True)
def registries() -> Iterator[None]:
    """Restore the registries after a test."""
    before = [(registry.classes, dict(registry.classes)) for registry in (TierRegistry, EVICTIONS)]
    yield
    for classes, were in before:
        classes.clear()
        classes.update(were)


class DictTier(Tier):
    """Keeps blocks in a dict that all tiers of this class share."""

    needs_directory = False
    known_options = ("region", "retries")
    opened: list[DictTier] = []  # noqa: RUF012

    def __init__(
        self, name: str, root: Path | None, capacity_bytes: int | None, config: TieredCacheConfig
    ) -> None:
        super().__init__(name, root, capacity_bytes, config)
        self.data: dict[BlockKey, Bits] = {}
        self.opened.append(self)

    @classmethod
    def check_url(cls, url: str) -> None:
        if not url.startswith("dict://"):
            raise ConfigError(f"{url!r} is not a dict: give dict://name")

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        super().check_options(options)
        int(options.get("retries", 0))

    def start_write(self, key: BlockKey, layout: BlockLayout, source: Bits) -> Sequence[TierFuture]:
        self.data[key] = source.copy()
        return ()

    def start_read(self, keys: Sequence[BlockKey], layout: BlockLayout, target: Bits) -> Sequence[TierFuture]:
        for position, key in enumerate(keys):
            target[position] = self.data[key]
        return ()

    def start_delete(self, key: BlockKey) -> Sequence[TierFuture]:
        self.data.pop(key, None)
        return ()


@pytest.fixture
def dict_tier() -> str:
    DictTier.opened.clear()
    register_tier("dict")(DictTier)
    return "dict"


def use(**options: Any) -> list[str]:
    """Store tokens through a manager and read them back; return the names of its tiers."""
    with KVCacheManager(TieredCacheConfig(**(SETTINGS | options))) as manager:
        manager.allocate("a")
        keys, values = random_kv(200)
        manager.append("a", 0, keys, values)
        manager.flush()
        found = manager.fetch("a", 0, range(200))
        assert torch.equal(found[0], keys) and torch.equal(found[1], values)
        return [name for name, tier in manager.stats().tiers.items() if tier.blocks]


class TestDirectories:
    def test_l2_without_a_url(self, dict_tier: str, cache_directory: Path) -> None:
        assert use(l1_capacity=3 * 4096, l2_tier=dict_tier) == ["L1", "L2"]
        assert use(l1_capacity=0, l2_tier=dict_tier) == ["L2"]
        assert all(tier._root is None and tier.url is None and not tier.data for tier in DictTier.opened)

    def test_l1_without_a_directory(
        self, dict_tier: str, cache_directory: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("HF_TIERED_CACHE_DIR", str(cache_directory / "is" / "not" / "made"))
        assert use(l1_tier=dict_tier) == ["L1"]
        assert list(cache_directory.iterdir()) == [] and DictTier.opened[0].capacity_bytes is None

    @pytest.mark.parametrize("kind", ["zarr", "nvme"])
    def test_files_need_a_place(self, kind: str) -> None:
        with pytest.raises(ConfigError, match=rf"l2_tier='{kind}' keeps files.*directory as l2_url"):
            KVCacheManager(TieredCacheConfig(l2_tier=kind))

    def test_the_tier_judges_its_url(self, dict_tier: str, tmp_path: Path) -> None:
        use(l1_capacity=0, l2_tier=dict_tier, l2_url="dict://cupboard")
        assert DictTier.opened[0].url == "dict://cupboard", "untouched"
        with pytest.raises(ConfigError, match="l2_url: 's3://bucket' is not a dict: give dict://name"):
            KVCacheManager(TieredCacheConfig(l2_tier=dict_tier, l2_url="s3://bucket"))
        with pytest.raises(ConfigError, match="l2_url: 's3://bucket': only local directories"):
            KVCacheManager(TieredCacheConfig(l2_tier="zarr", l2_url="s3://bucket"))
        with pytest.raises(ConfigError, match=r"l1_path: '.*' is not a dict"):
            KVCacheManager(TieredCacheConfig(l1_tier=dict_tier, l1_path=tmp_path))
        assert use(l1_capacity=0, l2_url=f"file://{tmp_path}") == ["L2"]


class TestOptions:
    def test_each_tier_has_its_own(self, dict_tier: str) -> None:
        given = {"region": "eu"}
        config = TieredCacheConfig(
            **SETTINGS,  # type: ignore[arg-type]
            l1_tier=dict_tier,
            l1_options=given,
            l2_tier=dict_tier,
            l2_options={"retries": 3},
        )
        given["region"] = "us"  # too late
        with KVCacheManager(config) as manager:
            manager.allocate("a")
            manager.append("a", 0, *random_kv(100))
            assert [dict(tier.options) for tier in DictTier.opened] == [{"region": "eu"}, {"retries": 3}]
        hash(config)

    @pytest.mark.parametrize(
        ("settings", "words"),
        [
            (
                {"l1_tier": "dict", "l1_options": {"regoin": 1}},
                "l1_options: unknown option 'regoin': did you mean 'reg",
            ),
            (
                {"l2_tier": "dict", "l2_options": {"x": 1}},
                "l2_options: .*the options of DictTier are region, retries",
            ),
            ({"l2_tier": "dict", "l2_options": {"retries": "many"}}, "l2_options: ValueError: invalid literal"),
            ({"l1_options": {"x": 1}}, "l1_options: .*the options of NvmeTier are none"),
            ({"l2_options": {"x": 1}}, "l2_options without an l2_tier or an l2_url"),
            ({"l1_options": ["x"]}, "l1_options=.*give a dict"),
            ({"l2_options": {1: 2}}, "l2_options=.*give a dict"),
            ({"l1_tier": None}, "l1_tier=None: give the name of a tier"),
            ({"l2_tier": 7}, "l2_tier=7: give the name of a tier"),
        ],
    )
    def test_nonsense(self, dict_tier: str, settings: dict[str, Any], words: str) -> None:
        with pytest.raises(ConfigError, match=words):
            KVCacheManager(TieredCacheConfig(**settings))


def cell(name: str, **more: Any) -> type[Tier]:
    """Define the class of a notebook cell, anew each time it runs."""
    return type(name, (DictTier,), {"__qualname__": name, "__module__": "__main__", **more})


def policy_cell(name: str) -> type[EvictionPolicy]:
    def keep_values(self: EvictionPolicy, slots: Slots) -> Values:
        return np.zeros(len(slots))

    return type(name, (EvictionPolicy,), {"__module__": "__main__", "keep_values": keep_values})


@pytest.mark.parametrize(
    ("register", "classes", "make", "builtin"),
    [
        (register_tier, TierRegistry.classes, cell, "nvme"),
        (register_eviction, EVICTIONS.classes, policy_cell, "lru"),
    ],
    ids=["tiers", "policies"],
)
class TestRegistering:
    def test_a_cell_that_runs_again(
        self, register: Callable[..., Any], classes: dict[str, Any], make: Callable[[str], Any], builtin: str
    ) -> None:
        register("own")(make("Mine"))
        again = make("Mine")
        assert register("own")(again) is again and classes["own"] is again

    def test_a_name_that_is_taken(
        self, register: Callable[..., Any], classes: dict[str, Any], make: Callable[[str], Any], builtin: str
    ) -> None:
        register("own")(make("Mine"))
        for name in ("own", builtin):
            before = classes[name]
            with pytest.raises(ConfigError, match=rf"{name}.* already.*replace=True"):
                register(name)(make("Other"))
            assert classes[name] is before
        other = make("Other")
        assert register("own", replace=True)(other) is other and classes["own"] is other

    @pytest.mark.parametrize("wrong", [object, 3, "x"])
    def test_something_else(
        self,
        register: Callable[..., Any],
        classes: dict[str, Any],
        make: Callable[[str], Any],
        builtin: str,
        wrong: object,
    ) -> None:
        with pytest.raises(ConfigError, match="does not extend"):
            register("own")(wrong)
        with pytest.raises(ConfigError, match="not a name"):
            register("")(make("Mine"))
        assert "own" not in classes


def test_what_is_missing_is_named() -> None:
    with pytest.raises(ConfigError, match=r"tier 'half': .*Half does not implement start_delete, start_read"):

        @register_tier("half")
        class Half(Tier):
            def start_write(self, key: BlockKey, layout: BlockLayout, source: Bits) -> Sequence[TierFuture]:
                return ()


PLUGIN = """
from hf_tiered_cache import EvictionPolicy, Tier, register_tier

class Plugged(Tier):
    needs_directory = False

    def __init__(self, *arguments):
        super().__init__(*arguments)
        self.data = {}

    def start_write(self, key, layout, source):
        self.data[key] = source.copy()
        return ()

    def start_read(self, keys, layout, target):
        for position, key in enumerate(keys):
            target[position] = self.data[key]
        return ()

    def start_delete(self, key):
        self.data.pop(key, None)
        return ()

@register_tier("registers-itself")
class RegistersItself(Plugged):
    pass

class Newest(EvictionPolicy):
    def keep_values(self, slots):
        return -self.table.order_of_sealing(slots).astype("float64")
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Install a distribution with a module and entry points, as pip would."""
    modules = set(sys.modules)

    def install(package: str, tiers: Mapping[str, str], policies: Mapping[str, str], code: str = PLUGIN) -> None:
        site = tmp_path / package
        info = site / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{package}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = ["[hf_tiered_cache.tiers]", *(f"{name} = {value}" for name, value in tiers.items())]
        lines += ["[hf_tiered_cache.eviction]", *(f"{name} = {value}" for name, value in policies.items())]
        (info / "entry_points.txt").write_text("\n".join(lines))
        monkeypatch.syspath_prepend(site)

    yield install
    for name in set(sys.modules) - modules:
        if name.startswith("plugged"):
            del sys.modules[name]


class TestEntryPoints:
    def test_an_installed_plug_in_is_found_by_its_name(self, install: Callable[..., None]) -> None:
        tiers = {"plugged": "plugged_one:Plugged", "registers-itself": "plugged_one:RegistersItself"}
        install("plugged_one", tiers, {"newest": "plugged_one:Newest"})
        assert "plugged_one" not in sys.modules and {"plugged", "nvme"} <= set(TierRegistry.names())
        assert use(l1_tier="plugged", eviction="newest") == ["L1"]
        assert use(l1_capacity=0, l2_tier="registers-itself") == ["L2"]
        with pytest.raises(ConfigError, match=r"unknown tier 'pluged'; there are .*nvme, plugged, "):
            KVCacheManager(TieredCacheConfig(l1_tier="pluged"))
        with pytest.raises(ConfigError, match=r"unknown eviction policy 'oldest'; there are fifo, heat, .*newest"):
            make_eviction_policy("oldest", HeatTable(), TieredCacheConfig())

    @pytest.mark.parametrize(
        ("value", "code", "cause"),
        [
            ("plugged_broken:Plugged", "import missing_module", ModuleNotFoundError),
            ("plugged_broken:Plugged", "x = 1", AttributeError),
            ("plugged_broken:Plugged", "1 / 0", ZeroDivisionError),
            ("plugged_broken:Plugged", "class Plugged: pass", ConfigError),
            ("plugged_absent:Plugged", "", ModuleNotFoundError),
        ],
    )
    @pytest.mark.parametrize("setting", ["l1_tier", "eviction"])
    def test_a_broken_one(
        self, install: Callable[..., None], setting: str, value: str, code: str, cause: type[Exception]
    ) -> None:
        install("plugged_broken", {"bad": value}, {"bad": value}, code)
        with pytest.raises(ConfigError, match=r"'bad' of .*plugged_broken.*cannot be loaded.*uninstall") as raised:
            KVCacheManager(TieredCacheConfig(**{setting: "bad"}))
        assert isinstance(raised.value.__cause__, cause)

    def test_two_packages_with_one_name(self, install: Callable[..., None]) -> None:
        install("plugged_one", {"twice": "plugged_one:Plugged"}, {})
        install("plugged_two", {"twice": "plugged_two:Plugged"}, {})
        with pytest.raises(ConfigError, match=r"offered by .*plugged_.* and .*plugged_.*uninstall one"):
            KVCacheManager(TieredCacheConfig(l1_tier="twice"))
