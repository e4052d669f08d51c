"""Host memory as a tier: blocks are stored as they are, page-locked once a CUDA device reads them.

    in use by blocks      kept for blocks to come      may still be mapped
    |<-- used_bytes -->|<-- at most an eighth -->|<-- ... -->| capacity_bytes
    |<------------- mapped_bytes ---------------->|

Each buffer is a mapping of whole pages for one block, so that freed memory goes back to the system at once
and no allocator rounds sizes or hoards memory. Mapping and page-locking take longer than the copy of a block;
hence some free buffers are kept.
"""

from __future__ import annotations

import logging
import mmap
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch

from ..core.blocks import Bits, BlockKey, BlockLayout, as_bits
from ..core.config import TieredCacheConfig
from ..core.errors import TierFullError
from .base import Tier, register_tier
from .io import TierFuture

logger = logging.getLogger(__name__)

# Share of the capacity for free buffers that are kept: about what is demoted at a time between the watermarks.
_KEPT_SHARE = 1 / 8
# cudaHostRegisterPortable: page-locked for every device.
_PORTABLE = 1


class _Buffer:
    """Mapped memory, until it is released or collected.

    Raises:
        TierFullError: the system has no memory left for it.
    """

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes
        try:
            # Private where there is a choice: the number of mappings is limited, and private neighbours merge.
            private = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
            self._mapping: mmap.mmap | None = mmap.mmap(-1, nbytes, **private)
        except OSError as error:
            raise TierFullError(f"host memory: {nbytes} more bytes cannot be mapped ({error})") from error
        with torch.inference_mode(False):
            self.memory = torch.frombuffer(self._mapping, dtype=torch.uint8)
        self._unlock: weakref.finalize[Any, Any] | None = None

    def lock_pages(self, device: torch.device) -> int:
        """Page-lock the buffer for all CUDA devices, unless it is. Return CUDA's error, 0 when it is locked.

        Args:
            device: one that is in use already. The first use of another one takes hundreds of megabytes.
        """
        if self._unlock is not None:
            return 0
        if hasattr(mmap, "MADV_DONTFORK"):
            # After a fork, parent and child share pages until one of them writes. If that is the parent, it goes
            # on with a copy, which the device does not know. The child does not need the pages.
            assert self._mapping is not None
            self._mapping.madvise(mmap.MADV_DONTFORK)
        with torch.cuda.device(device):
            status = int(
                torch.cuda.cudart().cudaHostRegister(self.memory.data_ptr(), self.memory.numel(), _PORTABLE)
            )
            if status:
                _forget_error(device)
                return status
        self._unlock = weakref.finalize(self, _unlock_pages, self.memory, device)  # unmapped only afterwards
        self._unlock.atexit = False
        return 0

    def release(self) -> None:
        """Give the memory back to the system. No tensor of it may be in use."""
        if self._unlock is not None:
            self._unlock()
        self.memory = self.memory.new_empty(0)
        self._mapping = None


def _unlock_pages(memory: torch.Tensor, device: torch.device) -> None:
    with torch.cuda.device(device):
        status = int(torch.cuda.cudart().cudaHostUnregister(memory.data_ptr()))
        if status:
            logger.warning("%d bytes of host memory stay page-locked (CUDA error %d)", memory.numel(), status)
            _forget_error(device)


def _forget_error(device: torch.device) -> None:
    """Clear the last CUDA error of this thread.

    PyTorch would report it for the next kernel that the thread launches, so launch one here.
    """
    with suppress(RuntimeError):
        torch.empty(1, device=device).fill_(0)


