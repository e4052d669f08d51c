"""The contract of a tier, and the registry of implementations."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import tensorstore as ts
import torch

from ..blocks import Bits, BlockKey, BlockLayout
from ..config import TieredCacheConfig
from ..errors import ConfigError, TierError, TierFullError, TierReadError

IO_TIMEOUT_SECONDS = 120.0


class TierIO:
    """Reads or writes on their way. Keep it until `result()` has returned: dropping it may cancel them.

    Args:
        futures: tensorstore futures of the operation; none when it has finished.
        describe: what is going on, for the error message.
        failed: called once when the operation failed.
    """

    def __init__(
        self,
        futures: Sequence[ts.Future[Any] | ts.WriteFutures],
        describe: str,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._futures = futures
        self._describe = describe
        self._failed = failed

    def result(self) -> None:
        """Wait until all is done. Blocks; releases the GIL.

        Raises:
            TierFullError: the device has no space left.
            TierReadError: a block is missing or damaged.
            TierError: anything else, a timeout included.
        """
        first_error: Exception | None = None
        for future in self._futures:
            try:
                future.result(timeout=IO_TIMEOUT_SECONDS)
            except (ValueError, TimeoutError, OSError) as error:
                first_error = first_error or error
        self._futures = ()
        if first_error is not None:
            self._failed()
            raise translate(first_error, self._describe) from first_error


def translate(error: Exception, describe: str) -> TierError:
    """Turn a failure of tensorstore, a `ValueError` with a code in its text, into one of this package's."""
    text = str(error)
    if "RESOURCE_EXHAUSTED" in text or "No space left" in text:
        return TierFullError(f"{describe}: no space left on the device; free some or use another path ({text})")
    if isinstance(error, KeyError):
        return TierReadError(f"{describe}: a block is missing ({text})")
    if any(code in text for code in ("NOT_FOUND", "DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT")):
        return TierReadError(f"{describe}: a block is missing or damaged ({text})")
    if isinstance(error, TimeoutError):
        return TierError(f"{describe}: no answer within {IO_TIMEOUT_SECONDS:.0f} s; is the storage reachable?")
    return TierError(f"{describe}: {text}")


