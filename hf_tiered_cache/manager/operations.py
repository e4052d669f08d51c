"""The operations on the tokens of one layer.

append   new tokens ─▶ window ─▶ seal ─▶ (staging ─▶ L1 ─▶ L2, in the background)
gather   sealed blocks (prefetched) + window + new tokens ─▶ one buffer ─▶ attention
attend   new tokens, window, sealed blocks (a few buffers) ─▶ attention, split by split
fetch    some positions, from wherever they are ─▶ new tensors
crop     drop tokens from the end; what remains of a cut block goes back to the window
"""

from __future__ import annotations

import numpy as np
import torch

from ..attention.online import OnlineAttention
from ..core.errors import ConfigError
from ..core.geometry import Geometry
from ..loading.reader_pool import ReaderLease
from ..sequence.layer_state import LayerState
from ..sequence.requests import Request
from ..sequence.window_sizing import WindowSizing
from .lookahead import Lookahead
from .positions import Positions, blocks_of, window_indices
from .resources import Resources
from .window_adaptation import WindowAdaptation


class LayerOperations:
    """Adds, reads and removes tokens of layers.

    Any number of threads may call, each with the lock of the layer's request.

    Args:
        resources: engines, tiers and loads.
        window_sizing: counts the windows.
        windows: keeps them at their size.
        lookahead: starts the loads of the layers that come next.
    """

    def __init__(
        self, resources: Resources, window_sizing: WindowSizing, windows: WindowAdaptation, lookahead: Lookahead
    ) -> None:
        self._resources = resources
        self._window_sizing = window_sizing
        self._windows = windows
        self._lookahead = lookahead

    def new_layer(self, request: Request, layer_idx: int, geometry: Geometry, device: torch.device) -> LayerState:
        """Add a layer without tokens to a request."""
        config, engine = self._resources.config, self._resources.engine(device)
        namespace, window_tokens = request.block_namespace(layer_idx), self._window_sizing.tokens
        layer = LayerState.empty(layer_idx, namespace, engine, geometry, config, window_tokens)
        request.layers[layer_idx] = layer
        self._window_sizing.add(layer, request.namespace)
        return layer

    def append(self, layer: LayerState, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add tokens `[B, H, T, D]` to the window, in pieces that it has room for, and seal the surplus.

        After an error the tokens added so far are in window and table, complete and in order.
        """
        self._windows.adapt(layer)
        done, total = 0, key.shape[2]
        while done < total:
            piece = slice(done, done + min(layer.window.room(), total - done))
            layer.window.append(key[:, :, piece], value[:, :, piece])
            done = piece.stop
            self._windows.seal_surplus(layer)

    def gather(
        self, request: Request, layer: LayerState, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens and return all K and V of a layer, `[B, H, S, D]`, the new tokens at the end.

        The blocks of the next layers are loaded while this waits for its own.
        """
        self._windows.adapt(layer)
        if not layer.table and layer.window.fits(key.shape[2]):
            layer.window.append(key, value)
            return layer.window.views()
        layer.streamed = False
        pipeline = self._resources.pipeline(layer.window.device)
        prefetcher = self._resources.open_prefetcher
        self._resources.open_residency.touch(layer.table.slots)
        old_tokens, tokens = layer.tokens, layer.tokens + key.shape[2]
        buffer_tokens = self._lookahead.buffer_tokens(request, tokens)
        load = prefetcher.begin(layer, pipeline, request.namespace, buffer_tokens)
        try:
            self._lookahead.start_following(request, layer)
        except BaseException:
            prefetcher.cancel(load)
            raise
        keys, values = prefetcher.finish(load, tokens)
        layer.window.copy_to(keys, values, end=old_tokens)
        keys[:, :, old_tokens:].copy_(key)
        values[:, :, old_tokens:].copy_(value)
        self.append(layer, key, value)
        self._lookahead.start_following(request, layer, with_itself=True)
        return keys, values

    def attend(
        self,
        request: Request,
        layer: LayerState,
        key: torch.Tensor,
        value: torch.Tensor,
        attention: OnlineAttention,
        lease: ReaderLease,
    ) -> None:
        """Append tokens and feed all K and V of a layer, the new tokens' included, to an attention.

        The splits in accelerator memory come first, while storage is being read. Sealed blocks stream through a
        few buffers, and no tensor here grows with the length of the sequence.

        After an error while blocks are read, the layer is as before.
        """
        if not layer.streamed:
            layer.streamed = True
            self._resources.forget(layer)  # drop its load for gathered attention
        self._windows.adapt(layer)
        new_tokens, tokens = key.shape[2], layer.tokens
        self._windows.seal_surplus(layer)  # storage may have refused some, and the window needs room
        if new_tokens == 1:  # any window has room for one token, and this saves a split
            layer.window.append(key, value)
        else:
            attention.add(key, value, tokens, newest=True)
        try:
            for window_keys, window_values, start in layer.window.splits(layer.sealed_tokens):
                attention.add(window_keys, window_values, start)
            if layer.table:
                self._resources.open_residency.touch(layer.table.slots)
                reader = self._resources.block_reader(layer.window.device, lease)
                for split in reader.read(layer, lambda after: self._lookahead.streamed_after(request, after)):
                    start = layer.sink_tokens + split.first_block * layer.block_tokens
                    attention.add_blocks(split.keys, split.values, start, split.row_map)
        except BaseException:
            if new_tokens == 1:
                layer.window.crop(1)
            raise
        if new_tokens > 1:
            self.append(layer, key, value)
        self._windows.seal_surplus(layer)

    def fetch(self, layer: LayerState, positions: Positions) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of some tokens, `[B, H, len(positions), D]` in their order, as new tensors. Blocks."""
        sealed = (positions >= layer.sink_tokens) & (positions < layer.sink_tokens + layer.sealed_tokens)
        from_window = layer.window.select_tokens(window_indices(layer, positions[~sealed]))
        if not sealed.any():
            return from_window
        device = layer.window.device
        to_window, to_sealed = (torch.from_numpy(np.flatnonzero(mask)).to(device) for mask in (~sealed, sealed))
        pipeline = self._resources.pipeline(device)
        wanted = blocks_of(layer, positions)
        self._resources.open_residency.touch(layer.table.slots[wanted])
        with self._resources.open_prefetcher.blocks(layer, pipeline, wanted) as (keys, values, place):
            offsets = torch.from_numpy(place(positions[sealed] - layer.sink_tokens)).to(device)
            results = []
            for stored, held in zip((keys, values), from_window, strict=True):
                result = stored.new_empty((*stored.shape[:2], len(positions), stored.shape[3]))
                result.index_copy_(2, to_window, held)
                result.index_copy_(2, to_sealed, stored.index_select(2, offsets))
                results.append(result)
        return results[0], results[1]

    def crop(self, layer: LayerState, keep_tokens: int) -> None:
        """Drop all tokens from `keep_tokens` on. Blocks on a read when it cuts a sealed block."""
        remove = layer.tokens - keep_tokens
        if remove <= layer.window.held_tokens or not layer.table:
            layer.window.crop(remove)
            return
        keep_blocks, border_tokens = divmod(max(0, keep_tokens - layer.sink_tokens), layer.block_tokens)
        first = layer.sink_tokens + keep_blocks * layer.block_tokens
        # Read before anything is dropped, so that a failure leaves the layer as it was.
        border = self.fetch(layer, np.arange(first, first + border_tokens))
        content = layer.window.with_only(min(keep_tokens, layer.sink_tokens), *border)
        self._resources.forget(layer)
        with layer.changing:
            layer.torn = True
            layer.window.become(content)
            self._resources.open_residency.truncate(layer.table, keep_blocks)
            layer.torn = False

    def select_rows(self, layer: LayerState, rows: Positions) -> None:
        """Replace batch row `i` by what row `rows[i]` was."""
        if not len(rows):
            raise ConfigError(
                f"no row of a batch of {layer.geometry.batch} would be left: free the request instead"
            )
        if np.array_equal(rows, np.arange(layer.geometry.batch)):
            return
        if self._resources.prefetcher is not None:
            self._resources.prefetcher.discard(layer)
        layer.select_rows(rows)

    def fork(self, layer: LayerState, request: Request, layer_idx: int) -> None:
        """Add a layer with the same tokens to a request: blocks are shared, the window is copied."""
        if layer.table:
            self._resources.open_residency.retain(layer.table.blocks)
        layer.window.follow()
        twin = layer.fork(request.block_namespace(layer_idx), layer_idx)
        request.layers[layer_idx] = twin
        self._window_sizing.add(twin, request.namespace)

    def forget(self, layer: LayerState) -> None:
        """Release all blocks and memory of a layer."""
        self._window_sizing.remove(layer)
        self._resources.forget(layer)
        if self._resources.residency is not None:
            self._resources.residency.forget(layer.table)
        layer.window.free()
