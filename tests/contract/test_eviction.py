"""What every eviction policy does; each implementation runs the same suite."""

from __future__ import annotations

import pytest

from hf_tiered_cache import ConfigError, EvictionPolicy, TieredCacheConfig
from hf_tiered_cache.blocks import BlockKey
from hf_tiered_cache.eviction import POLICIES, make_eviction_policy

KEYS = [BlockKey("r", layer_idx, block_idx, 0) for block_idx in range(4) for layer_idx in range(2)]


@pytest.mark.parametrize("name", sorted(POLICIES))
class TestContract:
    @pytest.fixture
    def policy(self, name: str) -> EvictionPolicy:
        policy = make_eviction_policy(name)
        for key in KEYS:
            policy.admit(key)
        return policy

    def test_exactly_as_many_as_asked(self, policy: EvictionPolicy) -> None:
        for count in range(len(KEYS) + 1):
            victims = policy.victims(count, lambda key: True)
            assert len(victims) == len(set(victims)) == count and set(victims) <= set(KEYS)

    def test_all_or_nothing(self, policy: EvictionPolicy) -> None:
        assert policy.victims(len(KEYS) + 1, lambda key: True) == []
        assert policy.victims(2, lambda key: key == KEYS[0]) == []

    def test_only_evictable(self, policy: EvictionPolicy) -> None:
        allowed = set(KEYS[3:])
        assert set(policy.victims(len(allowed), allowed.__contains__)) == allowed

    def test_naming_changes_nothing(self, policy: EvictionPolicy) -> None:
        assert policy.victims(3, lambda key: True) == policy.victims(3, lambda key: True)

    def test_forgotten_blocks_are_not_named(self, policy: EvictionPolicy) -> None:
        policy.forget(KEYS[0])
        policy.forget(KEYS[0])
        policy.touch(KEYS[0])
        assert KEYS[0] not in policy.victims(len(KEYS) - 1, lambda key: True)


def test_fifo_is_oldest_first() -> None:
    policy = make_eviction_policy("fifo")
    for key in KEYS:
        policy.admit(key)
    policy.touch(KEYS[0])
    assert policy.victims(3, lambda key: True) == KEYS[:3]


def test_unknown_policy_names_the_known_ones() -> None:
    with pytest.raises(ConfigError, match="fifo"):
        make_eviction_policy("oracle")
    TieredCacheConfig(eviction="oracle")  # the registry may still grow when settings are made
