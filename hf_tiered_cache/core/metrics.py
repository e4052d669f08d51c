"""Counters, and the snapshot of them that users read."""

from __future__ import annotations

import math
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

# The period over which rates are averaged.
_RATE_SECONDS = 10


@dataclass(frozen=True)
class TierStats:
    """The contents of one tier, and its traffic since the start.

    Args:
        tokens: tokens stored, as the mean over the tiered layers of all caches that share the manager.
        blocks: blocks stored, over all layers.
        used_bytes: space in use: in L0 every tensor that the package allocated on the accelerator, in L1 whole
            blocks of the file system, in L2 the size before compression.
        capacity_bytes: the limit on `used_bytes`, `None` when there is none.
        bytes_written, bytes_read: traffic since the start. L0's is what was copied to and from the host.
        blocks_served: blocks that attention read from this tier, the nearest that had them. Those of L0 were
            resident beside the windows.
    """

    tokens: float
    blocks: int
    used_bytes: int
    capacity_bytes: int | None
    bytes_written: int
    bytes_read: int
    blocks_served: int

    @property
    def bytes(self) -> int:
        """Deprecated: use `used_bytes`."""
        _warn_of_old_name("TierStats.bytes", "used_bytes")
        return self.used_bytes

    @property
    def hits(self) -> int:
        """Deprecated: use `blocks_served`."""
        _warn_of_old_name("TierStats.hits", "blocks_served")
        return self.blocks_served


@dataclass(frozen=True)
class CacheStats:
    """A snapshot, taken by `TieredCache.stats()` or `KVCacheManager.stats()`; it does not change afterwards.

    Args:
        sequence_tokens: tokens in the cache (the longest layer of the longest request).
        tiers: `"L0"`, `"host"`, `"L1"` and `"L2"`.
        blocks_sealed: blocks that left the window.
        blocks_demoted: blocks that moved from a tier to one below, or lost their copy in the upper one.
        blocks_promoted: blocks that were copied to a tier from one below.
        swap_ins_per_second, swap_outs_per_second: blocks that were copied to the accelerator, and that left it,
            over the last ten seconds.
        prefetch_hits: blocks whose load had been started before attention asked for them.
        prefetch_misses: blocks whose load began only when attention asked for them.
        read_stall_seconds: time the caller waited for blocks on their way in.
        write_stall_seconds: time the caller waited for a free staging buffer.
        lock_wait_seconds: time that threads waited for one another.
        window_tokens: current length of the windows.
        window_changes: lengths over time, as (first step of that length, tokens); a step is a forward pass.
        l0_bytes, peak_l0_bytes: accelerator memory that the package holds, now and at its peak.
        l1_io_mode: how L1 is read at present, `"direct"` or `"buffered"`; `None` before the first read.
    """

    sequence_tokens: int
    tiers: Mapping[str, TierStats]
    blocks_sealed: int
    blocks_demoted: int
    blocks_promoted: int
    swap_ins_per_second: float
    swap_outs_per_second: float
    prefetch_hits: int
    prefetch_misses: int
    read_stall_seconds: float
    write_stall_seconds: float
    lock_wait_seconds: float
    window_tokens: int
    window_changes: Sequence[tuple[int, int]]
    l0_bytes: int
    peak_l0_bytes: int
    l1_io_mode: str | None

    @property
    def stall_seconds(self) -> float:
        """Time the caller waited for the tiers, in either direction."""
        return self.read_stall_seconds + self.write_stall_seconds

    @property
    def prefetch_hit_rate(self) -> float | None:
        """Share of blocks whose load began ahead of time; `None` when nothing was loaded."""
        loads = self.prefetch_hits + self.prefetch_misses
        return self.prefetch_hits / loads if loads else None

    def __str__(self) -> str:
        rows = [
            f"{'tier':<5}{'tokens':>10}{'blocks':>9}{'used':>12}{'capacity':>12}"
            f"{'written':>12}{'read':>12}{'served':>11}"
        ]
        for name, tier in self.tiers.items():
            capacity = "-" if tier.capacity_bytes is None else format_bytes(tier.capacity_bytes)
            rows.append(
                f"{name:<5}{tier.tokens:>10,.0f}{tier.blocks:>9,}{format_bytes(tier.used_bytes):>12}{capacity:>12}"
                f"{format_bytes(tier.bytes_written):>12}{format_bytes(tier.bytes_read):>12}{tier.blocks_served:>11,}"
            )
        rate = self.prefetch_hit_rate
        rows.append(
            f"{self.sequence_tokens:,} tokens; peak L0 {format_bytes(self.peak_l0_bytes)}; "
            f"prefetch hits {'-' if rate is None else f'{rate:.1%}'}; "
            f"stalls {self.read_stall_seconds:.2f} s reading, {self.write_stall_seconds:.2f} s writing"
        )
        rows.append(
            f"windows of {self.window_tokens:,} tokens; {self.blocks_demoted:,} blocks demoted, "
            f"{self.blocks_promoted:,} promoted; {self.lock_wait_seconds:.2f} s waiting for locks"
        )
        rows.append(
            f"swaps in the last {_RATE_SECONDS} s: {self.swap_ins_per_second:.0f} blocks in and "
            f"{self.swap_outs_per_second:.0f} out per second"
        )
        rows.append(
            "(tokens per layer, the mean over conversations; blocks and bytes over all layers; "
            "L0's traffic is with the host)"
        )
        return "\n".join(rows)


def _warn_of_old_name(old: str, new: str) -> None:
    warnings.warn(
        f"{old} is now called {new}; the old name will be removed in the next release", FutureWarning, stacklevel=3
    )


