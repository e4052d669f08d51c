"""Keeps windows at their size: seals the tokens that are too many, and takes blocks back when a window grew."""

from __future__ import annotations

import logging

import torch

from ..core.errors import TierError
from ..sequence.layer_state import LayerState
from ..sequence.requests import Request, RequestTable
from ..sequence.window_sizing import WindowSizing
from .resources import Resources

logger = logging.getLogger(__name__)


class WindowAdaptation:
    """Fits the windows of layers to the size that `WindowSizing` decides.

    Any number of threads may call, each with the lock of the layer's request.

    Args:
        resources: seal blocks, and load those that come back.
        request_table: finds idle requests whose windows must shrink too.
        window_sizing: decides the size.
    """

    def __init__(self, resources: Resources, request_table: RequestTable, window_sizing: WindowSizing) -> None:
        self._resources = resources
        self._request_table = request_table
        self._window_sizing = window_sizing

    def begin(self, request: Request, layer_idx: int) -> None:
        """Note that a layer is about to be used. The first layer begins a step, which adapts all windows.

        Raises:
            TierError: windows must shrink, and storage failed; what was not sealed is still in the window.
        """
        if request.order.observe(layer_idx):
            self._resources.step()
            if self._window_sizing.automatic:
                self._window_sizing.step()
                self._shrink_windows(request)

    def adapt(self, layer: LayerState) -> None:
        """Give an automatic window its present size.

        A window that shrank seals its surplus. One that grew takes back the newest sealed block, one block per
        call, so that no step waits long.

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
            self.seal_surplus(layer)
            window.release_surplus()

    def _shrink_windows(self, request: Request) -> None:
        """Shrink windows that are too large: this request's, and those of idle requests."""
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
        last, residency = len(layer.table) - 1, self._resources.open_residency
        residency.touch(layer.table.slots[last:])
        layer.window.make_room_for_block()
        pipeline = self._resources.pipeline(layer.window.device)
        with (
            self._resources.open_prefetcher.apart(layer, pipeline, [last]) as (keys, values),
            layer.changing,
        ):
            layer.torn = True
            layer.window.prepend_block(keys, values)
            residency.truncate(layer.table, last)
            layer.torn = False
        if not layer.table:
            self._resources.forget(layer)

    def seal_surplus(self, layer: LayerState) -> None:
        """Seal the oldest blocks of a window until it has its size.

        Raises:
            TierError: storage failed; the layer holds all of its tokens.
        """
        while layer.window.has_block_to_seal:
            self._seal(layer)

    def evict(self, layer: LayerState) -> int:
        """Seal every full block of a window, and return their number. Blocks that were sealed before an error stay
        sealed."""
        layer.window.follow()
        sealed = 0
        while layer.window.held_tokens >= layer.block_tokens:
            self._seal(layer)
            sealed += 1
        layer.window.shrink()
        layer.growing = False
        return sealed

    def _seal(self, layer: LayerState) -> None:
        self._resources.sealer(layer.window.device).seal_oldest(layer)
