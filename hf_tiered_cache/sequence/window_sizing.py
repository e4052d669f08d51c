"""The windows of a manager, and their common size."""

from __future__ import annotations

from collections import Counter

import torch

from ..core.config import TieredCacheConfig
from ..core.locks import TimedLock
from ..core.metrics import Metrics
from .layer_state import LayerState
from .pressure import MemoryProbe, WindowChange, WindowGovernor


class WindowSizing:
    """Tells the governor which windows each device holds. Any thread may call.

    Args:
        config: fixed or automatic size, and its bounds.
        probe: returns the memory of a device.
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
        """The size that each window should have, in tokens."""
        return self._governor.window_tokens

    @property
    def changes(self) -> tuple[WindowChange, ...]:
        """The size over time."""
        return self._governor.changes

    def add(self, layer: LayerState, owner: str) -> None:
        """Add a layer of a request."""
        if self.automatic:
            with self._lock:
                self._layers[layer] = owner
                self._devices.add(layer.window.device)
            self._observe()

    def remove(self, layer: LayerState) -> None:
        """Remove a layer."""
        if self.automatic:
            with self._lock:
                self._layers.pop(layer, None)
            self._observe()

    def step(self) -> None:
        """Begin a forward pass: probe the memory."""
        self._steps += 1
        self._observe()

    def _observe(self) -> None:
        with self._lock:
            devices, layers = list(self._devices), list(self._layers.items())
        for device in devices:
            here = [(layer.window, owner) for layer, owner in layers if layer.window.device == device]
            per_token = [window.geometry.layout(1).nbytes for window, _ in here]
            largest = max(per_token, default=0)
            # During its first forward pass a request will still get as many layers as the others have.
            layers_of = Counter(owner for _, owner in here)
            to_come = sum(max(layers_of.values()) - made for made in layers_of.values()) if here else 0
            self._governor.observe(
                device,
                step=self._steps,
                bytes_per_token=sum(per_token) + to_come * largest,
                largest_bytes_per_token=largest,
                held_bytes=sum(window.nbytes for window, _ in here),
            )
