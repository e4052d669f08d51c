"""The ways that data takes through one layer.

append   new tokens ─▶ window ─▶ seal ─▶ (staging ─▶ L1 ─▶ L2, in the background)
gather   sealed blocks (prefetched) + window + new tokens ─▶ one buffer ─▶ attention
attend   new tokens, window, sealed blocks (a few buffers) ─▶ attention, split by split
fetch    some positions, from wherever they are ─▶ new tensors
crop     drop tokens from the end; a block that is cut goes back to the window
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from ..attention.online import OnlineAttention
from ..core.config import TieredCacheConfig
from ..core.errors import ConfigError, TierError
from ..core.geometry import Geometry
from ..loading.pipeline import DevicePipeline
from ..loading.prefetch import Prefetcher
from ..loading.reader_pool import ReaderLease
from ..residency.table import ResidencyTable
from ..sequence.layer_state import LayerState
from ..sequence.requests import Request, RequestTable
from ..sequence.window_sizing import WindowSizing
from .resources import Resources

logger = logging.getLogger(__name__)

Positions = np.ndarray[Any, np.dtype[np.int64]]


class LayerOperations:
    """Moves tokens of layers; see the module. Any number of threads, each with the lock of the layer's request.

    Args:
        resources: engines, tiers, prefetch; opened by the first seal.
    """

    def __init__(self, resources: Resources, request_table: RequestTable, window_sizing: WindowSizing) -> None:
        self._resources = resources
        self._request_table = request_table
        self._window_sizing = window_sizing
        self._config: TieredCacheConfig = resources.config

    def new_layer(self, request: Request, layer_idx: int, geometry: Geometry, device: torch.device) -> LayerState:
        """Give a request a layer without tokens."""
        engine, namespace = self._resources.engine(device), request.block_namespace(layer_idx)
        layer = LayerState.empty(layer_idx, namespace, engine, geometry, self._config, self._window_sizing.tokens)
        request.layers[layer_idx] = layer
        self._window_sizing.add(layer, request.namespace)
        return layer

    def begin(self, request: Request, layer_idx: int) -> None:
        """A layer of a request is about to be used. With its first, a step begins.

        Raises:
            TierError: windows must shrink, and storage failed; what was not sealed is still in the window.
        """
        if request.order.observe(layer_idx):
            self._resources.step()
            if self._window_sizing.automatic:
                self._window_sizing.step()
                self._shrink_windows(request)

    def adapt(self, layer: LayerState) -> None:
        """Give an automatic window its size of now. A smaller one seals what it has too many; a larger one takes
        the newest block back, one at a time, so that no step waits long for it.

        Raises:
            TierError: storage failed; the layer holds all of its tokens.
        """
        if not self._window_sizing.automatic:
            return
        window, tokens = layer.window, self._window_sizing.tokens
        if window.window_tokens != tokens:
            layer.growing = tokens > window.window_tokens
            window.resize(tokens)
        if layer.growing:
            layer.growing = bool(layer.table) and window.takes_block_back
            if layer.growing:
                self._take_block_back(layer)
        else:
            self._seal_surplus(layer)
            window.release_surplus()

    def _shrink_windows(self, request: Request) -> None:
        """Shrink windows that are too large: this request's, and those of others that nobody is working on."""
        self._shrink_windows_of(request)
        for other in self._request_table.all():
            if other is not request and other.lock.try_acquire():
                try:
                    if self._request_table.is_idle(other):
                        self._shrink_windows_of(other)
                except (TierError, torch.OutOfMemoryError) as error:
                    logger.warning("a window of %r could not shrink: %s", other.request_id, error)
                finally:
                    other.lock.release()

    def _shrink_windows_of(self, request: Request) -> None:
        for layer in request.layers.values():
            if layer.window.window_tokens > self._window_sizing.tokens or layer.window.has_block_to_seal:
                layer.window.follow()
                self.adapt(layer)

    def _take_block_back(self, layer: LayerState) -> None:
        last = len(layer.table) - 1
        self._residency.touch(layer.table.slots[last:])
        layer.window.make_room_for_block()
        with self._prefetcher.apart(layer, self._pipeline(layer), [last]) as (keys, values), layer.changing:
            layer.torn = True
            layer.window.prepend_block(keys, values)
            self._residency.truncate(layer.table, last)
            layer.torn = False
        if not layer.table:
            self._resources.forget(layer)

    def append(self, layer: LayerState, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add tokens `[B, H, T, D]` to the window, in pieces that it has room for, and seal what it has too many.

        Whenever this raises, what was added so far is in window and table, complete and in order.
        """
        self.adapt(layer)
        done, total = 0, key.shape[2]
        while done < total:
            piece = slice(done, done + min(layer.window.room(), total - done))
            layer.window.append(key[:, :, piece], value[:, :, piece])
            done = piece.stop
            self._seal_surplus(layer)

    def _seal_surplus(self, layer: LayerState) -> None:
        while layer.window.has_block_to_seal:
            self.seal(layer)

    def seal(self, layer: LayerState) -> None:
        """Move the window's oldest block into the table and on its way to storage."""
        self._pipeline(layer).seal_oldest(layer)

    def evict(self, layer: LayerState) -> int:
        """Seal every full block of the window; returns how many. What is sealed when this raises stays so."""
        layer.window.follow()
        sealed = 0
        while layer.window.held_tokens >= layer.block_tokens:
            self.seal(layer)
            sealed += 1
        layer.window.shrink()
        layer.growing = False
        return sealed

    def gather(
        self, request: Request, layer: LayerState, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """All K and V of a layer with the new tokens at the end, `[B, H, S, D]`, and append those.

        While this waits for the sealed blocks, those of the next layers are being loaded already.
        """
        self.adapt(layer)
        if not layer.table and layer.window.fits(key.shape[2]):
            layer.window.append(key, value)
            return layer.window.views()
        layer.streamed = False
        pipeline = self._pipeline(layer)
        self._residency.touch(layer.table.slots)
        old_tokens, tokens = layer.tokens, layer.tokens + key.shape[2]
        load = self._prefetcher.begin(layer, pipeline, request.namespace, self._buffer_tokens(request, tokens))
        try:
            self._prefetch_following(request, layer)
        except BaseException:
            self._prefetcher.cancel(load)
            raise
        keys, values = self._prefetcher.finish(load, tokens)
        layer.window.copy_to(keys, values, end=old_tokens)
        keys[:, :, old_tokens:].copy_(key)
        values[:, :, old_tokens:].copy_(value)
        self.append(layer, key, value)
        self._prefetch_following(request, layer, with_itself=True)
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
        """Feed an attention with all K and V of a layer, the new tokens' included, and append those.

        What is in accelerator memory comes first, so that storage gains time. Sealed blocks stream through a few
        buffers, and no tensor here grows with the length of the sequence.

        When this raises while blocks are read, the layer is as before.
        """
        if not layer.streamed:
            layer.streamed = True
            self._resources.forget(layer)  # what is being loaded for gathered attention
        self.adapt(layer)
        new_tokens, tokens = key.shape[2], layer.tokens
        self._seal_surplus(layer)  # what storage refused before; there is no room otherwise
        if new_tokens == 1:  # there is room for one in any window: a part less to attend to
            layer.window.append(key, value)
        else:
            attention.add(key, value, tokens, newest=True)
        try:
            for window_keys, window_values, start in layer.window.parts(layer.sealed_tokens):
                attention.add(window_keys, window_values, start)
            if layer.table:
                self._residency.touch(layer.table.slots)
                stream = self._resources.block_reader(layer.window.device, lease)
                for part in stream.read(layer, lambda after: self._streamed_after(request, after)):
                    start = layer.sink_tokens + part.first_block * layer.block_tokens
                    attention.add_blocks(part.keys, part.values, start, part.row_map)
        except BaseException:
            if new_tokens == 1:
                layer.window.crop(1)
            raise
        if new_tokens > 1:
            self.append(layer, key, value)
        self._seal_surplus(layer)

    def fetch(self, layer: LayerState, positions: Positions) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of some tokens, `[B, H, len(positions), D]` in their order, as new tensors. Blocks."""
        sealed = (positions >= layer.sink_tokens) & (positions < layer.sink_tokens + layer.sealed_tokens)
        from_window = layer.window.select_tokens(self._window_index(layer, positions[~sealed]))
        if not sealed.any():
            return from_window
        device = layer.window.device
        to_window, to_sealed = (torch.from_numpy(np.flatnonzero(mask)).to(device) for mask in (~sealed, sealed))
        pipeline = self._pipeline(layer)
        wanted = blocks_of(layer, positions)
        self._residency.touch(layer.table.slots[wanted])
        with self._prefetcher.blocks(layer, pipeline, wanted) as (keys, values, place):
            offsets = torch.from_numpy(place(positions[sealed] - layer.sink_tokens)).to(device)
            results = []
            for stored, held in zip((keys, values), from_window, strict=True):
                result = stored.new_empty((*stored.shape[:2], len(positions), stored.shape[3]))
                result.index_copy_(2, to_window, held)
                result.index_copy_(2, to_sealed, stored.index_select(2, offsets))
                results.append(result)
        return results[0], results[1]

    def crop(self, layer: LayerState, keep_tokens: int) -> None:
        """Forget all tokens from `keep_tokens` on. Blocks on a read when it cuts a sealed block."""
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
            self._residency.truncate(layer.table, keep_blocks)
            layer.torn = False

    def prefetch(self, request: Request, positions: Positions | None) -> int:
        """Start loads of the blocks that hold these positions, or that are likely to be read, for the layers that
        come next."""
        last = request.order.last
        if last is None:
            return 0
        newest = request.layers.get(last)
        if newest is not None and newest.streamed and newest.table:
            return int(self._look_ahead(request, newest))
        following = (request.layers.get(layer_idx) for layer_idx in request.order.following(last, request.layers))
        return sum(
            self._start_load(
                request, layer, self._likely_blocks(layer) if positions is None else blocks_of(layer, positions)
            )
            for layer in following
            if layer is not None
        )

    def _likely_blocks(self, layer: LayerState) -> list[int]:
        probability = self._residency.access_probability(layer.table.slots) if layer.table else np.empty(0)
        return [int(block) for block in np.flatnonzero(probability >= self._config.prefetch_threshold)]

    def select_rows(self, layer: LayerState, rows: Positions) -> None:
        """Let batch row `i` be what row `rows[i]` was."""
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
        """Give a request a layer with the same tokens: shared blocks, and a window of its own."""
        if layer.table:
            self._residency.retain(layer.table.blocks)
        layer.window.follow()
        twin = layer.fork(request.block_namespace(layer_idx), layer_idx)
        request.layers[layer_idx] = twin
        self._window_sizing.add(twin, request.namespace)

    def forget(self, layer: LayerState) -> None:
        """Give up all that a layer holds."""
        self._window_sizing.remove(layer)
        self._resources.forget(layer)
        if self._resources.residency is not None:
            self._resources.residency.forget(layer.table)
        layer.window.free()

    @property
    def _residency(self) -> ResidencyTable:
        assert self._resources.residency is not None, "there are sealed blocks, so the tiers are open"
        return self._resources.residency

    @property
    def _prefetcher(self) -> Prefetcher:
        assert self._resources.prefetcher is not None, "a pipeline is open, so the prefetch is"
        return self._resources.prefetcher

    def _look_ahead(self, request: Request, layer: LayerState) -> bool:
        device = layer.window.device
        return self._resources.reader_pool(device).try_own(
            request,
            lambda lease: self._resources.block_reader(device, lease).look_ahead(
                layer, lambda after: self._streamed_after(request, after)
            ),
        )

    def _streamed_after(self, request: Request, layer: LayerState) -> Iterator[LayerState]:
        """Return the layers after one that stream through the same buffers."""
        for layer_idx in request.order.following(layer.layer_idx, request.layers):
            following = request.layers.get(layer_idx)
            if following is not None and following.streamed and following.window.device == layer.window.device:
                yield following

    def _pipeline(self, layer: LayerState) -> DevicePipeline:
        return self._resources.pipeline(layer.window.device)

    def _buffer_tokens(self, request: Request, tokens: int) -> int:
        """Room that a layer's buffer should have: some for the tokens to come, all if their number is known."""
        block = self._config.block_tokens
        return -(-max(tokens + block, request.expected_tokens) // block) * block

    def _prefetch_following(self, request: Request, layer: LayerState, with_itself: bool = False) -> None:
        """Start loads for the layers after this one while there are buffers. The layer itself comes last in the
        cycle, and only once its update is complete."""
        for layer_idx in request.order.following(layer.layer_idx, request.layers):
            following = request.layers.get(layer_idx)
            if following is None or not following.table or (following is layer and not with_itself):
                continue
            if following.streamed or self._prefetcher.is_loading(following):
                continue
            if not self._start_load(request, following, range(len(following.table))):
                return

    def _start_load(self, request: Request, layer: LayerState, block_indices: Sequence[int]) -> bool:
        if not block_indices:
            return False
        tokens = self._buffer_tokens(request, layer.tokens)
        return self._prefetcher.start(layer, self._pipeline(layer), request.namespace, block_indices, tokens)

    def _window_index(self, layer: LayerState, positions: Positions) -> torch.Tensor:
        """Positions outside the sealed blocks as `WindowBuffer.select_tokens` counts them."""
        index = np.where(
            positions < layer.window.sink_held,
            positions - layer.window.sink_held,
            positions - layer.window.sink_held - layer.sealed_tokens,
        )
        return torch.from_numpy(index).to(layer.window.device)


def blocks_of(layer: LayerState, positions: Positions) -> list[int]:
    """The sealed blocks that hold some of these positions, ascending."""
    blocks = (positions - layer.sink_tokens) // layer.block_tokens
    return [int(block) for block in np.unique(blocks[(blocks >= 0) & (blocks < len(layer.table))])]


def as_positions(
    positions: torch.Tensor | Sequence[int] | np.ndarray[Any, Any], tokens: int, what: str = "positions"
) -> Positions:
    """Positions, or what else they are, as a 1-D int64 array.

    Raises:
        ConfigError: they are not 1-D, not integers, or not all in `[0, tokens)`.
    """
    try:
        array = positions.detach().cpu().numpy() if isinstance(positions, torch.Tensor) else np.asarray(positions)
    except (TypeError, ValueError, RuntimeError) as error:  # ragged, or a tensor that numpy does not know
        raise ConfigError(f"{what} must be a 1-D sequence of ints ({error})") from error
    if array.ndim != 1 or (array.size and not np.issubdtype(array.dtype, np.integer)):
        raise ConfigError(f"{what} must be a 1-D sequence of ints, not {array.dtype} of shape {array.shape}")
    if array.size and (array.min() < 0 or array.max() >= tokens):
        raise ConfigError(f"{what} must lie in [0, {tokens}); got {array.min()} to {array.max()}")
    return array.astype(np.int64)
