"""The KV cache in tiers: accelerator, local NVMe, bulk storage. Output as without the cache.

```python
from hf_tiered_cache import TieredCache

with TieredCache(config=model.config) as cache:
    model.generate(**inputs, cache=cache)  # before transformers 5.24: past_key_values=cache
```
"""

from .attention.online import AttentionRule
from .core.blocks import Bits, BlockKey, BlockLayout
from .core.config import TieredCacheConfig
from .core.errors import (
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
from .core.metrics import CacheStats, TierStats
from .integration.cache import TieredCache
from .integration.plan import plan_streaming
from .manager.manager import KVCacheManager
from .planning.planner import StreamingL0
from .residency.eviction import EvictionPolicy, Values, register_eviction
from .residency.heat import HeatTable, Slots
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
