"""The tiers that the settings ask for, checked before anything is opened."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..core.config import TieredCacheConfig
from ..core.errors import ConfigError
from . import Tier, TierRegistry
from .io import failures_as_tier_errors
from .workspace import check_directory, default_base


@dataclass(frozen=True)
class TierChoice:
    """A tier that the settings ask for.

    Args:
        name: e.g. `"L1"`.
        tier_class: its implementation.
        base: parent of its private directory; `None` if it needs none.
    """

    name: str
    tier_class: type[Tier]
    base: Path | None

    def open(self, root: Path | None, capacity_bytes: int | None, config: TieredCacheConfig) -> Tier:
        """Open the tier.

        Raises:
            TierError: it cannot be opened.
        """
        with failures_as_tier_errors(f"{self.name}: the tier {self.tier_class.__qualname__} cannot be opened"):
            return self.tier_class(self.name, root, capacity_bytes, config)


def choose_l1(config: TieredCacheConfig) -> TierChoice | None:
    """Return the tier that `l1_tier` and its settings ask for; `None` when L1 is turned off.

    Raises:
        ConfigError: there is no such tier, or it refuses its settings.
    """
    tier_class = _checked_class(config, "l1", config.l1_tier, config.l1_path)
    if config.l1_capacity_bytes == 0:
        return None
    base = None
    if tier_class.needs_directory:
        base = default_base() if config.l1_path is None else check_directory(config.l1_path, "l1_path")
    return TierChoice("L1", tier_class, base)


def choose_l2(config: TieredCacheConfig) -> TierChoice | None:
    """Return the tier that `l2_url`, `l2_tier` and its options ask for; `None` when there is no L2.

    Raises:
        ConfigError: there is no such tier, it refuses its settings, or it needs a directory and there is none.
    """
    if config.l2_url is None and config.l2_tier is None:
        if config.l2_options:
            raise ConfigError("l2_options without an l2_tier or an l2_url: there is no L2 that could have options")
        return None
    tier_class = _checked_class(config, "l2", config.l2_tier or "zarr", config.l2_url)
    if not tier_class.needs_directory:
        return TierChoice("L2", tier_class, None)
    if config.l2_url is None:
        raise ConfigError(f"l2_tier={config.l2_tier!r} keeps files: give it an existing directory as l2_url")
    return TierChoice("L2", tier_class, check_directory(config.l2_directory, "l2_url"))


def _checked_class(
    config: TieredCacheConfig, prefix: str, kind: str, url: str | os.PathLike[str] | None
) -> type[Tier]:
    tier_class = TierRegistry.get(kind)
    options = getattr(config, f"{prefix}_options")
    with _refused(f"{prefix}_options"):
        tier_class.check_options(options)
    if url is not None:
        with _refused("l1_path" if prefix == "l1" else "l2_url"):
            tier_class.check_url(os.fspath(url))
    return tier_class


@contextmanager
def _refused(setting: str) -> Iterator[None]:
    """Turn whatever a tier raises about a setting into a `ConfigError` that names the setting."""
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{setting}: {error}") from error
    except Exception as error:
        raise ConfigError(f"{setting}: {type(error).__name__}: {error}") from error
