"""Contract of the cost models: what an iteration costs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from enum import StrEnum
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sim.gpu import Gpu
from sim.model import Model
from sim.options import Options
from sim.registry import Registry
from sim.step import StepArrays, StepShape


class Resource(StrEnum):
    """What an iteration's time is spent on."""

    COMPUTE = "compute"
    BANDWIDTH = "bandwidth"
    COMMUNICATION = "communication"
    OVERHEAD = "overhead"


class CostOptions(Options):
    """Base of every cost model's options."""

    kind: str = Field(description="name of a cost model")


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

        Post-condition: >= 1 (a zero would freeze the clock). Monotone: more tokens never cost less.
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


COST_MODELS: Registry[CostModel] = Registry(
    "cost model",
    "sim.cost.base:CostModel",
    {
        "roofline": "sim.cost.roofline:Roofline",
        "linear": "sim.cost.linear:Linear",
        "constant": "sim.cost.constant:Constant",
    },
)
