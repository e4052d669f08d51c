"""The foundation of every other subpackage: blocks, settings, errors, metrics and locks.

Imports no other subpackage. Begin with `blocks`.
"""

from .blocks import Bits, Block, BlockKey, BlockLayout, BlockTable
from .config import TieredCacheConfig
from .errors import (
    CacheClosedError,
    ConfigError,
    FingerprintMismatchError,
    TieredCacheError,
    TierError,
    TierFullError,
    TierReadError,
    UnsupportedModelError,
    VerificationError,
)
from .geometry import Geometry
from .metrics import CacheStats, Metrics, TierStats

__all__ = [
    "Bits",
    "Block",
    "BlockKey",
    "BlockLayout",
    "BlockTable",
    "CacheClosedError",
    "CacheStats",
    "ConfigError",
    "FingerprintMismatchError",
    "Geometry",
    "Metrics",
    "TierError",
    "TierFullError",
    "TierReadError",
    "TierStats",
    "TieredCacheConfig",
    "TieredCacheError",
    "UnsupportedModelError",
    "VerificationError",
]
