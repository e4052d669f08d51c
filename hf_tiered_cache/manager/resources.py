"""The resources of a manager: threads, tiers and private directories."""

from __future__ import annotations

import _thread
import atexit
import logging
import os
import shutil
import threading
import weakref
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import torch

from ..core.config import TieredCacheConfig
from ..core.errors import CacheClosedError, TierError
from ..core.host_memory import available_bytes
from ..core.locks import TimedLock
from ..core.metrics import Metrics
from ..loading.pipeline import DevicePipeline
from ..loading.prefetch import Prefetcher
from ..loading.reader import BlockReader
from ..loading.reader_pool import ReaderLease, ReaderPool
from ..residency.device_pool import DevicePool
from ..residency.eviction import make_eviction_policy
from ..residency.heat import HeatTable
from ..residency.mover import Mover
from ..residency.table import ResidencyTable
from ..residency.writeback import WriteBack
from ..sequence.layer_state import LayerState
from ..tiers import Tier, TierRegistry
from ..tiers.choice import TierChoice, choose_l1, choose_l2
from ..tiers.io import failures_as_tier_errors
from ..tiers.workspace import PrivateDirectory
from ..transfer.engine import CopyEngine
from ..transfer.worker import BACKGROUND_NICENESS, Worker
from .sealing import Sealer

logger = logging.getLogger(__name__)

# Default capacities, as shares of free host memory and of free space on L1's file system.
_DEFAULT_HOST_SHARE = 0.1
_DEFAULT_DISK_SHARE = 0.8

EngineFactory = Callable[[torch.device, Metrics], CopyEngine]


