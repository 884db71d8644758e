"""Early rejection: a request whose first token would come too late is refused while its client can still go elsewhere.

The prediction is the engine's recent pace times the prompts ahead, so it knows nothing of queue orders that
let others pass, and nothing before the first prompt is computed: then everybody comes in.

Source: Mooncake's early rejection by predicted load (Qin et al. 2024, section 6), here at a single engine.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field

from sim.clock import NS_PER_MS
from sim.doors.base import Door, DoorOptions, Inside
from sim.options import Positive, by_class_index
from sim.request import Request


class PredictedTtftOptions(DoorOptions):
    """What it can be told."""

    kind: Literal["predicted_ttft"] = Field(description="a limit on the predicted time to first token")
    ttft_ms: Positive = Field(description="longest predicted time to first token that is accepted, milliseconds")
    by_class: dict[str, Positive] = Field(default_factory=dict, description="the same for single request classes")


class PredictedTtft(Door):
    """Compares the engine's prediction with the class's limit."""

    Options = PredictedTtftOptions

    def __init__(self, limit_ms: float, limit_ms_of: dict[int, float]) -> None:
        self._limit_ms = limit_ms
        self._limit_ms_of = limit_ms_of

    @classmethod
    def build(cls, options: DoorOptions, class_names: Sequence[str]) -> Self:
        assert isinstance(options, PredictedTtftOptions)
        return cls(options.ttft_ms, by_class_index(options.by_class, class_names, "by_class"))

    def refuses(self, request: Request, now_ns: int, inside: Inside) -> bool:
        predicted_ns = inside.predicted_ttft_ns(request)
        limit_ms = self._limit_ms_of.get(request.class_index, self._limit_ms)
        return predicted_ns is not None and predicted_ns > limit_ms * NS_PER_MS
