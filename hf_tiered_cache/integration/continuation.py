"""Checks of `generate` calls that would go wrong with a cache that is not empty, before anything is computed.

`generate` cuts the cached tokens off the prompt with `input_ids[:, -(length - cached):]`. If the whole prompt is
cached, that is `input_ids[:, -0:]`: everything is fed again, and the output is wrong without an error
(huggingface/transformers#37906). Assisted and prompt-lookup decoding feed the whole prompt again in any case.

`generate` does not pass its arguments to a cache. But it sets `_is_user_defined` on the cache that it was given,
from a frame whose local variables hold the arguments. This module reads them there. If the frame of some
transformers version looks different, the checks are skipped.
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
    """One call of `generate`, identified by its own copy of the generation config, to which it keeps a weak
    reference.

    Args:
        settings: the generation config in the frame of the call.
    """

    def __init__(self, settings: object) -> None:
        self.thread_id = threading.get_ident()
        self._settings = weakref.ref(settings)

    @classmethod
    def around(cls, frame: FrameType | None) -> GenerateCall | None:
        """Return the innermost call around a frame of this thread."""
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
        """True while the call runs."""
        return self.is_around(sys._current_frames().get(self.thread_id))


def _generate_frame(frame: FrameType | None) -> FrameType | None:
    """Return the next outer frame that belongs to `generate`."""
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
        input_ids: its tokens, `[B, T]`; `None` when it was called with embeddings.
        attention_mask: `[B, total_tokens]`, or `None` when it is all ones.
        input_tokens: `T`.
        total_tokens: length of the sequence to continue, cached tokens included.
        assisted: true if candidates come from an assistant model or a prompt lookup.
        chunked: true if the prompt is fed in chunks.
        uses_cache: false for `use_cache=False`.
        encoder_decoder: true if the model has an encoder, whose keys and values need a second cache.
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
        """Read the arguments from the frame that sets `_is_user_defined`; `None` if it is not the known
        `generate`."""
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
        if isinstance(embeddings, torch.Tensor):  # they always cover the whole sequence
            input_ids, input_tokens = None, embeddings.shape[1]
            total_tokens: Any = input_tokens
        else:
            input_tokens = input_ids.shape[1]
            # `generate` drops a mask of ones and notes its length.
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
            ConfigError: the call has `use_cache=False`.
        """
        if self.encoder_decoder:
            raise wrap_it()
        if not self.uses_cache:
            raise ConfigError(
                "generate(use_cache=False) was given a cache: it would feed the whole sequence in every step and "
                "append it again. Leave out the cache, or use_cache=False"
            )

    def check_cached(self, cached_tokens: int, known_ids: torch.Tensor | None) -> None:
        """Raise if the cached tokens cannot be the beginning of the sequence.

        Args:
            cached_tokens: number of cached tokens.
            known_ids: their first ids, `[B, K]`, as far as they are known.

        Raises:
            ConfigError: they cannot.
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
        """Return the ids of the tokens that will be cached after this call's prompt, `[B, K]`, as far as known.

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
    """Return the first column in which unmasked ids differ; `None` if there is none, or the batches differ."""
    tokens = min(ids.shape[1], known_ids.shape[1])
    if ids.shape[0] != known_ids.shape[0]:
        return None
    differs = ids[:, :tokens] != known_ids[:, :tokens].to(ids.device)
    if attention_mask is not None:
        differs &= attention_mask[:, :tokens].to(ids.device).bool()
    columns = differs.any(dim=0).nonzero()
    return int(columns[0]) if len(columns) else None


def check_wrapped(cache: object, frame: FrameType | None) -> None:
    """Raise if an encoder-decoder model uses this cache without an `EncoderDecoderCache` around it.

    Args:
        cache: the cache that is being updated.
        frame: of the update.

    Raises:
        UnsupportedModelError: it does, so cross-attention would append its keys and values as well.
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
