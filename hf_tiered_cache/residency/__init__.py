"""The tiers that hold copies of each block, and the moves of blocks between tiers.

Imports `core`, `tiers` and `transfer`. Begin with `table`.
"""

from .eviction import EvictionPolicy, Values, register_eviction
from .heat import HeatTable, Slots
from .mover import Mover
from .writeback import WriteBack

__all__ = ["EvictionPolicy", "HeatTable", "Mover", "Slots", "Values", "WriteBack", "register_eviction"]
