"""One forward pass over the layers of a cache: whose it is, and how far it has come."""

from __future__ import annotations

import sys
import threading
from dataclasses import dataclass, field
from types import FrameType
from typing import Protocol

import torch

from ..core.locks import ThreadReference, this_thread
from .continuation import GenerateCall
from .stock_layers import StateMark

_MODULE_CALLS = (torch.nn.Module._call_impl.__code__, torch.nn.Module._wrapped_call_impl.__code__)


class Pending(Protocol):
    """An update whose tokens the attention function adds. It is `begun` when that function has taken it, and
    `done` when the tokens are added."""

    layer_idx: int
    begun: bool
    done: bool


@dataclass(eq=False)
class ForwardPass:
    """The progress of one forward pass over the layers.

    Args:
        thread, thread_id: the thread that runs the pass.
        forward: false for calls of `update` from outside a model, which may come in any order.
        streams: true if the pass uses streaming attention.
        call: the call of `generate` around the pass; only while it is not known which layers the model updates.
        states: marks of the recurrent states from the beginning of the pass.
        before: tokens of each layer when its update began.
        updated: layers whose update has ended, though their attention may be `pending`.
    """

    thread: ThreadReference
    thread_id: int
    forward: bool
    streams: bool = False
    call: GenerateCall | None = None
    states: dict[int, StateMark | None] = field(default_factory=dict)
    before: dict[int, int] = field(default_factory=dict)
    updated: set[int] = field(default_factory=set)
    pending: Pending | None = None

    @classmethod
    def of_this_thread(cls, forward: bool) -> ForwardPass:
        """Begin a pass on the calling thread."""
        return cls(this_thread().reference, threading.get_ident(), forward)

    @property
    def is_mine(self) -> bool:
        """True if the calling thread began this pass."""
        return self.thread is this_thread().reference

    @property
    def is_running_elsewhere(self) -> bool:
        """True if another thread began this pass and is inside a model now."""
        if self.is_mine or self.thread() is None:
            return False
        frame = sys._current_frames().get(self.thread_id)
        return frame is not None and is_in_a_module(frame)


def is_in_a_module(frame: FrameType | None) -> bool:
    """Return true if this frame runs inside a model's forward."""
    while frame is not None:
        if frame.f_code in _MODULE_CALLS:
            return True
        frame = frame.f_back
    return False
