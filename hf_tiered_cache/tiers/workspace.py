"""Private directories, which the cache creates and removes; it removes no others.

    <base>/hf-tiered-<random>/          everything that one tier writes
    <base>/hf-tiered-<random>.lock      locked as long as its owner runs

The operating system releases the lock when the process ends, however it ends. So a directory whose lock can be
taken has no owner, and the next start removes it; that of a running process is never touched.
"""

from __future__ import annotations

import logging
import os
import secrets
import shutil
import tempfile
import time
import weakref
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from ..core.config import parse_location
from ..core.errors import ConfigError, TierError

logger = logging.getLogger(__name__)

_PREFIX = "hf-tiered-"
_ENVIRONMENT = "HF_TIERED_CACHE_DIR"
# A younger lock without a directory may belong to a process that is about to create one.
_STALE_LOCK_SECONDS = 60.0
_LOCK_TIMEOUT_SECONDS = 5.0


def default_base() -> Path:
    """Return the default parent of private directories: `$HF_TIERED_CACHE_DIR`, or the system's temporary
    directory, one folder per user. Absolute, so that a later change of the working directory changes nothing.

    Raises:
        ConfigError: `$HF_TIERED_CACHE_DIR` is not a path.
    """
    configured = os.environ.get(_ENVIRONMENT)
    if configured:
        location = parse_location(configured, _ENVIRONMENT)
        if "://" in location:
            raise ConfigError(f"{_ENVIRONMENT}={configured!r} is a URL: give a local directory")
        return Path(location)
    user = os.getuid() if hasattr(os, "getuid") else os.environ.get("USERNAME", "user")
    return Path(tempfile.gettempdir()).absolute() / f"hf_tiered_cache-{user}"


def check_directory(path: str | os.PathLike[str], name: str) -> Path:
    """Return the user's directory as a `Path`.

    It is not created: if its drive is not mounted, that would fill the wrong disk.

    Raises:
        ConfigError: it is missing, not a directory, or not writable.
    """
    directory = Path(path)
    if not directory.exists():
        raise ConfigError(f"{name}={str(path)!r} does not exist: create it, or check that its drive is mounted")
    if not directory.is_dir():
        raise ConfigError(f"{name}={str(path)!r} is not a directory")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise ConfigError(
            f"{name}={str(path)!r} is not writable: change its permissions or give another directory"
        )
    return directory


class PrivateDirectory:
    """A directory below `base` for this object alone, removed by `close()` or at the end of the process.

    Creating one also removes what dead processes left below `base`.

    Args:
        base: parent directory; created when it is the default one.

    Raises:
        TierError: it cannot be created there.
    """

    def __init__(self, base: Path) -> None:
        try:
            base.mkdir(mode=0o700, parents=True, exist_ok=True)
            _sweep(base)
            self.path = base / f"{_PREFIX}{secrets.token_hex(8)}"
            # Held before there is a directory, so that a sweep never finds one without an owner. Any thread may
            # run the finalizer, which releases the lock, so it must not belong to this thread.
            self._lock = FileLock(_lock_path(self.path), thread_local=False)
            # Before anything is created, in case an interrupt strikes in between.
            self._finalizer = weakref.finalize(self, _remove_own, self.path, self._lock, os.getpid())
            # No other process knows this name: a lock that is not granted at once never will be.
            self._lock.acquire(timeout=_LOCK_TIMEOUT_SECONDS)
            self.path.mkdir(mode=0o700)
        except OSError as error:
            raise TierError(f"cannot make a private directory below {base}: {error}") from error

    def close(self) -> None:
        """Remove the directory and its contents. May be called twice."""
        self._finalizer()


def _lock_path(directory: Path) -> Path:
    return directory.with_name(directory.name + ".lock")


def _remove_own(directory: Path, lock: FileLock, owner_pid: int) -> None:
    if os.getpid() == owner_pid:  # a forked child must not remove its parent's data
        _remove(directory, lock)


def _remove(directory: Path, lock: FileLock) -> None:
    shutil.rmtree(directory, ignore_errors=True)
    lock.release()
    # Unlinked after the release: a sweep that takes the lock in between finds no directory and does the same.
    _lock_path(directory).unlink(missing_ok=True)


def _sweep(base: Path) -> None:
    """Remove what has no owner: directories, and old locks of directories that are gone."""
    stale_before = time.time() - _STALE_LOCK_SECONDS
    for path in base.glob(f"{_PREFIX}*"):
        with suppress(FileNotFoundError):  # another process sweeps as well
            if path.is_dir():
                directory = path
            elif path.suffix == ".lock" and path.stat().st_mtime < stale_before:
                directory = path.with_suffix("")
            else:
                continue
            lock = FileLock(_lock_path(directory), timeout=0, thread_local=False)
            with suppress(Timeout):
                lock.acquire()
                logger.info("removing %s, left by a process that has ended", directory)
                _remove(directory, lock)
