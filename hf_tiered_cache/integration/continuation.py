"""Checks of `generate` calls that go wrong with a cache that is not empty, made before anything is computed.

`generate` slices the cached tokens off the prompt with `input_ids[:, -(length - cached):]`. For a prompt that is
cached as a whole that is `input_ids[:, -0:]`: everything is fed again, and the output is wrong without an error
(huggingface/transformers#37906). Assisted and prompt-lookup decoding feed the whole prompt again in any case.

A cache is not told what `generate` was called with. But `generate` marks the cache that it was given, by setting
`_is_user_defined`, from a frame that knows; so that is where we look. On a transformers version whose frame looks
different nothing is found and nothing changes.
"""

from __future__ import annotations

import sys
import threading
import weakref
from dataclasses import dataclass
from types import FrameType
from typing import Any

import torch
import transformers
from packaging.version import Version

from ..core.errors import ConfigError, UnsupportedModelError

_CHUNKS_ARE_FED_AGAIN = Version(transformers.__version__) < Version("5.23")


class GenerateCall:
    """One call of `generate`, known by the settings that it made for itself. Keeps nothing of it alive.

    Args:
        settings: the generation config in its frame.
    """

    def __init__(self, settings: object) -> None:
        self.thread_id = threading.get_ident()
        self._settings = weakref.ref(settings)

    @classmethod
    def around(cls, frame: FrameType | None) -> GenerateCall | None:
        """The innermost call around a frame of this thread."""
        frame = _generate_frame(frame)
        settings = None if frame is None else frame.f_locals.get("generation_config")
        return None if settings is None else cls(settings)

    def is_around(self, frame: FrameType | None) -> bool:
        """Return true if a frame is inside this call."""
        settings = self._settings()
        while settings is not None and (frame := _generate_frame(frame)) is not None:
            if frame.f_locals.get("generation_config") is settings:
                return True
            frame = frame.f_back
        return False

    @property
    def is_running(self) -> bool:
        """Return true while the call runs."""
        return self.is_around(sys._current_frames().get(self.thread_id))


def _generate_frame(frame: FrameType | None) -> FrameType | None:
    """The next frame outwards that is `generate`'s."""
    while frame is not None:
        if (
            frame.f_code.co_name == "generate"
            and frame.f_globals.get("__name__") == "transformers.generation.utils"
        ):
            return frame
        frame = frame.f_back
    return None


