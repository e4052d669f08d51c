"""Older blocks that stay on the accelerator beside the windows, as many as there is memory for.

seal ──────▶ resident while there is room      every resident block also has a copy in staging or in a tier,
load ──────▶ resident if the policy chooses    so it is evicted without being written
attention ◀── copied on the device, not from the host
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ..core.blocks import Block
from ..core.errors import TierError
from ..core.metrics import Metrics
from ..transfer.engine import CopyEngine, Event
from .eviction import EvictionPolicy
from .table import ResidencyTable

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class ResidentCopy:
    """One block's bytes on the accelerator, flat uint8, complete after `ready`.

    Freed when it is doomed and has no readers.
    """

    pool: DevicePool
    data: torch.Tensor
    ready: Event
    readers: int = 0
    doomed: bool = False


class DevicePool:
    """The resident blocks of one device. Any thread may call; the residency's lock guards everything.

    Invariant: `used_bytes <= capacity_bytes` at every moment, copies that wait for their readers included.

    Args:
        engine: of the device.
        residency: of the blocks.
        policy: chooses the blocks that stay.
        metrics: counts hits.
        capacity_bytes: accelerator memory for them.
    """

    def __init__(
        self,
        engine: CopyEngine,
        residency: ResidencyTable,
        policy: EvictionPolicy,
        metrics: Metrics,
        capacity_bytes: int,
    ) -> None:
        self.capacity_bytes = capacity_bytes
        self.used_bytes = 0
        self.blocks = 0
        self._engine = engine
        self._residency = residency
        self._policy = policy
        self._metrics = metrics
        self._place = f"L0 {engine.device}"
        residency.locations.add(self._place)

    # -- in and out -------------------------------------------------------------------------------------------

    def copy_of(self, packed: torch.Tensor) -> torch.Tensor | None:
        """Copy a new block's bytes on the compute stream, if there is room; for `enter`."""
        data = self._reserve(packed.numel()) if self.capacity_bytes else None
        if data is not None:
            data.copy_(packed)
        return data

    def enter(self, block: Block, data: torch.Tensor, ready: Event) -> None:
        """Make a block resident in reserved memory, which is complete after `ready`."""
        with self._residency.changed:
            if block.references and block.resident is None:
                block.resident = ResidentCopy(self, data, ready)
                self.blocks += 1
                self._residency.locations.set(block, self._place, there=True)
                return
            self._free_locked(data)

    def close(self) -> None:
        """Free the memory. Nothing may be copied at that time."""
        with self._residency.changed:
            for block in self._residency.locations.blocks(self._residency.locations.everything_in(self._place)):
                self.forget_locked(block)

    def forget_locked(self, block: Block) -> None:
        """Evict a resident block."""
        copy = block.resident
        assert isinstance(copy, ResidentCopy)
        block.resident = None
        self.blocks -= 1
        self._residency.locations.set(block, self._place, there=False)
        copy.doomed = True
        if not copy.readers:
            self._free_locked(copy.data)

    # -- on the prefetch thread -------------------------------------------------------------------------------

    @contextmanager
    def copies(self, blocks: Sequence[Block]) -> Iterator[list[ResidentCopy | None]]:
        """Yield the resident copy of each block, or `None`.

        Work that is enqueued on the copy-in stream inside the context may read the copies.
        """
        if not self.capacity_bytes:  # saves a look-up for every piece that is read
            yield [None] * len(blocks)
            return
        with self._residency.changed:
            copies = [block.resident if isinstance(block.resident, ResidentCopy) else None for block in blocks]
            for copy in copies:
                if copy is not None:
                    copy.readers += 1
        self._metrics.count(L0_hits=sum(copy is not None for copy in copies))
        try:
            yield copies
        finally:
            with self._residency.changed:
                for copy in copies:
                    if copy is not None:
                        copy.readers -= 1
                        if copy.doomed and not copy.readers:
                            self._free_locked(copy.data)

    def keep(self, blocks: Sequence[Block], payload: torch.Tensor) -> None:
        """Keep the blocks that are worth it, out of blocks of one layout that were just read.

        Args:
            blocks: each referenced by the caller.
            payload: host tensor `[len(blocks), rows, row_elements]`; must stay unchanged until the work enqueued
                on the copy-in stream by then has run.
        """
        if not self.capacity_bytes:
            return
        nbytes = blocks[0].layout.nbytes
        flat = payload.view(-1).view(torch.uint8)
        for block in self._choose(blocks):
            data = self._reserve(nbytes)
            if data is None:
                break
            first = blocks.index(block) * nbytes
            # The allocator may have returned memory that the compute stream still uses.
            ready = self._engine.copy_in_whole(flat[first : first + nbytes], data, self._engine.record_compute())
            self.enter(block, data, ready)
        if self._engine.host_writes:
            self._engine.finish_copies_in()  # `payload` is a buffer that attention may give back at any time

    def _choose(self, blocks: Sequence[Block]) -> list[Block]:
        """Return the blocks that should be resident, after evicting those that are worth less.

        Returns none when the policy fails. The user gets that error at the next call, so that the reads of these
        blocks do not fail.
        """
        locations = self._residency.locations
        with self._residency.changed:
            slots = np.array(
                [block.slot for block in blocks if block.resident is None and block.slot >= 0], np.int64
            )
            free = (self.capacity_bytes - self.used_bytes) // blocks[0].layout.nbytes
            idle = locations.idle(self._place)

            def choose(policy: EvictionPolicy) -> tuple[list[Block], list[Block]]:
                promoted, leaving = policy.promotions(slots, policy.evictable(idle), int(free), len(slots))
                return locations.blocks(promoted), locations.blocks(leaving)

            try:
                promoted, leaving = self._residency.ask(self._policy, choose)
            except TierError as error:
                logger.warning("%s", error)
                return []
            for block in leaving:
                self.forget_locked(block)
            return promoted

    def _reserve(self, nbytes: int) -> torch.Tensor | None:
        with self._residency.changed:
            if self.used_bytes + nbytes > self.capacity_bytes:
                return None
            self.used_bytes += nbytes
        try:
            return self._engine.allocate(nbytes)
        except torch.OutOfMemoryError:
            logger.debug("no memory to keep a block on %s", self._engine.device)
            with self._residency.changed:
                self.used_bytes -= nbytes
            return None

    def _free_locked(self, data: torch.Tensor) -> None:
        self._engine.free_after_copies(data)
        self.used_bytes -= data.numel()
