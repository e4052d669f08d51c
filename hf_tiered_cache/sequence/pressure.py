"""The size of an automatic window, which follows the accelerator's free memory.

    share of the memory that would be free if all windows were full

    0 %           10 %        12.5 %        15 %
     |   shrinks   |      stays as it is     |   grows    ...
       at once ────────────────▶ ◀──────────── slowly

Both changes aim at the reserve in the middle. A window that shrinks seals blocks, one that grows takes blocks
back; attention is exact in either case.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import psutil
import torch

from ..core.config import TieredCacheConfig
from ..core.host_memory import available_bytes
from .window import ring_tokens

logger = logging.getLogger(__name__)

# Free memory may differ from the reserve by this share of all memory before the window changes.
TOLERANCE = 0.025
# A window grows no sooner than this many steps after a change, by the least free memory in these steps. Free
# memory fluctuates, and a window that grew by its maximum would have to shrink again.
GROWTH_STEPS = 16
# The first growth may reach this at once; it is the default of a fixed window.
FIRST_GROWTH_TOKENS = 4096
# Layers that a model is assumed to have during its first forward pass, which creates them one by one.
ASSUMED_LAYERS = 128
_REMEMBERED_CHANGES = 256


class MemoryState(NamedTuple):
    """Memory of a device: what can still be allocated, and all of it."""

    free_bytes: int
    total_bytes: int


MemoryProbe = Callable[[torch.device], MemoryState]


def probe_memory(device: torch.device) -> MemoryState:
    """Return the present memory of a device.

    On CUDA this is what the driver reports as free (`torch.cuda.mem_get_info`, which includes other processes),
    plus what PyTorch's caching allocator has reserved but not allocated. The allocator keeps the memory of freed
    tensors, so the driver does not see that a window shrank. It allocates new tensors from that memory, and
    returns it to the driver before it reports out of memory. A limit of
    `torch.cuda.set_per_process_memory_fraction` is respected.

    Elsewhere: the host's memory; see `available_bytes`.
    """
    if device.type != "cuda":
        return MemoryState(available_bytes(), psutil.virtual_memory().total)
    free_bytes, total_bytes = torch.cuda.mem_get_info(device)
    statistics = torch.cuda.memory_stats(device)
    allocated_bytes = statistics.get("allocated_bytes.all.current", 0)
    free_bytes += statistics.get("reserved_bytes.all.current", 0) - allocated_bytes
    limit_bytes = int(total_bytes * torch.cuda.get_per_process_memory_fraction(device))
    return MemoryState(min(free_bytes, limit_bytes - allocated_bytes), limit_bytes)


class WindowChange(NamedTuple):
    """A size of the window, and the step since which it holds."""

    step: int
    window_tokens: int


@dataclass(eq=False)
class _DeviceView:
    """Measurements of one device.

    `claimable_bytes` holds, for the last steps, the memory that windows could occupy if nothing were left free; it
    does not depend on their present size. `largest_tokens` is the largest window that fits, or the present one
    while there is no reason to change.
    """

    first_step: int
    step: int
    memory: MemoryState
    bytes_per_token: int = 0
    claimable_bytes: deque[int] = field(default_factory=lambda: deque(maxlen=GROWTH_STEPS))
    largest_tokens: int = 0


class WindowGovernor:
    """Decides how many tokens each window of a manager keeps. Any thread may call.

    All devices share one size, that of the device with the least memory for it. The decision uses the memory that
    would be free if all windows were full, since a window may fill up within one forward pass. Everything else
    that a forward pass allocates must fit into the reserve.

    - **Shrinks** when less than the reserve minus 2.5 points would be free, at once, by as many blocks as bring
      the reserve back, down to `config.window_floor_tokens`.
    - **Grows** when more than the reserve plus 2.5 points would have been free in each of the last
      `GROWTH_STEPS` steps, and as many have passed since the last change, by as many blocks as leave the
      reserve free, at most to twice its size and to `config.window_max_tokens`. While a ring moves to larger
      memory, both copies are allocated, and the reserve minus 2.5 points must still be free.
    - **Starts** at the floor, and may grow to `FIRST_GROWTH_TOKENS` as soon as a layer is known. In the first
      step `ASSUMED_LAYERS` layers are assumed. When no layer is left, it starts anew.

    Sizes are whole blocks, or the floor. With a fixed `config.window_tokens` nothing is probed.

    Args:
        config: bounds and reserve.
        probe: returns the memory of a device; called at most once per step.
    """

    def __init__(self, config: TieredCacheConfig, probe: MemoryProbe = probe_memory) -> None:
        self._config = config
        self._probe = probe
        self._lock = threading.RLock()  # a probe may call stats()
        self._window_tokens = config.window_floor_tokens
        self._has_grown = False
        self._devices: dict[torch.device, _DeviceView] = {}
        self._changes = deque([WindowChange(0, self._window_tokens)], maxlen=_REMEMBERED_CHANGES)

    @property
    def window_tokens(self) -> int:
        """The present size of windows, in tokens."""
        return self._window_tokens

    @property
    def changes(self) -> tuple[WindowChange, ...]:
        """The start and the changes of the size, oldest first; the last 256 are kept."""
        with self._lock:
            return tuple(self._changes)

    def observe(
        self,
        device: torch.device,
        *,
        step: int,
        bytes_per_token: int,
        largest_bytes_per_token: int,
        held_bytes: int,
    ) -> int:
        """Decide the size by a device's memory.

        Call it when a step begins, and when layers were added or removed. A second call in a step does not probe,
        and changes the size only when `bytes_per_token` has grown.

        Args:
            device: of the windows.
            step: number of the forward pass.
            bytes_per_token: K and V of one token in all tiered layers of all requests on this device, including
                layers that are known to come. 0 when none is left.
            largest_bytes_per_token: the largest share of a single layer of one request in it.
            held_bytes: present memory of the windows of these layers.

        Returns:
            The size of windows from now on, in tokens.
        """
        if self._config.window_tokens != "auto":
            return self._window_tokens
        with self._lock:
            if not bytes_per_token:
                self._forget(device, step)
                return self._window_tokens
            view = self._devices.get(device)
            if view is None or view.step != step:
                memory = self._probe(device)
                if view is None:
                    view = self._devices[device] = _DeviceView(step, step, memory)
                view.step, view.memory, view.bytes_per_token = step, memory, 0
                view.claimable_bytes.append(memory.free_bytes + held_bytes)
            if step == view.first_step:
                bytes_per_token = max(bytes_per_token, ASSUMED_LAYERS * largest_bytes_per_token)
            if bytes_per_token <= view.bytes_per_token:
                return self._window_tokens
            view.bytes_per_token = bytes_per_token
            view.largest_tokens = self._largest_window(view, largest_bytes_per_token)
            self._change(step, min(known.largest_tokens for known in self._devices.values()))
            return self._window_tokens

    def _largest_window(self, view: _DeviceView, largest_bytes_per_token: int) -> int:
        """Return the largest window that fits on a device, or the present one if no change is needed."""
        now_tokens, reserve = self._window_tokens, self._config.memory_reserve
        full_bytes = self._memory_tokens(now_tokens) * view.bytes_per_token
        newest = view.claimable_bytes[-1]
        if newest - full_bytes < (reserve - TOLERANCE) * view.memory.total_bytes:
            return min(now_tokens, self._window_within(view, newest, reserve))
        if self._has_grown and view.step - self._changes[-1].step < GROWTH_STEPS:
            return now_tokens
        least = min(view.claimable_bytes)
        if least - full_bytes <= (reserve + TOLERANCE) * view.memory.total_bytes:
            return now_tokens
        twice_bytes = self._memory_tokens(now_tokens) * largest_bytes_per_token
        largest = min(
            self._window_within(view, least, reserve),
            self._window_within(view, least - twice_bytes, reserve - TOLERANCE),
            self._allowed(2 * now_tokens if self._has_grown else max(2 * now_tokens, FIRST_GROWTH_TOKENS)),
        )
        return max(now_tokens, largest)

    def _change(self, step: int, window_tokens: int) -> None:
        if window_tokens == self._window_tokens:
            return
        logger.info("step %d: windows keep %d tokens instead of %d", step, window_tokens, self._window_tokens)
        self._has_grown = self._has_grown or window_tokens > self._window_tokens
        self._window_tokens = window_tokens
        self._changes.append(WindowChange(step, window_tokens))

    def _forget(self, device: torch.device, step: int) -> None:
        """Drop a device on which no window is left."""
        self._devices.pop(device, None)
        if not self._devices:
            self._change(step, self._config.window_floor_tokens)
            self._has_grown = False

    def _memory_tokens(self, window_tokens: int) -> int:
        """Return the tokens for which a layer has memory when a window of this size is full."""
        return self._config.sink_tokens + ring_tokens(window_tokens, self._config.block_tokens)

    def _window_within(self, view: _DeviceView, claimable_bytes: int, reserve: float) -> int:
        """Return the largest window, within the bounds, that leaves the reserve free when it is full."""
        usable_bytes = claimable_bytes - int(reserve * view.memory.total_bytes)
        one_block = self._config.block_tokens
        besides_tokens = self._memory_tokens(one_block) - one_block
        return self._allowed(usable_bytes // view.bytes_per_token - besides_tokens)

    def _allowed(self, window_tokens: int) -> int:
        """Round a size down to whole blocks within the bounds, but not below the floor."""
        if self._config.window_max_tokens is not None:
            window_tokens = min(window_tokens, self._config.window_max_tokens)
        whole = window_tokens // self._config.block_tokens * self._config.block_tokens
        return max(self._config.window_floor_tokens, whole)
