"""The errors of the package.

    TieredCacheError
    ├── ConfigError (ValueError)        an invalid setting or argument
    ├── TierError (OSError)             a storage tier failed
    │   ├── TierFullError               no room left, nothing was lost
    │   └── TierReadError               a block could not be read back
    ├── VerificationError               a block is not what was written
    ├── FingerprintMismatchError        a saved context belongs to another model
    ├── UnsupportedModelError           this model, or this way of running it, cannot be tiered
    └── CacheClosedError                used after `close()`

Each also inherits the builtin in brackets, so `except OSError` catches storage failures.
"""

from __future__ import annotations


class TieredCacheError(Exception):
    """Base of everything that this package raises on purpose."""


class ConfigError(TieredCacheError, ValueError):
    """A setting or argument is invalid; nothing was changed."""


class TierError(TieredCacheError, OSError):
    """A storage tier failed."""


class TierFullError(TierError):
    """A tier has no room left. The block that it was to store is still held where it was."""


class TierReadError(TierError):
    """A block could not be read back from its tier."""


class VerificationError(TieredCacheError):
    """A block that was read differs from the block that was written."""


class FingerprintMismatchError(TieredCacheError):
    """A saved context belongs to another model, tokenizer or dtype."""


class UnsupportedModelError(TieredCacheError):
    """The model, or the way it is run, cannot be tiered."""


class CacheClosedError(TieredCacheError):
    """The cache or manager was used after `close()`."""
