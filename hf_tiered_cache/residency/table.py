"""The copies of each sealed block: registration, reads, and the record of their use.

    seal ──▶ staging ──write-back──▶ host ◀──▶ L1 ◀──▶ L2      demotion ──▶  ◀── promotion
                │                      │        │       │
                └──────────── read: the nearest copy ───┘

Every move writes the new copy, waits until it is complete, updates the table under the lock, and frees the old
copy. So a block always has a complete copy, and a read that has begun pins its copy. A promotion leaves the lower
copy where it is: the upper one is *clean*, and is demoted without being written again.
"""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import TypeVar

import numpy as np
import torch

from ..core.blocks import STAGING, Bits, Block, BlockCopy, BlockTable
from ..core.errors import TierError
from ..core.locks import TimedCondition
from ..core.metrics import Metrics
from ..tiers import Tier, TierIO
from ..tiers.io import caused_by, failures_as_tier_errors
from ..transfer.staging import StagingSlot
from ..transfer.worker import Worker
from .eviction import EvictionPolicy
from .garbage import Garbage
from .heat import Floats, HeatTable, Slots
from .locations import BlockLocations

logger = logging.getLogger(__name__)

T = TypeVar("T")

# Blocks read from lower tiers, among which promotions choose.
_REMEMBERED_MISSES = 1024
# Blocks that are released under one hold of the lock, which other threads need, too.
_RELEASED_TOGETHER = 512


