"""`KVCacheManager`: the tiers behind a handful of calls, with or without transformers."""

from __future__ import annotations

import os
import threading
import weakref
from collections import deque
from collections.abc import Hashable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

from .config import TieredCacheConfig
from .errors import CacheClosedError, ConfigError
from .layers import LayerState
from .metrics import CacheStats
from .online_attention import AttentionRule, OnlineAttention
from .paths import DataPaths, Request, as_positions, layers_of
from .report import snapshot
from .resources import EngineFactory, Resources
from .transfer.engine import make_engine
from .window import Geometry


class KVCacheManager:
    """Holds K and V of requests in tiers: the newest tokens on the accelerator, older blocks in storage.

    A request has layers; a layer has tokens, in order, for a batch of rows. Nothing is opened before the first
    block leaves a window. Calls are serialised by one lock; they block while storage is behind (counted as
    stall). What went wrong in the background is raised by the next call that adds tokens, or by `flush`.

    ```python
    with KVCacheManager(TieredCacheConfig(window_tokens=4096)) as manager:
        manager.allocate("a", seq_len=100_000)
        manager.append("a", layer_id, key, value)            # [B, H, T, D]
        key, value = manager.fetch("a", layer_id, torch.tensor([3, 70_000]))
    ```

    Args:
        cache_config: settings; the defaults when `None`.
        engine_factory: makes the copy engine of a device.

    Raises:
        ConfigError: a setting makes no sense, or a path is missing or not writable.
    """

    def __init__(
        self, cache_config: TieredCacheConfig | None = None, *, engine_factory: EngineFactory = make_engine
    ) -> None:
        self.config = cache_config or TieredCacheConfig()
        self._resources = Resources(self.config, engine_factory)
        self._paths = DataPaths(self._resources)
        self._lock = threading.RLock()
        self._requests: dict[Hashable, Request] = {}
        self._namespaces = 0
        self._depth = 0
        # Requests whose owners were garbage-collected; freed by the next call. See `abandon`.
        self._abandoned: deque[Hashable] = deque()
        self._finalizer = weakref.finalize(self, self._resources.close_elsewhere)
        self._finalizer.atexit = False

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """Whether `close()` was called."""
        return self._resources.closed

    def close(self) -> None:
        """End threads, drop all requests, remove what was written. Blocks. May be called twice."""
        with self._lock:
            if not self.closed:
                for layer in layers_of(list(self._requests.values())):
                    self._paths.forget(layer)
                self._requests.clear()
                self._finalizer.detach()
                self._resources.close()

    # -- requests ---------------------------------------------------------------------------------------------

    def allocate(self, request_id: Hashable, seq_len: int = 0) -> None:
        """Register a request.

        Args:
            request_id: a new name.
            seq_len: tokens it is expected to reach; buffers are sized for it as soon as they are needed.

        Raises:
            ConfigError: the name is taken, or `seq_len` is negative.
        """
        with self._calling():
            if request_id in self._requests:
                raise ConfigError(f"request {request_id!r} exists: free() it first, or choose another name")
            if seq_len < 0:
                raise ConfigError(f"seq_len={seq_len} is negative")
            namespace = f"request{self._namespaces:04d}"
            self._namespaces += 1
            self._requests[request_id] = Request(request_id, namespace, seq_len)

    def free(self, request_id: Hashable) -> None:
        """Forget a request and delete its blocks, except those that a fork still needs.

        Raises:
            ConfigError: there is no such request.
        """
        with self._calling():
            self._free(request_id)

    def abandon(self, request_id: Hashable) -> None:
        """Free a request at the next call. For the garbage collector: takes no lock and does not block."""
        self._abandoned.append(request_id)

    def fork(self, request_id: Hashable, new_request_id: Hashable) -> None:
        """Register a second request with the same tokens. Sealed blocks are shared, windows are copied.

        Raises:
            ConfigError: there is no such request, or the new name is taken.
        """
        with self._calling():
            source = self._request(request_id)
            self.allocate(new_request_id, source.expected_tokens)
            twin = self._requests[new_request_id]
            for layer_idx, layer in source.layers.items():
                self._paths.fork(layer, twin, layer_idx)

    def fork_layer(self, request_id: Hashable, layer_id: int, new_layer_id: int) -> None:
        """Make a second layer of a request with the tokens of the first, blocks shared. None when it has none.

        Raises:
            ConfigError: there is no such request, or the new layer exists.
        """
        with self._calling():
            request = self._request(request_id)
            if new_layer_id in request.layers:
                raise ConfigError(f"layer {new_layer_id} of {request_id!r} exists: free_layer() it first")
            if layer_id in request.layers:
                self._paths.fork(request.layers[layer_id], request, new_layer_id)

    def free_layer(self, request_id: Hashable, layer_id: int) -> None:
        """Forget the tokens of one layer; without effect when it holds none."""
        with self._calling():
            layer = self._request(request_id).layers.pop(layer_id, None)
            if layer is not None:
                self._paths.forget(layer)

    def batch_size(self, request_id: Hashable, layer_id: int) -> int | None:
        """Rows of a layer's batch; `None` before its first `append`."""
        layer = self._request(request_id).layers.get(layer_id)
        return None if layer is None else layer.geometry.batch

    def tokens(self, request_id: Hashable, layer_id: int) -> int:
        """Tokens that a layer holds; 0 before its first `append`."""
        layer = self._request(request_id).layers.get(layer_id)
        return 0 if layer is None else layer.tokens

    def overflows(self, request_id: Hashable, layer_id: int, new_tokens: int) -> bool:
        """Whether blocks of a layer have left its window, or will when so many tokens are added."""
        layer = self._request(request_id).layers.get(layer_id)
        if layer is None:
            return new_tokens > self.config.held_tokens
        return bool(layer.table) or not layer.window.fits(new_tokens)

    # -- data -------------------------------------------------------------------------------------------------

    def append(self, request_id: Hashable, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add tokens to a layer. What leaves its window is sealed and written in the background.

        Args:
            request_id, layer_id: which layer.
            key: `[B, Hk, T, Dk]`.
            value: `[B, Hv, T, Dv]`, same batch, tokens, dtype and device.

        Raises:
            ConfigError: the tensors do not fit each other or what the layer holds; nothing was added.
            TierError: storage failed. The tokens that were sealed or are in the window so far stay.
        """
        with self._calling(adds_tokens=True):
            self._paths.append(self._layer(request_id, layer_id, key, value), key, value)

    def update(
        self, request_id: Hashable, layer_id: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens to a layer and return all of its K and V, as attention needs them.

        Args:
            request_id, layer_id, key, value: as for `append`.

        Returns:
            K `[B, Hk, S, Dk]` and V `[B, Hv, S, Dv]`, views of reused buffers: valid until the next call, and
            not to be written to. What was enqueued on the current stream before that call may still read them.

        Raises:
            ConfigError: as for `append`.
            TierError: as for `append`, or a block could not be read.
        """
        with self._calling(adds_tokens=True):
            layer = self._layer(request_id, layer_id, key, value)
            return self._paths.gather(self._requests[request_id], layer, key, value)

    def attend(
        self,
        request_id: Hashable,
        layer_id: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        rule: AttentionRule | None = None,
    ) -> torch.Tensor:
        """Add tokens to a layer and return their causal attention over all of its tokens.

        K and V are taken a few blocks at a time through fixed buffers: accelerator memory does not depend on the
        length of the sequence, and the result is exact; see `OnlineAttention`. Blocks while storage is behind.

        Args:
            request_id, layer_id, key, value: as for `append`.
            query: `[B, Hq, T, Dk]`, the queries of the same tokens; `Hq` is a multiple of the heads of K and V.
            rule: scale, mask and the like.

        Returns:
            `[B, T, Hq, Dv]` in query's dtype.

        Raises:
            ConfigError: the tensors do not fit each other or what the layer holds; nothing was added.
            TierReadError: a block could not be read; nothing was added.
            TierError: storage failed while older tokens left the window; the tokens added so far stay.
        """
        with self._calling(adds_tokens=True):
            Geometry.of(key, value)
            rule = rule or AttentionRule()
            rule.check_fits(query, key, value, self.tokens(request_id, layer_id) + key.shape[2])
            layer = self._layer(request_id, layer_id, key, value)
            account = self._resources.account(key.device)
            with OnlineAttention(query, key.shape[1], value.shape[3], rule, account) as attention:
                self._paths.attend(self._requests[request_id], layer, key, value, attention)
                return attention.finish()

    def fetch(
        self, request_id: Hashable, layer_id: int, positions: torch.Tensor | Sequence[int]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return K and V of some tokens.

        Args:
            request_id, layer_id: which layer.
            positions: 1-D, token indices in any order, repeats allowed.

        Returns:
            K `[B, Hk, P, Dk]` and V `[B, Hv, P, Dv]` in the order of `positions`, new tensors on the layer's
            device.

        Raises:
            ConfigError: no such layer, or a position outside `[0, tokens)`.
            TierReadError: a block could not be read.
        """
        with self._calling():
            layer = self._existing_layer(request_id, layer_id)
            wanted = as_positions(positions, layer.tokens)
            self._requests[request_id].order.observe(layer_id)
            return self._paths.fetch(layer, wanted)

    def prefetch(self, request_id: Hashable, predicted_positions: torch.Tensor | Sequence[int]) -> int:
        """Start to load the blocks that hold these positions, for the layers that come next. Does not block.

        The layers are those that follow the last one used, in the order learnt so far, as many as there are
        free buffers (`prefetch_layers + 1` per device). `update` and `fetch` then find the blocks on their way.

        Args:
            request_id: which request.
            predicted_positions: 1-D, token indices; those in sink or window need no load.

        Returns:
            For how many layers a load was started.
        """
        with self._calling():
            request = self._request(request_id)
            longest = max((layer.tokens for layer in request.layers.values()), default=0)
            return self._paths.prefetch(request, as_positions(predicted_positions, longest))

    def evict(self, request_id: Hashable) -> int:
        """Let a request leave the accelerator: seal every full block of its windows. Blocks on storage.

        Sink tokens and the newest tokens that fill no block stay. The request can be used as before.

        Returns:
            How many blocks were sealed.

        Raises:
            TierError: storage failed; what was not sealed is still in the window.
        """
        with self._calling(adds_tokens=True):
            sealed = 0
            for layer in self._request(request_id).layers.values():
                while layer.window.held_tokens >= layer.block_tokens:
                    self._paths.seal(layer)
                    sealed += 1
                layer.window.shrink()
            return sealed

    def flush(self) -> None:
        """Wait until every sealed block is in a tier. Blocks.

        Raises:
            TierError: one could not be written.
        """
        with self._calling():
            self._resources.flush()

    # -- changes of what is held --------------------------------------------------------------------------------

    def crop(self, request_id: Hashable, layer_id: int, tokens_to_remove: int) -> None:
        """Remove the newest tokens of a layer. A crop into sealed blocks drops them whole and takes what
        remains of the one on the border back into the window (blocks on its read).

        Raises:
            ConfigError: `tokens_to_remove` is negative.
            TierReadError: the block on the border could not be read; nothing was removed.
        """
        with self._calling():
            layer = self._existing_layer(request_id, layer_id)
            if tokens_to_remove < 0:
                raise ConfigError(f"tokens_to_remove={tokens_to_remove} is negative")
            self._paths.crop(layer, max(0, layer.tokens - tokens_to_remove))

    def select_rows(self, request_id: Hashable, layer_id: int, rows: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Let batch row `i` of a layer be what row `rows[i]` was: reorders, repeats or drops rows. Moves the
        window's data only; for sealed blocks a row map changes."""
        with self._calling():
            layer = self._existing_layer(request_id, layer_id)
            index = np.asarray(rows, dtype=np.int64)
            if index.size == 0 or index.min() < 0 or index.max() >= layer.geometry.batch:
                raise ConfigError(f"rows {index.tolist()} are not all within a batch of {layer.geometry.batch}")
            self._paths.select_rows(layer, index)

    # -- numbers ------------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """A snapshot of what the tiers hold and have done."""
        with self._lock:
            return snapshot(self._resources, list(layers_of(list(self._requests.values()))))

    # -- inside -----------------------------------------------------------------------------------------------

    @contextmanager
    def _calling(self, adds_tokens: bool = False) -> Iterator[None]:
        """One call at a time, none after `close()`, and no new tokens before an earlier failure was heard."""
        with self._lock:
            if self.closed:
                raise CacheClosedError("the cache is closed: make a new one")
            if self._resources.owner_pid != os.getpid():
                raise CacheClosedError(
                    "the cache belongs to the parent process, and so do its threads: make a new one"
                )
            if adds_tokens and self._resources.write_back is not None:
                self._resources.write_back.raise_failure()
            while self._abandoned and self._depth == 0:
                self._free(self._abandoned.popleft())
            self._depth += 1
            try:
                yield
            finally:
                self._depth -= 1

    def _free(self, request_id: Hashable) -> None:
        for layer in self._request(request_id).layers.values():
            self._paths.forget(layer)
        del self._requests[request_id]

    def _request(self, request_id: Hashable) -> Request:
        if request_id not in self._requests:
            raise ConfigError(f"there is no request {request_id!r}: allocate() it first")
        return self._requests[request_id]

    def _existing_layer(self, request_id: Hashable, layer_id: int) -> LayerState:
        request = self._request(request_id)
        if layer_id not in request.layers:
            raise ConfigError(f"layer {layer_id} of {request_id!r} holds nothing yet: append() to it first")
        return request.layers[layer_id]

    def _layer(self, request_id: Hashable, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> LayerState:
        """The layer to which these tensors can be appended, made if it is the first time."""
        request = self._request(request_id)
        geometry = Geometry.of(key, value)
        layer = request.layers.get(layer_id)
        if layer is None:
            engine, namespace = self._resources.engine(key.device), request.block_namespace(layer_id)
            layer = LayerState.empty(layer_id, namespace, engine, geometry, self.config)
            request.layers[layer_id] = layer
        else:
            layer.check_fits(geometry, key.device)
        request.order.observe(layer_id)
        return layer
