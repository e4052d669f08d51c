"""Deletion of copies that are no longer needed: a batch at a time, between other work.

copy is dropped ──▶ waiting ──a batch──▶ deleted, its room is free
                       ▲         │
                       └─ again ─┴─▶ stuck: storage refused; the copy keeps its room
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from itertools import islice

from ..core.blocks import Block, BlockKey
from ..core.errors import TierError
from ..core.locks import TimedLock
from ..tiers import Tier
from ..tiers.base import DELETED_TOGETHER
from ..transfer.worker import Worker


class Garbage:
    """Deletes copies on the background thread.

    Other work that waits for that thread runs between two batches. When the owner closes, remaining copies are
    dropped: they are removed with the whole tier.

    Args:
        lock: of the residency; guards `Block.leaving` and everything here.
        background: the thread.
        report: called with the error when a copy could not be deleted.
    """

    def __init__(self, lock: TimedLock, background: Worker, report: Callable[[TierError], None]) -> None:
        self._lock = lock
        self._background = background
        self._report = report
        self._waiting: dict[tuple[Tier, Block], None] = {}
        self._stuck: dict[tuple[Tier, Block], None] = {}
        self._is_queued = False
        self._stopped = False

    def add_locked(self, tier: Tier, block: Block) -> None:
        """Queue a copy without readers for deletion. Then call `collect_soon`, without the lock."""
        self._waiting[tier, block] = None

    def collect_soon(self) -> None:
        """Delete the waiting copies in the background, after the work that is queued there already."""
        with self._lock:
            if self._waiting and not self._is_queued and not self._stopped:
                with suppress(RuntimeError):  # closing
                    self._background.submit(self._collect_queued)
                self._is_queued = True

    def stop(self) -> None:
        """Begin no other batch in the background, as the owner closes. Takes no lock and does not block."""
        self._stopped = True

    def collect_all(self) -> None:
        """Delete all waiting copies, and retry stuck ones once, in the background. Blocks."""
        with self._lock:
            self._waiting |= self._stuck
            self._stuck.clear()
        self._background.submit(self.collect).result()  # even if nothing waits: a batch may be under way
        while self._waiting:
            self._background.submit(self.collect).result()

    # -- on the background thread -------------------------------------------------------------------------------

    def collect(self, wanted: tuple[Tier, Block] | None = None) -> bool:
        """Delete a batch of waiting copies, or retry stuck ones when none is waiting. Blocks.

        Args:
            wanted: a copy that should be among them.

        Returns:
            Whether any room was freed.
        """
        with self._lock:
            batch = dict.fromkeys(islice(self._waiting or self._stuck, DELETED_TOGETHER))
            if wanted is not None and (wanted in self._waiting or wanted in self._stuck):
                batch[wanted] = None
            for copy in batch:
                self._waiting.pop(copy, None)
                self._stuck.pop(copy, None)
        failed = self._delete(batch)
        with self._lock:
            self._stuck |= failed
            for tier, block in batch.keys() - failed.keys():
                block.leaving.discard(tier.name)
        return len(failed) < len(batch)

    def _collect_queued(self) -> None:
        self.collect()
        with self._lock:
            self._is_queued = False
        self.collect_soon()

    def _delete(self, batch: dict[tuple[Tier, Block], None]) -> dict[tuple[Tier, Block], None]:
        """Delete copies, tier by tier; return those that could not be deleted."""
        by_tier: defaultdict[Tier, dict[BlockKey, Block]] = defaultdict(dict)
        for tier, block in batch:
            by_tier[tier][block.key] = block
        failed: dict[tuple[Tier, Block], None] = {}
        for tier, blocks in by_tier.items():
            for key, error in tier.delete_many(list(blocks)).items():
                failed[tier, blocks[key]] = None
                self._report(error)
        return failed
