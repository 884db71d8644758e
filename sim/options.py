"""Typed, strict options: what a scenario may say about one implementation.

Every implementation declares an `Options` class beside itself. Field descriptions carry meaning and unit;
they appear in the JSON Schema and in error messages.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, GetCoreSchemaHandler, GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from sim.errors import ScenarioError, did_you_mean
from sim.registry import Registry

T = TypeVar("T")

# Of two constraints of one kind pydantic keeps only the one written here: a field that narrows `le` needs
# `Annotated[Count, Field(le=...)]`. The bound of plain numbers is an `lt`, so that `Field(le=...)` narrows it.
Count = Annotated[int, Field(ge=1, le=10**12, strict=True)]
"""A whole number of things, at least one."""
CountOrZero = Annotated[int, Field(ge=0, le=10**12, strict=True)]
"""A whole number of things, possibly none."""
Positive = Annotated[float, Field(gt=0, lt=1e15, allow_inf_nan=False, strict=True)]
"""A number above zero, small enough that sums and products of a few of them stay finite."""
NonNegative = Annotated[float, Field(ge=0, lt=1e15, allow_inf_nan=False, strict=True)]
"""A number, zero or more, small enough that sums and products of a few of them stay finite."""
Finite = Annotated[float, Field(gt=-1e15, lt=1e15, allow_inf_nan=False, strict=True)]
"""A number of either sign, small enough that sums and products of a few of them stay finite."""
PositiveSeconds = Annotated[float, Field(gt=0, le=1e9, allow_inf_nan=False, strict=True)]
"""A time above zero, up to some 30 years: sums of a few of them fit in 64 bits of nanoseconds."""
Seconds = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False, strict=True)]
"""A time, zero or more, up to some 30 years."""
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False, strict=True)]
"""A probability or a part of a whole."""


class Options(BaseModel):
    """Base of all options: frozen, unknown keys are errors, nothing is converted silently."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


def by_class_index(by_name: Mapping[str, T], class_names: Sequence[str], place: str) -> dict[int, T]:
    """What options say by name of a request class, by the class's index. Raises ScenarioError at `place`."""
    for name in by_name:
        if name not in class_names:
            raise ScenarioError(
                place,
                f"no request class is called {name!r}",
                valid=f"classes: {', '.join(class_names)}",
                remedy=did_you_mean(name, class_names),
            )
    return {class_names.index(name): value for name, value in by_name.items()}


class OneOf:
    """Field annotation: the options of one implementation of a family, which `key` names.

    `Annotated[ArrivalOptions, OneOf(ARRIVALS)]` accepts `{kind: poisson, rate_per_s: 6}` and yields the
    `Options` of the class registered as `poisson`. A name with a colon is somebody else's class; it is
    imported only when validation runs with the context `{"allow_imports": True}`.
    """

    def __init__(self, registry: Registry[Any], key: str = "kind") -> None:
        self._registry = registry
        self._key = key

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        choices: dict[str, CoreSchema] = {
            name: handler.generate_schema(self._registry.load(name).Options) for name in self._registry
        }
        foreign = core_schema.with_info_plain_validator_function(self._validate_foreign)
        union = core_schema.tagged_union_schema({**choices, _FOREIGN: foreign}, discriminator=self._tag)

        def json_schema(_: CoreSchema, to_json: GetJsonSchemaHandler) -> JsonSchemaValue:
            named = [{"allOf": [to_json(choice), self._names(const=name)]} for name, choice in choices.items()]
            return {
                "oneOf": [*named, self._names(pattern=":", description="a class of your own, package.module:Class")]
            }

        return core_schema.no_info_before_validator_function(
            self._check_name, union, metadata={"pydantic_js_functions": [json_schema]}
        )

    def options_class(self, value: Any) -> type[Options] | None:
        """The options class that `value` (a mapping or options) selects; None when it names no registered one."""
        name = self._name(value)
        if not isinstance(name, str) or name not in self._registry:
            return None
        options: type[Options] = self._registry.load(name).Options
        return options

    def _names(self, **constraint: str) -> dict[str, Any]:
        """JSON Schema of a mapping whose name obeys `constraint`."""
        return {"type": "object", "properties": {self._key: {"type": "string", **constraint}}, "required": [self._key]}

    def _name(self, value: Any) -> Any:
        return value.get(self._key) if isinstance(value, dict) else getattr(value, self._key, None)

    def _tag(self, value: Any) -> str:
        name = str(self._name(value))
        return name if name in self._registry else _FOREIGN

    def _check_name(self, value: Any) -> Any:
        known = f"known: {', '.join(self._registry)}"
        if not isinstance(value, (dict, BaseModel)):
            raise PydanticCustomError(
                "not_a_mapping",
                "{found}; {valid}",
                {"found": f"expected a mapping with {self._key!r}, got {value!r}", "valid": known},
            )
        name = self._name(value)
        if not isinstance(name, str):
            found = f"{self._key!r} is missing" if name is None else f"{self._key!r} is {name!r}"
            raise PydanticCustomError("no_name", "{found}; {valid}", {"found": found, "valid": known})
        if name not in self._registry and ":" not in name:
            raise PydanticCustomError(
                "unknown_name",
                "{found}; {valid}. {remedy}",
                {
                    "key": self._key,
                    "found": f"unknown {self._registry.what} {name!r}",
                    "valid": known,
                    "remedy": did_you_mean(name, self._registry),
                },
            )
        return value

    def _validate_foreign(self, value: Any, info: core_schema.ValidationInfo) -> Any:
        allowed = bool((info.context or {}).get("allow_imports"))
        try:
            implementation = self._registry.load(str(self._name(value)), allow_imports=allowed)
        except ScenarioError as error:
            raise PydanticCustomError(
                "foreign",
                "{found}; {valid}. {remedy}",
                {"key": self._key, "found": error.found, "valid": error.valid, "remedy": error.remedy},
            ) from error
        return implementation.Options.model_validate(value)


_FOREIGN = "package.module:Class"
