"""Which sealed blocks are in which place, as arrays over the slots of the heat table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..core.blocks import Block
from .heat import Mask, Slots


class Places:
    """The blocks that live, by slot, and a mask for each place. Not locked: the caller holds a lock.

    Args:
        names: of the places, the nearest first.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._blocks: list[Block | None] = []
        self._masks: dict[str, Mask] = {name: np.zeros(0, np.bool_) for name in names}
        self._busy = np.zeros(0, np.int32)

    def add(self, name: str) -> None:
        """There is one more place."""
        self._masks[name] = np.zeros(len(self._blocks), np.bool_)

    def enter(self, block: Block) -> None:
        """A block lives, with its slot; it is nowhere yet."""
        while block.slot >= len(self._blocks):
            self._grow(max(64, 2 * len(self._blocks)))
        self._blocks[block.slot] = block

    def leave(self, block: Block) -> None:
        """A block lives no longer; its slot may become another's."""
        self._blocks[block.slot] = None
        self._busy[block.slot] = 0
        for mask in self._masks.values():
            mask[block.slot] = False

    def set(self, block: Block, place: str, there: bool) -> None:
        """A copy of the block is in a place, or is not any more."""
        if place in self._masks and block.slot >= 0:
            self._masks[place][block.slot] = there

    def hold(self, blocks: Iterable[Block], count: int) -> None:
        """So many more moves or reads, or less, are using these blocks."""
        for block in blocks:
            if block.slot >= 0:
                self._busy[block.slot] += count

    def at_rest(self, place: str) -> Slots:
        """Slots of the blocks in a place that nobody is using."""
        return np.flatnonzero(self._masks[place] & (self._busy == 0))

    def in_use(self, slots: Slots) -> Slots:
        """Those of some slots whose blocks somebody is using."""
        in_use: Slots = slots[self._busy[slots] != 0]
        return in_use

    def everything_in(self, place: str) -> Slots:
        """Slots of all blocks in a place."""
        return np.flatnonzero(self._masks[place])

    def at_rest_elsewhere(self, slots: Slots, places: Sequence[str]) -> Slots:
        """Those of some slots, some maybe out of date, that nobody is using and that are in none of the places."""
        slots = slots[slots < len(self._blocks)]
        absent = self._busy[slots] == 0
        for place in places:
            absent &= ~self._masks[place][slots]
        return np.array([slot for slot in slots[absent].tolist() if self._blocks[slot] is not None], np.int64)

    def blocks(self, slots: Slots) -> list[Block]:
        """The blocks of some slots."""
        found = [self._blocks[slot] for slot in slots.tolist()]
        return [block for block in found if block is not None]

    def _grow(self, size: int) -> None:
        more = size - len(self._blocks)
        self._blocks += [None] * more
        self._busy = np.concatenate([self._busy, np.zeros(more, np.int32)])
        for name, mask in self._masks.items():
            self._masks[name] = np.concatenate([mask, np.zeros(more, np.bool_)])
