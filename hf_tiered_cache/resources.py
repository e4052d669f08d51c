"""What a manager opens and must close again: threads, tiers, private directories."""

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

from .config import TieredCacheConfig
from .errors import TierError
from .eviction import make_eviction_policy
from .lane import Lane
from .metrics import L0Account, Metrics
from .prefetch import Prefetcher
from .residency import Residency
from .stream import BlockStream
from .tiers import Tier, TierRegistry
from .transfer.engine import CopyEngine
from .transfer.worker import BACKGROUND_NICENESS, Worker
from .workspace import PrivateDirectory, check_directory, default_base
from .writeback import WriteBack

logger = logging.getLogger(__name__)

# Of what is free on L1's file system, when the user set no capacity.
_DEFAULT_DISK_SHARE = 0.8

EngineFactory = Callable[[torch.device, Metrics], CopyEngine]


class Resources:
    """Engines, lanes and tiers of one manager.

    Tiers and threads come into being when the first block is sealed: a context that fits its window touches no
    storage. Until then `residency`, `write_back` and `prefetcher` are `None`.

    Args:
        config: settings; names and paths are checked at once.
        engine_factory: makes the copy engine of a device.

    Raises:
        ConfigError: a path is missing or not writable, or a tier or policy does not exist.
    """

    def __init__(self, config: TieredCacheConfig, engine_factory: EngineFactory) -> None:
        self.config = config
        self.metrics = Metrics()
        self.tiers: dict[str, Tier] = {}
        self.residency: Residency | None = None
        self.write_back: WriteBack | None = None
        self.prefetcher: Prefetcher | None = None
        self.closed = False
        self.owner_pid = os.getpid()
        self._close_lock = threading.Lock()
        self._engine_factory = engine_factory
        self._background = Worker("write-back", BACKGROUND_NICENESS)
        self._engines: dict[torch.device, CopyEngine] = {}
        self._lanes: dict[torch.device, Lane] = {}
        self._accounts: dict[torch.device, L0Account] = {}
        self.streams: dict[torch.device, BlockStream] = {}
        self._directories: list[PrivateDirectory] = []
        self._tier_classes = {"L1": TierRegistry.get(config.l1_tier), "L2": TierRegistry.get(config.l2_tier)}
        make_eviction_policy(config.eviction)
        self._l1_base = default_base() if config.l1_path is None else check_directory(config.l1_path, "l1_path")
        self._l2_base = check_directory(config.l2_directory, "l2_url") if config.l2_directory else None

    def engine(self, device: torch.device) -> CopyEngine:
        """The copy engine of a device."""
        if device not in self._engines:
            self._engines[device] = self._engine_factory(device, self.metrics)
        return self._engines[device]

    def lane(self, device: torch.device) -> Lane:
        """The copy path of a device; opens the tiers the first time.

        Raises:
            TierError: a private directory cannot be made.
        """
        if device not in self._lanes:
            if self.write_back is None:
                self.write_back = self._open_tiers()
            self._lanes[device] = Lane(
                self.engine(device),
                self.write_back,
                self.metrics,
                gather_buffers=self.config.prefetch_layers + 1,
                staging_blocks=self.config.staging_blocks,
            )
        return self._lanes[device]

    def block_stream(self, device: torch.device) -> BlockStream:
        """The buffers through which a device's sealed blocks reach an attention that takes them part by part."""
        if device not in self.streams:
            lane, config = self.lane(device), self.config
            assert self.residency is not None
            self.streams[device] = BlockStream(
                lane, self.residency, self.metrics, config.stream_buffers, config.stream_buffer_bytes
            )
        return self.streams[device]

    def account(self, device: torch.device) -> L0Account:
        """The books, and the scratch memory, of computations on a device."""
        if device not in self._accounts:
            self._accounts[device] = L0Account(self.metrics)
        return self._accounts[device]

    def _open_tiers(self) -> WriteBack:
        global _storage_pid
        if _storage_pid not in (None, os.getpid()):
            raise TierError(
                "this process was forked from one whose caches use storage, which tensorstore does not survive: "
                "start it with multiprocessing's 'spawn' or 'forkserver'"
            )
        _storage_pid = os.getpid()
        _open_resources.add(self)
        config = self.config
        if config.l1_capacity_bytes != 0:
            root = self._private_directory(self._l1_base)
            capacity = config.l1_capacity_bytes
            if capacity is None:
                capacity = int(shutil.disk_usage(root).free * _DEFAULT_DISK_SHARE)
            self.tiers["L1"] = self._tier_classes["L1"]("L1", root, capacity, config)
        if self._l2_base is not None:
            root = self._private_directory(self._l2_base)
            self.tiers["L2"] = self._tier_classes["L2"]("L2", root, None, config)
        tiers = list(self.tiers.values())
        policies = [make_eviction_policy(config.eviction) for _ in tiers[:-1]]
        self.residency = Residency(tiers, policies, self.metrics, self._background)
        self.prefetcher = Prefetcher(self.residency, self.metrics)
        return WriteBack(self.residency, self.metrics, self._background)

    def flush(self) -> None:
        """Wait until every block is in a tier and what nobody needs is deleted. Blocks.

        Raises:
            TierError: a block could not be stored.
        """
        if self.write_back is not None:
            for lane in self._lanes.values():
                lane.worker.submit(lambda: None).result()  # loads that were given up hold blocks until their turn
            self.write_back.flush()

    def _private_directory(self, base: Path) -> Path:
        directory = PrivateDirectory(base)
        self._directories.append(directory)
        logger.info("blocks go to %s", directory.path)
        return directory.path

    def close(self) -> None:
        """End threads, close tiers, remove directories. Blocks. May be called twice, and from any thread."""
        with self._close_lock, ExitStack() as closing:
            if self.closed:
                return
            self.closed = True
            _open_resources.discard(self)
            # Backwards: first the threads that copy, then the one that writes, then the files.
            for directory in self._directories:
                closing.callback(directory.close)
            for tier in self.tiers.values():
                closing.callback(tier.close)
            closing.callback(self._background.close)
            for account in self._accounts.values():
                closing.callback(account.close)
            for stream in self.streams.values():
                closing.callback(stream.close)
            for engine in self._engines.values():
                closing.callback(engine.close)
            for lane in self._lanes.values():
                closing.callback(lane.close)

    def close_elsewhere(self) -> None:
        """Close from a new thread. For the garbage collector, which runs in the middle of anything: there it may
        neither take a lock nor wait for a thread (so not even `threading` may start this one)."""
        _thread.start_new_thread(self.close, ())


# The process in which storage was first used.
_storage_pid: int | None = None

_open_resources: weakref.WeakSet[Resources] = weakref.WeakSet()


@atexit.register
def _close_all() -> None:
    for resources in list(_open_resources):
        resources.close()
