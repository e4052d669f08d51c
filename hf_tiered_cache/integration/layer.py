"""`TieredLayer`: one layer of a `TieredCache`, and the state that the layers of a cache share."""

from __future__ import annotations

import itertools
from contextlib import suppress
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import DynamicLayer

from ..core.errors import CacheClosedError, ConfigError, UnsupportedModelError
from ..manager.manager import KVCacheManager
from .attention import PendingAttention, can_stream, in_one_dtype
from .passes import ForwardPasses

_request_numbers = itertools.count()


class CacheBinding:
    """State that the layers of a cache share: the manager, and the cache's request in it.

    `streams` is true while an update leaves its tokens to streaming attention.

    Args:
        manager: stores the tokens.
        text_config: of the model.
        model_layers: number of its layers.
        users: request ids of all caches that use the manager; a cache shares the set with its deep copies. The
            last user to close closes the manager.
        source: the cache that this one copies.
    """

    def __init__(
        self,
        manager: KVCacheManager,
        text_config: PreTrainedConfig,
        model_layers: int,
        users: set[str],
        source: CacheBinding | None = None,
    ) -> None:
        self.manager = manager
        self.request_id = _new_request_id()
        self.closed = False
        self.streams = False
        self.next_layer_idx = model_layers
        self.passes = ForwardPasses(getattr(text_config, "layer_types", None) or ())
        self.can_stream = can_stream(text_config)
        if source is None:
            manager.allocate(self.request_id)
        else:
            manager.fork(source.request_id, self.request_id)
        self._text_config = text_config
        self._users = users
        users.add(self.request_id)  # a set, since the garbage collector may take no lock

    def fork(self) -> CacheBinding:
        """Return the binding of a second cache with the same tokens."""
        self.check_open()
        return CacheBinding(self.manager, self._text_config, self.next_layer_idx, self._users, source=self)

    def check_open(self) -> None:
        """Raise after `close()`."""
        if self.closed or self.manager.closed:
            raise CacheClosedError("this cache is closed: make a new TieredCache")

    def renew(self) -> None:
        """Drop all tokens, in whatever state an interrupt left them, and start with an empty request."""
        old, new = self.request_id, _new_request_id()
        self.manager.allocate(new)
        self._users.add(new)
        self.request_id = new
        self._users.discard(old)
        with suppress(ConfigError):  # an earlier call was interrupted after it freed the request
            self.manager.free(old)

    def close(self) -> None:
        """Free the request; the last user closes the manager."""
        if self.closed:
            return
        self.closed = True
        self._users.discard(self.request_id)
        if not self._users:
            self.manager.close()
        else:
            with suppress(CacheClosedError):  # another copy has just closed the manager
                self.manager.free(self.request_id)

    def abandon(self) -> None:
        """Release the request of a garbage-collected cache. Without other references the manager is collected
        too."""
        if not self.closed:
            self.closed = True
            self._users.discard(self.request_id)
            self.manager.abandon(self.request_id)


def _new_request_id() -> str:
    return f"cache-{next(_request_numbers)}"


def _dense(states: torch.Tensor) -> torch.Tensor:
    """Return the same values with the strides that `torch.cat` would give.

    Attention rounds alike for any strides between heads and rows. The linear layer that expands latents does not:
    it picks its kernel by the strides, even of a dimension of size 1.
    """
    if states.shape[0] == 1:
        _, _, tokens, dim = states.shape
        return states.as_strided(states.shape, (tokens * dim, tokens * dim, dim, 1))
    return states.contiguous()