def format_bytes(size: float) -> str:
    """Write a number of bytes with a binary unit, e.g. `"1.5 MiB"`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


class _Rate:
    """The rate of an event per second, over the last seconds. Not thread-safe."""

    def __init__(self) -> None:
        self._per_second: Counter[int] = Counter()

    def add(self, amount: int) -> None:
        now = int(time.monotonic())
        if now not in self._per_second:
            self._forget_before(now - _RATE_SECONDS)
        self._per_second[now] += amount

    def value(self) -> float:
        self._forget_before(int(time.monotonic()) - _RATE_SECONDS)
        return self._per_second.total() / _RATE_SECONDS

    def _forget_before(self, second: int) -> None:
        for old in [known for known in self._per_second if known < second]:
            del self._per_second[old]


class Metrics:
    """The counters behind `CacheStats`; every method may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: Counter[str] = Counter()
        self._stall_seconds = {"read": 0.0, "write": 0.0}
        self._lock_wait_seconds = 0.0
        self._rates = {"blocks_loaded": _Rate(), "blocks_sealed": _Rate()}
        self._l0_bytes = 0
        self._peak_l0_bytes = 0

    def count(self, **amounts: int) -> None:
        """Add to counters by name, e.g. `count(prefetch_hits=3)`."""
        with self._lock:
            self._counts.update(amounts)
            for name, rate in self._rates.items():
                if name in amounts:
                    rate.add(amounts[name])

    def allocated_l0(self, delta_bytes: int) -> None:
        """Count accelerator memory: positive when allocated, negative when freed."""
        with self._lock:
            self._l0_bytes += delta_bytes
            self._peak_l0_bytes = max(self._peak_l0_bytes, self._l0_bytes)

    @contextmanager
    def stall(self, direction: Literal["read", "write"]) -> Iterator[None]:
        """Time a wait of the caller."""
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._stall_seconds[direction] += time.perf_counter() - started

    @contextmanager
    def lock_wait(self) -> Iterator[None]:
        """Time a wait for another thread."""
        started = time.perf_counter()
        try:
            yield
        finally:
            with self._lock:
                self._lock_wait_seconds += time.perf_counter() - started

    def snapshot(
        self,
        *,
        sequence_tokens: int,
        window_tokens: int,
        window_changes: Sequence[tuple[int, int]],
        tiers: Mapping[str, TierStats],
        l1_io_mode: str | None,
    ) -> CacheStats:
        """Combine the counters with the values that only the manager knows."""
        with self._lock:
            return CacheStats(
                sequence_tokens=sequence_tokens,
                tiers=tiers,
                blocks_sealed=self._counts["blocks_sealed"],
                blocks_demoted=self._counts["blocks_demoted"],
                blocks_promoted=self._counts["blocks_promoted"],
                swap_ins_per_second=self._rates["blocks_loaded"].value(),
                swap_outs_per_second=self._rates["blocks_sealed"].value(),
                prefetch_hits=self._counts["prefetch_hits"],
                prefetch_misses=self._counts["prefetch_misses"],
                read_stall_seconds=self._stall_seconds["read"],
                write_stall_seconds=self._stall_seconds["write"],
                lock_wait_seconds=self._lock_wait_seconds,
                window_tokens=window_tokens,
                window_changes=window_changes,
                l0_bytes=self._l0_bytes,
                peak_l0_bytes=self._peak_l0_bytes,
                l1_io_mode=l1_io_mode,
            )

    def __getitem__(self, name: str) -> int:
        with self._lock:
            return self._counts[name]

    @property
    def l0_bytes(self) -> int:
        """Accelerator memory held now."""
        return self._l0_bytes


class L0Account:
    """The memory of a computation on one device: counts what PyTorch allocates, and holds scratch memory.

    Used by one thread at a time.

    Args:
        metrics: where it is counted as L0; `None` for nowhere.
    """

    def __init__(self, metrics: Metrics | None = None) -> None:
        self._metrics = metrics
        self._scratch: dict[str, torch.Tensor | None] = {}

    def add(self, delta_bytes: int) -> None:
        """Count bytes: positive when allocated, negative when freed."""
        if self._metrics is not None:
            self._metrics.allocated_l0(delta_bytes)

    @contextmanager
    def temporary(self, *tensors: torch.Tensor | None) -> Iterator[None]:
        """Count tensors that were just allocated, until the end of the context; `None` counts nothing."""
        nbytes = tensor_bytes(*tensors)
        self.add(nbytes)
        try:
            yield
        finally:
            self.add(-nbytes)

    def scratch(self, name: str, shape: torch.Size, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return a contiguous, uninitialised tensor, in memory that the next call with this name reuses.

        A newly allocated large tensor costs more, page by page, than what is computed with it.
        """
        nbytes = math.prod(shape) * dtype.itemsize
        held = self._scratch.get(name)
        if held is None or held.numel() < nbytes or held.device != device:
            self.add(nbytes - tensor_bytes(held))
            held = self._scratch[name] = None  # freed before a larger one is allocated
            with torch.inference_mode(False):  # it may be mutated in both modes
                held = torch.empty(nbytes, dtype=torch.uint8, device=device)
            self._scratch[name] = held
        return held[:nbytes].view(dtype).view(shape)

    def close(self) -> None:
        """Free the scratch memory."""
        self.add(-tensor_bytes(*self._scratch.values()))
        self._scratch.clear()


def tensor_bytes(*tensors: torch.Tensor | None) -> int:
    """Bytes of the elements of some tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)
