"""Forward passes as a whole: which layers a pass has updated, and whether it came to its end.

    update(0) ──▶ update(1) ──▶ ... ──▶ update(last)        complete
    update(0) ──▶ update(1) ──x                             an error, or Ctrl-C, between two layers: incomplete

Layers then hold different numbers of tokens, and to go on would be silently wrong. Nobody tells a cache that a
forward pass has failed. It is noticed when the next one begins, or when anything else uses the cache. The same
goes for the calls that change every layer: a crop, a reorder, a reset.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, TypeVar

from ..core.errors import TieredCacheError, UnsupportedModelError
from ..core.locks import TimedLock
from ..core.metrics import Metrics
from .continuation import GenerateCall
from .forward_pass import ForwardPass, Pending, is_in_a_module
from .stock_layers import (
    StateMark,
    attention_layers,
    has_changed,
    indexer_is_complete,
    indexer_tokens,
    recurrent_layers,
    state_mark,
)

_REMEDY = "cache.crop(0) takes back what it has added, reset() begins anew"

_Pending = TypeVar("_Pending", bound=Pending)


class ForwardPasses:
    """Follows the forward passes of one cache, and the calls that change all of its layers.

    A pass is complete when every attention layer was updated, and every layer with a recurrent state was changed
    if the first of its kind was. (Fused kernels of an accelerator may change such states unseen; then none is
    asked for.) Methods take the cache's layers, since a model may append some.

    Args:
        kinds: for each layer of the model what it is, as far as the config tells.
    """

    def __init__(self, kinds: Sequence[str] = ()) -> None:
        self._kinds = kinds
        self._pass: ForwardPass | None = None
        self._changing: str | None = None
        self._cropping: dict[int, int] | None = None
        self._generating: GenerateCall | None = None
        self._streams_next = False
        self._states_next: dict[int, StateMark | None] | None = None
        self._all_seen = False
        self._never_updated: set[int] = set()
        self._beginning = TimedLock(Metrics())  # heals if an interrupt strikes before it is given back

    # -- updates ----------------------------------------------------------------------------------------------

    def announce(self, layers: Sequence[Any]) -> None:
        """A model asks for the size of a mask: a forward pass is about to begin. Whether it streams, the mask
        function tells next; see `announce_streaming`.

        Raises:
            TieredCacheError: the pass before ended when it had changed recurrent states, and nothing else yet.
        """
        self._streams_next = False
        recurrent = recurrent_layers(layers)
        if recurrent:
            if any(
                has_changed(layers[i], mark) for i, mark in (self._states_next or {}).items() if mark is not None
            ):
                self._changing = "the last forward pass"
                self.check_changes()
            self._states_next = {layer_idx: state_mark(layers[layer_idx]) for layer_idx in recurrent}
        _sized.passes = weakref.ref(self)

    def announce_generation(self, call: GenerateCall, layers: Sequence[Any]) -> None:
        """A call of `generate` is about to use the cache.

        Raises:
            TieredCacheError, UnsupportedModelError: as for `check`.
        """
        self.check(layers)
        self._generating = call

    def enter(self, layer_idx: int, layers: Sequence[Any]) -> ForwardPass:
        """A layer is about to be updated, in the pass that is returned.

        Raises:
            TieredCacheError: the pass before was not complete, or another thread is in the middle of one.
            UnsupportedModelError: the update before was left to an attention function that did not take it.
        """
        current = self._pass
        if current is None or layer_idx in current.before or not current.is_mine or self._is_unfinished:
            current = self._begin(layers, sys._getframe(2))
        elif current.pending is not None:
            _check_taken(current.pending)
        current.before.setdefault(layer_idx, layers[layer_idx].get_seq_length())
        return current

    def leave(self, layer_idx: int) -> None:
        """The layer's update has ended."""
        if self._pass is not None:
            self._pass.updated.add(layer_idx)

    def leave_to_attention(self, pending: _Pending) -> _Pending:
        """The update under way leaves its tokens to the attention function. Returns them."""
        assert self._pass is not None
        self._pass.pending = pending
        return pending

    def _begin(self, layers: Sequence[Any], caller: FrameType) -> ForwardPass:
        forward = is_in_a_module(caller)
        if not self._beginning.try_acquire():
            raise _two_threads()
        try:
            last = self._pass
            if last is not None and not last.forward and not self._is_unfinished:
                if not forward:
                    return last  # who fills a cache by hand may do so layer by layer, in pieces
                _check_equal_lengths(layers, attention_layers(layers))
            self.check(layers)
            begun = ForwardPass.of_this_thread(forward)
            begun.streams, self._streams_next = self._streams_next and forward, False
            if forward:
                begun.states = self._states_next or {i: state_mark(layers[i]) for i in recurrent_layers(layers)}
                self._states_next = None
                begun.call = None if self._all_seen else GenerateCall.around(caller)
            self._pass = begun
            return begun
        finally:
            self._beginning.release()

    # -- is all well? -----------------------------------------------------------------------------------------

    def check_thread(self) -> None:
        """Raise if another thread is using the cache.

        Raises:
            TieredCacheError: one is in the middle of a forward pass, or of `generate`.
        """
        call, last = self._generating, self._pass
        if call is not None and call.thread_id != threading.get_ident() and call.is_running:
            raise _two_threads()
        if last is not None and last.forward and last.is_running_elsewhere:
            raise _two_threads()

    def check(self, layers: Sequence[Any]) -> None:
        """Raise unless the last pass, and the last call that changed all layers, came to their ends.

        Raises:
            TieredCacheError: they did not, or another thread is at it; the message says what to do.
            UnsupportedModelError: the last update was left to an attention function that did not take it.
        """
        last = self._pass
        if self._generating is not None:
            self.check_thread()
        self.check_changes()
        if self._cropping is not None:
            raise TieredCacheError(
                "crop() was interrupted when some layers were cropped and others were not: cache.crop(0) "
                "completes it, reset() begins anew"
            )
        if last is None or not last.forward:
            return
        if last.pending is not None:
            _check_taken(last.pending)
        missing = self._missing(last, layers)
        if not missing:
            self._all_seen = True
        elif last.call is not None and last.call.is_around(sys._getframe(1)):
            # That call of `generate` has gone on, so the pass did not fail: the model has no use for these layers.
            self._never_updated |= missing
        elif last.is_running_elsewhere:
            raise _two_threads()
        else:
            where = "in" if min(missing) in last.before else "before"
            raise TieredCacheError(
                f"the last forward pass ended with an error {where} layer {min(missing)}, or was interrupted "
                f"there. Layers hold different tokens, and to go on would be wrong: {_REMEDY}"
            )

    def check_changes(self) -> None:
        """Raise if a change of all layers, which cannot be taken back, did not come to its end.

        Raises:
            TieredCacheError: it did not: only a reset helps.
        """
        if self._changing is not None:
            raise TieredCacheError(
                f"{self._changing} was interrupted when some layers were changed and others were not: reset() the "
                "cache and begin anew"
            )

    def is_complete(self, layers: Sequence[Any]) -> bool:
        """True if the last pass and the last crop, if any, were completed."""
        last = self._pass
        if self._cropping is not None:
            return False
        if last is None or not last.forward:
            return True
        return (last.pending is None or last.pending.done) and not self._missing(last, layers)

    @property
    def _is_unfinished(self) -> bool:
        return self._changing is not None or self._cropping is not None

    def _missing(self, last: ForwardPass, layers: Sequence[Any]) -> set[int]:
        """Layers that a complete pass would have updated; none if it has changed nothing at all."""
        untouched = not last.updated and last.before == {i: layers[i].get_seq_length() for i in last.before}
        if untouched and not any(has_changed(layers[i], mark) for i, mark in last.states.items()):
            return set()
        missing = {layer_idx for layer_idx in attention_layers(layers) if layer_idx not in last.updated}
        indexers = [layer_idx for layer_idx, layer in enumerate(layers) if indexer_tokens(layer)]
        if indexers and indexer_is_complete(layers[indexers[0]]):
            missing.update(layer_idx for layer_idx in indexers if not indexer_is_complete(layers[layer_idx]))
        first_changed: dict[str, bool] = {}
        for layer_idx, mark in last.states.items():
            layer = layers[layer_idx]
            kind = self._kinds[layer_idx] if layer_idx < len(self._kinds) else type(layer).__name__
            changed = has_changed(layer, mark)
            if first_changed.setdefault(kind, changed) and not changed:
                missing.add(layer_idx)
        return missing - self._never_updated

    # -- what changes all layers --------------------------------------------------------------------------------

    def tokens_before(self, layer_idx: int, held_tokens: int) -> int:
        """Return the length of a layer once the last pass or the last crop is completed or undone."""
        if self._cropping is not None:
            return min(held_tokens, self._cropping.get(layer_idx, held_tokens))
        if self._pass is None or not self._pass.forward:
            return held_tokens
        return self._pass.before.get(layer_idx, held_tokens)

    def is_torn(self, layer_idx: int) -> bool:
        """Return true if the last pass ended in the middle of this layer's update."""
        last = self._pass
        return last is not None and layer_idx in last.before and layer_idx not in last.updated

    @contextmanager
    def changing(self, what: str) -> Iterator[None]:
        """Layers are being changed in a way that cannot be taken back: unless it comes to its end, only a reset
        helps.

        Args:
            what: for the error message.
        """
        self._changing = what
        yield
        self._changing = None

    @contextmanager
    def cropping(self, targets: Mapping[int, int]) -> Iterator[None]:
        """Layers are being cropped to so many tokens each. That settles what was incomplete before."""
        self._cropping = dict(targets)
        yield
        self.settle()

    def unchanged(self) -> None:
        """Forget a change of all layers that the first layer refused."""
        self._changing = self._cropping = None

    def settle(self) -> None:
        """All layers are in order."""
        self._pass = self._states_next = None
        self._changing = self._cropping = None


