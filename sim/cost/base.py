"""Contract of the cost models: what an iteration costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import IntEnum, StrEnum
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, SerializerFunctionWrapHandler, model_serializer, model_validator
from pydantic_core import PydanticCustomError

from sim.cost.host import HOST_TIMES, HostOptions
from sim.gpu import Gpu
from sim.model import Model
from sim.options import OneOf, Options
from sim.registry import Registry
from sim.step import StepArrays, StepShape


class Resource(StrEnum):
    """What an iteration's time is spent on."""

    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    COMMUNICATION = "communication"
    OVERHEAD = "overhead"


class Coverage(IntEnum):
    """How far an iteration lies from what was measured; the larger, the further."""

    MEASURED = 0
    """At measured points."""
    INTERPOLATED = 1
    """Between measured points."""
    EXTRAPOLATED = 2
    """Beyond them."""


OWN_HOST_TIMES = ("host_us", "host_us_per_request")
"""How cost models call host times of their own that a scenario may set."""


class CostOptions(Options):
    """Base of every cost model's options."""

    kind: str = Field(description="name of a cost model")
    host: Annotated[HostOptions, OneOf(HOST_TIMES)] | None = Field(
        default=None, description="host time before every iteration; null: as this cost model itself has it"
    )

    @model_validator(mode="after")
    def _check_host(self) -> Self:
        twice = [name for name in OWN_HOST_TIMES if name in self.model_fields_set]
        if self.host is not None and twice:
            found = {
                "found": f"host times are given twice: {', '.join(twice)} and host",
                "valid": "host is in place of the cost model's own host times",
                "remedy": f"Leave host or {' and '.join(twice)} out; in a variant, null takes a key back.",
            }
            raise PydanticCustomError("refused", "{found}", found)
        return self

    @model_serializer(mode="wrap")
    def _without_idle_host_times(self, to_dict: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """What is written can be read again: times in whose place `host` stands are left out."""
        data: dict[str, Any] = to_dict(self)
        if self.host is not None:
            data = {key: value for key, value in data.items() if key not in OWN_HOST_TIMES}
        return data

    def describe_host(self) -> str:
        """Whose host times these are, in a few words."""
        if self.host is not None:
            return self.host.describe()
        own = [f"{name} {getattr(self, name):g}" for name in OWN_HOST_TIMES if hasattr(self, name)]
        return ": ".join([f"that of {self.kind} itself", *filter(None, [", ".join(own)])])


@dataclass(frozen=True)
class Target:
    """What is being priced: one replica of a model."""

    model: Model
    gpu: Gpu
    tensor_parallel: int
    kv_dtype_bytes: float
    """Bytes per element of KV."""


class CostModel(ABC):
    """Prices iterations. Pure: no state, no randomness; sees aggregates only, never requests."""

    Options: ClassVar[type[CostOptions]]

    @classmethod
    @abstractmethod
    def build(cls, options: CostOptions, target: Target) -> CostModel:
        """The model for one replica. Raises ScenarioError or ArtifactError when it cannot price `target`."""

    @abstractmethod
    def price(self, shape: StepShape) -> int:
        """Device time of one iteration, nanoseconds.

        Post-condition: >= 1 (a zero would freeze the clock). Monotone: more tokens never cost less
        (measured tables: of one chunk or of equal contexts; a mixture counts as its means, and spread costs).
        """

    @abstractmethod
    def price_decode_run(self, shape: StepShape, num_steps: int) -> NDArray[np.int64]:
        """Prices of `num_steps` iterations in a row that only decode, each with contexts one token longer.

        `shape` is the first one. Entry i equals `price` of the i-th shape to the nanosecond: same
        operations, same order.
        """

    @abstractmethod
    def host_ns(self, shape: StepShape) -> int:
        """Time that the host takes to plan this iteration before the device can start it, ns, >= 0."""

    @abstractmethod
    def breakdown(self, steps: StepArrays) -> dict[Resource, NDArray[np.float64]]:
        """Device time of many iterations by resource, nanoseconds, one array entry per iteration.

        Every resource has an entry; their sum equals the prices up to rounding.
        """

    def coverage(self, steps: StepArrays) -> NDArray[np.int8] | None:
        """The `Coverage` of many iterations, one entry each; None for a model that rests on no measurements."""
        return None

    def perturbed(self, rng: np.random.Generator) -> CostModel | None:
        """The same model, its prices off by a draw from the errors of its fit; None where it knows of none.

        What is drawn is common to all iterations: errors of a fit repeat, they don't average out over a run.
        Changes nothing but the state of `rng`.
        """
        return None

    def facts(self) -> dict[str, Any]:
        """What the prices rest on, as plain data for the results; empty where the options say it all."""
        return {}


def prefill_sums(prefills: tuple[tuple[int, int], ...]) -> tuple[int, int, int]:
    """`(tokens, pairs, kv_tokens)` over the prefill chunks of one iteration.

    `pairs` counts (query, key) pairs under the causal mask: a chunk of n tokens on a context of c has
    n·c + n(n+1)/2. `kv_tokens` counts the tokens whose KV its attention reads: c + n.
    """
    tokens = pairs = kv_tokens = 0
    for num_tokens, context in prefills:
        tokens += num_tokens
        pairs += num_tokens * (2 * context + num_tokens + 1) // 2
        kv_tokens += context + num_tokens
    return tokens, pairs, kv_tokens


def prefill_sums_of(steps: StepArrays) -> tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]:
    """`prefill_sums` of many iterations: three int64 arrays with one entry per iteration."""
    num_tokens, context = steps.prefill_num_tokens, steps.prefill_context
    sums = tuple(np.zeros(len(steps.num_decode), dtype=np.int64) for _ in range(3))
    values = (num_tokens, num_tokens * (2 * context + num_tokens + 1) // 2, context + num_tokens)
    for total, value in zip(sums, values, strict=True):
        np.add.at(total, steps.prefill_iteration, value)
    tokens, pairs, kv_tokens = sums
    return tokens, pairs, kv_tokens


def decode_contexts(shape: StepShape, num_steps: int) -> NDArray[np.int64]:
    """`decode_context_sum` of `num_steps` decode-only iterations in a row that begin with `shape`."""
    return shape.decode_context_sum + shape.num_decode * np.arange(num_steps, dtype=np.int64)


COST_MODELS: Registry[CostModel] = Registry(
    "cost model",
    "sim.cost.base:CostModel",
    {
        "roofline": "sim.cost.roofline:Roofline",
        "table": "sim.cost.table:Table",
        "linear": "sim.cost.linear:Linear",
        "constant": "sim.cost.constant:Constant",
    },
)