class Resources:
    """Engines, pipelines and tiers of one manager.

    Tiers and threads are opened when the first block is sealed: a context that fits its window uses no storage.
    Until then `residency`, `write_back` and `prefetcher` are `None`.

    Args:
        config: settings; names and paths are checked immediately.
        engine_factory: makes the copy engine of a device.

    Raises:
        ConfigError: a path is missing or not writable, a tier or policy does not exist, or a tier refuses its
            settings.
    """

    def __init__(self, config: TieredCacheConfig, engine_factory: EngineFactory) -> None:
        self.config = config
        self.metrics = Metrics()
        self.tiers: dict[str, Tier] = {}
        self.residency: ResidencyTable | None = None
        self.write_back: WriteBack | None = None
        self.prefetcher: Prefetcher | None = None
        self.closed = False
        self._owner_pid = os.getpid()
        self._close_lock = threading.Lock()
        self._engine_factory = engine_factory
        self._background = Worker("write-back", BACKGROUND_NICENESS)
        self._engines: dict[torch.device, CopyEngine] = {}
        self._pipelines: dict[torch.device, DevicePipeline] = {}
        self._sealers: dict[torch.device, Sealer] = {}
        self._reader_pools: dict[torch.device, ReaderPool] = {}
        self._opening = TimedLock(self.metrics)
        self._directories: list[PrivateDirectory] = []
        self._l1, self._l2 = choose_l1(config), choose_l2(config)
        make_eviction_policy(config.eviction_policy, HeatTable(), config)

    def check_process(self) -> None:
        """Raise in a forked child of the process that made this object.

        Raises:
            CacheClosedError: the calling process is another one.
        """
        if self._owner_pid != os.getpid():
            raise CacheClosedError(
                "the cache belongs to the parent process, and so do its threads: make a new one"
            )

    def engine(self, device: torch.device) -> CopyEngine:
        """Return the copy engine of a device."""
        engine = self._engines.get(device)
        if engine is None:
            with self._opening:
                if device not in self._engines:
                    self._engines[device] = self._engine_factory(device, self.metrics)
                engine = self._engines[device]
        return engine

    def pipeline(self, device: torch.device) -> DevicePipeline:
        """Return the pipeline that loads blocks to a device; opens the tiers the first time.

        Raises:
            TierError: a private directory cannot be made.
        """
        pipeline = self._pipelines.get(device)
        if pipeline is None:
            self._open_device(device)
            pipeline = self._pipelines[device]
        return pipeline

    def sealer(self, device: torch.device) -> Sealer:
        """Return the sealer of a device; opens the tiers the first time.

        Raises:
            TierError: a private directory cannot be made.
        """
        self.pipeline(device)
        return self._sealers[device]

    @property
    def open_residency(self) -> ResidencyTable:
        """The residency table, after the first seal."""
        assert self.residency is not None, "there are sealed blocks, so the tiers are open"
        return self.residency

    @property
    def open_prefetcher(self) -> Prefetcher:
        """The prefetcher, after the first seal."""
        assert self.prefetcher is not None, "there are sealed blocks, so the tiers are open"
        return self.prefetcher

    @property
    def resident_blocks(self) -> int:
        """Resident blocks on all accelerators."""
        return sum(pipeline.resident.blocks for pipeline in list(self._pipelines.values()))

    def reader_pool(self, device: torch.device) -> ReaderPool:
        """Return the reader pool of a device, for streaming attention."""
        pool = self._reader_pools.get(device)
        if pool is None:
            engine = self.engine(device)
            with self._opening:
                pool = self._reader_pools.setdefault(
                    device, ReaderPool(engine, self.metrics, self.config.concurrent_streams)
                )
        return pool

    def block_reader(self, device: torch.device, lease: ReaderLease) -> BlockReader:
        """Return the reader of a lease, which streams sealed blocks to attention; opened on first use."""
        if lease.reader is None:
            pipeline, config = self.pipeline(device), self.config
            assert self.residency is not None
            lease.reader = BlockReader(
                pipeline, self.residency, self.metrics, config.stream_buffers, config.stream_buffer_bytes
            )
        return lease.reader

    def step(self) -> None:
        """Begin a forward pass: advance the heat table, and start to balance the tiers."""
        for pipeline in list(self._pipelines.values()):
            pipeline.buffers.leave_for_ended_threads()
        if self.write_back is not None:
            assert self.residency is not None
            self.residency.step()
            self.write_back.balance_soon()

    def forget(self, layer: LayerState) -> None:
        """Cancel all loads of a layer that is about to be dropped."""
        if self.prefetcher is not None:
            self.prefetcher.discard(layer)
        for pool in list(self._reader_pools.values()):
            pool.forget(layer)

    def _open_device(self, device: torch.device) -> None:
        engine = self.engine(device)
        with self._opening:
            if device in self._pipelines:
                return
            if self.write_back is None:
                self.write_back = self._open_tiers()
            assert self.residency is not None
            config, metrics = self.config, self.metrics
            policy = make_eviction_policy(config.eviction_policy, self.residency.heat, config)
            resident = DevicePool(engine, self.residency, policy, metrics, config.resident_bytes)
            self._sealers[device] = Sealer(engine, self.write_back, resident, metrics, config.staging_blocks)
            self._pipelines[device] = DevicePipeline(
                engine, self.residency, resident, metrics, config.prefetch_layers
            )

    def _open_tiers(self) -> WriteBack:
        global _storage_pid
        if _storage_pid not in (None, os.getpid()):
            raise TierError(
                "this process was forked from one whose caches use storage, which tensorstore does not survive: "
                "start it with multiprocessing's 'spawn' or 'forkserver'"
            )
        _storage_pid = os.getpid()
        _open_resources.add(self)
        with ExitStack() as undo:
            tiers = self._open_each(undo)
            residency = ResidencyTable(tiers, self.metrics, self._background)
            policies = [
                make_eviction_policy(self.config.eviction_policy, residency.heat, self.config) for _ in tiers[:-1]
            ]
            undo.pop_all()
        self.tiers = {tier.name: tier for tier in tiers}
        self.residency = residency
        self.prefetcher = Prefetcher(residency, self.metrics)
        mover = Mover(residency, policies, self.config, self.metrics)
        return WriteBack(residency, mover, self.metrics, self._background)

    def _open_each(self, undo: ExitStack) -> list[Tier]:
        """Open the tiers, nearest first; `undo` closes them again."""
        config = self.config
        tiers: list[Tier] = []

        def open_tier(choice: TierChoice, root: Path | None, capacity_bytes: int | None) -> None:
            tiers.append(choice.open(root, capacity_bytes, config))
            undo.callback(_close_tier, tiers[-1])

        capacity = config.host_capacity_bytes
        if capacity is None:
            capacity = int(available_bytes() * _DEFAULT_HOST_SHARE)
        if capacity:
            open_tier(TierChoice("host", TierRegistry.get("host"), None), None, capacity)
        if self._l1 is not None:
            root, capacity = self._private_directory(self._l1, undo), config.l1_capacity_bytes
            if capacity is None and root is not None:
                capacity = int(shutil.disk_usage(root).free * _DEFAULT_DISK_SHARE)
            open_tier(self._l1, root, capacity)
        if self._l2 is not None:
            open_tier(self._l2, self._private_directory(self._l2, undo), None)
        return tiers

    def flush(self) -> None:
        """Wait until every block is in a tier and unused blocks are deleted. Blocks.

        Raises:
            TierError: a block could not be stored.
        """
        if self.write_back is not None:
            for pipeline in list(self._pipelines.values()):
                # Cancelled loads reference their blocks until their turn comes.
                pipeline.worker.submit(lambda: None).result()
            self.write_back.flush()

    def _private_directory(self, choice: TierChoice, undo: ExitStack) -> Path | None:
        if choice.base is None:
            return None
        directory = PrivateDirectory(choice.base)
        self._directories.append(directory)
        undo.callback(self._directories.remove, directory)
        undo.callback(directory.close)
        logger.info("blocks go to %s", directory.path)
        return directory.path

    def close(self) -> None:
        """End threads, close tiers, remove directories. Blocks, but not until queued deletions are done, since the
        directories are removed as a whole. May be called twice, and from any thread.

        Raises:
            TierError: a tier without a directory could not be cleared or closed; all else is closed.
        """
        with self._close_lock, ExitStack() as closing:
            if self.closed:
                return
            if self.residency is not None:
                self.residency.garbage.stop()
            self.closed = True
            _open_resources.discard(self)
            # In reverse order: first the threads that copy, then the one that writes, then the files.
            for directory in self._directories:
                closing.callback(directory.close)
            for tier in self.tiers.values():
                closing.callback(_close_tier, tier)
            closing.callback(self._background.close)
            for pool in self._reader_pools.values():
                closing.callback(pool.close)
            for engine in self._engines.values():
                closing.callback(engine.close)
            for sealer in self._sealers.values():
                closing.callback(sealer.close)
            for pipeline in self._pipelines.values():
                closing.callback(pipeline.close)

    def close_elsewhere(self) -> None:
        """Close in a new thread. For finalizers: the garbage collector may interrupt any code, so they may neither
        take a lock nor wait for a thread. (`threading` would wait until the new thread has started.)"""
        _thread.start_new_thread(self._close_unasked, ())

    def _close_unasked(self) -> None:
        """Close and log errors, as there is no caller to raise them to."""
        try:
            self.close()
        except Exception as error:
            logger.warning("a cache was not closed in order: %s", error)


def _close_tier(tier: Tier) -> None:
    """Close a tier. Delete its blocks first, unless its directory is removed anyway."""
    with failures_as_tier_errors(f"{tier.name}: closing"):
        try:
            if not tier.needs_directory:
                tier.clear()
        finally:
            tier.close()


# The process in which storage was first used.
_storage_pid: int | None = None

_open_resources: weakref.WeakSet[Resources] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for resources in list(_open_resources):
        resources._close_unasked()
