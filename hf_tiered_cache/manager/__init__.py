"""`KVCacheManager`: the cache without transformers, and the operations behind its methods.

Imports `loading`, `residency`, `sequence`, `tiers`, `transfer`, `attention` and `core`. Begin with `manager`.
"""

from .manager import KVCacheManager

__all__ = ["KVCacheManager"]
