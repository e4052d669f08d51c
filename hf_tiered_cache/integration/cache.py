"""`TieredCache`: the tiers as a transformers `Cache`."""

from __future__ import annotations

import copy
import functools
import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer

from ..core.config import TieredCacheConfig
from ..core.errors import ConfigError, UnsupportedModelError
from ..core.metrics import CacheStats
from ..manager.manager import KVCacheManager
from .attention import UNTRACED, enable_streaming
from .continuation import GenerationStart, check_wrapped
from .layer import CacheBinding, TieredLayer
from .passes import ForwardPasses
from .rollback import crop_layers

logger = logging.getLogger(__name__)

# These accept only their own cache class.
_OWN_CACHE_MODELS = ("minimax",)


class TieredCache(DynamicCache):
    """A transformers cache that keeps a window of each layer on the accelerator and the rest in storage.

    Generation gives the same output as with `DynamicCache`. Full-attention layers are tiered. Sliding-window,
    linear, hybrid, indexed and model-specific layers are the same classes as in a `DynamicCache`.

    ```python
    with TieredCache(config=model.config, window_tokens=4096) as cache:
        model.generate(**inputs, past_key_values=cache)
    ```

    No file or thread is opened before a window overflows. `close()`, or the end of `with`, removes what was
    written. Without it, that happens when the cache is garbage-collected, at the latest when the process ends.

    Args:
        config: the model's config.
        cache_config: settings as one object.
        manager: manager to share with other caches, with its budget; it is not closed with this cache.
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
        if manager is not None and not isinstance(manager, KVCacheManager):
            raise ConfigError(f"manager={manager!r} is not a KVCacheManager")
        if manager is not None and (options or cache_config is not None):
            raise ConfigError("manager= brings its own settings: leave out cache_config and single settings")
        super().__init__(config=config)
        # Every layer exists from the start; transformers must not append more.
        self.layer_class_to_replicate = None
        users = set() if manager is None else {"its creator"}
        if manager is None:
            manager = KVCacheManager(TieredCacheConfig.from_options(cache_config, options))
        self._binding = CacheBinding(manager, text_config, len(self.layers), users)
        self._text_config = text_config
        self._has_encoder = bool(getattr(config, "is_encoder_decoder", False))
        self._given_to_generate = False
        self._known_ids: torch.Tensor | None = None
        _abandon_with(self, self._binding)
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

    @classmethod
    def for_model(
        cls,
        model: PreTrainedModel,
        *,
        cache_config: TieredCacheConfig | None = None,
        manager: KVCacheManager | None = None,
        **options: Any,
    ) -> TieredCache:
        """Make a cache for streaming attention, where the model allows it.

        With streaming attention, accelerator memory does not depend on the length of the context: not even one
        layer is gathered. This calls `model.set_attn_implementation("tiered")`, which stays set; the model still
        works with other caches. A model that is not known to allow it is not changed, and each layer is gathered
        for the model's own attention; a warning says so, once per architecture.

        Args:
            model: a causal language model of transformers.
            cache_config, manager, options: as for `TieredCache`.

        Raises:
            ConfigError: as for `TieredCache`.
            UnsupportedModelError: as for `TieredCache`.
        """
        if not isinstance(model, PreTrainedModel):
            raise ConfigError(
                f"model={model!r:.80} is not a model of transformers: load it first, e.g. with "
                "AutoModelForCausalLM.from_pretrained"
            )
        cache = cls(config=model.config, cache_config=cache_config, manager=manager, **options)
        if not enable_streaming(model):
            _say_once_that_layers_are_gathered(model.config.get_text_config(decoder=True).model_type)
        return cache

    def __repr__(self) -> str:
        tiered = [layer for layer in self.layers if isinstance(layer, TieredLayer)]
        config = self.manager.config
        if self._binding.closed or self.manager.closed:
            state = "closed"
        else:
            state = f"{max((layer.get_seq_length() for layer in tiered), default=0)} tokens"
        return (
            f"TieredCache({state}; {len(tiered)} of {len(self.layers)} layers tiered; "
            f"window_tokens={config.window_tokens}, block_tokens={config.block_tokens})"
        )

    def __enter__(self) -> TieredCache:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def __copy__(self) -> TieredCache:
        """Return this cache, since shallow copies of caches share their layers; `copy.deepcopy` makes a branch."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredCache:
        """Return a second cache with the same tokens; sealed blocks are shared, windows and other layers copied.

        Raises:
            TieredCacheError: the last forward pass was not completed, or another thread is running one.
        """
        self._passes.check(self.layers)
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        binding = self._binding.fork()
        for name, value in self.__dict__.items():
            if name not in ("layers", "_binding"):
                setattr(twin, name, copy.deepcopy(value, memo))
        twin._binding = binding
        _abandon_with(twin, binding)
        twin.layers = [
            layer.bound_to(binding, layer.layer_idx)
            if isinstance(layer, TieredLayer)
            else copy.deepcopy(layer, memo)
            for layer in self.layers
        ]
        return twin

    def __reduce__(self) -> Any:
        raise TypeError("a TieredCache holds threads and files and cannot be pickled; deepcopy makes a second one")

    @property
    def _is_user_defined(self) -> bool:
        """`generate` sets this on the cache that it was given, before it reads the number of cached tokens."""
        return self._given_to_generate

    @_is_user_defined.setter
    def _is_user_defined(self, value: bool) -> None:
        self._given_to_generate = value
        start = GenerationStart.seen_from(sys._getframe(1))
        if start is not None:
            self._prepare_to_continue(start)

    def _prepare_to_continue(self, start: GenerationStart) -> None:
        """Crop or raise where `generate` would silently compute a wrong result."""
        self._binding.check_open()
        start.check_mode()
        self._passes.announce_generation(start.call, self.layers)
        cached_tokens = 0 if all(self.is_linear) else self.get_seq_length()
        start.check_cached(cached_tokens, self._known_ids)
        if cached_tokens and cached_tokens == start.total_tokens:
            if not self.is_croppable:
                raise ConfigError(
                    f"all {cached_tokens} tokens of the prompt are cached, and this model's cache cannot crop() "
                    "one: add a token to the prompt, or start with an empty cache"
                )
            # `generate` needs one token to compute logits from.
            self.crop(-1)
        self._known_ids = start.known_ids(cached_tokens, self._known_ids)

    @property
    def _passes(self) -> ForwardPasses:
        return self._binding.passes

    @property
    def manager(self) -> KVCacheManager:
        """The manager that stores the tokens."""
        return self._binding.manager

    @torch.compiler.disable(reason=UNTRACED)
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens to a layer and return the K and V for its attention; see `TieredLayer.update`.

        Raises:
            UnsupportedModelError: the config describes no such layer, or an encoder-decoder model also uses this
                cache for cross-attention.
            TieredCacheError: the forward pass before was not completed, or another thread uses the cache.
        """
        if layer_idx >= len(self.layers):
            raise UnsupportedModelError(
                f"the model updates layer {layer_idx}, and its config describes {len(self.layers)} layers"
            )
        if self._has_encoder:
            check_wrapped(self, sys._getframe(1))
        binding, passes = self._binding, self._binding.passes
        binding.check_open()
        binding.streams = passes.enter(layer_idx, self.layers).streams and binding.can_stream
        keys, values = self.layers[layer_idx].update(key_states, value_states, *args, **kwargs)
        binding.streams = False
        passes.leave(layer_idx)
        return keys, values

    @torch.compiler.disable(reason=UNTRACED)
    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Return the tokens of a layer; by default of the first one that counts them."""
        tokens: int = super().get_seq_length(layer_idx)
        return tokens

    @torch.compiler.disable(reason=UNTRACED)
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Return length and offset of the keys for `query_length` new tokens of a layer."""
        self._passes.announce(self.layers)
        sizes: tuple[int, int] = super().get_mask_sizes(query_length, layer_idx)
        return sizes

    def crop(self, tokens_to_remove: int) -> None:
        """Remove the newest `-tokens_to_remove` tokens of every layer.

        After a forward pass that ended with an error or an interrupt, `crop(0)` removes the tokens that it added
        to some of the layers, and `crop(-n)` leaves `get_seq_length() - n` tokens in each.

        Raises:
            ValueError: the number is positive.
            TieredCacheError: a layer never held as many tokens, or cannot drop any; nothing was removed. Or
                another thread is running a forward pass.
            TierReadError: a block on the border could not be read; call `crop` again.
        """
        remove = -int(tokens_to_remove)  # assisted decoding passes a tensor
        if remove < 0:
            raise ValueError(
                f"crop({-remove}): pass a negative number, the newest tokens to remove, e.g. crop(-3)"
            )
        self._binding.check_open()
        self._passes.check_thread()
        crop_layers(self.layers, remove, self._passes)
        if self._known_ids is not None:
            self._known_ids = self._known_ids[:, : self.get_seq_length()]

    def reset(self) -> None:
        """Drop all tokens, in whatever state an interrupt left them. Raises only while another thread uses the
        cache."""
        self._binding.check_open()
        self._passes.check_thread()
        with self._passes.changing("reset()"):
            self._known_ids = None
            self._binding.renew()
            # Stock layers are made anew: an interrupt may have left them in any state.
            fresh = DynamicCache(config=self._text_config).layers
            for layer_idx, layer in enumerate(self.layers):
                if isinstance(layer, TieredLayer):
                    layer.is_initialized = False
                else:
                    self.layers[layer_idx] = fresh[layer_idx]
        self._passes.settle()

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace batch row `i` of every layer by what row `beam_idx[i]` was."""
        rows = beam_idx.cpu()  # once for all layers, since it synchronises an accelerator
        self._change_rows(
            "reorder_cache()",
            lambda layer: layer.reorder_cache(rows if isinstance(layer, TieredLayer) else beam_idx),
        )

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row of every layer `repeats` times."""
        self._change_rows("batch_repeat_interleave()", lambda layer: layer.batch_repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some batch rows of every layer, given by index or by a mask."""
        self._change_rows("batch_select_indices()", lambda layer: layer.batch_select_indices(indices))

    def _change_rows(self, what: str, change: Callable[[Any], None]) -> None:
        self._binding.check_open()
        self._passes.check(self.layers)
        self._known_ids = None
        with self._passes.changing(what):
            for position, layer in enumerate(self.layers):
                try:
                    change(layer)
                except Exception:
                    if position == 0 and isinstance(layer, TieredLayer):  # it refused, and nothing was changed
                        self._passes.unchanged()
                    raise

    def stats(self) -> CacheStats:
        """Return a snapshot of the tiers and their traffic, over all caches of the manager."""
        return self.manager.stats()

    def flush(self) -> None:
        """Block until every block that left a window is stored."""
        self._binding.check_open()
        self.manager.flush()

    def close(self) -> None:
        """End threads and remove what was written. Blocks briefly. May be called twice."""
        self._binding.close()


@functools.cache
def _say_once_that_layers_are_gathered(model_type: str) -> None:
    logger.warning(
        "%s is not known to work with streaming attention: each layer's keys and values are gathered on the "
        "accelerator while it computes",
        model_type,
    )


def _abandon_with(cache: TieredCache, binding: CacheBinding) -> None:
    weakref.finalize(cache, binding.abandon).atexit = False
