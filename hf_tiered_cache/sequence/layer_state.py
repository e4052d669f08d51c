"""The state of one layer of one request."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from ..core.blocks import BlockTable
from ..core.config import TieredCacheConfig
from ..core.errors import ConfigError, TieredCacheError
from ..core.geometry import Geometry
from ..transfer.engine import CopyEngine
from .window import WindowBuffer


def check_layer_id(layer_id: int) -> None:
    """Raise unless a layer id is an int. (Equal tensors, for example, are different dictionary keys.)

    Raises:
        ConfigError: it is neither a Python nor a numpy int.
    """
    if isinstance(layer_id, bool) or not isinstance(layer_id, (int, np.integer)):
        raise ConfigError(f"layer_id={layer_id!r} is {type(layer_id).__name__}: pass an int")


class LayerState:
    """Window and block table of one layer; together they hold its tokens.

        token 0                                                              tokens
        |<- sink ->|<----------- sealed: table ----------->|<--- window --->|

    Args:
        layer_idx: the layer.
        window: its L0.
        table: its sealed blocks.
        sink_tokens, block_tokens: as set.

    Window and table each change in one assignment. Code that changes both holds `changing`, since other threads
    count tokens, and sets `torn` meanwhile: if an interrupt strikes in between, a token may be in both or in
    neither. `streamed` is true when streaming attention reads the layer, which then needs no gathered load.
    `growing` is true while the window takes blocks back after it was made larger.
    """

    def __init__(
        self, layer_idx: int, window: WindowBuffer, table: BlockTable, sink_tokens: int, block_tokens: int
    ) -> None:
        self.layer_idx = layer_idx
        self.window = window
        self.table = table
        self.sink_tokens = sink_tokens
        self.block_tokens = block_tokens
        self.streamed = False
        self.growing = False
        self.torn = False
        self.changing = threading.Lock()

    @classmethod
    def empty(
        cls,
        layer_idx: int,
        namespace: str,
        engine: CopyEngine,
        geometry: Geometry,
        config: TieredCacheConfig,
        window_tokens: int,
    ) -> LayerState:
        """Make a layer without tokens."""
        window = WindowBuffer(engine, geometry, config.sink_tokens, window_tokens, config.block_tokens)
        return cls(layer_idx, window, BlockTable(namespace, layer_idx), config.sink_tokens, config.block_tokens)

    @property
    def geometry(self) -> Geometry:
        """Shape and dtype of K and V."""
        return self.window.geometry

    @property
    def sealed_tokens(self) -> int:
        """Tokens in sealed blocks."""
        return len(self.table) * self.block_tokens

    @property
    def tokens(self) -> int:
        """Tokens of the sequence."""
        return self.window.tokens + self.sealed_tokens

    def count_tokens(self) -> int:
        """Return `tokens`, without the request's lock."""
        with self.changing:
            return self.tokens

    def tokens_in(self, tier: str) -> int:
        """Return the tokens in sealed blocks whose nearest stored copy is in a tier."""
        return sum(block.stored_in == tier for block in self.table.blocks) * self.block_tokens

    def check_intact(self) -> None:
        """Raise if an interrupt struck between window and table.

        Raises:
            TieredCacheError: it did.
        """
        if self.torn:
            raise TieredCacheError(
                f"an interrupt struck while tokens of layer {self.layer_idx} were being moved, and where they are "
                "is not certain: reset() the cache, or free() the request, and begin anew"
            )

    def check_fits(self, new: Geometry, device: torch.device) -> None:
        """Raise unless tokens of this shape and device can be appended.

        Raises:
            ConfigError: they cannot.
        """
        held = self.geometry
        if held.batch != new.batch:
            raise ConfigError(
                f"layer {self.layer_idx} holds a batch of {held.batch}, and got one of {new.batch}. To go on from "
                "one prompt with several rows (beams, samples), call batch_repeat_interleave on the cache first"
            )
        if held != new or self.window.device != device:
            raise ConfigError(
                f"layer {self.layer_idx} holds {held} on {self.window.device}, got {new} on {device}. "
                "For another model take another cache, or reset() this one"
            )

    def select_rows(self, rows: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Replace batch row `i` by what row `rows[i]` was. Copies the window; of sealed blocks only row maps
        change."""
        index = np.asarray(rows, dtype=np.int64)
        content = self.window.with_rows(index)
        with self.changing:
            self.torn = True
            self.window.become(content)
            self.table.select_rows(index)
            self.torn = False

    def fork(self, namespace: str, layer_idx: int) -> LayerState:
        """Return a second layer with the same tokens. The window is copied; the caller adds the references to the
        shared blocks."""
        table = self.table.fork(namespace, layer_idx)
        twin = LayerState(layer_idx, self.window.copy(), table, self.sink_tokens, self.block_tokens)
        twin.streamed, twin.growing = self.streamed, self.growing
        return twin