class Tier(ABC):
    """One place that stores sealed blocks, host memory in, host memory out.

    `write` and `read_into` start the operation and return, or have finished it then; their `TierIO.result()`
    blocks. `delete` blocks briefly. All methods may be called from any thread. A block is written once; its key
    is unique.

    Invariants:
        - `used_bytes <= capacity_bytes` at every moment: room is taken before a write starts and given back
          after the block is gone, or when the write has failed;
        - a block is readable from the moment its write's `result()` has returned until `delete`.

    Args:
        name: `"L1"`, say, as users see it.
        root: an empty directory that belongs to this tier alone; `None` for a tier that needs none.
        capacity_bytes: limit on what the tier occupies; `None` for no limit.
        config: all settings.
    """

    needs_directory: ClassVar[bool] = True

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

    @property
    def root(self) -> Path:
        """Its directory; only of a tier that `needs_directory`."""
        assert self._root is not None
        return self._root

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
        """How the tier reads just now, when there is a choice."""
        return None

    def occupied_bytes(self, layout: BlockLayout) -> int:
        """Bytes that a block of this layout takes at most."""
        return layout.nbytes

    def has_room(self, occupied_bytes: int) -> bool:
        """Whether that many bytes fit in right now."""
        return self.capacity_bytes is None or self._used_bytes + occupied_bytes <= self.capacity_bytes

    def write(self, key: BlockKey, layout: BlockLayout, source: Bits) -> TierIO:
        """Start to store one block.

        Args:
            key: the block's name, new to this tier.
            layout: its layout.
            source: `[rows, row_elements]`; must not change before `result()` has returned.

        Raises:
            TierFullError: the block would exceed the capacity; nothing was written.
        """
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
        describe = self._describe("writing", key)
        try:
            futures = self._start_write(key, layout, source)
        except TierError:
            self._give_back(key)
            raise
        except (ValueError, OSError) as error:
            self._give_back(key)
            raise translate(error, describe) from error
        return TierIO(futures, describe, failed=lambda: self._discard(key))

    def read_into(self, keys: Sequence[BlockKey], layout: BlockLayout, target: Bits) -> TierIO:
        """Start to load blocks that share one layout.

        Args:
            keys: the blocks, of any layers.
            target: `[len(keys), rows, row_elements]`, filled in place. Its content is undefined until
                `result()` has returned, and after it has raised.
        """
        describe = self._describe("reading", keys[0], keys[-1])
        try:
            return TierIO(self._start_read(keys, layout, target), describe)
        except (ValueError, OSError, KeyError) as error:
            raise translate(error, describe) from error

    def tensor(self, key: BlockKey) -> torch.Tensor | None:
        """A stored block in memory that a device can read by itself, flat uint8, valid until `delete`; `None`
        where there is no such memory."""
        return None

    def lock_pages(self, device: torch.device) -> None:
        """Copies of a CUDA device will read what `tensor` returns: such memory is page-locked from now on, where
        the system allows it."""

    def delete(self, key: BlockKey) -> None:
        """Remove a block; its room is free afterwards.

        Raises:
            TierError: the storage refused.
        """
        describe = self._describe("deleting", key)
        try:
            deletes = self._start_delete(key)
        except (ValueError, OSError) as error:
            raise translate(error, describe) from error
        TierIO(deletes, describe).result()
        self._forget(key)
        self._give_back(key)

    def flush(self) -> None:
        """Make what was written readable by others. Blocks."""

    def close(self) -> None:
        """Let go of open files; what is stored stays."""

    def _describe(self, doing: str, key: BlockKey, last: BlockKey | None = None) -> str:
        """What is going on, for error messages."""
        blocks = f"block {key.block_idx}" if last is None else f"blocks {key.block_idx} to {last.block_idx}"
        where = "" if self._root is None else f" below {self._root}"
        return f"{self.name}: {doing} layer {key.layer_idx}, {blocks}{where}"

    def _discard(self, key: BlockKey) -> None:
        try:
            self.delete(key)
        except TierError:  # the device is failing altogether
            self._forget(key)
            self._give_back(key)

    def _give_back(self, key: BlockKey) -> None:
        with self._lock:
            self._used_bytes -= self._block_bytes.pop(key, 0)

    @abstractmethod
    def _start_write(self, key: BlockKey, layout: BlockLayout, source: Bits) -> Sequence[ts.WriteFutures]: ...

    @abstractmethod
    def _start_read(
        self, keys: Sequence[BlockKey], layout: BlockLayout, target: Bits
    ) -> Sequence[ts.WriteFutures]: ...

    @abstractmethod
    def _start_delete(self, key: BlockKey) -> Sequence[ts.Future[Any]]:
        """Start to remove a block, nothing when it is not there; tried again when it fails."""

    def _forget(self, key: BlockKey) -> None:
        """A block has been removed."""


def delete_chunk(store: ts.TensorStore, chunk_key: str) -> ts.Future[Any]:
    """Start to remove one chunk of an array."""
    assert store.kvstore is not None
    return store.kvstore.write(chunk_key, None)


class TierRegistry:
    """Implementations by the name that settings use."""

    classes: ClassVar[dict[str, type[Tier]]] = {}

    @classmethod
    def get(cls, kind: str) -> type[Tier]:
        """Return the implementation called `kind`.

        Raises:
            ConfigError: there is none.
        """
        if kind not in cls.classes:
            raise ConfigError(f"unknown tier {kind!r}; there are {', '.join(sorted(cls.classes))}")
        return cls.classes[kind]


def register_tier(kind: str) -> Callable[[type[Tier]], type[Tier]]:
    """Class decorator: make a `Tier` available as `l1_tier=kind` or `l2_tier=kind`."""

    def register(tier_class: type[Tier]) -> type[Tier]:
        TierRegistry.classes[kind] = tier_class
        return tier_class

    return register
