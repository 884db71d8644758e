"""Name -> implementation, loaded on first use: one table a family, one line an entry.

A table holds `"module:Class"` strings, so that listing what exists imports nothing. A user's own class
is named the same way in a scenario (`kind: "their.package:Class"`), which needs an explicit permission
because it runs their code.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Iterator, Mapping
from typing import Any, Generic, TypeVar, cast

from sim.errors import InvariantError, ScenarioError, did_you_mean

T = TypeVar("T")


class Registry(Generic[T]):
    """The named implementations of one family (`what` is the family's word in messages)."""

    def __init__(self, what: str, base: str, entries: Mapping[str, str]) -> None:
        """`base` is the `"module:Class"` that every implementation derives from."""
        self.what = what
        self._base = base
        self._entries = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: str) -> bool:
        return name in self._entries

    def load(self, name: str, *, place: str = "", allow_imports: bool = False) -> type[T]:
        """The class registered as `name`. Imports its module; raises ScenarioError at `place`."""
        target = self._entries.get(name)
        if target is None and ":" in name:
            return self._load_foreign(name, place, allow_imports)
        if target is None:
            raise ScenarioError(
                place,
                f"unknown {self.what} {name!r}",
                valid=f"known: {', '.join(self)}",
                remedy=did_you_mean(name, self),
            )
        return cast("type[T]", _import(target))

    def _load_foreign(self, name: str, place: str, allow_imports: bool) -> type[T]:
        if not allow_imports:
            raise ScenarioError(
                place,
                f"{self.what} {name!r} would run code from outside servesim",
                valid=f"known: {', '.join(self)}",
                remedy="Pass --allow-imports if you trust this scenario.",
            )
        try:
            loaded: object = _import(name)
        except (ImportError, AttributeError, ValueError) as error:
            raise ScenarioError(
                place, f"cannot import {self.what} {name!r} ({error})", remedy="Is it installed?"
            ) from error
        base: type[T] = _import(self._base)
        if not (inspect.isclass(loaded) and issubclass(loaded, base)):
            raise ScenarioError(place, f"{name!r} is not a subclass of {self._base}")
        return loaded


def _import(target: str) -> Any:
    module, _, attribute = target.partition(":")
    if not module or not attribute:
        raise InvariantError(f"registry entry {target!r} is not 'module:Class'")
    return getattr(importlib.import_module(module), attribute)
