"""All windows of a manager, and the size that each of them should have."""

from __future__ import annotations

from collections import Counter

import torch

from ..core.config import TieredCacheConfig
from ..core.locks import TimedLock
from ..core.metrics import Metrics
from .layer_state import LayerState
from .pressure import MemoryProbe, WindowChange, WindowGovernor


class WindowSizing:
    """All windows of a manager by device, for the governor of their size. Any thread may call.

    Args:
        config: says whether the size is fixed.
        probe: of a device's memory.
        metrics: counts waits.
    """

    def __init__(self, config: TieredCacheConfig, probe: MemoryProbe, metrics: Metrics) -> None:
        self.automatic = config.window_tokens == "auto"
        self._governor = WindowGovernor(config, probe)
        self._lock = TimedLock(metrics)
        self._layers: dict[LayerState, str] = {}
        self._devices: set[torch.device] = set()
        self._steps = 0

    @property
    def tokens(self) -> int:
        """Tokens that each window should keep."""
        return self._governor.window_tokens

    @property
    def changes(self) -> tuple[WindowChange, ...]:
        """The size over time."""
        return self._governor.changes

    def add(self, layer: LayerState, owner: str) -> None:
        """There is one more layer, of a request."""
        if self.automatic:
            with self._lock:
                self._layers[layer] = owner
                self._devices.add(layer.window.device)
            self._observe()

    def remove(self, layer: LayerState) -> None:
        """A layer went away."""
        if self.automatic:
            with self._lock:
                self._layers.pop(layer, None)
            self._observe()

    def step(self) -> None:
        """A forward pass begins: look at the memory."""
        self._steps += 1
        self._observe()

    def _observe(self) -> None:
        with self._lock:
            devices, layers = list(self._devices), list(self._layers.items())
        for device in devices:
            here = [(layer.window, owner) for layer, owner in layers if layer.window.device == device]
            per_token = [window.geometry.layout(1).nbytes for window, _ in here]
            largest = max(per_token, default=0)
            # A request whose first forward pass is under way will have as many layers as the others.
            layers_of = Counter(owner for _, owner in here)
            to_come = sum(max(layers_of.values()) - made for made in layers_of.values()) if here else 0
            self._governor.observe(
                device,
                step=self._steps,
                bytes_per_token=sum(per_token) + to_come * largest,
                largest_bytes_per_token=largest,
                held_bytes=sum(window.nbytes for window, _ in here),
            )
