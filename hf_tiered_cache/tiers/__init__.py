"""Storage of blocks: host memory, local NVMe and bulk storage. Importing this package registers these tiers.

Imports `core`. Begin with `base`, the contract of a tier.
"""

from .base import Tier, TierRegistry, register_tier
from .host import HostTier
from .io import TierFuture, TierIO
from .nvme import NvmeTier
from .zarr import ZarrTier

__all__ = ["HostTier", "NvmeTier", "Tier", "TierFuture", "TierIO", "TierRegistry", "ZarrTier", "register_tier"]
