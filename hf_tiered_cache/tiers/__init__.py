"""The tiers. Importing this package registers the built-in ones."""

from ..tier_io import TierFuture, TierIO
from .base import Tier, TierRegistry, register_tier
from .host import HostTier
from .nvme import NvmeTier
from .zarr import ZarrTier

__all__ = ["HostTier", "NvmeTier", "Tier", "TierFuture", "TierIO", "TierRegistry", "ZarrTier", "register_tier"]
