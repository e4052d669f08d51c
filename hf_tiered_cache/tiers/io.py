"""Operations of tiers that are under way: their results, the retry, and the translation of errors."""

from __future__ import annotations

import concurrent.futures
import errno
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal, Protocol

from ..core.errors import TieredCacheError, TierError, TierFullError, TierReadError

logger = logging.getLogger(__name__)

IO_TIMEOUT_SECONDS = 120.0

Doing = Literal["writing", "reading", "deleting"]

# The same class from Python 3.11 on.
_TIMEOUTS = (TimeoutError, concurrent.futures.TimeoutError)


class TierFuture(Protocol):
    """A pending operation of a tier, such as a future of tensorstore or of `concurrent.futures`."""

    def result(self, timeout: float | None = None) -> Any:
        """Wait until it is done, for `timeout` seconds at most.

        The value returned is ignored. An exception is a failure, `TimeoutError` when the time is over.
        """


class TierIO:
    """Reads, writes or deletions under way. Keep it until `result()` has returned: dropping it may cancel them.

    Every operation of every tier is tried a second time, whether the first try failed when it began or in
    `result()`. There is no second try when a tier is full, nor when storage gave no answer in time: the first try
    may still be under way then.

    Args:
        start: begins the operation; see `Tier.start_write` and its like.
        doing: kind of operation.
        describe: description of the operation, for error messages.
        clean: removes what a failed try may have left; when it raises, there is no second try.
        failed: called once when the operation failed for good, whatever was raised.

    Raises:
        TierError: as `result`, when the operation could not begin.
    """

    def __init__(
        self,
        start: Callable[[], Sequence[TierFuture]],
        doing: Doing,
        describe: str,
        *,
        clean: Callable[[], None] = lambda: None,
        failed: Callable[[], None] = lambda: None,
    ) -> None:
        self._start = start
        self._doing = doing
        self._describe = describe
        self._clean = clean
        self._failed = failed
        self._futures: Sequence[TierFuture] = ()
        self._may_try_again = True
        self._has_failed = False
        self._attempt(self._begin)

    def result(self) -> None:
        """Wait until all is done. Blocks; releases the GIL.

        Raises:
            TierFullError: the device has no space left.
            TierReadError: a block is missing or damaged.
            TierError: anything else, a timeout included.
        """
        if self._has_failed:
            raise TierError(f"{self._describe}: failed before")
        self._attempt(self._wait)

    def _attempt(self, step: Callable[[], None]) -> None:
        """Run a step; when it fails, start over once."""
        try:
            try:
                step()
            except Exception as error:
                if not self._is_worth_another_try(error):
                    raise
                logger.debug("%s: %r; trying again", self._describe, error)
                self._may_try_again = False
                self._clean_up_after(error)
                self._begin()
                if step == self._wait:
                    self._wait()
        except BaseException as error:
            self._has_failed = True
            try:
                self._failed()
            except Exception:
                logger.warning("%s: cleaning up after a failure failed, too", self._describe, exc_info=True)
            if not isinstance(error, Exception):
                raise
            raise translate(error, self._doing, self._describe) from error

    def _begin(self) -> None:
        futures = self._start()
        if futures is None:  # of a plug-in without annotations
            raise TypeError("None was returned: return a sequence of futures, () when all is done")
        self._futures = tuple(futures)

    def _wait(self) -> None:
        """Wait for all futures, even after a failure: none may still use the caller's memory."""
        futures, self._futures = self._futures, ()
        first_error: BaseException | None = None
        for future in futures:
            began = time.monotonic()
            try:
                future.result(timeout=IO_TIMEOUT_SECONDS)
            except BaseException as error:
                if isinstance(error, _TIMEOUTS) and time.monotonic() - began >= IO_TIMEOUT_SECONDS:
                    self._may_try_again = False
                    first_error = _NoAnswerError(f"no answer within {IO_TIMEOUT_SECONDS:.0f} s")
                    first_error.__cause__ = error
                first_error = first_error or error
        try:
            if first_error is not None:
                raise first_error
        finally:
            del first_error  # it refers to this frame, and that to the caller's memory

    def _is_worth_another_try(self, error: Exception) -> bool:
        return self._may_try_again and not (self._doing == "writing" and _is_full(error))

    def _clean_up_after(self, error: Exception) -> None:
        try:
            self._clean()
        except TierError as second:
            logger.debug("%s: cannot start over: %s", self._describe, second)
            raise error from None


class _NoAnswerError(Exception):
    """Storage did not answer in time."""


def _is_full(error: Exception) -> bool:
    """Return true if a write failed because there is certainly no space left."""
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno in (errno.ENOSPC, errno.EDQUOT)
    # tensorstore raises a ValueError with the system's message.
    said = type(error) is ValueError and ("No space left" in str(error) or "quota exceeded" in str(error))
    return said or isinstance(error, TierFullError)


def translate(error: Exception, doing: Doing, describe: str) -> TierError:
    """Turn what a tier raised into an error of this package, which names the layer and the block."""
    text = str(error) or repr(error)
    for kind in (TierFullError, TierReadError, TierError):
        if isinstance(error, kind):
            return kind(text if text.startswith(describe) else f"{describe}: {text}")
    if isinstance(error, _NoAnswerError):
        return TierError(f"{describe}: {text}; is the storage reachable?")
    if doing == "writing" and _is_full(error):
        return TierFullError(f"{describe}: no space left on the device; free some or use another path ({text})")
    if doing == "reading":
        if isinstance(error, (KeyError, FileNotFoundError)):
            return TierReadError(f"{describe}: a block is missing ({text})")
        codes = ("NOT_FOUND", "DATA_LOSS", "FAILED_PRECONDITION", "INVALID_ARGUMENT")
        if type(error) is ValueError and any(code in text for code in codes):  # of tensorstore
            return TierReadError(f"{describe}: a block is missing or damaged ({text})")
    named = text if type(error) in (ValueError, OSError) else f"{type(error).__name__}: {text}"
    return TierError(f"{describe}: {named}")


def caused_by(cause: BaseException, describe: str) -> TierError:
    """Return a `TierError` for whatever was raised, `SystemExit` included, which would else go unnoticed."""
    error = TierError(f"{describe}: {cause!r}")
    error.__cause__ = cause
    return error


@contextmanager
def failures_as_tier_errors(describe: str) -> Iterator[None]:
    """Turn whatever a tier or a policy raises inside into a `TierError`, with it as the cause.

    Args:
        describe: description of the operation, for error messages.
    """
    try:
        yield
    except TieredCacheError:
        raise
    except Exception as error:
        raise TierError(f"{describe}: {type(error).__name__}: {error}") from error
