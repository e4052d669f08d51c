"""The memory that a cache will need, computed before it exists.

Imports `sequence`, `transfer`, `attention` and `core` for their sizes. Begin with `planner`.
"""

from .planner import LayerShapes, StreamingL0, plan_streaming

__all__ = ["LayerShapes", "StreamingL0", "plan_streaming"]
