"""The KV cache in tiers: accelerator, local NVMe, bulk storage. Output as without the cache.

```python
from hf_tiered_cache import TieredCache

with TieredCache(config=model.config) as cache:
    model.generate(**inputs, past_key_values=cache)
```
"""

from .blocks import Bits, BlockKey, BlockLayout
from .cache import TieredCache
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
from .eviction import EvictionPolicy, Values, register_eviction
from .heat import HeatTable, Slots
from .manager import KVCacheManager
from .metrics import CacheStats, TierStats
from .online_attention import AttentionRule
from .planner import StreamingL0, plan_streaming
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
