"""The map from the rows of a batch to the stored rows of a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class RowGroup:
    """The batch rows `members` that read one stored row; `index` holds them on a device."""

    stored_row: int
    members: list[int]
    index: torch.Tensor


class RowMap:
    """The stored row that each batch row reads. Immutable.

    Its tensors on a device are made once for each stream that computes with them. Tensors shared by all streams
    would make the others wait for the stream that made them.

    Args:
        rows: 1-D.
    """

    def __init__(self, rows: Sequence[int] | np.ndarray[Any, Any]) -> None:
        self.rows: np.ndarray[Any, np.dtype[np.int64]] = np.asarray(rows, np.int64)
        self._ascending = np.array_equal(self.rows, np.arange(len(self.rows)))
        self._indices: dict[object, torch.Tensor] = {}
        self._groups: dict[object, list[RowGroup]] = {}

    def is_identity(self, stored_rows: int) -> bool:
        """Return true if there are as many batch rows as stored rows, and each reads its own."""
        return self._ascending and len(self.rows) == stored_rows

    def select(self, rows: Sequence[int] | np.ndarray[Any, Any]) -> RowMap:
        """Return a map in which batch row `i` reads what row `rows[i]` of this map reads."""
        return RowMap(self.rows[np.asarray(rows)])

    def index(self, device: torch.device) -> torch.Tensor:
        """Return the map as an int64 tensor, for use on the current stream of a device."""
        key = _stream_of(device)
        if key not in self._indices:
            self._indices[key] = index_on(self.rows, device)
        return self._indices[key]

    def groups(self, device: torch.device) -> list[RowGroup]:
        """Return the batch rows by the stored row that they read, for use on the current stream of a device."""
        key = _stream_of(device)
        if key not in self._groups:
            order = np.argsort(self.rows, kind="stable")
            stored, counts = np.unique(self.rows, return_counts=True)
            ends = np.cumsum(counts)
            whole = index_on(order, device)
            self._groups[key] = [
                RowGroup(int(row), order[end - count : end].tolist(), whole[end - count : end])
                for row, count, end in zip(stored, counts.tolist(), ends.tolist(), strict=True)
            ]
        return self._groups[key]


def index_on(rows: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    """Return an index tensor for the current stream of a device.

    The host does not wait for the copy, if pages can be locked.
    """
    with torch.inference_mode(False):
        index = torch.from_numpy(np.asarray(rows, np.int64))
        if device.type != "cuda":
            return index.to(device)
        try:
            pinned = index.pin_memory()
        except RuntimeError:  # the system refuses to lock pages
            return index.to(device)
        return pinned.to(device, non_blocking=True)


def _stream_of(device: torch.device) -> object:
    return torch.cuda.current_stream(device) if device.type == "cuda" else device
