"""Test suites for plug-ins: subclass one in a test module, and pytest checks a tier or policy.

Nothing else in the package imports this; it needs pytest, and `EvictionContract` also needs hypothesis
(`pip install "hf-tiered-cache[test]"`).
"""

from typing import TYPE_CHECKING, Any

import pytest

# Before these modules are imported, so that failures show the values.
pytest.register_assert_rewrite("hf_tiered_cache.testing.tiers", "hf_tiered_cache.testing.eviction")

from .tiers import StorageTierContract, TierContract  # noqa: E402

if TYPE_CHECKING:
    from .eviction import EvictionContract

__all__ = ["EvictionContract", "StorageTierContract", "TierContract"]


def __getattr__(name: str) -> Any:
    if name == "EvictionContract":  # imported late: the others work without hypothesis
        from .eviction import EvictionContract

        return EvictionContract
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
