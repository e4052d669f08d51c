"""Forward passes as a whole: which layers a pass has updated, and whether it came to its end.

    update(0) ──▶ update(1) ──▶ ... ──▶ update(last)        complete
    update(0) ──▶ update(1) ──x                             an error, or Ctrl-C, between two layers: incomplete

After an incomplete pass layers hold different numbers of tokens, and continuing would give wrong output. A cache
is not told that a forward pass failed. It notices when the next pass begins, or at any other use of the cache. The
same applies to calls that change every layer: a crop, a reorder, a reset.
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

    A pass is complete when every attention layer was updated, and every layer with a recurrent state has changed
    if the first of its kind has. (Fused kernels may change such states without a trace; then no change is
    required.) Methods take the cache's layers, since a model may append some.

    Args:
        kinds: `layer_types` of the model's config, if it has them.
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
        self._beginning = TimedLock(Metrics())  # recovers if an interrupt strikes before its release

    # -- updates ----------------------------------------------------------------------------------------------

    def announce(self, layers: Sequence[Any]) -> None:
        """Note that a forward pass is about to begin, since a model asks for the size of its mask. The mask
        function tells next if the pass streams; see `announce_streaming`.

        Raises:
            TieredCacheError: the pass before ended after it had changed recurrent states, and nothing else.
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
        """Note that a call of `generate` is about to use the cache.

        Raises:
            TieredCacheError, UnsupportedModelError: as for `check`.
        """
        self.check(layers)
        self._generating = call

    def enter(self, layer_idx: int, layers: Sequence[Any]) -> ForwardPass:
        """Begin the update of a layer; return the pass to which it belongs.

        Raises:
            TieredCacheError: the pass before was not complete, or another thread is running one.
            UnsupportedModelError: the attention function did not take the tokens of the update before.
        """
        current = self._pass
        if current is None or layer_idx in current.before or not current.is_mine or self._is_unfinished:
            current = self._begin(layers, sys._getframe(2))
        elif current.pending is not None:
            _check_taken(current.pending)
        current.before.setdefault(layer_idx, layers[layer_idx].get_seq_length())
        return current

    def leave(self, layer_idx: int) -> None:
        """End the update of a layer."""
        if self._pass is not None:
            self._pass.updated.add(layer_idx)

    def leave_to_attention(self, pending: _Pending) -> _Pending:
        """Note that the attention function adds the tokens of this update. Returns `pending`."""
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
                    return last  # a cache may be filled by hand, layer by layer and in pieces
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

    # -- checks -----------------------------------------------------------------------------------------

    def check_thread(self) -> None:
        """Raise if another thread is using the cache.

        Raises:
            TieredCacheError: one is running a forward pass, or `generate`.
        """
        call, last = self._generating, self._pass
        if call is not None and call.thread_id != threading.get_ident() and call.is_running:
            raise _two_threads()
        if last is not None and last.forward and last.is_running_elsewhere:
            raise _two_threads()

    def check(self, layers: Sequence[Any]) -> None:
        """Raise unless the last pass, and the last call that changed all layers, were completed.

        Raises:
            TieredCacheError: one was not, or another thread is running it; the message says what to do.
            UnsupportedModelError: the attention function did not take the tokens of the last update.
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
            # That call of `generate` continues, so the pass did not fail: the model does not use these layers.
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
        """Raise if a change of all layers that cannot be undone was not completed.

        Raises:
            TieredCacheError: it was not; only a reset helps.
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
        """Return the layers that a complete pass would have updated; none if the pass changed nothing."""
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

    # -- changes of all layers --------------------------------------------------------------------------------

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
        """Change all layers in a way that cannot be undone. If it is not completed, only a reset helps.

        Args:
            what: for the error message.
        """
        self._changing = what
        yield
        self._changing = None

    @contextmanager
    def cropping(self, targets: Mapping[int, int]) -> Iterator[None]:
        """Crop layers to these numbers of tokens. Completes a pass or crop that was incomplete."""
        self._cropping = dict(targets)
        yield
        self.settle()

    def unchanged(self) -> None:
        """Take back the note of a change that the first layer refused."""
        self._changing = self._cropping = None

    def settle(self) -> None:
        """Note that all layers are consistent."""
        self._pass = self._states_next = None
        self._changing = self._cropping = None


class _Sized(threading.local):
    """The passes whose mask size a thread has asked for."""

    passes: weakref.ref[ForwardPasses] | None = None


_sized = _Sized()


def announce_streaming() -> None:
    """Note that the coming pass uses streaming attention, since its mask is made for the `"tiered"` attention."""
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
    """Raise if the attention function did not add the tokens of the last update."""
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
        "another thread is using this cache, which serves one thread at a time. Give each thread a cache "
        "of its own (on one KVCacheManager they share their memory), or wait for the other one"
    )
