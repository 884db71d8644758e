"""Predictions of how long an answer will get, with an error that has a name.

A prediction is a function of the request and of a seed: the same request is predicted alike by every policy
and at every time.

Sources: VTC-artifact and FastServe know true or maximal lengths; errors of the log-normal kind are what
regressors on prompts have (a sigma of 0.4 is a factor of 1.5 for a third of requests); length classes are what
classifiers have, e.g. Jin et al. 2023, "S3: Increasing GPU Utilization during Generative Inference".
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, field_validator
from pydantic_core import PydanticCustomError

from sim.options import Count, CountOrZero, NonNegative, Options, Share
from sim.registry import Registry
from sim.request import Request
from sim.rng import stream


class PredictionOptions(Options):
    """Base of every prediction's options."""

    kind: str = Field(description="name of a prediction of answer lengths")


class Prediction(ABC):
    """Predicts output tokens."""

    Options: ClassVar[type[PredictionOptions]]

    @classmethod
    @abstractmethod
    def build(cls, options: PredictionOptions) -> Self:
        """The predictor. `options` is an instance of `cls.Options`."""

    @abstractmethod
    def outputs(self, request: Request) -> float:
        """Predicted output tokens, > 0. Pure."""


class OracleOptions(PredictionOptions):
    """Nothing to choose."""

    kind: Literal["oracle"] = Field(default="oracle", description="the true length")


class LognormalOptions(PredictionOptions):
    """How wrong it is."""

    kind: Literal["lognormal"] = Field(description="the true length times a factor around 1")
    sigma: Annotated[NonNegative, Field(le=10)] = Field(description="standard deviation of the factor's logarithm")
    seed: CountOrZero = Field(default=0, description="of the errors")


class BucketOptions(PredictionOptions):
    """The classes, and how often the right one is named."""

    kind: Literal["bucket"] = Field(description="the class of lengths that the answer belongs to, or another one")
    edges: Annotated[tuple[Count, ...], Field(min_length=1, max_length=1000)] = Field(
        description="longest answer of each class but the last, in output tokens, rising"
    )
    accuracy: Share = Field(default=1.0, description="share of requests whose class is named rightly")
    seed: CountOrZero = Field(default=0, description="of the errors")

    @field_validator("edges")
    @classmethod
    def _rise(cls, edges: tuple[int, ...]) -> tuple[int, ...]:
        if list(edges) != sorted(set(edges)):
            raise PydanticCustomError("not_rising", "the edges {edges} do not rise", {"edges": list(edges)})
        return edges


class Oracle(Prediction):
    """Knows the answer."""

    Options = OracleOptions

    @classmethod
    def build(cls, options: PredictionOptions) -> Self:
        return cls()

    def outputs(self, request: Request) -> float:
        return request.num_target_tokens


class Lognormal(Prediction):
    """Is wrong by a factor whose logarithm is normal: its median is the truth."""

    Options = LognormalOptions

    def __init__(self, options: LognormalOptions) -> None:
        self._sigma, self._seed = options.sigma, options.seed

    @classmethod
    def build(cls, options: PredictionOptions) -> Self:
        assert isinstance(options, LognormalOptions)
        return cls(options)

    def outputs(self, request: Request) -> float:
        error = stream(self._seed, f"prediction/{request.index}").standard_normal()
        return request.num_target_tokens * math.exp(self._sigma * error)


class Bucket(Prediction):
    """Names a class; the prediction is the longest answer of it (for the last one: twice the last edge)."""

    Options = BucketOptions

    def __init__(self, options: BucketOptions) -> None:
        self._edges, self._accuracy, self._seed = options.edges, options.accuracy, options.seed

    @classmethod
    def build(cls, options: PredictionOptions) -> Self:
        assert isinstance(options, BucketOptions)
        return cls(options)

    def outputs(self, request: Request) -> float:
        edges = self._edges
        named = bisect_left(edges, request.num_target_tokens)
        if self._accuracy < 1:
            rng = stream(self._seed, f"prediction/{request.index}")
            if rng.random() >= self._accuracy:
                named = (named + int(rng.integers(1, len(edges) + 1))) % (len(edges) + 1)
        return edges[named] if named < len(edges) else 2 * edges[-1]


PREDICTIONS: Registry[Prediction] = Registry(
    "prediction",
    "sim.queues.prediction:Prediction",
    {
        "oracle": "sim.queues.prediction:Oracle",
        "lognormal": "sim.queues.prediction:Lognormal",
        "bucket": "sim.queues.prediction:Bucket",
    },
)
