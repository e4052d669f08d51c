"""The requests of a manager, with their layers and locks."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Hashable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..core.errors import CacheClosedError, ConfigError
from ..core.locks import ThreadReference, TimedLock, this_thread
from ..core.metrics import Metrics
from .layer_state import LayerState, check_layer_id


class LayerOrder:
    """The observed, cyclic order in which a model updates its layers. Layers may be skipped. Until a layer's
    successor was observed, it is assumed to be the next higher layer."""

    def __init__(self) -> None:
        self._successor: dict[int, int] = {}
        self._in_this_pass: set[int] = set()
        self.last: int | None = None

    def observe(self, layer_idx: int) -> bool:
        """Note that a layer is being updated. Return true if a forward pass begins with it."""
        if self.last is not None:
            self._successor[self.last] = layer_idx
        self.last = layer_idx
        begins = not self._in_this_pass or layer_idx in self._in_this_pass
        if begins:
            self._in_this_pass.clear()
        self._in_this_pass.add(layer_idx)
        return begins

    def following(self, layer_idx: int, known: Iterable[int]) -> Iterator[int]:
        """Yield the layers that come next, the nearest first, up to `layer_idx` itself."""
        ascending = sorted({*known, layer_idx})
        seen: set[int] = set()
        current = layer_idx
        while current not in seen:
            seen.add(current)
            guess = next((other for other in ascending if other > current), ascending[0])
            current = self._successor.get(current, guess)
            if current not in seen:
                yield current
        if current == layer_idx:
            yield layer_idx


@dataclass(eq=False)
class Request:
    """One sequence, or a batch of sequences of equal length. `lock` guards all but the first three fields.

    Args:
        request_id: the user's name for it.
        namespace: prefix of its blocks' names in the tiers.
        expected_tokens: length for which buffers are allocated.
        lock: held by the thread that works on the request.
    """

    request_id: Hashable
    namespace: str
    expected_tokens: int
    lock: TimedLock
    freed: bool = False
    layers: dict[int, LayerState] = field(default_factory=dict)
    layers_made: Counter[int] = field(default_factory=Counter)
    order: LayerOrder = field(default_factory=LayerOrder)

    def existing_layer(self, layer_idx: int) -> LayerState:
        """Return a layer that holds tokens, for use by the calling thread.

        Raises:
            ConfigError: there is no such layer.
            TieredCacheError: an interrupt has torn it.
        """
        check_layer_id(layer_idx)
        if layer_idx not in self.layers:
            raise ConfigError(f"layer {layer_idx} of {self.request_id!r} holds nothing yet: append() to it first")
        layer = self.layers[layer_idx]
        layer.check_intact()
        layer.window.follow()
        return layer

    def block_namespace(self, layer_idx: int) -> str:
        """Return a new namespace for the blocks of a layer. After a reset, the names of dropped blocks may still
        be in use."""
        made = self.layers_made[layer_idx]
        self.layers_made[layer_idx] += 1
        return self.namespace if made == 0 else f"{self.namespace}.{made}"


class RequestTable:
    """All requests by name. Any thread may call.

    Args:
        metrics: counts waits for locks.
    """

    def __init__(self, metrics: Metrics) -> None:
        self.closed = False
        self._metrics = metrics
        self._lock = TimedLock(metrics)
        self._requests: dict[Hashable, Request] = {}
        self._namespaces = 0
        self._abandoned: deque[Hashable] = deque()
        self._last_used: dict[ThreadReference, Request] = {}
        self._leaving: set[Request] = set()

    def create(self, request_id: Hashable, expected_tokens: int) -> Request:
        """Make a request. It cannot be found before it is registered.

        Raises:
            ConfigError: the name is taken.
        """
        with self._lock:
            self._check_free(request_id)
            self._namespaces += 1
            namespace = f"request{self._namespaces - 1:04d}"
        return Request(request_id, namespace, expected_tokens, TimedLock(self._metrics))

    def register(self, request: Request) -> None:
        """Make a request findable by its name.

        Raises:
            ConfigError: the name was taken meanwhile.
        """
        with self._lock:
            self._check_free(request.request_id)
            self._requests[request.request_id] = request

    def find(self, request_id: Hashable) -> Request:
        """Return the request of this name.

        Raises:
            ConfigError: there is none.
            CacheClosedError: the manager is closed.
        """
        with self._lock:
            if self.closed:
                raise closed_error()
            if request_id not in self._requests:
                raise _no_request(request_id)
            return self._requests[request_id]

    @contextmanager
    def using(self, request_id: Hashable) -> Iterator[Request]:
        """Provide the request of this name, with its lock held. Blocks while another thread works on it.

        Raises:
            ConfigError: there is none, or it was freed while this waited.
            CacheClosedError: the manager is closed, or was closed while this waited.
        """
        request = self.find(request_id)
        with request.lock:
            if self.closed:
                raise closed_error()
            if request.freed:
                raise _no_request(request_id)
            self._last_used[this_thread().reference] = request
            yield request

    def is_idle(self, request: Request) -> bool:
        """Return true if no other thread can still be reading views of this request: each has called for another
        request since, or has ended. Needs the request's lock."""
        mine = this_thread().reference
        for thread, last in list(self._last_used.items()):
            if thread() is None:
                self._last_used.pop(thread, None)
            elif last is request and thread is not mine:
                return False
        return True

    def remove(self, request_id: Hashable) -> Request:
        """Take a request out of the table; threads that wait for its lock get an error. Call `gone` afterwards.

        Raises:
            ConfigError: there is none.
        """
        with self._lock:
            if request_id not in self._requests:
                raise _no_request(request_id)
            request = self._requests.pop(request_id)
            self._leaving.add(request)
            return request

    def gone(self, request: Request) -> None:
        """Note that a removed request has released everything."""
        with self._lock:
            self._leaving.discard(request)
            for thread, last in list(self._last_used.items()):
                if last is request:
                    self._last_used.pop(thread, None)

    def close(self) -> list[Request]:
        """Empty the table for good. Returns the requests that were registered or are being removed."""
        with self._lock:
            self.closed = True
            requests = [*self._requests.values(), *self._leaving]
            self._requests.clear()
            return requests

    def abandon(self, request_id: Hashable) -> None:
        """Note that a request's owner is gone. Takes no lock and does not block."""
        self._abandoned.append(request_id)

    def abandoned(self) -> Iterator[Hashable]:
        """Take the names noted by `abandon`."""
        while self._abandoned:
            try:
                yield self._abandoned.popleft()
            except IndexError:  # another thread took it
                return

    def all(self) -> list[Request]:
        """Return all registered requests."""
        with self._lock:
            return list(self._requests.values())

    def _check_free(self, request_id: Hashable) -> None:
        if self.closed:
            raise closed_error()
        if request_id in self._requests:
            raise ConfigError(f"request {request_id!r} exists: free() it first, or choose another name")


def closed_error() -> CacheClosedError:
    """Return the error of a call to a closed manager."""
    return CacheClosedError("the cache is closed: make a new one")


def _no_request(request_id: Hashable) -> ConfigError:
    return ConfigError(f"there is no request {request_id!r}: allocate() it first")


def layers_of(requests: Iterable[Request]) -> Iterator[LayerState]:
    """Yield all layers of all requests."""
    for request in requests:
        yield from list(request.layers.values())
