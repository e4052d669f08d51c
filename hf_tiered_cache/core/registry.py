"""Implementations by name: those of the package, of the user's own code, and of installed plug-ins."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Generic, TypeVar

from .errors import ConfigError

_Base = TypeVar("_Base")
_Class = TypeVar("_Class", bound="type[Any]")


class Registry(Generic[_Base]):
    """The classes that a setting can name.

    A name that was not registered is looked up among the entry points of installed packages, and loaded then.

    Args:
        kind: what the classes are, for error messages.
        base: the class that all of them extend.
        group: of the entry points.
        offered: whether `names` lists a class.
    """

    def __init__(
        self,
        kind: str,
        base: type[_Base],
        group: str,
        offered: Callable[[type[_Base]], bool] = lambda some_class: True,
    ) -> None:
        self.classes: dict[str, type[_Base]] = {}
        self._kind = kind
        self._base = base
        self._group = group
        self._offered = offered

    def register(self, name: str, *, replace: bool = False) -> Callable[[_Class], _Class]:
        """Class decorator: make a class available under a name.

        A class of the same module and qualified name takes the place of its predecessor, so that the cell of a
        notebook can be run again.

        Args:
            name: as in the settings.
            replace: whether the class takes the place of another one of that name.

        Raises:
            ConfigError: the name is another class's, or the class is not complete.
        """

        def decorate(new_class: _Class) -> _Class:
            self._enter(name, new_class, replace)
            return new_class

        return decorate

    def get(self, name: str) -> type[_Base]:
        """Return the class of a name.

        Raises:
            ConfigError: there is none, or its package cannot be loaded.
        """
        if name not in self.classes:
            self._load(name)
        return self.classes[name]

    def names(self) -> list[str]:
        """Return the names to choose from, those of installed plug-ins included, without loading them."""
        installed = entry_points(group=self._group).names - self.classes.keys()
        return sorted({*installed, *(name for name, known in self.classes.items() if self._offered(known))})

    def _enter(self, name: str, new_class: type[Any], replace: bool) -> None:
        if not isinstance(name, str) or not name:
            raise ConfigError(f"{name!r} is not a name for a {self._kind}: give a string")
        if not (isinstance(new_class, type) and issubclass(new_class, self._base)):
            raise ConfigError(f"{self._kind} {name!r}: {new_class!r} does not extend {self._base.__name__}")
        if inspect.isabstract(new_class):
            missing = ", ".join(sorted(getattr(new_class, "__abstractmethods__", ())))
            raise ConfigError(f"{self._kind} {name!r}: {new_class.__qualname__} does not implement {missing}")
        known = self.classes.get(name)
        if known is not None and not replace and _full_name(known) != _full_name(new_class):
            raise ConfigError(
                f"there is a {self._kind} {name!r} already, {_full_name(known)}: "
                "take another name, or replace=True"
            )
        self.classes[name] = new_class

    def _load(self, name: str) -> None:
        """Load the plug-in that offers a name, and register its class."""
        offers = list({offer.value: offer for offer in entry_points(group=self._group, name=name)}.values())
        if not offers:
            raise ConfigError(f"unknown {self._kind} {name!r}; there are {', '.join(self.names())}")
        if len(offers) > 1:
            values = " and ".join(_source(offer) for offer in offers)
            raise ConfigError(f"{self._kind} {name!r} is offered by {values}: uninstall one of them")
        (offer,) = offers
        try:
            loaded = offer.load()
            if name not in self.classes:  # its module may have registered it
                self._enter(name, loaded, replace=False)
        except Exception as error:
            raise ConfigError(
                f"{self._kind} {name!r} of {_source(offer)} cannot be loaded: {error!r}; repair or uninstall it"
            ) from error


def _full_name(some_class: type[Any]) -> str:
    return f"{some_class.__module__}.{some_class.__qualname__}"


def _source(offer: EntryPoint) -> str:
    package = "" if offer.dist is None else f" of the package {offer.dist.name!r}"
    return f"{offer.value!r}{package}"
