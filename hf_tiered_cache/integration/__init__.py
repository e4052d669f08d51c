"""Everything that knows transformers: the `Cache` subclass, its layers, and the `"tiered"` attention function.

Imports `manager`, `planning`, `attention` and `core`. Begin with `cache`.
"""

from .cache import TieredCache
from .plan import plan_streaming

__all__ = ["TieredCache", "plan_streaming"]
