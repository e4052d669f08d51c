"""Random traces of stated distributions, to compare eviction policies. The same seed gives the same trace."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from ..residency.heat import Slots
from ..residency.replay import RecordingTable, Trace

_LAYERS = 4
_SEAL_STEPS = 16  # a request seals a block per layer each time it has taken this many steps

_READ_SHARE = 0.16
_DRIFT = 0.02

_REQUESTS = 4
_BLOCKS_OF_MIX = (24, 72)
_PERIOD_ROUNDS = (50, 150)
_PERIODS = 3


class _Layer:
    """One layer of one request: its blocks, and the state of a skewed choice among them."""

    def __init__(self, table: RecordingTable) -> None:
        self.group = table.new_group()
        self.slots = np.empty(0, np.int64)
        self.ranking = np.empty(0, np.int64)
        self.favourites = np.empty(0, np.int64)


Choice = Callable[[_Layer], Slots]
"""The positions of the blocks that a layer reads in a step."""


def everything(layer: _Layer) -> Slots:
    """Return all of them, as in exact attention."""
    return np.arange(len(layer.slots))


class Skewed:
    """Random selective attention: in each step 16 % of a layer's blocks are read.

    Blocks are drawn without replacement, with weights `1 / (rank · (1 + distance))`: Zipf's law over a random
    ranking, in which 2 % of the blocks change places in each step, times a preference for the newest. A share
    of each choice are favourites, which stay for 50 steps on average; the others are drawn anew in each step.

    Args:
        random: the random generator.
        favourites: their share. With 0.8, 83 % of a choice were in the one before, as measured on SmolLM2-135M.
        leaving: probability that a favourite leaves, per step. If it is large and `favourites=1`, choices depend
            on the last choice alone.
    """

    def __init__(self, random: np.random.Generator, favourites: float = 0.8, leaving: float = 0.02) -> None:
        self._random = random
        self._favourites = favourites
        self._leaving = leaving

    def __call__(self, layer: _Layer) -> Slots:
        blocks = len(layer.slots)
        read = round(_READ_SHARE * blocks)
        weights = self._weights(layer)
        layer.favourites = layer.favourites[self._random.random(len(layer.favourites)) >= self._leaving]
        missing = round(self._favourites * read) - len(layer.favourites)
        layer.favourites = np.concatenate([layer.favourites, self._draw(missing, weights, layer.favourites)])
        others = self._draw(read - len(layer.favourites), weights, layer.favourites)
        return np.concatenate([layer.favourites, others])

    def _weights(self, layer: _Layer) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
        blocks = len(layer.slots)
        for block in range(len(layer.ranking), blocks):  # a new one takes a random rank
            layer.ranking = np.insert(layer.ranking, self._random.integers(block + 1), block)
        for _ in range(self._random.binomial(blocks, _DRIFT / 2)):
            pair = self._random.integers(blocks, size=2)
            layer.ranking[pair] = layer.ranking[pair[::-1]]
        weights = 1 / np.arange(blocks, 0, -1)
        weights[layer.ranking] /= np.arange(1, blocks + 1)
        return weights

    def _draw(self, count: int, weights: np.ndarray[tuple[int], np.dtype[np.float64]], without: Slots) -> Slots:
        # The smallest of exponential noise over weight (Efraimidis and Spirakis, Inf. Process. Lett. 97(5), 2006).
        order = np.argsort(self._random.exponential(size=len(weights)) / weights)
        return order[~np.isin(order, without)][: max(0, count)]


class _Request:
    """A sequence that is being decoded."""

    def __init__(self, table: RecordingTable, blocks: int, choose: Choice) -> None:
        self._table = table
        self._choose = choose
        self._layers = [_Layer(table) for _ in range(_LAYERS)]
        self._steps = 0
        table.tick()
        for _ in range(blocks):
            self._seal()

    def step(self) -> None:
        """Run a forward pass of one token."""
        self._table.tick()
        self._steps += 1
        if self._steps % _SEAL_STEPS == 0:
            self._seal()
        for layer in self._layers:
            self._table.touch(layer.slots[self._choose(layer)])

    def close(self) -> None:
        """Free all blocks."""
        for layer in self._layers:
            self._table.remove(layer.slots)
            self._table.free_group(layer.group)

    def _seal(self) -> None:
        for layer in self._layers:
            layer.slots = np.append(layer.slots, self._table.add(layer.group, len(layer.slots)))


def decode(choose: Choice, blocks: int = 96, steps: int = 400) -> Trace:
    """Return the trace of one request of 4 layers, which grow by a block every 16 steps."""
    table = RecordingTable()
    request = _Request(table, blocks, choose)
    for _ in range(steps):
        request.step()
    return table.trace


def mix(random: np.random.Generator, choose: Choice, rounds: int = 400) -> Trace:
    """Return the trace of four requests of 4 layers and 24 to 72 blocks each.

    In a round each active one takes a step. A request is active for 50 to 150 rounds and pauses for as many; after
    three periods another takes its place. All of this is drawn uniformly.
    """
    table = RecordingTable()
    places = [_Place(table, random, choose) for _ in range(_REQUESTS)]
    for now in range(rounds):
        for place in places:
            place.turn(now)
    return table.trace


class _Place:
    """One request of a mix, and its successors."""

    def __init__(self, table: RecordingTable, random: np.random.Generator, choose: Choice) -> None:
        self._table = table
        self._random = random
        self._choose = choose
        self._request: _Request | None = None
        self._active = False
        self._periods = 0
        self._change_at = int(random.integers(_PERIOD_ROUNDS[0]))

    def turn(self, now: int) -> None:
        if now == self._change_at:
            self._change_at += int(self._random.integers(*_PERIOD_ROUNDS))
            self._active = not self._active
            if self._active and self._request is None:
                self._request = _Request(self._table, int(self._random.integers(*_BLOCKS_OF_MIX)), self._choose)
            self._periods += self._active
            if not self._active and self._periods == _PERIODS and self._request is not None:
                self._request.close()
                self._request, self._periods = None, 0
        if self._active and self._request is not None:
            self._request.step()
