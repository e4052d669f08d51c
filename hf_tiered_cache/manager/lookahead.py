"""Decides which layers' blocks are loaded next, and starts these loads."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from ..core.config import TieredCacheConfig
from ..sequence.layer_state import LayerState
from ..sequence.requests import Request
from .positions import Positions, blocks_of
from .resources import Resources


class Lookahead:
    """Starts loads for the layers that come next in the order of updates.

    Any number of threads may call, each with the lock of the request.

    Args:
        resources: the loads of gathered attention, and the readers of streaming attention.
    """

    def __init__(self, resources: Resources) -> None:
        self._resources = resources
        self._config: TieredCacheConfig = resources.config

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
        if not layer.table:
            return []
        probability = self._resources.open_residency.access_probability(layer.table.slots)
        return [int(block) for block in np.flatnonzero(probability >= self._config.prefetch_threshold)]

    def _look_ahead(self, request: Request, layer: LayerState) -> bool:
        device = layer.window.device
        return self._resources.reader_pool(device).try_own(
            request,
            lambda lease: self._resources.block_reader(device, lease).look_ahead(
                layer, lambda after: self.streamed_after(request, after)
            ),
        )

    def streamed_after(self, request: Request, layer: LayerState) -> Iterator[LayerState]:
        """Yield the layers after one that stream through the same buffers, the nearest first."""
        for layer_idx in request.order.following(layer.layer_idx, request.layers):
            following = request.layers.get(layer_idx)
            if following is not None and following.streamed and following.window.device == layer.window.device:
                yield following

    def buffer_tokens(self, request: Request, tokens: int) -> int:
        """Return the tokens that the buffer of a layer should have room for: for those expected, or for one block
        more than `tokens`."""
        block = self._config.block_tokens
        return -(-max(tokens + block, request.expected_tokens) // block) * block

    def start_following(self, request: Request, layer: LayerState, with_itself: bool = False) -> None:
        """Start gathered loads for the layers after this one, while there are buffers. The layer itself comes
        last in the cycle, and only once its update is complete."""
        for layer_idx in request.order.following(layer.layer_idx, request.layers):
            following = request.layers.get(layer_idx)
            if following is None or not following.table or (following is layer and not with_itself):
                continue
            if following.streamed or self._resources.open_prefetcher.is_loading(following):
                continue
            if not self._start_load(request, following, range(len(following.table))):
                return

    def _start_load(self, request: Request, layer: LayerState, block_indices: Sequence[int]) -> bool:
        if not block_indices:
            return False
        tokens = self.buffer_tokens(request, layer.tokens)
        pipeline = self._resources.pipeline(layer.window.device)
        return self._resources.open_prefetcher.start(layer, pipeline, request.namespace, block_indices, tokens)