class ResidencyTable:
    """Copies of blocks, in staging and in the tiers. Reads run on the caller's thread and block.

    Methods that end in `_locked` are called with `changed` held, and so are those of `heat` and `locations`.

    Invariants:
        - a referenced block has at least one copy, so `read` can always load it;
        - `copies` names a tier only while the tier can read the block, the nearest first.

    Args:
        tiers: from the nearest to the farthest.
        metrics: counts bytes.
        background: deletes copies that are no longer needed.
    """

    def __init__(self, tiers: Sequence[Tier], metrics: Metrics, background: Worker) -> None:
        self.tiers = {tier.name: tier for tier in tiers}
        self.heat = HeatTable()
        self.locations = BlockLocations([tier.name for tier in tiers])
        self.changed = TimedCondition(metrics)
        self._failure: TierError | None = None
        self._nearness = {place: rank for rank, place in enumerate((STAGING, *self.tiers))}
        self._groups: dict[tuple[str, int], int] = {}
        self._missed: deque[int] = deque(maxlen=_REMEMBERED_MISSES)
        self._reading = 0
        self._metrics = metrics
        self._background = background
        self._held_by_reads: Counter[str] = Counter()
        self.garbage = Garbage(self.changed, background, self.report)

    # -- blocks and references to them ----------------------------------------------------------------------------

    def add_locked(self, block: Block, staged: StagingSlot) -> None:
        """Add a new block, with its caller's reference, and its first copy."""
        group = self._groups.get(block.key[:2])
        if group is None:
            group = self._groups[block.key[:2]] = self.heat.new_group()
        block.slot = self.heat.add(group, block.key.block_idx)
        block.copies[STAGING] = BlockCopy(staged)
        self.locations.register(block)

    def retain(self, blocks: Iterable[Block]) -> None:
        """Count one more reference to each block."""
        with self.changed:
            for block in blocks:
                block.references += 1

    def release(self, blocks: Iterable[Block]) -> None:
        """Count one reference less to each block; unreferenced blocks are deleted in the background."""
        remaining = iter(blocks)
        while some := list(islice(remaining, _RELEASED_TOGETHER)):
            with self.changed:
                self._release_locked(some)
        self.garbage.collect_soon()

    def _release_locked(self, blocks: Sequence[Block]) -> None:
        unneeded = []
        for block in blocks:
            block.references -= 1
            if block.references == 0 and block.slot >= 0:  # else an interrupt struck while it was being sealed
                unneeded.append(block)
        for block in unneeded:
            if block.resident is not None:
                block.resident.pool.forget_locked(block)
            for place in list(block.copies):
                self.remove_copy_locked(block, place)
            self.locations.unregister(block)
        self.heat.remove(np.array([block.slot for block in unneeded], np.int64))
        for block in unneeded:
            block.slot = -1

    def truncate(self, table: BlockTable, keep_blocks: int) -> None:
        """Cut a layer to its first `keep_blocks` blocks."""
        dropped = table.truncate(keep_blocks)
        with self.changed:
            group = self._groups.get((table.namespace, table.layer_idx))
            if group is not None:
                self.heat.truncate(group, keep_blocks)
        self.release(dropped)

    def forget(self, table: BlockTable) -> None:
        """Drop a layer with its blocks."""
        self.truncate(table, 0)
        with self.changed:
            group = self._groups.pop((table.namespace, table.layer_idx), None)
            if group is not None:
                self.heat.free_group(group)

    # -- how they are used ----------------------------------------------------------------------------------------

    def step(self) -> None:
        """Begin a forward pass."""
        with self.changed:
            self.heat.tick()

    def touch(self, slots: Slots) -> None:
        """Record that attention reads the blocks of these slots."""
        with self.changed:
            self.heat.touch(slots)

    def access_probability(self, slots: Slots) -> Floats:
        """Return the probability that each block is read in the next step, float32."""
        with self.changed:
            return self.heat.access_probability(slots)

    def misses_locked(self) -> Slots:
        """Return the slots of blocks that were read from another tier than the nearest since the last call.

        Some of these blocks may have been freed. Those that are in use now are returned again next time.
        """
        missed = np.unique(np.array(self._missed, np.int64))
        self._missed.clear()
        self._missed.extend(self.locations.in_use(missed).tolist())
        return missed

    def wait_for_reads(self, seconds: float) -> None:
        """Wait until no read is under way, for `seconds` at most."""
        with self.changed:
            self.changed.wait_for(lambda: self._reading == 0, seconds)

    # -- reading --------------------------------------------------------------------------------------------------

    def read(self, blocks: Sequence[Block], target: Bits, wanted: bool = True) -> None:
        """Load blocks of one layout into host memory, each from its nearest copy. Blocks.

        Args:
            blocks: each referenced by the caller.
            target: `[len(blocks), rows, row_elements]`; undefined when this raises.
            wanted: whether attention needs them, and not just a move.

        Raises:
            TierReadError: a block could not be read.
        """
        with self.changed:
            self._reading += wanted
            places = [next(iter(block.copies)) for block in blocks]
            copies = [block.copies[place] for block, place in zip(blocks, places, strict=True)]
            for copy in copies:
                copy.pins += 1
            self.locations.hold(blocks, 1)
            if wanted:
                self._count_hits_locked(blocks, places)
        try:
            self._read_pinned(blocks, places, copies, target)
        finally:
            with self.changed:
                self._reading -= wanted
                self.locations.hold(blocks, -1)
                for block, copy in zip(blocks, copies, strict=True):
                    self.unpin_locked(block, copy)
                if self._reading == 0:
                    self.changed.notify_all()
            self.garbage.collect_soon()

    @contextmanager
    def in_memory(self, blocks: Sequence[Block]) -> Iterator[list[torch.Tensor | None]]:
        """Yield for each block its nearest copy, flat uint8, or `None` if a device cannot read it in place.

        The copies are valid inside the context.
        """
        tier = next(iter(self.tiers.values()))
        with self.changed:
            nearest = [next(iter(block.copies.values())) for block in blocks]
            copies = [copy if copy.origin is tier else None for copy in nearest]
            held = [(block, copy) for block, copy in zip(blocks, copies, strict=True) if copy is not None]
            for _, copy in held:
                copy.pins += 1
            self.locations.hold((block for block, _ in held), 1)
        try:
            with failures_as_tier_errors(f"{tier.name}: blocks in memory"):
                tensors = [
                    None if copy is None else tier.tensor(block.key)
                    for block, copy in zip(blocks, copies, strict=True)
                ]
            yield tensors
        finally:
            with self.changed:
                self.locations.hold((block for block, _ in held), -1)
                for block, copy in held:
                    self.unpin_locked(block, copy)
            self.garbage.collect_soon()

    def count_in_memory(self, blocks: Sequence[Block]) -> None:
        """Count blocks that a device has read in place."""
        name = next(iter(self.tiers))
        nbytes = sum(block.layout.nbytes for block in blocks)
        self._metrics.count(**{f"{name}_hits": len(blocks), f"{name}_read": nbytes})

    def _count_hits_locked(self, blocks: Sequence[Block], places: Sequence[str]) -> None:
        self._metrics.count(**{f"{place}_hits": count for place, count in Counter(places).items()})
        nearest = next(iter(self.tiers))
        self._missed.extend(
            block.slot for block, place in zip(blocks, places, strict=True) if place not in (STAGING, nearest)
        )

    # -- adding and removing copies -------------------------------------------------------------------------------

    def arrive_locked(self, block: Block, tier: Tier) -> None:
        """Record that a tier has stored a block."""
        block.copies[tier.name] = BlockCopy(tier)
        if block.references == 0:  # dropped while it was being written
            self.remove_copy_locked(block, tier.name)
            return
        if len(block.copies) > 1:
            block.copies = dict(sorted(block.copies.items(), key=lambda item: self._nearness[item[0]]))
        self.locations.set(block, tier.name, there=True)

    def remove_copy_locked(self, block: Block, place: str) -> None:
        """Remove a copy: later reads take another one, and it is freed when the last read that pins it ends."""
        copy = block.copies.pop(place, None)
        if copy is None:
            return
        copy.doomed = True
        if place != STAGING:
            block.leaving.add(place)
        self.locations.set(block, place, there=False)
        if copy.pins == 0:
            self._drop_locked(block, copy)
        else:
            self._held_by_reads[place] += 1

    def unpin_locked(self, block: Block, copy: BlockCopy) -> None:
        """Unpin a copy after a read, or after a write from staging."""
        copy.pins -= 1
        if copy.doomed and copy.pins == 0:
            self._held_by_reads[STAGING if isinstance(copy.origin, StagingSlot) else copy.origin.name] -= 1
            self._drop_locked(block, copy)
            self.changed.notify_all()

    def room_will_come_locked(self, tier: Tier) -> bool:
        """Return true if copies leave the tier as soon as the reads that pin them end."""
        return self._held_by_reads[tier.name] > 0

    # -- what goes wrong ------------------------------------------------------------------------------------------

    def ask(self, policy: EvictionPolicy, question: Callable[[EvictionPolicy], T]) -> T:
        """Query a policy, and once more if that fails.

        May be called with the lock held, on a thread of the package.

        Args:
            policy: possibly the user's.
            question: the query, which changes nothing.

        Raises:
            TierError: the policy failed twice. The next `take_failure` returns the error, too.
        """
        try:
            return question(policy)
        except BaseException as error:
            logger.debug("%s: %r; asking again", type(policy).__name__, error)
        try:
            return question(policy)
        except BaseException as error:
            failure = caused_by(
                error, f"the eviction policy {type(policy).__qualname__} failed; nothing was moved"
            )
        self.report(failure)
        raise failure

    def report(self, failure: TierError) -> None:
        """Keep the error of background work that no caller waits for; the user's next call raises it."""
        self._failure = failure

    def take_failure(self) -> TierError | None:
        """Return the error that was reported last, unless it was returned before."""
        failure, self._failure = self._failure, None
        return failure

    # -- inside ---------------------------------------------------------------------------------------------------

    def _drop_locked(self, block: Block, copy: BlockCopy) -> None:
        if isinstance(copy.origin, StagingSlot):
            copy.origin.pool.release(copy.origin)
        else:
            self.garbage.add_locked(copy.origin, block)

    def _read_pinned(
        self, blocks: Sequence[Block], places: Sequence[str], copies: Sequence[BlockCopy], target: Bits
    ) -> None:
        loads: list[TierIO] = []
        failure: BaseException | None = None
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
            except BaseException as error:
                failure = failure or error
        for load in loads:  # all, even after a failure: nothing may still write to `target`
            try:
                load.result()
            except BaseException as error:
                failure = failure or error
        try:
            if isinstance(failure, Exception):
                raise failure
            if failure is not None:
                raise caused_by(failure, "reading failed")
        finally:
            del failure  # it refers to this frame, and that to the caller's memory


def _equal_runs(items: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Yield the first and end index of each run of equal items."""
    first = 0
    for position in range(1, len(items) + 1):
        if position == len(items) or items[position] != items[first]:
            yield first, position
            first = position
