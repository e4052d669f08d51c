"""Requests whose content can be checked while many threads use them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from hf_tiered_cache import KVCacheManager

from .crew import UNIT, Layer, assert_attention, codes_from, codes_of, tokens_of


class Known:
    """A request whose tokens the test knows. A caller of the manager holds `lock`."""

    def __init__(self, request_id: str, layers: dict[int, Layer] | None = None) -> None:
        self.request_id = request_id
        self.layers = layers or {}
        self.lock = threading.Lock()

    def tokens(self, layer_id: int) -> int:
        return self.layers[layer_id][0].shape[2] if layer_id in self.layers else 0


class Open:
    """A request on which several threads call at will, and a record of their calls.

    In every serial order, a layer consists of whole calls, those of one thread in their order. Once it is `full`,
    the last of its `users` closes it.
    """

    full_tokens = 500

    def __init__(self, manager: KVCacheManager, request_id: str) -> None:
        self.manager = manager
        self.request_id = request_id
        self.users = 0
        self.full = False
        self.lock = threading.Lock()
        self.calls: dict[int, dict[int, int]] = {
            0: {},
            1: {},
        }  # of each layer: first code of a call, and its tokens
        self._written: Counter[tuple[int, int]] = Counter()
        manager.allocate(request_id)

    def new_tokens(self, layer_id: int, writer: int, count: int) -> torch.Tensor:
        """Return codes for a call that is about to be made."""
        with self.lock:
            codes = codes_from(writer, self._written[layer_id, writer], count)
            self._written[layer_id, writer] += count
            self.calls[layer_id][int(codes[0])] = count
            if sum(self.calls[layer_id].values()) > self.full_tokens:
                self.full = True
        return codes

    def saw(self, layer_id: int, found: Layer, own: torch.Tensor | None = None) -> None:
        """Check tokens read from the start of a layer; they end with `own`, if that was just added."""
        codes, swapped = codes_of(found)
        if own is not None:
            assert torch.equal(codes[len(codes) - len(own) :], own), "update does not end with its own tokens"
        self.check(layer_id, codes, swapped)

    def check(self, layer_id: int, codes: torch.Tensor, swapped: torch.Tensor) -> None:
        """Fail unless a layer can hold these tokens. For subclasses."""
        raise NotImplementedError

    def close(self) -> None:
        """Check the content after the last call, and free the request."""
        for layer_id, calls in self.calls.items():
            if calls:
                tokens = self.manager.tokens(self.request_id, layer_id)
                assert tokens == self.final_tokens(layer_id), f"{self.request_id}, layer {layer_id}"
                self.saw(layer_id, self.manager.fetch(self.request_id, layer_id, range(tokens)))
        self.manager.free(self.request_id)

    def final_tokens(self, layer_id: int) -> int:
        return sum(self.calls[layer_id].values())


class Growing(Open):
    """An open request to which tokens are only added: every state seen is a prefix of the final one.

    Results that can be checked only at the end are kept: `fetched` are layer, positions and codes, `attended` are
    layer, own tokens, query and output.
    """

    def __init__(self, manager: KVCacheManager, request_id: str) -> None:
        super().__init__(manager, request_id)
        self.fetched: list[tuple[int, list[int], torch.Tensor]] = []
        self.attended: list[tuple[int, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        self._longest = {layer_id: torch.empty(0, dtype=torch.long) for layer_id in self.calls}

    def check(self, layer_id: int, codes: torch.Tensor, swapped: torch.Tensor) -> None:
        assert not swapped.any()
        with self.lock:
            calls = dict(self.calls[layer_id])
            shorter, longer = sorted((codes, self._longest[layer_id]), key=len)
            assert torch.equal(longer[: len(shorter)], shorter), "two threads saw different tokens"
            self._longest[layer_id] = longer
        position, next_number = 0, Counter[int]()
        while position < len(codes):
            writer, number = divmod(int(codes[position]), UNIT)
            assert number == next_number[writer], (
                f"writer {writer}: {next_number[writer]} expected, {number} found"
            )
            count = calls[int(codes[position])]
            assert torch.equal(codes[position : position + count], codes_from(writer, number, count)), (
                f"the call of writer {writer} from {number} on is torn at {position}"
            )
            next_number[writer] += count
            position += count

    def close(self) -> None:
        super().close()
        for layer_id, positions, codes in self.fetched:
            assert torch.equal(self._longest[layer_id][positions], codes)
        for layer_id, own, query, output in self.attended:
            codes = self._longest[layer_id]
            end = int((codes == own[-1]).nonzero()) + 1
            assert_attention(output, query, tokens_of(codes[:end]))


class Changing(Open):
    """An open request that is also cropped and has its rows swapped. A thread removes no more tokens than it has
    added, so the first tokens stay."""

    full_tokens = 3000
    first_tokens = 40

    def __init__(self, manager: KVCacheManager, request_id: str) -> None:
        super().__init__(manager, request_id)
        self.cropped: Counter[int] = Counter()
        self.credit: Counter[tuple[int, int]] = Counter()  # by layer and writer: tokens that it may remove
        self.swaps: Counter[int] = Counter()
        for layer_id in self.calls:
            codes = self.new_tokens(layer_id, 15, self.first_tokens)
            manager.append(request_id, layer_id, *tokens_of(codes))

    def check(self, layer_id: int, codes: torch.Tensor, swapped: torch.Tensor) -> None:
        with self.lock:
            calls = dict(self.calls[layer_id])
        assert torch.equal(codes[: self.first_tokens], codes_from(15, 0, self.first_tokens))
        last_number: dict[int, int] = {}
        for position, code in enumerate(codes.tolist()):
            writer, number = divmod(code, UNIT)
            assert number > last_number.get(writer, -1), f"token {number} of writer {writer} is out of order"
            last_number[writer] = number
            if code not in calls:
                assert position and code == codes[position - 1] + 1, f"a call is torn at {position}"
                assert swapped[position] == swapped[position - 1], f"half a call is swapped at {position}"

    def final_tokens(self, layer_id: int) -> int:
        return super().final_tokens(layer_id) - self.cropped[layer_id]

    def close(self) -> None:
        for layer_id in self.calls:
            first = self.manager.fetch(self.request_id, layer_id, [0])
            assert codes_of(first)[1].item() == self.swaps[layer_id] % 2, "a swap of rows is lost"
        super().close()


class Succession:
    """Open requests of one kind: when one is full, the next replaces it."""

    def __init__(self, make: Callable[[], Open]) -> None:
        self._make = make
        self._lock = threading.Lock()
        self._current: Open | None = None

    @contextmanager
    def use(self) -> Iterator[Any]:
        with self._lock:
            if self._current is None or self._current.full:
                self._current = self._make()
            request = self._current
            request.users += 1
        yield request
        with self._lock:
            request.users -= 1
            last = request.full and request.users == 0
        if last:
            request.close()

    def close(self) -> None:
        if self._current is not None and not self._current.full:
            self._current.close()
