"""Shortest answer first, by a prediction of its length; or the shortest rest of it, for those who were preempted.

Both keep the mean wait low and let long answers wait for as long as shorter ones keep coming.

Sources: shortest job first, and shortest remaining processing time (Schrage 1968), with output tokens as the
size; SRPT is one of FastServe's schedulers, where it also takes running requests off the batch, which a queue
cannot.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field

from sim.options import OneOf
from sim.queues.base import QueueOrderOptions, Setting
from sim.queues.keyed import KeyedOrder
from sim.queues.prediction import PREDICTIONS, OracleOptions, Prediction, PredictionOptions
from sim.request import Request


class PredictedOptions(QueueOrderOptions):
    """How answers are predicted."""

    prediction: Annotated[PredictionOptions, OneOf(PREDICTIONS)] = Field(
        default_factory=OracleOptions, description="how long an answer is expected to get"
    )


class ShortestFirstOptions(PredictedOptions):
    """What it can be told."""

    kind: Literal["sjf"] = Field(description="the shortest predicted answer first")


class ShortestRemainingOptions(PredictedOptions):
    """What it can be told."""

    kind: Literal["srpt"] = Field(description="the shortest predicted rest of an answer first")


class ShortestFirst(KeyedOrder):
    """By predicted output tokens; equal ones by arrival."""

    Options: ClassVar[type[PredictedOptions]] = ShortestFirstOptions

    def __init__(self, prediction: Prediction) -> None:
        super().__init__()
        self._prediction = prediction

    @classmethod
    def build(cls, options: QueueOrderOptions, setting: Setting) -> Self:
        assert isinstance(options, PredictedOptions)
        prediction = options.prediction
        return cls(PREDICTIONS.load(prediction.kind, allow_imports=True).build(prediction))

    def key(self, request: Request, now_ns: int) -> tuple[Any, ...]:
        return self._prediction.outputs(request), request.arrival_ns, request.index


class ShortestRemaining(ShortestFirst):
    """By predicted output tokens that are still to come, none if there are more than predicted."""

    Options = ShortestRemainingOptions

    def key(self, request: Request, now_ns: int) -> tuple[Any, ...]:
        left = max(0.0, self._prediction.outputs(request) - request.num_output_tokens)
        return left, request.arrival_ns, request.index