@register_tier("host")
class HostTier(Tier):
    """Blocks in host memory; see the module for the map and `Tier` for the contract.

    `write` and `read_into` copy, on the calling thread and without the GIL, and have finished when they return.
    What is stored is gone after `close`.

    Invariants:
        - `mapped_bytes <= capacity_bytes` at every moment;
        - free buffers that are kept are released before a block is refused.
    """

    needs_directory: ClassVar[bool] = False

    def __init__(
        self, name: str, root: Path | None, capacity_bytes: int | None, config: TieredCacheConfig
    ) -> None:
        super().__init__(name, root, capacity_bytes, config)
        self._stored: dict[BlockKey, tuple[_Buffer, int]] = {}
        self._buffers_lock = threading.Lock()
        self._kept: dict[int, list[_Buffer]] = {}
        self._kept_bytes = 0
        self._mapped_bytes = 0
        self._locks_for: torch.device | None = None
        self._refused = False

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory that the tier occupies with blocks and with free buffers that are kept."""
        return self._mapped_bytes

    def occupied_bytes(self, layout: BlockLayout) -> int:
        return -(-layout.nbytes // mmap.PAGESIZE) * mmap.PAGESIZE

    def tensor(self, key: BlockKey) -> torch.Tensor:
        """Return a stored block itself, flat uint8 of `layout.nbytes`, to copy from directly.

        It must not be changed, and is valid until `delete`.

        Raises:
            KeyError: the block is not stored here.
        """
        buffer, nbytes = self._stored[key]
        return buffer.memory[:nbytes]

    def lock_pages(self, device: torch.device) -> None:
        """Page-lock buffers that get a block from now on; see `Tier`.

        Copies from memory that is not locked are as correct, but slower. After the first refusal of the system,
        locking is not tried again.
        """
        with self._buffers_lock:
            if not self._refused:
                self._locks_for = self._locks_for or device

    def clear(self) -> None:
        """Do nothing: `close` frees the memory."""

    def close(self) -> None:
        with self._buffers_lock:
            buffers = [buffer for buffer, _ in self._stored.values()]
            buffers += [buffer for kept in self._kept.values() for buffer in kept]
            self._stored.clear()
            self._kept.clear()
            self._kept_bytes = 0
            for buffer in buffers:
                self._release(buffer)

    def start_write(self, key: BlockKey, layout: BlockLayout, source: Bits) -> Sequence[TierFuture]:
        buffer = self._take(self.occupied_bytes(layout))
        np.copyto(_bits(buffer.memory, layout), source)
        self._stored[key] = (buffer, layout.nbytes)
        return ()

    def start_read(self, keys: Sequence[BlockKey], layout: BlockLayout, target: Bits) -> Sequence[TierFuture]:
        for key, block_target in zip(keys, target, strict=True):
            np.copyto(block_target, _bits(self.tensor(key), layout))
        return ()

    def start_delete(self, key: BlockKey) -> Sequence[TierFuture]:
        stored = self._stored.pop(key, None)
        if stored is not None:
            self._keep(stored[0])
        return ()

    def _take(self, nbytes: int) -> _Buffer:
        """Return a buffer of exactly this size, for which room is reserved already."""
        with self._buffers_lock:
            if self._kept.get(nbytes):
                self._kept_bytes -= nbytes
                buffer = self._kept[nbytes].pop()
            else:
                if self.capacity_bytes is not None:
                    self._give_way(self.capacity_bytes - nbytes)
                buffer = _Buffer(nbytes)
                self._mapped_bytes += nbytes
            self._lock_pages_of(buffer)
            return buffer

    def _lock_pages_of(self, buffer: _Buffer) -> None:
        if self._locks_for is not None and (status := buffer.lock_pages(self._locks_for)):
            logger.warning(
                "host memory cannot be page-locked any more (CUDA error %d): new blocks stay unlocked, and copies "
                "from there are slower. Lower host_capacity if the machine is short of memory",
                status,
            )
            self._locks_for, self._refused = None, True

    def _keep(self, buffer: _Buffer) -> None:
        """Keep a buffer whose block was deleted, or release it."""
        with self._buffers_lock:
            whole = self._mapped_bytes if self.capacity_bytes is None else self.capacity_bytes
            if self._kept_bytes + buffer.nbytes <= whole * _KEPT_SHARE:
                self._kept.setdefault(buffer.nbytes, []).append(buffer)
                self._kept_bytes += buffer.nbytes
            else:
                self._release(buffer)

    def _give_way(self, mapped_bytes: int) -> None:
        """Release kept buffers until no more than this is mapped."""
        for kept in self._kept.values():
            while kept and self._mapped_bytes > mapped_bytes:
                buffer = kept.pop()
                self._kept_bytes -= buffer.nbytes
                self._release(buffer)

    def _release(self, buffer: _Buffer) -> None:
        buffer.release()
        self._mapped_bytes -= buffer.nbytes


def _bits(memory: torch.Tensor, layout: BlockLayout) -> Bits:
    """View a block in memory as the tiers see it, `[rows, row_elements]`."""
    bits: Bits = as_bits(layout.over(memory, 1))[0]
    return bits
