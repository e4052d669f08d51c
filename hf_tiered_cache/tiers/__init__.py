"""The tiers. Importing this package registers the built-in ones."""

from .base import Tier, TierIO, TierRegistry, register_tier
from .host import HostTier
from .nvme import NvmeTier
from .zarr import ZarrTier

__all__ = ["HostTier", "NvmeTier", "Tier", "TierIO", "TierRegistry", "ZarrTier", "register_tier"]