class TieredLayer(DynamicLayer):
    """One full-attention layer whose older tokens are stored in tiers.

    It replaces a `DynamicLayer`. `update` returns the same values, as views of buffers that later updates of other
    layers overwrite.

    Args:
        binding: the cache's manager and request.
        layer_idx: the manager's id of the layer: its index in the model, unless it is a copy.
        keeps_output: true if the model reads the result of `update` even after other layers were updated (KV
            sharing); such layers return copies.
    """

    def __init__(self, binding: CacheBinding, layer_idx: int, keeps_output: bool) -> None:
        self._binding = binding
        self._layer_idx = layer_idx
        self._keeps_output = keeps_output
        self.is_initialized = False

    def __repr__(self) -> str:
        return f"TieredLayer(layer_idx={self._layer_idx})"

    def __deepcopy__(self, memo: dict[int, Any]) -> TieredLayer:
        """Return one more layer of the same cache, with the same tokens. Models that loop over layers add such
        layers."""
        binding = self._binding
        binding.check_open()
        layer_idx = binding.next_layer_idx
        binding.next_layer_idx += 1
        binding.manager.fork_layer(binding.request_id, self._layer_idx, layer_idx)
        return self.bound_to(binding, layer_idx)

    def bound_to(self, binding: CacheBinding, layer_idx: int) -> TieredLayer:
        """Return a layer for tokens that are in the manager already, and equal to this layer's."""
        twin = TieredLayer(binding, layer_idx, self._keeps_output)
        twin.is_initialized = self.is_initialized
        if self.is_initialized:
            twin.device, twin.dtype, twin._dtypes = self.device, self.dtype, self._dtypes
        return twin

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Note dtype and device; allocates nothing."""
        self.dtype, self.device = key_states.dtype, key_states.device
        self._dtypes = key_states.dtype, value_states.dtype
        self.is_initialized = True

    @property
    def layer_idx(self) -> int:
        """The manager's id of the layer."""
        return self._layer_idx

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens and return all K and V of the layer, or leave both to streaming attention.

        Args:
            key_states: `[B, Hk, T, Dk]`.
            value_states: `[B, Hv, T, Dv]`.

        Returns:
            K `[B, Hk, S, Dk]` and V `[B, Hv, S, Dv]`. Read them before the next layers' updates, and do not write
            to them. With streaming attention, and if the tokens exceed the window: the new tokens, marked as a
            `PendingAttention`, which appends them.

        Raises:
            UnsupportedModelError: gradients are being recorded.
            TierError: storage failed.
        """
        binding, manager = self._binding, self._binding.manager
        binding.check_open()
        if torch.is_grad_enabled() and (key_states.requires_grad or value_states.requires_grad):
            raise UnsupportedModelError(
                "TieredCache serves inference, and gradients are being recorded: "
                "run the model under torch.no_grad() or torch.inference_mode()"
            )
        if key_states.is_cuda and torch.cuda.is_current_stream_capturing():
            raise UnsupportedModelError(
                "a CUDA graph is being captured, and a replay would not move the cache's tokens: run the model "
                'without CUDA graphs (torch.compile without mode="reduce-overhead" or "max-autotune")'
            )
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if (
            binding.streams
            and not self._keeps_output
            and manager.overflows(binding.request_id, self._layer_idx, key_states.shape[2])
        ):
            pending = PendingAttention(manager, binding.request_id, self._layer_idx)
            return binding.passes.leave_to_attention(pending).mark(key_states, value_states)
        keys, values = self._gathered(key_states, value_states)
        if self._keeps_output:
            return keys.clone(), values.clone()
        if keys.shape[1] == 1 and keys.shape[-1] != values.shape[-1]:  # latents (MLA)
            return _dense(keys), _dense(values)
        return keys, values

    def _gathered(self, key_states: torch.Tensor, value_states: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Append tokens and return all K and V, each in the dtype to which `torch.cat` would promote it.

        Under `torch.autocast` rotated keys are float32 and values are not; the tiers store both in the wider
        dtype.
        """
        manager, request_id = self._binding.manager, self._binding.request_id
        keys, values = manager.update(request_id, self._layer_idx, *in_one_dtype(key_states, value_states))
        self._dtypes = (
            torch.promote_types(self._dtypes[0], key_states.dtype),
            torch.promote_types(self._dtypes[1], value_states.dtype),
        )
        return keys.to(self._dtypes[0]), values.to(self._dtypes[1])

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
        """Do nothing: the tiers decide what stays on the accelerator."""

    def prefetch(self) -> None:
        """Do nothing: the manager prefetches by itself."""

    def check_intact(self) -> None:
        """Raise if an interrupt struck while this layer's tokens were being moved.

        Raises:
            TieredCacheError: only a reset helps.
        """
        self._binding.manager.check_intact(self._binding.request_id, self._layer_idx)

    def reset(self) -> None:
        """Drop all tokens."""
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
        tokens_to_remove = int(tokens_to_remove)  # assisted decoding passes a tensor
        if tokens_to_remove and self.get_seq_length():
            self._binding.manager.crop(self._binding.request_id, self._layer_idx, -tokens_to_remove)

    def reorder_cache(self, beam_idx: torch.LongTensor) -> None:
        """Replace batch row `i` by what row `beam_idx[i]` was."""
        self._select_rows(beam_idx)

    def batch_repeat_interleave(self, repeats: int) -> None:
        """Repeat each batch row `repeats` times."""
        if self.get_seq_length():
            self._select_rows(torch.arange(self.batch_size, device="cpu").repeat_interleave(repeats))

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Keep some batch rows, given by index or by a mask."""
        if self.get_seq_length():
            picked = indices.cpu() if isinstance(indices, torch.Tensor) else indices
            self._select_rows(torch.arange(self.batch_size, device="cpu")[picked])

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
        positions = torch.arange(self.get_seq_length(), device="cpu")
        states = self._binding.manager.fetch(self._binding.request_id, self._layer_idx, positions)[which]
        return states.to(self._dtypes[which])

    def _refuse(self, value: torch.Tensor | None) -> None:
        if value is not None:
            raise AttributeError(
                f"layer {self._layer_idx} keeps its keys and values in tiers: they cannot be assigned; "
                "use update, crop, reset or the batch_* methods"
            )
