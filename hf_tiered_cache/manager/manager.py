"""`KVCacheManager`: the tiers behind a handful of calls, with or without transformers."""

from __future__ import annotations

import weakref
from collections.abc import Hashable, Sequence
from concurrent.futures import CancelledError
from contextlib import AbstractContextManager, suppress
from typing import Any

import numpy as np
import torch

from ..attention.online import AttentionRule, OnlineAttention
from ..core.config import TieredCacheConfig, parse_count
from ..core.errors import ConfigError
from ..core.geometry import Geometry
from ..core.locks import TimedLock
from ..core.metrics import CacheStats
from ..sequence.layer_state import LayerState, check_layer_id
from ..sequence.pressure import MemoryProbe, probe_memory
from ..sequence.requests import Request, RequestTable, closed_error, layers_of
from ..sequence.window_sizing import WindowSizing
from ..transfer.devices import make_engine
from .lookahead import Lookahead
from .operations import LayerOperations
from .positions import as_positions
from .report import snapshot
from .resources import EngineFactory, Resources
from .window_adaptation import WindowAdaptation


class KVCacheManager:
    """Stores K and V of requests in tiers: the newest tokens on the accelerator, older blocks in storage.

    A request has layers; a layer has tokens, in order, for a batch of rows. No file or thread is opened before the
    first block leaves a window. Any number of threads may call. Calls on one request wait for each other, calls on
    different requests do not, and all share the tiers and their capacities. Calls block while storage is behind,
    which counts as a stall. An error in the background is raised by the next call that adds tokens, or by `flush`.

    ```python
    with KVCacheManager(TieredCacheConfig(window_tokens=4096)) as manager:
        manager.allocate("a", seq_len=100_000)
        manager.append("a", layer_id, key, value)            # [B, H, T, D]
        key, value = manager.fetch("a", layer_id, torch.tensor([3, 70_000]))
    ```

    Args:
        cache_config: settings as one object; the defaults when `None`.
        memory_probe: returns the memory of a device, for automatic windows; see `probe_memory`.
        engine_factory: makes the copy engine of a device.
        options: single settings, which override `cache_config`; see `TieredCacheConfig`.

    Raises:
        ConfigError: a setting makes no sense, or a path is missing or not writable.
    """

    def __init__(
        self,
        cache_config: TieredCacheConfig | None = None,
        *,
        memory_probe: MemoryProbe = probe_memory,
        engine_factory: EngineFactory = make_engine,
        **options: Any,
    ) -> None:
        self.config = TieredCacheConfig.from_options(cache_config, options)
        self._resources = Resources(self.config, engine_factory)
        self._request_table = RequestTable(self._resources.metrics)
        self._window_sizing = WindowSizing(self.config, memory_probe, self._resources.metrics)
        self._windows = WindowAdaptation(self._resources, self._request_table, self._window_sizing)
        self._lookahead = Lookahead(self._resources)
        self._operations = LayerOperations(self._resources, self._window_sizing, self._windows, self._lookahead)
        self._closing = TimedLock(self._resources.metrics)
        self._finalizer = weakref.finalize(self, self._resources.close_elsewhere)
        self._finalizer.atexit = False

    def __enter__(self) -> KVCacheManager:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def closed(self) -> bool:
        """True once `close()` was called."""
        return self._request_table.closed or self._resources.closed

    def close(self) -> None:
        """End threads, drop all requests, remove what was written. Blocks until calls of other threads have ended;
        later calls raise `CacheClosedError`. May be called twice."""
        with self._closing:
            for request in self._request_table.close():
                self._drop(request)
            self._finalizer.detach()
            self._resources.close()

    # -- requests ---------------------------------------------------------------------------------------------

    def allocate(self, request_id: Hashable, seq_len: int = 0) -> None:
        """Register a request.

        Args:
            request_id: a new name.
            seq_len: expected length in tokens; buffers are allocated for it when they are first needed.

        Raises:
            ConfigError: the name is taken, or `seq_len` is negative.
        """
        self._check()
        self._request_table.register(self._request_table.create(request_id, parse_count(seq_len, "seq_len", 0)))

    def free(self, request_id: Hashable) -> None:
        """Drop a request and delete its blocks, except those that a fork shares.

        Raises:
            ConfigError: there is no such request.
        """
        self._check()
        self._drop(self._request_table.remove(request_id))

    def abandon(self, request_id: Hashable) -> None:
        """Free a request at the next call. For the garbage collector: takes no lock and does not block."""
        self._request_table.abandon(request_id)

    def fork(self, request_id: Hashable, new_request_id: Hashable) -> None:
        """Register a second request with the same tokens. Sealed blocks are shared, windows are copied.

        Raises:
            ConfigError: there is no such request, or the new name is taken.
        """
        with self._using(request_id) as source:
            twin = self._request_table.create(new_request_id, source.expected_tokens)
            try:
                for layer_idx, layer in source.layers.items():
                    self._operations.fork(layer, twin, layer_idx)
                self._request_table.register(twin)
            except BaseException:
                self._drop(twin)
                raise

    def fork_layer(self, request_id: Hashable, layer_id: int, new_layer_id: int) -> None:
        """Make a second layer of a request with the tokens of the first; blocks are shared. Without effect if the
        first layer does not exist.

        Raises:
            ConfigError: there is no such request, or the new layer exists.
        """
        with self._using(request_id) as request:
            if new_layer_id in request.layers:
                raise ConfigError(f"layer {new_layer_id} of {request_id!r} exists: free_layer() it first")
            if layer_id in request.layers:
                self._operations.fork(request.layers[layer_id], request, new_layer_id)

    def free_layer(self, request_id: Hashable, layer_id: int) -> None:
        """Drop all tokens of one layer; without effect if it holds none."""
        with self._using(request_id) as request:
            layer = request.layers.pop(layer_id, None)
            if layer is not None:
                self._operations.forget(layer)

    def batch_size(self, request_id: Hashable, layer_id: int) -> int | None:
        """Return the batch size of a layer; `None` before its first `append`."""
        layer = self._request_table.find(request_id).layers.get(layer_id)
        return None if layer is None else layer.geometry.batch

    def tokens(self, request_id: Hashable, layer_id: int) -> int:
        """Return the tokens of a layer; 0 before its first `append`. Does not wait for running calls."""
        layer = self._request_table.find(request_id).layers.get(layer_id)
        return 0 if layer is None else layer.count_tokens()

    def check_intact(self, request_id: Hashable, layer_id: int) -> None:
        """Raise `TieredCacheError` if an interrupt left a layer inconsistent, so that only `free` helps."""
        layer = self._request_table.find(request_id).layers.get(layer_id)
        if layer is not None:
            layer.check_intact()

    def overflows(self, request_id: Hashable, layer_id: int, new_tokens: int) -> bool:
        """Return true if a layer has sealed blocks, or will have when this many tokens are added."""
        layer = self._request_table.find(request_id).layers.get(layer_id)
        if layer is None:
            return new_tokens > self.config.sink_tokens + self._window_sizing.tokens + self.config.block_tokens
        return bool(layer.table) or not layer.window.fits(new_tokens)

    # -- data -------------------------------------------------------------------------------------------------

    def append(self, request_id: Hashable, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> None:
        """Add tokens to a layer. Blocks that leave its window are sealed and written in the background.

        Args:
            request_id, layer_id: which layer.
            key: `[B, Hk, T, Dk]`.
            value: `[B, Hv, T, Dv]`, same batch, tokens, dtype and device.

        Raises:
            ConfigError: the tensors do not fit each other or the layer; nothing was added.
            TierError: storage failed. The tokens added so far stay.
        """
        with self._using(request_id, adds_tokens=True) as request:
            self._operations.append(self._layer(request, layer_id, key, value), key, value)

    def update(
        self, request_id: Hashable, layer_id: int, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add tokens to a layer and return all of its K and V, as attention needs them.

        Args:
            request_id, layer_id, key, value: as for `append`.

        Returns:
            K `[B, Hk, S, Dk]` and V `[B, Hv, S, Dv]`, views of reused buffers. Do not write to them. They are
            valid until this thread's next call, or another thread's call on this request. Kernels that were
            enqueued on the current stream before that call may still read them.

        Raises:
            ConfigError: as for `append`.
            TierError: as for `append`, or a block could not be read.
        """
        with self._using(request_id, adds_tokens=True) as request:
            return self._operations.gather(request, self._layer(request, layer_id, key, value), key, value)

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

        K and V are read a few blocks at a time through buffers of fixed size, so accelerator memory does not
        depend on the length of the sequence. The result is exact; see `OnlineAttention`. Blocks while storage is
        behind.

        Args:
            request_id, layer_id, key, value: as for `append`.
            query: `[B, Hq, T, Dk]`, the queries of the same tokens; `Hq` is a multiple of the heads of K and V.
            rule: scale, mask, softcap and sinks; the defaults when `None`.

        Returns:
            `[B, T, Hq, Dv]` in query's dtype, or the rule's.

        Raises:
            ConfigError: the tensors do not fit each other or the layer; nothing was added.
            TierReadError: a block could not be read; nothing was added.
            TierError: storage failed while older tokens left the window; the tokens added so far stay.
        """
        with self._using(request_id, adds_tokens=True) as request:
            Geometry.of(key, value)
            check_layer_id(layer_id)
            rule = AttentionRule.of(rule)
            held = request.layers.get(layer_id)
            rule.check_fits(query, key, value, (held.tokens if held else 0) + key.shape[2])
            layer = self._layer(request, layer_id, key, value)
            with (
                self._resources.reader_pool(key.device).lease(request) as lease,
                OnlineAttention(query, key.shape[1], value.shape[3], rule, lease.account) as attention,
            ):
                self._operations.attend(request, layer, key, value, attention, lease)
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
        with self._using(request_id) as request:
            layer = request.existing_layer(layer_id)
            wanted = as_positions(positions, layer.tokens)
            self._windows.begin(request, layer_id)
            return self._operations.fetch(layer, wanted)

    def prefetch(
        self, request_id: Hashable, predicted_positions: torch.Tensor | Sequence[int] | None = None
    ) -> int:
        """Start to load blocks for the layers that come next, for as many layers as there are free buffers (at
        least `prefetch_layers` per device). `update` and `fetch` use these loads. Does not block.

        Args:
            request_id: which request.
            predicted_positions: 1-D token indices, whose blocks are loaded; those in sink or window need no load.
                `None`: blocks whose past reads give a probability of at least `prefetch_threshold`.

        Returns:
            The number of layers for which a load was started.
        """
        with self._using(request_id) as request:
            longest = max((layer.tokens for layer in request.layers.values()), default=0)
            positions = None if predicted_positions is None else as_positions(predicted_positions, longest)
            return self._lookahead.prefetch(request, positions)

    def evict(self, request_id: Hashable) -> int:
        """Take a request off the accelerator: seal every full block of its windows. Blocks on storage. Sink tokens
        and the newest tokens that fill no block stay, and the request can be used as before.

        Returns:
            The number of blocks that were sealed.

        Raises:
            TierError: storage failed; blocks that were not sealed are still in the window.
        """
        with self._using(request_id, adds_tokens=True) as request:
            return sum(self._windows.evict(layer) for layer in request.layers.values())

    def flush(self) -> None:
        """Wait until every sealed block is in a tier. Blocks.

        Raises:
            TierError: one could not be written.
        """
        self._check()
        try:
            self._resources.flush()
        except (RuntimeError, CancelledError) as error:
            if self.closed:
                raise closed_error() from error
            raise

    # -- changes of tokens --------------------------------------------------------------------------------

    def crop(self, request_id: Hashable, layer_id: int, tokens_to_remove: int) -> None:
        """Remove the newest tokens of a layer. A crop into sealed blocks drops them, and puts the remaining tokens
        of the last one back into the window (blocks on its read).

        Raises:
            ConfigError: `tokens_to_remove` is negative.
            TierReadError: the block on the border could not be read; nothing was removed.
        """
        with self._using(request_id) as request:
            layer = request.existing_layer(layer_id)
            tokens_to_remove = parse_count(tokens_to_remove, "tokens_to_remove", 0)
            self._operations.crop(layer, max(0, layer.tokens - tokens_to_remove))

    def select_rows(self, request_id: Hashable, layer_id: int, rows: Sequence[int] | np.ndarray[Any, Any]) -> None:
        """Replace batch row `i` of a layer by what row `rows[i]` was: reorder, repeat or drop rows. Copies the
        window only; sealed blocks get another row map."""
        with self._using(request_id) as request:
            layer = request.existing_layer(layer_id)
            index = as_positions(rows, layer.geometry.batch, f"rows of a batch of {layer.geometry.batch}")
            self._operations.select_rows(layer, index)

    # -- numbers ------------------------------------------------------------------------------------------------

    def stats(self) -> CacheStats:
        """Return a snapshot of the tiers, their content and their traffic."""
        return snapshot(self._resources, self._window_sizing, list(layers_of(self._request_table.all())))

    # -- inside -----------------------------------------------------------------------------------------------

    def _check(self, adds_tokens: bool = False) -> None:
        """Raise after `close()`; before tokens are added, raise an earlier error of the background."""
        if self.closed:
            raise closed_error()
        self._resources.check_process()
        if adds_tokens and self._resources.write_back is not None:
            self._resources.write_back.raise_failure()
        for request_id in self._request_table.abandoned():
            with suppress(ConfigError):  # it was freed as well
                self._drop(self._request_table.remove(request_id))

    def _using(self, request_id: Hashable, adds_tokens: bool = False) -> AbstractContextManager[Request]:
        """Provide a request with its lock held."""
        self._check(adds_tokens)
        return self._request_table.using(request_id)

    def _drop(self, request: Request) -> None:
        with request.lock:
            request.freed = True
            for layer in request.layers.values():
                self._operations.forget(layer)
            request.layers.clear()
        self._request_table.gone(request)

    def _layer(self, request: Request, layer_id: int, key: torch.Tensor, value: torch.Tensor) -> LayerState:
        """Return the layer to which these tensors can be appended; made on first use."""
        geometry = Geometry.of(key, value)
        check_layer_id(layer_id)
        layer = request.layers.get(layer_id)
        if layer is None:
            layer = self._operations.new_layer(request, layer_id, geometry, key.device)
        else:
            layer.check_intact()
            layer.check_fits(geometry, key.device)
            layer.window.follow()
        self._windows.begin(request, layer_id)
        return layer
