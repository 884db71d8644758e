"""Field types that several parts of a traffic description share."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, GetCoreSchemaHandler, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError, core_schema

from sim.clock import NS_PER_S
from sim.options import OneOf, Options, PositiveSeconds, Seconds
from sim.workload.base import LENGTHS, Ints, LengthOptions

_MAX_S = 4e9


def refusal(found: str, valid: str) -> PydanticCustomError:
    """What a validator raises: what was found and what would be accepted."""
    return PydanticCustomError("contradiction", "{found}; {valid}", {"found": found, "valid": valid})


class _OrNumber:
    """Field annotation: a plain number may stand for the mapping `{kind: constant, <key>: number}`."""

    def __init__(self, key: str, types: tuple[type, ...], number: JsonSchemaValue) -> None:
        self._key, self._types, self._number = key, types, number

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        return core_schema.no_info_before_validator_function(
            self._expand, handler(source), metadata={"pydantic_js_functions": [self._json_schema]}
        )

    def _expand(self, value: Any) -> Any:
        return {"kind": "constant", self._key: value} if type(value) in self._types else value

    def _json_schema(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        return {"anyOf": [self._number, handler(schema)]}


LengthField = Annotated[
    LengthOptions, OneOf(LENGTHS), _OrNumber("value", (int, float), {"type": "integer", "minimum": 1})
]
"""A length distribution; a plain integer is a constant."""


class ConstantDuration(Options):
    """Always the same time."""

    kind: Literal["constant"] = "constant"
    value_s: Seconds = Field(description="the time, seconds")

    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        """`num` times in nanoseconds."""
        return _to_ns(np.full(num, self.value_s))


class ExponentialDuration(Options):
    """Exponentially distributed time."""

    kind: Literal["exponential"] = "exponential"
    mean_s: PositiveSeconds = Field(description="mean, seconds")

    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        """`num` times in nanoseconds."""
        return _to_ns(rng.exponential(self.mean_s, num))


class UniformDuration(Options):
    """Uniformly distributed time."""

    kind: Literal["uniform"] = "uniform"
    low_s: Seconds = Field(description="shortest, seconds")
    high_s: Seconds = Field(description="longest, seconds")

    @model_validator(mode="after")
    def _check(self) -> UniformDuration:
        if self.low_s > self.high_s:
            raise refusal(f"low_s {self.low_s:g} is above high_s {self.high_s:g}", "low_s must not exceed high_s")
        return self

    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        """`num` times in nanoseconds."""
        return _to_ns(rng.uniform(self.low_s, self.high_s, num))


DurationField = Annotated[
    Annotated[ConstantDuration | ExponentialDuration | UniformDuration, Field(discriminator="kind")],
    _OrNumber("value_s", (int, float), {"type": "number", "minimum": 0}),
]
"""A distribution of times in seconds; a plain number is a constant."""


def _to_ns(seconds: NDArray[np.float64]) -> Ints:
    """A time that an integer cannot hold is cut: no run lasts so long."""
    nanoseconds: Ints = np.rint(np.minimum(seconds, _MAX_S) * NS_PER_S).astype(np.int64)
    return nanoseconds