class _Sized(threading.local):
    """The passes for which a thread has asked the size of the mask."""

    passes: weakref.ref[ForwardPasses] | None = None


_sized = _Sized()


def announce_streaming() -> None:
    """The mask that is being made is for the `"tiered"` attention, so the pass to come takes old tokens part by
    part."""
    passes = None if _sized.passes is None else _sized.passes()
    _sized.passes = None
    if passes is not None:
        passes._streams_next = True


def _check_equal_lengths(layers: Sequence[Any], attention_layers: Sequence[int]) -> None:
    lengths = {layer_idx: layers[layer_idx].get_seq_length() for layer_idx in attention_layers}
    if len(set(lengths.values())) > 1:
        shortest, longest = min(lengths, key=lengths.__getitem__), max(lengths, key=lengths.__getitem__)
        raise TieredCacheError(
            f"layer {shortest} was filled with {lengths[shortest]} tokens and layer {longest} with "
            f"{lengths[longest]}: a model needs as many in each layer"
        )


def _check_taken(pending: Pending) -> None:
    """Raise if the last update left tokens to an attention function that did not add them."""
    if pending.done:
        return
    if pending.begun:
        raise TieredCacheError(
            f"the last forward pass ended with an error in the attention of layer {pending.layer_idx}. Layers "
            f"hold different tokens, and to go on would be wrong: {_REMEDY}"
        )
    raise UnsupportedModelError(
        f'layer {pending.layer_idx} did not pass on its keys and values to the "tiered" attention as the cache '
        "returned them, so its output is wrong (or the forward pass was interrupted just there). "
        f'Call model.set_attn_implementation("sdpa"); {_REMEDY}'
    )


def _two_threads() -> TieredCacheError:
    return TieredCacheError(
        "another thread is using this cache: one conversation is one thread's at a time. Give each thread a cache "
        "of its own (on one KVCacheManager they share their memory), or wait for the other one"
    )
