"""`TieredCache`: the tiers as a transformers `Cache`."""

from __future__ import annotations

import copy
import itertools
import logging
import sys
import weakref
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicCache, DynamicLayer

from .config import TieredCacheConfig
from .continuation import GenerationStart, generation_start
from .errors import CacheClosedError, ConfigError, UnsupportedModelError
from .manager import KVCacheManager
from .metrics import CacheStats

logger = logging.getLogger(__name__)

# These accept no cache but their own class.
_OWN_CACHE_MODELS = ("minimax",)

_request_numbers = itertools.count()


class _Binding:
    """What a cache shares with its layers: the manager, and the request in it that is this cache's."""

    def __init__(self, manager: KVCacheManager, users: list[int], source: _Binding | None = None) -> None:
        self.manager = manager
        self.request_id = f"cache-{next(_request_numbers)}"
        self.closed = False
        # One number shared by all caches that deepcopy made of one; the last to close closes the manager.
        self._users = users
        self._users[0] += 1
        if source is None:
            manager.allocate(self.request_id)
        else:
            manager.fork(source.request_id, self.request_id)

    def fork(self) -> _Binding:
        self.check_open()
        return _Binding(self.manager, self._users, source=self)

    def check_open(self) -> None:
        if self.closed or self.manager.closed:
            raise CacheClosedError("this cache is closed: make a new TieredCache")

    def close(self) -> None:
        if self.closed:
            return
        self.closed = True
        self._users[0] -= 1
        if self._users[0] == 0:
            self.manager.close()
        elif not self.manager.closed:
            self.manager.free(self.request_id)


