"""Precedence among requests whose loads compete for the buffers of gathered attention."""

from __future__ import annotations

from collections.abc import Iterable

from ..sequence.layer_state import LayerState

# A request is idle when this many layers of others were updated since one of its own was.
_IDLE_UPDATES = 8
_REMEMBERED_REQUESTS = 256


class Precedence:
    """Decides which load gives up its buffer. Not thread-safe: the prefetcher's lock guards it."""

    def __init__(self) -> None:
        self._updates = 0
        self._last_update: dict[str, int] = {}

    def note_update(self, owner: str) -> None:
        """Note that a layer of a request is being updated."""
        self._updates += 1
        self._last_update.pop(owner, None)
        self._last_update[owner] = self._updates
        if len(self._last_update) > _REMEMBERED_REQUESTS:
            del self._last_update[next(iter(self._last_update))]  # least recently updated

    def rival(
        self, loads: Iterable[tuple[str, LayerState]], owner: str, at_any_cost: bool = False
    ) -> LayerState | None:
        """Return the layer whose load gives way to a load of `owner`, or `None`.

        This is the newest load of an idle request; else the newest of the request with the most loads, if it has
        at least two more than `owner`.

        Args:
            loads: request and layer of each load ahead of time, oldest first.
            owner: the request that needs a buffer.
            at_any_cost: attention waits for this load. The request with the most loads gives one up in any case,
                or `owner` itself if there is no other.
        """
        ahead: dict[str, list[LayerState]] = {owner: []}
        for other, layer in loads:
            ahead.setdefault(other, []).append(layer)
        own = ahead.pop(owner)
        for other, layers in ahead.items():
            if self._updates - self._last_update.get(other, 0) > _IDLE_UPDATES:
                return layers[-1]
        most = max(ahead.values(), key=len, default=[])
        if len(most) > len(own) + 1 or (at_any_cost and most):
            return most[-1]
        return own[-1] if at_any_cost and own else None
