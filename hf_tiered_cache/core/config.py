"""Settings: one frozen object, validated when it is created, without any I/O."""

from __future__ import annotations

import difflib
import functools
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, TypeVar

from .errors import ConfigError
from .values import as_bytes, as_count, as_location, as_number

ATTENTION_TILE_TOKENS = 16

T = TypeVar("T")

# Settings of features that do not exist yet, with the values that leave them off.
_NOT_YET: dict[str, tuple[Any, ...]] = {
    "selection": (None,),
    "top_blocks": (None,),
    "tolerance": (None,),
    "verify": (None, False),
}


def parse_bytes(size: object, name: str = "size") -> int:
    """Turn a size into bytes.

    Args:
        size: a whole number of bytes, or a string such as `"6GiB"` or `"6Gi"` (binary), `"200 GB"` or `"200G"`
            (decimal).
        name: the setting's name, for the error message.

    Returns:
        The number of bytes, at least 0.

    Raises:
        ConfigError: the size is negative, or not a size.
    """
    try:
        parsed = as_bytes(size)
    except ValueError as error:
        raise ConfigError(
            f"{name}={size!r} is not a size ({error}): give bytes as an int, or a string like '6GiB'"
        ) from error
    if parsed < 0:
        raise ConfigError(f"{name}={size!r} is negative")
    return parsed


def parse_count(count: object, name: str, minimum: int) -> int:
    """Turn a whole number of any type (`1e6` too), or text such as `"4K"` (4,000) or `"4Ki"` (4,096), into an int.

    Raises:
        ConfigError: it is not a whole number, or below `minimum`.
    """
    try:
        parsed = as_count(count)
    except ValueError as error:
        raise ConfigError(f"{name}={count!r}: give an int of at least {minimum} ({error})") from error
    if parsed < minimum:
        problem = "negative" if parsed < 0 else "too small"
        raise ConfigError(f"{name}={count!r} is {problem}: give an int of at least {minimum}")
    return parsed


def parse_location(location: object, name: str) -> str:
    """Turn a path into an absolute one, `~` expanded; URLs other than `file://` stay as they are.

    Raises:
        ConfigError: it is neither a path nor a URL.
    """
    try:
        return as_location(location)
    except ValueError as error:
        raise ConfigError(f"{name}={location!r}: give an existing directory, or None ({error})") from error


def _with_hints(settings: type[T]) -> type[T]:
    """Make a dataclass of settings suggest the closest name for an unknown keyword."""
    initialise: Any = vars(settings)["__init__"]

    @functools.wraps(initialise)
    def checked(self: Any, *values: object, **options: object) -> None:
        if values:
            raise ConfigError(f"pass settings as keywords, e.g. {settings.__name__}(window_tokens=4096)")
        known = {field.name for field in fields(self)}
        for name in options:
            if name not in known:
                close = difflib.get_close_matches(name, known, 1)
                usable = ", ".join(sorted(known - set(_NOT_YET)))
                hint = f"did you mean {close[0]!r}?" if close else f"the settings are {usable}"
                raise ConfigError(f"unknown setting {name!r}: {hint}")
        initialise(self, **options)

    settings.__init__ = checked  # type: ignore[method-assign]
    return settings


