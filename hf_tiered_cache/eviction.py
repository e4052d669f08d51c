"""Which blocks leave a tier first: the contract, the registry, and oldest-first."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable

from .blocks import BlockKey
from .errors import ConfigError

POLICIES: dict[str, type[EvictionPolicy]] = {}


def register_eviction(name: str) -> Callable[[type[EvictionPolicy]], type[EvictionPolicy]]:
    """Class decorator: make a policy available as `eviction=name`."""

    def register(policy_class: type[EvictionPolicy]) -> type[EvictionPolicy]:
        POLICIES[name] = policy_class
        return policy_class

    return register


def make_eviction_policy(name: str) -> EvictionPolicy:
    """Return a fresh policy.

    Raises:
        ConfigError: there is no policy of that name.
    """
    if name not in POLICIES:
        raise ConfigError(f"unknown eviction policy {name!r}; there are {', '.join(sorted(POLICIES))}")
    return POLICIES[name]()


class EvictionPolicy(ABC):
    """Orders the blocks of one tier. It moves nothing and is called under its owner's lock.

    `victims(count, evictable)` names exactly `count` distinct admitted blocks for which `evictable` holds,
    the first to leave first, or none at all; naming does not change the policy. What leaves is told by `forget`.
    """

    @abstractmethod
    def admit(self, key: BlockKey) -> None:
        """The tier holds this block now."""

    @abstractmethod
    def touch(self, key: BlockKey) -> None:
        """The block was read. Blocks that are not admitted are ignored."""

    @abstractmethod
    def forget(self, key: BlockKey) -> None:
        """The tier no longer holds this block. Blocks that are not admitted are ignored."""

    @abstractmethod
    def victims(self, count: int, evictable: Callable[[BlockKey], bool]) -> list[BlockKey]:
        """Name the blocks that leave first; see the class."""


@register_eviction("fifo")
class FifoPolicy(EvictionPolicy):
    """Oldest admission first, whatever is read: in exact mode every block is read in each step, so reads say
    nothing, and the order of recency would evict just what is needed next."""

    def __init__(self) -> None:
        self._admitted: OrderedDict[BlockKey, None] = OrderedDict()

    def admit(self, key: BlockKey) -> None:
        self._admitted[key] = None

    def touch(self, key: BlockKey) -> None:
        pass

    def forget(self, key: BlockKey) -> None:
        self._admitted.pop(key, None)

    def victims(self, count: int, evictable: Callable[[BlockKey], bool]) -> list[BlockKey]:
        chosen: list[BlockKey] = []
        for key in self._admitted:
            if len(chosen) == count:
                break
            if evictable(key):
                chosen.append(key)
        return chosen if len(chosen) == count else []