@dataclass(frozen=True, kw_only=True)
class GenerationStart:
    """The arguments of a `generate` call that has just begun.

    Args:
        call: the call itself.
        input_ids: tokens that it was called with, `[B, T]`; `None` when it was called with embeddings.
        attention_mask: `[B, total_tokens]`, or `None` when it is all ones.
        input_tokens: `T`.
        total_tokens: length of the sequence that it means to continue, cached tokens included.
        assisted: whether candidates come from an assistant model or a prompt lookup.
        chunked: whether the prompt is fed in chunks.
        uses_cache: whether it expects the cache to be used.
        encoder_decoder: whether the model has an encoder, whose keys and values need a cache of their own.
    """

    call: GenerateCall
    input_ids: torch.Tensor | None
    attention_mask: torch.Tensor | None
    input_tokens: int
    total_tokens: int
    assisted: bool
    chunked: bool
    uses_cache: bool
    encoder_decoder: bool

    @classmethod
    def seen_from(cls, frame: FrameType | None) -> GenerationStart | None:
        """Read it off the frame that sets `_is_user_defined`; `None` when that is not `generate` as we know it."""
        if frame is None or frame.f_code.co_name != "_prepare_cache_for_generation":
            return None
        call = GenerateCall.around(frame)
        model_kwargs = frame.f_locals.get("model_kwargs")
        settings = frame.f_locals.get("generation_config")
        config = getattr(frame.f_locals.get("self"), "config", None)
        input_ids: Any = None if frame.f_back is None else frame.f_back.f_locals.get("input_ids")
        if call is None or not isinstance(model_kwargs, dict) or not isinstance(input_ids, torch.Tensor):
            return None
        embeddings, mask = model_kwargs.get("inputs_embeds"), model_kwargs.get("attention_mask")
        if isinstance(embeddings, torch.Tensor):  # these are always the whole sequence
            input_ids, input_tokens = None, embeddings.shape[1]
            total_tokens: Any = input_tokens
        else:
            input_tokens = input_ids.shape[1]
            # A mask of ones is dropped, and its length noted.
            total_tokens = (
                mask.shape[-1] if isinstance(mask, torch.Tensor) else getattr(settings, "_mask_length", None)
            )
        if not isinstance(total_tokens, int):
            return None
        return cls(
            call=call,
            input_ids=input_ids,
            attention_mask=mask if isinstance(mask, torch.Tensor) and mask.ndim == 2 else None,
            input_tokens=input_tokens,
            total_tokens=total_tokens,
            assisted=getattr(frame.f_locals.get("generation_mode"), "value", None) == "assisted_generation",
            chunked=getattr(settings, "prefill_chunk_size", None) is not None,
            uses_cache=getattr(settings, "use_cache", None) is not False,
            encoder_decoder=bool(getattr(config, "is_encoder_decoder", False)),
        )

    def check_mode(self) -> None:
        """Raise if the cache cannot serve this call at all.

        Raises:
            UnsupportedModelError: the model has an encoder.
            ConfigError: the call is not to use a cache.
        """
        if self.encoder_decoder:
            raise wrap_it()
        if not self.uses_cache:
            raise ConfigError(
                "generate(use_cache=False) was given a cache: it would feed the whole sequence in every step and "
                "append it again. Leave out the cache, or use_cache=False"
            )

    def check_cached(self, cached_tokens: int, known_ids: torch.Tensor | None) -> None:
        """Raise if what is cached cannot be the beginning of the sequence.

        Args:
            cached_tokens: how many tokens are cached.
            known_ids: the first of their ids, `[B, K]`, as far as they are known.

        Raises:
            ConfigError: it cannot.
        """
        if cached_tokens == 0:
            return
        if self.assisted and self.input_tokens == self.total_tokens:
            raise ConfigError(
                f"assisted and prompt-lookup decoding feed the whole prompt again, and {cached_tokens} tokens of "
                "it are cached: pass only the new tokens, with the attention mask of all, or use an empty cache"
            )
        if self.chunked and _CHUNKS_ARE_FED_AGAIN:
            raise ConfigError(
                "transformers before 5.23 feeds the whole prompt again with prefill_chunk_size, and "
                f"{cached_tokens} tokens of it are cached: leave prefill_chunk_size out, or reset() the cache"
            )
        if cached_tokens > self.total_tokens:
            raise ConfigError(
                f"the cache holds {cached_tokens} tokens, and this call continues a sequence of "
                f"{self.total_tokens}. For another prompt, reset() the cache or make a new one; to go back in "
                f"this conversation, crop({self.total_tokens - 1 - cached_tokens})"
            )
        if self.input_ids is None or known_ids is None or self.input_tokens != self.total_tokens:
            return
        differs_at = _first_difference(self.input_ids, known_ids[:, :cached_tokens], self.attention_mask)
        if differs_at is not None:
            raise ConfigError(
                f"the cache holds another conversation: the prompt differs from the {cached_tokens} cached tokens "
                f"at token {differs_at}. For another prompt, reset() the cache or make a new one; to keep the "
                f"tokens before, crop({differs_at - cached_tokens})"
            )

    def known_ids(self, cached_tokens: int, known_ids: torch.Tensor | None) -> torch.Tensor | None:
        """The ids that the cache will hold once this call has fed its prompt, `[B, K]`, as far as they are known.

        Args:
            cached_tokens, known_ids: as for `check_cached`.
        """
        if self.input_ids is None:
            return None
        if self.input_tokens == self.total_tokens:
            return self.input_ids.clone()
        return None if known_ids is None else known_ids[:, :cached_tokens]


def _first_difference(
    ids: torch.Tensor, known_ids: torch.Tensor, attention_mask: torch.Tensor | None
) -> int | None:
    """The first column in which unmasked ids differ; `None` if there is none, or they cannot be compared."""
    tokens = min(ids.shape[1], known_ids.shape[1])
    if ids.shape[0] != known_ids.shape[0]:
        return None
    differs = ids[:, :tokens] != known_ids[:, :tokens].to(ids.device)
    if attention_mask is not None:
        differs &= attention_mask[:, :tokens].to(ids.device).bool()
    columns = differs.any(dim=0).nonzero()
    return int(columns[0]) if len(columns) else None


def check_wrapped(cache: object, frame: FrameType | None) -> None:
    """Raise if the attention of an encoder-decoder model has this cache itself, and not one that wraps it.

    Args:
        cache: which is being updated.
        frame: of the update.

    Raises:
        UnsupportedModelError: it has, so cross-attention would add its keys and values, too.
    """
    while frame is not None and not isinstance(frame.f_locals.get("self"), torch.nn.Module):
        frame = frame.f_back
    if frame is not None and any(
        frame.f_locals.get(name) is cache for name in ("cache", "past_key_values", "past_key_value")
    ):
        raise wrap_it()


def wrap_it() -> UnsupportedModelError:
    """Return the error for an encoder-decoder model that uses the cache without a wrapper."""
    return UnsupportedModelError(
        "an encoder-decoder model needs a second cache for its cross-attention: pass transformers' "
        "EncoderDecoderCache(TieredCache(config=model.config), DynamicCache(config=model.config))"
    )