@_with_hints
@dataclass(frozen=True, kw_only=True)
class TieredCacheConfig:
    """The settings of a cache: the limits of its tiers, and how they move data.

    Numbers may be of any numeric type, numpy's included; whole numbers may be floats (`1e9`), and sizes and counts
    may be text (`"4Ki"`). They are stored as plain `int`, `float` or `str`, and paths as absolute, `~` expanded.

    Args:
        window_tokens: newest tokens of each layer that always stay on the accelerator (L0). At least one block.
            `"auto"`: as many as its memory allows at the time, in whole blocks; see the next three.
        window_min_tokens, window_max_tokens: bounds of an automatic window, at least one block. Default: one
            block, and no upper bound.
        memory_reserve: share of the accelerator's memory that an automatic window leaves free, within 2.5
            percentage points: the window shrinks when less is free, and grows when more is.
        sink_tokens: first tokens of the sequence, which stay on the accelerator as well.
        block_tokens: tokens per block, a multiple of 16. A block is the unit of every transfer.
        prefetch_layers: number of layers ahead for which old blocks are loaded. Each takes one buffer of a whole
            layer on the accelerator; the layer that is computing takes one more.
        resident_capacity: bytes of accelerator memory (`int` or e.g. `"2GiB"`), per device, for older blocks that
            stay there beside the window.
        stream_buffers: buffers through which old blocks stream to attention
            (`attn_implementation="tiered"`), at least 2: one is read while the others are being loaded.
        stream_buffer_size: maximum bytes of each (`int` or e.g. `"16MiB"`), but at least one block. Larger buffers
            hide more of the storage's time behind the computation between two attention calls. They grow with
            the context, up to the longest layer or this size.
        concurrent_streams: number of threads that may run streaming attention at a time, per device, each with
            its own buffers; others wait. A second set of buffers is allocated when a second thread needs it.
        host_capacity: bytes of host memory for blocks, nearer than L1 (`int` or e.g. `"8GiB"`; page-locked on
            CUDA), never exceeded; 0 turns this tier off. Default: a tenth of what is available when the first
            block is written.
        l1_path: existing directory on fast local storage. The cache works in a private directory below it and
            removes only that. Default: below `$HF_TIERED_CACHE_DIR`, or the system's temporary directory.
        l1_capacity: bytes that L1 may occupy (`int` or e.g. `"200GiB"`), never exceeded; 0 turns L1 off.
            Default: 80 % of what is free on the file system when the first block is written.
        l1_io_mode: `"direct"` bypasses the page cache, `"buffered"` uses it, `"auto"` uses buffered reads
            while L1 is small compared with the free memory, and direct ones beyond.
        l2_url: existing directory for blocks that L1 has no room for. `None`: no L2.
        staging_blocks: host staging buffers (pinned on CUDA) for blocks on their way to storage.
        eviction: policy that chooses the blocks which leave a tier first; see `register_eviction`. Default:
            `"pinned"`, which no other policy can beat in exact mode.
        high_watermark, low_watermark: when more than the first share of a tier's capacity is occupied, its coldest
            blocks are demoted one tier, in the background, until no more than the second share is.
        protection_steps: a block that was read within this many steps (forward passes, of any request) is not
            demoted.
        warmup_steps: number of steps before blocks are demoted or promoted because of how often they were read.
        prefetch_threshold: blocks whose probability of being read is at least this are loaded ahead of time, where
            it is not certain which blocks come next.
        l1_tier, l2_tier: storage implementations; see `register_tier`. Default: `"nvme"`, and `"zarr"` where there
            is an `l2_url`. A tier that needs no directory can be used without an `l2_url`.
        l1_options, l2_options: options of the tier, by name; each tier defines its own. Read only.
        mode: `"exact"`: every token takes part in attention.
        selection, top_blocks, tolerance, verify: reserved; values that turn them on are rejected.

    Raises:
        ConfigError: a value is invalid. The message says which and what to give instead.
    """

    window_tokens: int | Literal["auto"] = 4096
    window_min_tokens: int | None = None
    window_max_tokens: int | None = None
    memory_reserve: float = 0.125
    sink_tokens: int = 0
    block_tokens: int = 256
    prefetch_layers: int = 2
    resident_capacity: float | str = 0
    stream_buffers: int = 3
    stream_buffer_size: float | str = "16MiB"
    concurrent_streams: int = 2
    host_capacity: float | str | None = None
    l1_path: str | os.PathLike[str] | None = None
    l1_capacity: float | str | None = None
    l1_io_mode: Literal["auto", "direct", "buffered"] = "auto"
    l2_url: str | os.PathLike[str] | None = None
    staging_blocks: int = 8
    eviction: str | None = None
    high_watermark: float = 0.9
    low_watermark: float = 0.8
    protection_steps: int = 2
    warmup_steps: int = 16
    prefetch_threshold: float = 0.5
    l1_tier: str = "nvme"
    l2_tier: str | None = None
    l1_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    l2_options: Mapping[str, Any] = field(default_factory=dict, hash=False)
    mode: Literal["exact"] = "exact"
    selection: str | None = None
    top_blocks: int | None = None
    tolerance: float | None = None
    verify: bool | None = None

    def __post_init__(self) -> None:
        for name in ("l1_path", "l2_url"):
            if getattr(self, name) is not None:
                self._set(name, parse_location(getattr(self, name), name))
        for name, nothing in _NOT_YET.items():
            value = getattr(self, name)
            if not any(value is one for one in nothing):
                raise ConfigError(f"{name}={value!r} is not available yet: leave it at {nothing[0]!r}")
        if not _is_one_of(self.mode, "exact"):
            raise ConfigError(f"mode={self.mode!r} is not available: the only mode is 'exact'")
        for name, minimum in (
            ("sink_tokens", 0),
            ("block_tokens", 1),
            ("prefetch_layers", 1),
            ("stream_buffers", 2),
            ("concurrent_streams", 1),
            ("staging_blocks", 1),
            ("protection_steps", 0),
            ("warmup_steps", 0),
        ):
            self._set(name, parse_count(getattr(self, name), name, minimum))
        for name in ("host_capacity", "l1_capacity", "resident_capacity", "stream_buffer_size"):
            if getattr(self, name) is not None or name in ("resident_capacity", "stream_buffer_size"):
                self._set(name, parse_bytes(getattr(self, name), name))
        if self.block_tokens % ATTENTION_TILE_TOKENS:
            raise ConfigError(
                f"block_tokens={self.block_tokens} is not a multiple of the attention tile of "
                f"{ATTENTION_TILE_TOKENS} tokens: take 128 or 256, for example"
            )
        self._check_window()
        self._check_residency()
        if not _is_one_of(self.l1_io_mode, "auto", "direct", "buffered"):
            raise ConfigError(f"l1_io_mode={self.l1_io_mode!r}: take 'auto', 'direct' or 'buffered'")
        if self.stream_buffer_bytes == 0:
            raise ConfigError("stream_buffer_size=0: a buffer holds at least one block; '16MiB' is a good size")
        no_l2 = self.l2_url is None and self.l2_tier is None
        if self.l1_capacity_bytes == 0 and no_l2 and self.host_capacity_bytes in (0, None):
            raise ConfigError(
                "l1_capacity=0 turns L1 off: give an l2_url or a host_capacity, or blocks have nowhere to go"
            )
        self._check_tiers()

    def _check_window(self) -> None:
        bounds = ("window_min_tokens", "window_max_tokens")
        if _is_one_of(self.window_tokens, "auto"):
            sizes = [name for name in bounds if getattr(self, name) is not None]
        else:
            sizes = ["window_tokens"]
            for name in bounds:
                if getattr(self, name) is not None:
                    raise ConfigError(
                        f"{name}={getattr(self, name)!r} bounds an automatic window: set "
                        "window_tokens='auto', or leave it out"
                    )
        for name in sizes:
            self._set(name, parse_count(getattr(self, name), name, 1))
            if getattr(self, name) < self.block_tokens:
                raise ConfigError(
                    f"{name}={getattr(self, name)} is smaller than block_tokens={self.block_tokens}: "
                    "a window holds at least one block; widen the window or take smaller blocks"
                )
        if self.window_max_tokens is not None and self.window_max_tokens < self.window_floor_tokens:
            raise ConfigError(
                f"window_max_tokens={self.window_max_tokens} is below window_min_tokens={self.window_floor_tokens}"
            )
        if not 0.025 <= self._fraction("memory_reserve") <= 0.9:
            raise ConfigError(f"memory_reserve={self.memory_reserve}: give a share between 0.025 and 0.9")

    def _check_residency(self) -> None:
        low, high = self._fraction("low_watermark"), self._fraction("high_watermark")
        if not 0 < low <= high <= 1:
            raise ConfigError(
                f"low_watermark={low} and high_watermark={high}: give shares of a capacity, 0 < low <= high <= 1"
            )
        if not 0 <= self._fraction("prefetch_threshold") <= 1:
            raise ConfigError(f"prefetch_threshold={self.prefetch_threshold}: give a probability, 0 to 1")
        if self.eviction is not None and not isinstance(self.eviction, str):
            raise ConfigError(f"eviction={self.eviction!r}: give the name of a policy, or None")

    def _check_tiers(self) -> None:
        if self.l2_tier is None and "://" in self.l2_directory:
            raise ConfigError(
                f"l2_url={self.l2_url!r}: give an existing directory, or an l2_tier that supports such URLs"
            )
        for name in ("l1_tier", "l2_tier"):
            tier = getattr(self, name)
            if not isinstance(tier, str) and not (tier is None and name == "l2_tier"):
                raise ConfigError(f"{name}={tier!r}: give the name of a tier")
        for name in ("l1_options", "l2_options"):
            options = getattr(self, name)
            if not isinstance(options, Mapping) or not all(isinstance(option, str) for option in options):
                raise ConfigError(f"{name}={options!r}: give a dict of options by name")
            object.__setattr__(self, name, dict(options))  # the caller may change theirs

    def _fraction(self, name: str) -> float:
        value = getattr(self, name)
        try:
            fraction = float(as_number(value))
        except ValueError as error:
            raise ConfigError(f"{name}={value!r}: give a number between 0 and 1 ({error})") from error
        self._set(name, fraction)
        return fraction

    def _set(self, name: str, value: object) -> None:
        """Replace a setting by its parsed value, while this object is being created."""
        object.__setattr__(self, name, value)

    @property
    def window_floor_tokens(self) -> int:
        """The fewest tokens that the window holds."""
        if self.window_tokens == "auto":
            return self.block_tokens if self.window_min_tokens is None else self.window_min_tokens
        return self.window_tokens

    @property
    def eviction_policy(self) -> str:
        """`eviction`, or the default of the mode."""
        return self.eviction or "pinned"

    @property
    def host_capacity_bytes(self) -> int | None:
        """`host_capacity` in bytes, `None` if it is not set."""
        return None if self.host_capacity is None else parse_bytes(self.host_capacity, "host_capacity")

    @property
    def resident_bytes(self) -> int:
        """`resident_capacity` in bytes."""
        return parse_bytes(self.resident_capacity, "resident_capacity")

    @property
    def l1_capacity_bytes(self) -> int | None:
        """`l1_capacity` in bytes, `None` if it is not set."""
        return None if self.l1_capacity is None else parse_bytes(self.l1_capacity, "l1_capacity")

    @property
    def stream_buffer_bytes(self) -> int:
        """`stream_buffer_size` in bytes."""
        return parse_bytes(self.stream_buffer_size, "stream_buffer_size")

    @property
    def l2_directory(self) -> str:
        """`l2_url` as a path, empty when there is no L2."""
        return "" if self.l2_url is None else os.fspath(self.l2_url)

    @classmethod
    def from_options(cls, base: TieredCacheConfig | None, options: dict[str, Any]) -> TieredCacheConfig:
        """Return `base` (default settings when `None`) with `options` applied.

        Raises:
            ConfigError: an option does not exist, or is invalid.
        """
        if base is not None and not isinstance(base, cls):
            raise ConfigError(
                f"cache_config={base!r} is not a TieredCacheConfig; pass single settings as keywords"
            )
        return cls(**options) if base is None else replace(base, **options)


def _is_one_of(value: object, *names: str) -> bool:
    """Return true if the value is one of these texts. (Arrays would be compared element by element.)"""
    return isinstance(value, str) and value in names
