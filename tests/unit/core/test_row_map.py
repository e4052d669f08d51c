"""Row maps, and the number of their copies to a device."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from hf_tiered_cache import KVCacheManager, TieredCacheConfig
from hf_tiered_cache.core import row_map
from hf_tiered_cache.core.row_map import RowMap

from ...fakes import random_kv

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_a_map_of_a_map() -> None:
    first = RowMap([2, 0, 2])
    assert first.select([1, 1, 0]).rows.tolist() == [0, 0, 2]
    assert RowMap(range(3)).is_identity(3)
    assert not RowMap(range(3)).is_identity(4)
    assert not first.is_identity(3)


def test_groups() -> None:
    groups = RowMap([2, 0, 2, 0, 2]).groups(CPU)
    assert [(group.stored_row, group.members, group.index.tolist()) for group in groups] == [
        (0, [1, 3], [1, 3]),
        (2, [0, 2, 4], [0, 2, 4]),
    ]


@pytest.fixture
def copies(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list of the maps that are copied to a device during the test."""
    copied: list[Any] = []

    def index_on(rows: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
        copied.append(rows.tolist())
        return torch.from_numpy(rows)

    monkeypatch.setattr(row_map, "index_on", index_on)
    return copied


def test_each_stream_has_its_own(copies: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Each stream copies a map for itself, so that no stream has to wait for another."""
    current = ["a"]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: (device, current[0]))
    rows = RowMap([1, 0])
    for stream in "abab":
        current[0] = stream
        for _ in range(3):
            rows.index(CUDA)
            rows.groups(CUDA)
    assert len(copies) == 4


def test_attention_copies_a_map_once(copies: list[Any]) -> None:
    """A map is copied once, for any number of splits of a layer and any number of steps."""
    block_bytes = 2 * 2 * 2 * 16 * 8 * 4
    config = TieredCacheConfig(window_tokens=32, block_tokens=16, stream_buffer_size=block_bytes)
    with KVCacheManager(config) as manager:
        manager.allocate("a")
        manager.append("a", 0, *random_kv(300, batch=2))
        manager.select_rows("a", 0, np.array([1, 1]))
        for tokens in (1, 1, 20, 20):  # blocks in their stored layout, and side by side
            manager.attend("a", 0, torch.randn(2, 4, tokens, 8), *random_kv(tokens, batch=2))
    assert copies == [[0, 1], [1, 1]]  # the members of the one group; the map
