"""Bounds of options are those that are written beside them."""

import importlib
import pkgutil
from collections.abc import Iterator

import pytest

import sim
from sim.options import Options


def options_classes(base: type[Options] = Options) -> Iterator[type[Options]]:
    for cls in base.__subclasses__():
        yield cls
        yield from options_classes(cls)


@pytest.mark.parametrize(("bound", "strictest"), [("le", min), ("lt", min), ("ge", max), ("gt", max)])
def test_no_bound_of_a_field_is_undone_by_that_of_its_type(bound, strictest):
    """Of several bounds of one kind pydantic checks the last, which is that of `Count` where the field has a default.

    `Annotated[Count, Field(le=...)]` puts the narrower one last.
    """
    for module in pkgutil.walk_packages(sim.__path__, "sim."):
        if module.name != "sim.__main__":
            importlib.import_module(module.name)
    undone = [
        (cls.__name__, name, bounds)
        for cls in set(options_classes())
        for name, field in cls.model_fields.items()
        if (bounds := [getattr(part, bound) for part in field.metadata if hasattr(part, bound)])
        and bounds[-1] != strictest(bounds)
    ]
    assert undone == []
