"""The contract of a tier, and the registry of implementations."""

from __future__ import annotations

import difflib
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import torch

from ..core.blocks import Bits, BlockKey, BlockLayout
from ..core.config import TieredCacheConfig
from ..core.errors import ConfigError, TierError, TierFullError
from ..core.registry import Registry
from .io import Doing, TierFuture, TierIO, caused_by, failures_as_tier_errors

logger = logging.getLogger(__name__)

DELETED_TOGETHER = 128
"""Blocks that are removed at a time: enough to keep storage busy, few enough not to delay other work."""

_TierClass = TypeVar("_TierClass", bound="type[Tier]")


class Tier(ABC):
    """One place that stores sealed blocks, which it takes from and returns to host memory.

    A custom tier implements `start_write`, `start_read` and `start_delete`, and is registered:

    ```python
    @register_tier("mine")
    class MyTier(Tier):
        needs_directory = False
        ...

    TieredCacheConfig(l2_tier="mine", l2_options={...})
    ```

    Whatever these three raise, also later in their futures, is handled: what the failed try may have left is
    removed, and the operation is tried once more. When that fails, too, room and key are given back, and the user
    gets a `TierError` with the cause. No data is lost by that. A tier that is full raises `TierFullError`: the
    block then goes elsewhere.

    All methods may be called from any thread, several at a time. A block is written once; its key is unique.

    Invariants:
        - `used_bytes <= capacity_bytes` at every moment: room is reserved before a write starts and given back
          after the block is gone, or when the write has failed;
        - a block is readable from the moment its write's `result()` has returned until `delete`.

    Args:
        name: as users see it, e.g. `"L1"`.
        root: an empty directory that belongs to this tier alone; `None` for a tier that needs none.
        capacity_bytes: limit on what the tier occupies; `None` for no limit.
        config: all settings.
    """

    needs_directory: ClassVar[bool] = True
    """True if the tier keeps files in a directory, which is created for it below `l1_path` or `l2_url` and removed
    afterwards. Otherwise those settings need not be given, and `clear` is called at the end."""
    known_options: ClassVar[tuple[str, ...]] = ()
    """The names of its options, for `l1_options` or `l2_options`."""

    def __init__(
        self, name: str, root: Path | None, capacity_bytes: int | None, config: TieredCacheConfig
    ) -> None:
        self.name = name
        self._root = root
        self.capacity_bytes = capacity_bytes
        self._config = config
        self._lock = threading.Lock()
        self._block_bytes: dict[BlockKey, int] = {}
        self._used_bytes = 0

    # -- settings -------------------------------------------------------------------------------------------------

    @classmethod
    def check_url(cls, url: str) -> None:
        """Check the user's `l2_url` or `l1_path`.

        By default a tier that needs a directory accepts the path of an existing one, also as `file://...`, and any
        other tier accepts everything.

        Raises:
            ConfigError: the tier cannot use it. The message begins with the value and says what to give.
        """
        if cls.needs_directory and "://" in url and not url.startswith("file://"):
            raise ConfigError(f"{url!r}: only local directories are available yet")

    @classmethod
    def check_options(cls, options: Mapping[str, Any]) -> None:
        """Check the user's `l1_options` or `l2_options`.

        By default every name must be one of `known_options`; extend this method to check the values.

        Raises:
            ConfigError: an option does not exist, or is invalid.
        """
        for name in options:
            if name not in cls.known_options:
                close = difflib.get_close_matches(str(name), cls.known_options, 1)
                known = ", ".join(cls.known_options) or "none"
                hint = f"did you mean {close[0]!r}? The" if close else "the"
                raise ConfigError(f"unknown option {name!r}: {hint} options of {cls.__name__} are {known}")

    @property
    def options(self) -> Mapping[str, Any]:
        """The options of the tier, checked."""
        own = {"L1": self._config.l1_options, "L2": self._config.l2_options}
        return own.get(self.name) or {}

    @property
    def url(self) -> str | None:
        """`l1_path` or `l2_url` as the user gave it, checked; `None` if not given."""
        given = {"L1": self._config.l1_path, "L2": self._config.l2_url}.get(self.name)
        return None if given is None else os.fspath(given)

    @property
    def root(self) -> Path:
        """The directory of a tier that `needs_directory`; others have none."""
        assert self._root is not None
        return self._root

    # -- what is stored -------------------------------------------------------------------------------------------

    @property
    def used_bytes(self) -> int:
        """Bytes occupied, blocks still being written included."""
        return self._used_bytes

    @property
    def blocks(self) -> int:
        """Blocks held, those still being written included."""
        return len(self._block_bytes)

    @property
    def io_mode(self) -> str | None:
        """The current mode of reading, when there is a choice."""
        return None

    def occupied_bytes(self, layout: BlockLayout) -> int:
        """Return the most bytes that a block of this layout takes."""
        return layout.nbytes

    def has_room(self, occupied_bytes: int) -> bool:
        """Return true if this many bytes fit now."""
        return self.capacity_bytes is None or self._used_bytes + occupied_bytes <= self.capacity_bytes

    # -- to implement ---------------------------------------------------------------------------------------------

    @abstractmethod
    def start_write(self, key: BlockKey, layout: BlockLayout, source: Bits) -> Sequence[TierFuture]:
        """Begin to store one block.

        Args:
            key: the block's name. Nothing is stored under it, unless an earlier try left something that
                `start_delete` could not remove.
            layout: its layout, for `start_read`.
            source: `[rows, row_elements]`, unsigned integers of `layout.bits_dtype`, contiguous. It is
                overwritten as soon as the write is over: copy what must be kept.

        Returns:
            A sequence of objects with `result(timeout=)`, one for each operation that was begun; the block is
            stored when all of them have returned. Empty if it is stored already.

        Raises:
            TierFullError: there is no space left.
            Exception: any other failure.
        """

    @abstractmethod
    def start_read(self, keys: Sequence[BlockKey], layout: BlockLayout, target: Bits) -> Sequence[TierFuture]:
        """Begin to load blocks that share one layout.

        Args:
            keys: the blocks, of any layers and requests.
            layout: as it was given to `start_write`.
            target: `[len(keys), rows, row_elements]`, to be filled in place. Do not write to it after the last
                future has returned or raised.

        Returns:
            A sequence of objects with `result(timeout=)`; `target` is complete when all of them have returned.
            Empty if it is complete already.

        Raises:
            KeyError: a block is missing.
            Exception: any other failure.
        """

    @abstractmethod
    def start_delete(self, key: BlockKey) -> Sequence[TierFuture]:
        """Begin to remove a block, or what a failed write may have left of it. Do nothing if there is neither.

        Many deletions may be under way at a time.

        Returns:
            A sequence of objects with `result(timeout=)`; the block is gone when all of them have returned. Empty
            if it is gone already.

        Raises:
            Exception: the block could not be removed. That is tried again later: removing twice is no error.
        """

    # -- optional -------------------------------------------------------------------------------------------------

    def forget(self, key: BlockKey) -> None:
        """Drop what the tier remembers of a block that was removed."""

    def tensor(self, key: BlockKey) -> torch.Tensor | None:
        """Return a stored block in memory that a device can read directly, flat uint8, valid until `delete`.

        `None` if there is no such memory.
        """
        return None

    def lock_pages(self, device: torch.device) -> None:
        """Page-lock the memory that `tensor` returns from now on, where the system allows it.

        A CUDA device will copy from it.
        """

    def flush(self) -> None:
        """Make what was written readable by others. Blocks."""

    def clear(self) -> None:
        """Remove everything that is stored, by default block by block. Blocks.

        Called at the end, before `close`, if there is no directory to be removed.

        Raises:
            TierError: something could not be removed.
        """
        failures: dict[BlockKey, TierError] = {}
        keys = list(self._block_bytes)
        for first in range(0, len(keys), DELETED_TOGETHER):
            failures |= self.delete_many(keys[first : first + DELETED_TOGETHER])
        for failure in failures.values():
            raise failure

    def close(self) -> None:
        """Close files and connections. May be called twice."""

    # -- what the rest of the package calls -----------------------------------------------------------------------

    def write(self, key: BlockKey, layout: BlockLayout, source: Bits) -> TierIO:
        """Start to store one block; it may be stored already when this returns.

        Args:
            key: the block's name, new to this tier.
            layout: its layout.
            source: `[rows, row_elements]`; must not change before `result()` has returned.

        Raises:
            TierFullError: the block would exceed the capacity; nothing was written.
            TierError: it could not be stored; nothing of it is left.
        """
        describe = self._describe("writing", key)
        with failures_as_tier_errors(describe):
            if source.shape != (layout.rows, layout.row_elements):
                raise ValueError(f"{source.shape} is not the shape of a block of {layout}")
            occupied = self.occupied_bytes(layout)
        with self._lock:
            if not self.has_room(occupied):
                raise TierFullError(
                    f"{self.name} is full: {self._used_bytes} of {self.capacity_bytes} bytes used, "
                    f"{occupied} more needed for layer {key.layer_idx}, block {key.block_idx}"
                )
            assert key not in self._block_bytes, f"{self.name} has {key} already"
            self._used_bytes += occupied
            self._block_bytes[key] = occupied
        return TierIO(
            lambda: self.start_write(key, layout, source),
            "writing",
            describe,
            clean=lambda: self._remove(key).result(),
            failed=lambda: self._discard(key),
        )

    def read_into(self, keys: Sequence[BlockKey], layout: BlockLayout, target: Bits) -> TierIO:
        """Start to load blocks that share one layout.

        Args:
            keys: the blocks, of any layers.
            target: `[len(keys), rows, row_elements]`, filled in place. Its content is undefined until
                `result()` has returned, and after it has raised.

        Raises:
            TierReadError: a block is missing or damaged.
            TierError: the blocks cannot be read.
        """
        describe = self._describe("reading", keys[0], keys[-1])
        return TierIO(lambda: self.start_read(keys, layout, target), "reading", describe)

    def delete(self, key: BlockKey) -> None:
        """Remove a block; its room is free afterwards. Blocks.

        Raises:
            TierError: the storage refused; the block keeps its room.
        """
        for failure in self.delete_many([key]).values():
            raise failure

    def delete_many(self, keys: Sequence[BlockKey]) -> dict[BlockKey, TierError]:
        """Remove blocks, all at the same time; their room is free afterwards. Blocks.

        Returns:
            The error, for each block that is still there and keeps its room.
        """
        begun: dict[BlockKey, TierIO] = {}
        failures: dict[BlockKey, TierError] = {}
        for key in keys:
            with self._failure_into(failures, key):
                begun[key] = self._remove(key)
        for key, deletion in begun.items():
            with self._failure_into(failures, key):
                deletion.result()
                self._give_back(key)
                self.forget(key)
        return failures

    @contextmanager
    def _failure_into(self, failures: dict[BlockKey, TierError], key: BlockKey) -> Iterator[None]:
        """Record whatever is raised inside, so that the other blocks are handled as well."""
        try:
            yield
        except TierError as error:
            failures[key] = error
        except BaseException as error:
            failures[key] = caused_by(error, self._describe("deleting", key))

    def _remove(self, key: BlockKey) -> TierIO:
        return TierIO(lambda: self.start_delete(key), "deleting", self._describe("deleting", key))

    def _discard(self, key: BlockKey) -> None:
        """Clean up after a failed write: give room and key back, and remove what is left of it if possible."""
        try:
            self._remove(key).result()
        except TierError as error:
            logger.warning("%s; parts that the failed write stored may remain", error)
        finally:
            self._give_back(key)
            self.forget(key)

    def _give_back(self, key: BlockKey) -> None:
        with self._lock:
            self._used_bytes -= self._block_bytes.pop(key, 0)

    def _describe(self, doing: Doing, key: BlockKey, last: BlockKey | None = None) -> str:
        """Describe an operation for error messages."""
        blocks = f"block {key.block_idx}" if last is None else f"blocks {key.block_idx} to {last.block_idx}"
        where = "" if self._root is None else f" below {self._root}"
        return f"{self.name}: {doing} layer {key.layer_idx}, {blocks}{where}"


TierRegistry: Registry[Tier] = Registry("tier", Tier, "hf_tiered_cache.tiers")  # type: ignore[type-abstract]
"""The tiers that `l1_tier` and `l2_tier` can name."""


def register_tier(kind: str, *, replace: bool = False) -> Callable[[_TierClass], _TierClass]:
    """Class decorator: make a `Tier` available as `l1_tier=kind` or `l2_tier=kind`.

    Args:
        kind: its name.
        replace: whether it takes the place of another class of that name. A class of the same module and qualified
            name always does: a notebook cell can be run again.

    Raises:
        ConfigError: the name is another class's, or a method is missing.
    """
    return TierRegistry.register(kind, replace=replace)
