"""Fixtures of the tests of streaming attention."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from hf_tiered_cache.integration.attention import PendingAttention


@pytest.fixture
def streamed_layers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list of the layers that used streaming attention during the test, in order."""
    layers: list[int] = []
    attend = PendingAttention.attend

    def noting(pending: PendingAttention, *arguments: Any) -> torch.Tensor:
        layers.append(pending.layer_idx)
        return attend(pending, *arguments)

    monkeypatch.setattr(PendingAttention, "attend", noting)
    return layers
