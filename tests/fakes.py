"""Test doubles: an engine with late copies that poisons free buffers, tiers that are slow or fail."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from hf_tiered_cache import TieredCacheConfig
from hf_tiered_cache.core.blocks import Bits, BlockKey, BlockLayout
from hf_tiered_cache.core.metrics import Metrics
from hf_tiered_cache.sequence.pressure import WindowChange
from hf_tiered_cache.tiers import NvmeTier, TierFuture, register_tier
from hf_tiered_cache.transfer.engine import CpuCopyEngine, Event

POISON = 0xFF  # a NaN in every float format


class LateEngine(CpuCopyEngine):
    """An engine whose copies start after random delays, and which poisons every buffer once it is released."""

    def __init__(self, device: torch.device, metrics: Metrics, max_delay_seconds: float = 0.002) -> None:
        super().__init__(device, metrics)
        self._random = random.Random(0)
        self._max_delay_seconds = max_delay_seconds

    def recycled(self, buffer: torch.Tensor) -> None:
        buffer.fill_(POISON)

    def record_compute(self, stream: Any = None) -> Event:
        return _LateEvent(self._dawdle)  # a copy or a read that waits for it starts late

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        self._dawdle()
        super()._copy(target, source)

    def _dawdle(self) -> None:
        time.sleep(self._random.random() * self._max_delay_seconds)


class _LateEvent:
    def __init__(self, dawdle: Callable[[], None]) -> None:
        self._dawdle = dawdle

    def wait(self) -> None:
        self._dawdle()


class StagedLateEngine(LateEngine):
    """A late engine of a device whose memory the host cannot write: every block goes through a staging buffer."""

    host_writes = False


class UnorderedEngine(StagedLateEngine):
    """The control: copies as late as in the others, but the compute stream waits for nothing."""

    def compute_waits(self, event: Event) -> None:
        return


class MetaEngine(CpuCopyEngine):
    """The engine of a device without data: accounts, but copies nothing. For tests of placement on devices."""

    host_writes = False

    def _allocate(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)

    def _copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert self.device in (target.device, source.device), "a copy strayed to another device"


class Faults:
    """Switches of the faulty tier; each test sets the ones that it needs."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Switch all faults off."""
        self.write_error: str | None = None
        self.read_error: str | None = None
        self.delete_error: str | None = None
        self.gate: threading.Event | None = None
        self.delay_seconds = 0.0
        self.writes = 0
        self.reads: list[int] = []


FAULTS = Faults()


@register_tier("faulty")
class FaultyTier(NvmeTier):
    """An L1 that fails or waits as set in `FAULTS`, with the messages that tensorstore would give."""

    def start_write(self, key: BlockKey, layout: BlockLayout, source: Bits) -> Sequence[TierFuture]:
        FAULTS.writes += 1
        if FAULTS.gate is not None:
            FAULTS.gate.wait()
        time.sleep(FAULTS.delay_seconds)
        if FAULTS.write_error:
            raise ValueError(FAULTS.write_error)
        return super().start_write(key, layout, source)

    def start_read(self, keys: Sequence[BlockKey], layout: BlockLayout, target: Bits) -> Sequence[TierFuture]:
        FAULTS.reads.extend(key.layer_idx for key in keys)
        if FAULTS.read_error:
            raise ValueError(FAULTS.read_error)
        return super().start_read(keys, layout, target)

    def start_delete(self, key: BlockKey) -> Sequence[TierFuture]:
        if FAULTS.delete_error:
            raise ValueError(FAULTS.delete_error)
        return super().start_delete(key)


class RandomGovernor:
    """A replacement for `WindowGovernor` with another size at each step, one to nine blocks."""

    def __init__(self, config: TieredCacheConfig, probe: object) -> None:
        self._random = random.Random(0)
        self._block_tokens = config.block_tokens
        self._step = 0
        self.window_tokens = config.window_floor_tokens
        self.changes: list[WindowChange] = []

    def observe(self, device: torch.device, *, step: int, **memory: int) -> int:
        if step != self._step:
            self._step = step
            self.window_tokens = self._random.randint(1, 9) * self._block_tokens
            self.changes.append(WindowChange(step, self.window_tokens))
        return self.window_tokens


def random_kv(
    tokens: int,
    *,
    batch: int = 1,
    key_shape: tuple[int, int] = (2, 8),
    value_shape: tuple[int, int] = (2, 8),
    dtype: torch.dtype = torch.float32,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random K and V `[batch, heads, tokens, dim]`; shapes are `(heads, dim)`."""
    keys = torch.randn(batch, key_shape[0], tokens, key_shape[1]).to(dtype)
    values = torch.randn(batch, value_shape[0], tokens, value_shape[1]).to(dtype)
    return keys, values


def pieces(tokens: int, sizes: Iterable[int]) -> Iterable[slice]:
    """Cut `tokens` into consecutive slices of the sizes given, repeated until all are covered."""
    done = 0
    while done < tokens:
        for size in sizes:
            if done < tokens:
                yield slice(done, min(done + size, tokens))
                done = min(done + size, tokens)


def eventually(condition: Callable[[], bool], seconds: float = 5.0) -> bool:
    """Return true if the condition becomes true in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            return False
        time.sleep(0.005)
    return True
