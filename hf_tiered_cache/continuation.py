"""What stock `generate` gets wrong with a cache that is not empty, noticed before it happens.

`generate` slices the cached tokens off the prompt with `input_ids[:, -(length - cached):]`. For a prompt that is
cached as a whole that is `input_ids[:, -0:]`: everything is fed again, and the output is wrong without an error
(huggingface/transformers#37906). Assisted and prompt-lookup decoding feed the whole prompt again in any case.

A cache is not told what `generate` was called with. But `generate` marks the cache that it was given, by setting
`_is_user_defined`, from a frame that knows; so that is where we look. On a transformers version whose frame looks
different nothing is found and nothing changes.
"""

from __future__ import annotations

from types import FrameType
from typing import Any, NamedTuple

import torch


class GenerationStart(NamedTuple):
    """What `generate` is about to do.

    Args:
        total_tokens: length of the sequence that it means to continue, cached tokens included.
        input_tokens: tokens that it was called with.
        assisted: whether candidates come from an assistant model or a prompt lookup.
    """

    total_tokens: int
    input_tokens: int
    assisted: bool


def generation_start(frame: FrameType | None) -> GenerationStart | None:
    """Read it off the frame that sets `_is_user_defined`; `None` when that is not `generate` as we know it."""
    if frame is None or frame.f_code.co_name != "_prepare_cache_for_generation" or frame.f_back is None:
        return None
    model_kwargs = frame.f_locals.get("model_kwargs")
    input_ids = frame.f_back.f_locals.get("input_ids")
    if not isinstance(model_kwargs, dict) or not isinstance(input_ids, torch.Tensor):
        return None
    if "inputs_embeds" in model_kwargs:
        return None
    attention_mask: Any = model_kwargs.get("attention_mask")
    if isinstance(attention_mask, torch.Tensor):
        total_tokens: Any = attention_mask.shape[-1]
    else:  # a mask of ones is dropped, and its length noted
        total_tokens = getattr(frame.f_locals.get("generation_config"), "_mask_length", None)
    if not isinstance(total_tokens, int):
        return None
    mode = getattr(frame.f_locals.get("generation_mode"), "value", None)
    return GenerationStart(total_tokens, input_ids.shape[1], mode == "assisted_generation")
