"""The choice of a copy engine for a device."""

from __future__ import annotations

import torch

from ..core.errors import UnsupportedModelError
from ..core.metrics import Metrics
from .cuda import CudaCopyEngine
from .engine import CopyEngine, CpuCopyEngine


def make_engine(device: torch.device, metrics: Metrics) -> CopyEngine:
    """Return the engine for a device.

    Raises:
        UnsupportedModelError: the device is neither a CUDA device nor the CPU.
    """
    if device.type == "cuda":
        return CudaCopyEngine(device, metrics)
    if device.type == "cpu":
        return CpuCopyEngine(device, metrics)
    raise UnsupportedModelError(f"the model's layers are on {device}: only CUDA devices and the CPU are supported")
