"""Shapes of K and V, and their layout in a buffer."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from .blocks import BlockLayout
from .errors import ConfigError

# The alignment that vectorised kernels and copies prefer.
_ALIGNMENT_BYTES = 256


@dataclass(frozen=True)
class Geometry:
    """Shape of one layer's K `[batch, key_heads, T, key_dim]` and V `[batch, value_heads, T, value_dim]`."""

    batch: int
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    dtype: torch.dtype

    @classmethod
    def of(cls, key: torch.Tensor, value: torch.Tensor) -> Geometry:
        """Return the geometry of these tensors.

        Raises:
            ConfigError: they are not a K and V of one layer.
        """
        if not isinstance(key, torch.Tensor) or not isinstance(value, torch.Tensor):
            raise ConfigError(
                f"key is {type(key).__name__}, value {type(value).__name__}: pass tensors [B, H, T, D]"
            )
        if key.ndim != 4 or value.ndim != 4 or key.shape[0] != value.shape[0] or key.shape[2] != value.shape[2]:
            raise ConfigError(
                f"key {tuple(key.shape)} and value {tuple(value.shape)} must be [B, H, T, D] with the same batch "
                "and the same number of tokens"
            )
        if key.dtype != value.dtype or key.device != value.device:
            raise ConfigError(
                f"key is {key.dtype} on {key.device}, value {value.dtype} on {value.device}: both must be the "
                "same. torch.autocast makes them differ; load the model in one dtype instead"
            )
        return cls(key.shape[0], key.shape[1], key.shape[3], value.shape[1], value.shape[3], key.dtype)

    def layout(self, block_tokens: int) -> BlockLayout:
        """Return the layout of a block of this shape."""
        return BlockLayout(
            self.batch,
            self.key_heads,
            self.key_dim,
            self.value_heads,
            self.value_dim,
            block_tokens,
            self.dtype,
        )

    def nbytes(self, tokens: int) -> int:
        """Return the size in bytes of a buffer for `carve`."""
        keys, values = self._part_bytes(tokens)
        return keys + values

    def tokens_in(self, nbytes: int) -> int:
        """Return the number of tokens that fit in a buffer of this size."""
        per_token = self.nbytes(_ALIGNMENT_BYTES) // _ALIGNMENT_BYTES
        return max(0, nbytes - 2 * _ALIGNMENT_BYTES) // per_token

    def carve(self, buffer: torch.Tensor, tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """View the start of a flat uint8 buffer as K and V `[batch, heads, tokens, dim]`."""
        key_bytes, _ = self._part_bytes(tokens)
        shapes = (
            (self.batch, self.key_heads, tokens, self.key_dim),
            (self.batch, self.value_heads, tokens, self.value_dim),
        )
        # In inference mode, a change of dtype would give tensors that cannot be mutated outside of it.
        with torch.inference_mode(False):
            keys, values = (
                buffer[offset : offset + math.prod(shape) * self.dtype.itemsize].view(self.dtype).view(shape)
                for offset, shape in zip((0, key_bytes), shapes, strict=True)
            )
        return keys, values

    def _part_bytes(self, tokens: int) -> tuple[int, int]:
        """Return the bytes of K and of V, each rounded up so that V is aligned too."""
        per_token = self.batch * tokens * self.dtype.itemsize
        keys, values = (
            per_token * size for size in (self.key_heads * self.key_dim, self.value_heads * self.value_dim)
        )
        return -(-keys // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES, -(-values // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
