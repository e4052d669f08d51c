"""The tiers that hold copies of each block, and the moves of blocks between tiers.

Imports `core`, `tiers` and `transfer`. Begin with `table`.
"""

from .eviction import EvictionPolicy, register_eviction
from .heat import HeatTable
from .mover import Mover
from .writeback import WriteBack

__all__ = ["EvictionPolicy", "HeatTable", "Mover", "WriteBack", "register_eviction"]
