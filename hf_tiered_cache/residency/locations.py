"""The places that hold a copy of each sealed block, as masks over the slots of the heat table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..core.blocks import Block
from .heat import Mask, Slots


class BlockLocations:
    """The registered blocks by slot, and one mask per place. Not thread-safe: the caller holds a lock.

    Args:
        names: of the places, the nearest first.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._blocks: list[Block | None] = []
        self._masks: dict[str, Mask] = {name: np.zeros(0, np.bool_) for name in names}
        self._busy = np.zeros(0, np.int32)

    def add(self, name: str) -> None:
        """Add a place."""
        self._masks[name] = np.zeros(len(self._blocks), np.bool_)

    def register(self, block: Block) -> None:
        """Add a block that has a slot. No place holds it yet."""
        while block.slot >= len(self._blocks):
            self._grow(max(64, 2 * len(self._blocks)))
        self._blocks[block.slot] = block

    def unregister(self, block: Block) -> None:
        """Remove a block. Its slot may go to another block."""
        self._blocks[block.slot] = None
        self._busy[block.slot] = 0
        for mask in self._masks.values():
            mask[block.slot] = False

    def set(self, block: Block, place: str, there: bool) -> None:
        """Record that a place holds a copy of the block, or no longer does."""
        if place in self._masks and block.slot >= 0:
            self._masks[place][block.slot] = there

    def hold(self, blocks: Iterable[Block], count: int) -> None:
        """Add `count`, which may be negative, to the number of moves and reads that use each block."""
        for block in blocks:
            if block.slot >= 0:
                self._busy[block.slot] += count

    def idle(self, place: str) -> Slots:
        """Return the slots of the blocks in a place that no move or read uses."""
        return np.flatnonzero(self._masks[place] & (self._busy == 0))

    def in_use(self, slots: Slots) -> Slots:
        """Return the slots among these whose blocks a move or read uses."""
        in_use: Slots = slots[self._busy[slots] != 0]
        return in_use

    def everything_in(self, place: str) -> Slots:
        """Return the slots of all blocks in a place."""
        return np.flatnonzero(self._masks[place])

    def idle_elsewhere(self, slots: Slots, places: Sequence[str]) -> Slots:
        """Return the slots among these that are idle and that none of the places holds.

        Slots whose block was unregistered are left out.
        """
        slots = slots[slots < len(self._blocks)]
        absent = self._busy[slots] == 0
        for place in places:
            absent &= ~self._masks[place][slots]
        return np.array([slot for slot in slots[absent].tolist() if self._blocks[slot] is not None], np.int64)

    def blocks(self, slots: Slots) -> list[Block]:
        """Return the blocks of these slots."""
        found = [self._blocks[slot] for slot in slots.tolist()]
        return [block for block in found if block is not None]

    def _grow(self, size: int) -> None:
        more = size - len(self._blocks)
        self._blocks += [None] * more
        self._busy = np.concatenate([self._busy, np.zeros(more, np.int32)])
        for name, mask in self._masks.items():
            self._masks[name] = np.concatenate([mask, np.zeros(more, np.bool_)])
