"""Where sealed blocks are: the copies of each, and how they are read.

    seal ──▶ staging ──write-back──▶ L1 ──demotion──▶ L2
                │                     │                │
                └───────── read: the nearest copy ─────┘

Every move makes the lower copy, waits until it is complete, flips the residency under the lock, and lets the upper
copy go. So a block always has a complete copy, and a read that has begun keeps its copy alive by a pin.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress

from .blocks import STAGING, Bits, Block, BlockCopy, BlockKey
from .errors import TierError
from .eviction import EvictionPolicy
from .metrics import Metrics
from .tiers import Tier, TierIO
from .transfer.staging import StagingSlot
from .transfer.worker import Worker


class Residency:
    """Copies of blocks, in staging and in the tiers. Reads run on the caller's thread and block.

    Methods that end in `_locked` are called with `changed` held.

    Invariants:
        - a referenced block has at least one copy, so `read` can always load it;
        - `copies` names a tier only while the tier can read the block.

    Args:
        tiers: from the nearest to the farthest.
        policies: for each tier but the last, which blocks leave first; told of what comes and goes.
        metrics: counts bytes.
        background: deletes what nobody needs.
    """

    def __init__(
        self, tiers: Sequence[Tier], policies: Sequence[EvictionPolicy], metrics: Metrics, background: Worker
    ) -> None:
        self.tiers = {tier.name: tier for tier in tiers}
        self.policies = {tier.name: policy for tier, policy in zip(tiers, policies, strict=False)}
        self.changed = threading.Condition()
        self.delete_failure: TierError | None = None
        self._metrics = metrics
        self._background = background
        self._resident: dict[BlockKey, Block] = {}
        self._held_by_reads: Counter[str] = Counter()
        self._garbage: list[tuple[Tier, BlockKey]] = []

    def add_locked(self, block: Block, slot: StagingSlot) -> None:
        """A new block, with its caller's reference, and its first copy."""
        block.copies[STAGING] = BlockCopy(slot)
        self._resident[block.key] = block

    def retain(self, blocks: Iterable[Block]) -> None:
        """Count one more reference to each block."""
        with self.changed:
            for block in blocks:
                block.references += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Count one reference less; what nobody references any more is deleted in the background."""
        with self.changed:
            for block in blocks:
                block.references -= 1
                if block.references == 0:
                    for place in list(block.copies):
                        self.remove_copy_locked(block, place)
                    del self._resident[block.key]
        self._collect_soon()

    def read(self, blocks: Sequence[Block], target: Bits) -> None:
        """Load blocks of one layout into host memory, each from its nearest copy; blocks.

        Args:
            blocks: each referenced by the caller.
            target: `[len(blocks), rows, row_elements]`; undefined when this raises.

        Raises:
            TierReadError: a block could not be read.
        """
        with self.changed:
            places = [next(iter(block.copies)) for block in blocks]  # in the order of the moves: nearest first
            copies = [block.copies[place] for block, place in zip(blocks, places, strict=True)]
            for copy in copies:
                copy.pins += 1
        try:
            self._read_pinned(blocks, places, copies, target)
        finally:
            with self.changed:
                for block, copy in zip(blocks, copies, strict=True):
                    self.unpin_locked(block, copy)
            self._collect_soon()

    def find_locked(self, keys: Iterable[BlockKey]) -> list[Block]:
        """The blocks of these names."""
        return [self._resident[key] for key in keys]

    def arrive_locked(self, block: Block, tier: Tier) -> None:
        """The tier has stored the block."""
        block.copies[tier.name] = BlockCopy(tier)
        if tier.name in self.policies:
            self.policies[tier.name].admit(block.key)
        if block.references == 0:  # dropped while it was being written
            self.remove_copy_locked(block, tier.name)

    def remove_copy_locked(self, block: Block, place: str) -> None:
        """Later reads take another copy; this one is dropped when the last read that holds it has ended."""
        copy = block.copies.pop(place, None)
        if copy is None:
            return
        copy.doomed = True
        if place in self.policies:
            self.policies[place].forget(block.key)
        if copy.pins == 0:
            self._drop_locked(block, copy)
        else:
            self._held_by_reads[place] += 1

    def unpin_locked(self, block: Block, copy: BlockCopy) -> None:
        """A read, or a write from staging, has ended."""
        copy.pins -= 1
        if copy.doomed and copy.pins == 0:
            self._held_by_reads[STAGING if isinstance(copy.origin, StagingSlot) else copy.origin.name] -= 1
            self._drop_locked(block, copy)
            self.changed.notify_all()

    def room_will_come_locked(self, tier: Tier) -> bool:
        """Whether copies leave the tier as soon as the reads that hold them have ended."""
        return self._held_by_reads[tier.name] > 0

    def collect(self) -> bool:
        """Delete the copies that nobody needs; blocks. Whether that freed any room.

        What cannot be deleted is tried again the next time, and told in `delete_failure`.
        """
        with self.changed:
            garbage, self._garbage = self._garbage, []
        failed = []
        for tier, key in garbage:
            try:
                tier.delete(key)
            except TierError as error:
                failed.append((tier, key))
                self.delete_failure = error
        with self.changed:
            self._garbage += failed
        return len(failed) < len(garbage)

    def _collect_soon(self) -> None:
        if self._garbage:
            with suppress(RuntimeError):  # closing: the whole directory goes
                self._background.submit(self.collect)

    def _drop_locked(self, block: Block, copy: BlockCopy) -> None:
        if isinstance(copy.origin, StagingSlot):
            copy.origin.pool.release(copy.origin)
        else:
            self._garbage.append((copy.origin, block.key))

    def _read_pinned(
        self, blocks: Sequence[Block], places: Sequence[str], copies: Sequence[BlockCopy], target: Bits
    ) -> None:
        loads: list[TierIO] = []
        failure: Exception | None = None
        for first, end in _equal_runs(places):
            try:
                if places[first] == STAGING:
                    for position in range(first, end):
                        slot: StagingSlot = copies[position].origin
                        assert slot.ready is not None
                        slot.ready.wait()
                        target[position] = slot.bits(blocks[position].layout)[0]
                else:
                    tier, run = self.tiers[places[first]], blocks[first:end]
                    loads.append(tier.read_into([block.key for block in run], run[0].layout, target[first:end]))
                    self._metrics.count(**{f"{tier.name}_read": sum(block.layout.nbytes for block in run)})
            except Exception as error:
                failure = failure or error
        for load in loads:  # to the last, even after a failure: nothing may still write to `target`
            try:
                load.result()
            except TierError as error:
                failure = failure or error
        if failure is not None:
            raise failure


def _equal_runs(items: Sequence[str]) -> Iterator[tuple[int, int]]:
    """First and end of each run of equal items."""
    first = 0
    for position in range(1, len(items) + 1):
        if position == len(items) or items[position] != items[first]:
            yield first, position
            first = position
