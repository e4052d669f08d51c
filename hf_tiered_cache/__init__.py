"""A tiered KV cache: accelerator, local NVMe, bulk storage. The model's output does not change.

```python
from hf_tiered_cache import TieredCache

with TieredCache(config=model.config) as cache:
    model.generate(**inputs, cache=cache)  # before transformers 5.24: past_key_values=cache
```
"""

from .attention import AttentionRule
from .core import (
    Bits,
    BlockKey,
    BlockLayout,
    CacheClosedError,
    CacheStats,
    ConfigError,
    FingerprintMismatchError,
    TieredCacheConfig,
    TieredCacheError,
    TierError,
    TierFullError,
    TierReadError,
    TierStats,
    UnsupportedModelError,
    VerificationError,
)
from .integration import TieredCache, plan_streaming
from .manager import KVCacheManager
from .planning import StreamingL0
from .residency import EvictionPolicy, HeatTable, Slots, Values, register_eviction
from .tiers import Tier, TierFuture, register_tier

__version__ = "0.1.0"

__all__ = [
    "AttentionRule",
    "Bits",
    "BlockKey",
    "BlockLayout",
    "CacheClosedError",
    "CacheStats",
    "ConfigError",
    "EvictionPolicy",
    "FingerprintMismatchError",
    "HeatTable",
    "KVCacheManager",
    "Slots",
    "StreamingL0",
    "Tier",
    "TierError",
    "TierFullError",
    "TierFuture",
    "TierReadError",
    "TierStats",
    "TieredCache",
    "TieredCacheConfig",
    "TieredCacheError",
    "UnsupportedModelError",
    "Values",
    "VerificationError",
    "plan_streaming",
    "register_eviction",
    "register_tier",
]