class TieredLayer(DynamicLayer):
    """One full-attention layer whose older tokens live in the tiers.

    Takes the place of a `DynamicLayer`; what `update` returns has the same values, as views of buffers that later
    updates of other layers overwrite.

    Args:
        binding: the cache's manager and request.
        layer_idx: the layer's index in the model.
        keeps_output: the model reads what `update` returned even after other layers were updated (KV sharing);
            such layers return tensors of their own.
    """

    def __init__(self, binding: _Binding, layer_idx: int, keeps_output: bool) -> None:
        self._binding = binding
        self._layer_idx = layer_idx
        self._keeps_output = keeps_output
        self.is_initialized = False

    def __repr__(self) -> str:
        return f"TieredLayer(layer_idx={self._layer_idx})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredLayer:
        raise TypeError("a TieredLayer belongs to its cache: deepcopy the TieredCache")

    def bound_to(self, binding: _Binding) -> TieredLayer:
        """The same layer of another cache, whose request holds the same tokens."""
        twin = TieredLayer(binding, self._layer_idx, self._keeps_output)
        twin.is_initialized = self.is_initialized
        if self.is_initialized:
            twin.device, twin.dtype = self.device, self.dtype
        return twin

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note dtype and device; memory is taken when tokens come."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens and return all K and V of the layer.

        Args:
            key_states: `[B, Hk, T, Dk]`.
            value_states: `[B, Hv, T, Dv]`.

        Returns:
            K `[B, Hk, S, Dk]` and V `[B, Hv, S, Dv]`; read them before the next layers' updates, and do not
            write to them.

        Raises:
            UnsupportedModelError: gradients are being recorded.
            TierError: storage failed.
        """
        self._binding.check_open()
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise UnsupportedModelError(
                "TieredCache serves inference, and gradients are being recorded: "
                "run the model under torch.no_grad() or torch.inference_mode()"
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        keys, values = self._binding.manager.update(
            self._binding.request_id, self._layer_idx, key_states, value_states
        )
        return (keys.clone(), values.clone()) if self._keeps_output else (keys, values)

    def get_seq_length(self) -> int:
        """Tokens in the layer."""
        self._binding.check_open()
        return self._binding.manager.tokens(self._binding.request_id, self._layer_idx)

    @property
    def keys(self) -> torch.Tensor | None:
        """All K `[B, Hk, S, Dk]`, read from the tiers into a new tensor; `None` while there is none."""
        return self._materialise(0)

    @keys.setter
    def keys(self, value: torch.Tensor | None) -> None:
        self._refuse(value)

    @property
    def values(self) -> torch.Tensor | None:
        """All V `[B, Hv, S, Dv]`, read from the tiers into a new tensor; `None` while there is none."""
        return self._materialise(1)

    @values.setter
    def values(self, value: torch.Tensor | None) -> None:
        self._refuse(value)

    def offload(self) -> None:
        """Nothing to do: the tiers decide what stays on the accelerator."""

    def prefetch(self) -> None:
        """Nothing to do: the tiers load ahead by themselves."""

    def reset(self) -> None:
        """Forget all tokens."""
        self._binding.check_open()
        self._binding.manager.free_layer(self._binding.request_id, self._layer_idx)
        self.is_initialized = False

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens.

        Raises:
            ValueError: the number is positive.
        """
        if tokens_to_remove > 0:
            raise ValueError(
                f"crop({tokens_to_remove}): pass a negative number, the newest tokens to remove, e.g. crop(-3)"
            )
        if tokens_to_remove and self.get_seq_length():
            self._binding.manager.crop(self._binding.request_id, self._layer_idx, -tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Let batch row `i` be what row `beam_idx[i]` was."""
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times."""
        if self.get_seq_length():
            self._select_rows(torch.arange(self.batch_size).repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some batch rows, given by index or by a mask."""
        if self.get_seq_length():
            picked = indices.cpu() if isinstance(indices, torch.Tensor) else indices
            self._select_rows(torch.arange(self.batch_size)[picked])

    @property
    def batch_size(self) -> int:
        """Rows of the batch; there is no such attribute before the first update."""
        batch = self._binding.manager.batch_size(self._binding.request_id, self._layer_idx)
        if batch is None:
            raise AttributeError("batch_size is known after the first update")
        return batch

    def _select_rows(self, rows: torch.Tensor) -> None:
        if self.get_seq_length():
            self._binding.manager.select_rows(self._binding.request_id, self._layer_idx, rows.tolist())

    def _materialise(self, which: int) -> torch.Tensor | None:
        if self._binding.closed or not self.get_seq_length():
            return None
        positions = torch.arange(self.get_seq_length())
        return self._binding.manager.fetch(self._binding.request_id, self._layer_idx, positions)[which]

    def _refuse(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise AttributeError(
                f"layer {self._layer_idx} keeps its keys and values in tiers: they cannot be assigned; "
                "use update, crop, reset or the batch_* methods"
            )


class TieredCache(DynamicCache):
    """A transformers cache that keeps a window of each layer on the accelerator and the rest in storage.

    Generation gives the same output as with `DynamicCache`. Full-attention layers are tiered; sliding-window,
    linear, hybrid, indexed and model-specific layers are what `DynamicCache` makes of them.

    ```python
    with TieredCache(config=model.config, window_tokens=4096) as cache:
        model.generate(**inputs, past_key_values=cache)
    ```

    Nothing is opened before a window overflows. Call `close()`, or use `with`, to remove what was written at
    once; otherwise it goes with the cache, at the latest when the process ends.

    Args:
        config: the model's config.
        cache_config: settings as one object.
        manager: share another cache's manager, and its budget; it is not closed with this cache.
        options: single settings, which override `cache_config`; see `TieredCacheConfig`.

    Raises:
        ConfigError: a setting makes no sense, or a path is missing or not writable.
        UnsupportedModelError: the model accepts only a cache class of its own.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        *,
        cache_config: TieredCacheConfig | None = None,
        manager: KVCacheManager | None = None,
        **options: Any,
    ) -> None:
        if not isinstance(config, PreTrainedConfig):
            raise ConfigError(f"config={type(config).__name__}: pass the model's config, config=model.config")
        text_config = config.get_text_config(decoder=True)
        if text_config.model_type in _OWN_CACHE_MODELS:
            raise UnsupportedModelError(
                f"{text_config.model_type!r} accepts only its own cache class: generate without TieredCache"
            )
        if manager is not None and (options or cache_config is not None):
            raise ConfigError("manager= brings its own settings: leave out cache_config and single settings")
        super().__init__(config=config)
        # Every layer exists from the start; stock code must not append more.
        self.layer_class_to_replicate = None
        shared = manager is not None
        if manager is None:
            manager = KVCacheManager(TieredCacheConfig.from_options(cache_config, options))
        self._binding = _Binding(manager, users=[int(shared)])
        self._given_to_generate = False
        self._finalizer = weakref.finalize(self, self._binding.close)
        keeps_output = bool(
            getattr(text_config, "kv_sharing_modes", None) or getattr(text_config, "num_kv_shared_layers", 0)
        )
        self.layers: list[Any] = [
            TieredLayer(self._binding, layer_idx, keeps_output) if type(layer) is DynamicLayer else layer
            for layer_idx, layer in enumerate(self.layers)
        ]
        if not any(isinstance(layer, TieredLayer) for layer in self.layers):
            kinds = sorted({type(layer).__name__ for layer in self.layers})
            logger.warning(
                "%s has no full-attention layer to tier (its layers: %s): this cache works like a DynamicCache",
                text_config.model_type,
                ", ".join(kinds),
            )

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        """A second cache with the same tokens; sealed blocks are shared, windows and other layers copied."""
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        binding = self._binding.fork()
        for name, value in self.__dict__.items():
            if name not in ("layers", "_binding", "_finalizer"):
                setattr(twin, name, copy.deepcopy(value, memo))
        twin._binding = binding
        twin._finalizer = weakref.finalize(twin, binding.close)
        twin.layers = [
            layer.bound_to(binding) if isinstance(layer, TieredLayer) else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return twin

    def __reduce__(self) -> Any:
        raise TypeError("a TieredCache holds threads and files and cannot be pickled; deepcopy makes a second one")

    @property
    def _is_user_defined(self) -> bool:
        """`generate` sets this on a cache it was given, before it looks at what is cached."""
        return self._given_to_generate

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self._given_to_generate = value
        start = generation_start(sys._getframe(1))
        if start is not None:
            self._prepare_to_continue(start)

    def _prepare_to_continue(self, start: GenerationStart) -> None:
        """Crop or raise where stock `generate` would silently feed cached tokens a second time."""
        cached_tokens = self.get_seq_length()
        if cached_tokens == 0:
            return
        if start.assisted and start.input_tokens == start.total_tokens:
            raise ConfigError(
                f"assisted and prompt-lookup decoding feed the whole prompt again, and {cached_tokens} tokens of it "
                "are cached: pass only the new tokens with the attention mask of all, or start with an empty cache"
            )
        if cached_tokens > start.total_tokens:
            raise ConfigError(
                f"the cache holds {cached_tokens} tokens, and the prompt with all that went before has "
                f"{start.total_tokens}: crop({start.total_tokens - 1 - cached_tokens}) it or reset() it"
            )
        if cached_tokens == start.total_tokens:
            if not self.is_croppable:
                raise ConfigError(
                    f"all {cached_tokens} tokens of the prompt are cached, and this model's cache cannot crop() one: "
                    "add a token to the prompt, or start with an empty cache"
                )
            # `generate` needs one token to compute logits from.
            self.crop(-1)

    @property
    def manager(self) -> KVCacheManager:
        """The manager that holds the tokens."""
        return self._binding.manager

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to a layer and return what its attention needs; see `TieredLayer.update`.

        Raises:
            UnsupportedModelError: the config knew of no such layer.
        """
        if layer_idx >= len(self.layers):
            raise UnsupportedModelError(
                f"the model updates layer {layer_idx}, and its config describes {len(self.layers)} layers"
            )
        keys, values = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        return keys, values

    def stats(self) -> CacheStats:
        """What the tiers hold and have done so far (all caches of the manager together)."""
        return self.manager.stats()

    def flush(self) -> None:
        """Wait until every block that left a window is in storage. Blocks."""
        self._binding.check_open()
        self.manager.flush()

    def close(self) -> None:
        """End threads and remove what was written. Blocks briefly. May be called twice."""
        self._finalizer()
