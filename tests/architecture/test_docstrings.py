"""Every public method is documented: by itself, or by the contract that it overrides."""

import importlib
import inspect
import pkgutil
from collections.abc import Iterator
from functools import cached_property

import sim

DESCRIPTORS = (classmethod, staticmethod, property, cached_property)


def public_classes() -> Iterator[type]:
    names = [module.name for module in pkgutil.walk_packages(sim.__path__, "sim.")]
    for module in [importlib.import_module(name) for name in names if name != "sim.__main__"]:
        for name, cls in inspect.getmembers(module, inspect.isclass):
            if cls.__module__ == module.__name__ and not name.startswith("_"):
                yield cls


def public_methods(cls: type) -> list[str]:
    """Names of the methods and properties that a class defines; fields that hold a function are none."""
    return [
        name
        for name, value in vars(cls).items()
        if (inspect.isfunction(value) or isinstance(value, DESCRIPTORS))
        and not name.startswith("_")
        and name not in inspect.get_annotations(cls)
    ]


def documentation(cls: type, name: str) -> str:
    """The docstring of a method, or of the nearest one that it overrides."""
    definitions = [vars(owner)[name] for owner in cls.__mro__ if name in vars(owner)]
    return next((doc for definition in definitions if (doc := inspect.getdoc(definition))), "")


def test_public_methods_are_documented_by_themselves_or_their_contract():
    methods = [(cls, name) for cls in public_classes() for name in public_methods(cls)]
    assert len(methods) > 50
    found = [f"{cls.__module__}.{cls.__qualname__}.{name}" for cls, name in methods if not documentation(cls, name)]
    assert found == []
