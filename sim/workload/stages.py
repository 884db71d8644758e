"""Arrivals whose rate changes: pieces of constant rate and linear ramps, one after the other."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import numpy as np
from pydantic import Discriminator, Field, Tag, model_validator

from sim.options import NonNegative, Options, PositiveSeconds
from sim.workload.base import ArrivalOptions, Arrivals, Ints
from sim.workload.fields import refusal
from sim.workload.times import Floats, check_number, partial_sums, times_ns, up_to


class SteadyStage(Options):
    """A piece of constant rate; 0 is a pause."""

    duration_s: PositiveSeconds = Field(description="length of the stage, seconds")
    rate_per_s: NonNegative = Field(le=1e9, description="mean requests per second")

    @property
    def rates(self) -> tuple[float, float]:
        """Rate at the beginning and at the end."""
        return self.rate_per_s, self.rate_per_s

    def scaled(self, factor: float) -> SteadyStage:
        """The stage with `factor` times the rate."""
        return self.model_copy(update={"rate_per_s": self.rate_per_s * factor})


class RampStage(Options):
    """A piece over which the rate changes linearly."""

    duration_s: PositiveSeconds = Field(description="length of the stage, seconds")
    start_rate_per_s: NonNegative = Field(le=1e9, description="mean requests per second at its beginning")
    end_rate_per_s: NonNegative = Field(le=1e9, description="mean requests per second at its end")

    @property
    def rates(self) -> tuple[float, float]:
        """Rate at the beginning and at the end."""
        return self.start_rate_per_s, self.end_rate_per_s

    def scaled(self, factor: float) -> RampStage:
        """The stage with `factor` times the rates."""
        rates = {"start_rate_per_s": self.start_rate_per_s * factor, "end_rate_per_s": self.end_rate_per_s * factor}
        return self.model_copy(update=rates)


def _stage_kind(value: Any) -> str:
    """A mapping that speaks of a start or an end is a ramp."""
    keys = value if isinstance(value, dict) else type(value).model_fields if isinstance(value, Options) else ()
    return "ramp" if "start_rate_per_s" in keys or "end_rate_per_s" in keys else "steady"


Stage = Annotated[Annotated[SteadyStage, Tag("steady")] | Annotated[RampStage, Tag("ramp")], Discriminator(_stage_kind)]


class StagesOptions(ArrivalOptions):
    """Stages one after the other; nobody comes after the last one."""

    stages: list[Stage] = Field(
        min_length=1,
        description="{duration_s, rate_per_s}, or a ramp {duration_s, start_rate_per_s, end_rate_per_s}",
    )
    process: Literal["poisson", "constant"] = Field(
        default="poisson", description="random arrivals, or one whenever the expected number grows by one"
    )

    @model_validator(mode="after")
    def _check(self) -> StagesOptions:
        if not any(max(stage.rates) > 0 for stage in self.stages):
            raise refusal("the rate of every stage is 0", "at least one must be above 0")
        return self


class Stages(Arrivals):
    """A Poisson process whose rate is piecewise linear in time, or its regular counterpart.

    Drawn by inversion, which is exact: unit-rate arrivals are mapped through the inverse of the expected
    number of arrivals up to each time (Çinlar, "Introduction to Stochastic Processes", 1975).
    """

    Options = StagesOptions

    def __init__(self, options: StagesOptions) -> None:
        self._options = options
        self._durations_s = np.array([stage.duration_s for stage in options.stages])
        self._start_rates, self._end_rates = np.array([stage.rates for stage in options.stages]).T
        in_stage = self._durations_s * (self._start_rates + self._end_rates) / 2
        self._begins_s = np.concatenate(([0.0], np.cumsum(self._durations_s)))
        self._expected = np.concatenate(([0.0], np.cumsum(in_stage)))

    @classmethod
    def build(cls, options: ArrivalOptions) -> Stages:
        """The process for its options."""
        return cls(StagesOptions.model_validate(options))

    @property
    def ends_by_itself(self) -> bool:
        """See the base."""
        return True

    def draw(self, num_requests: int | None, duration_ns: int | None, rng: np.random.Generator) -> Ints:
        """See the base. Fewer than `num_requests` when the stages end before."""
        expected = float(self._expected[-1])
        check_number(int(min(expected, num_requests or np.inf, 1e18)))
        regular = self._options.process == "constant"
        sums = partial_sums(np.ones if regular else rng.standard_exponential, num_requests, expected)
        return up_to(duration_ns, times_ns(self._when(sums[sums <= expected])))

    def scaled(self, factor: float) -> Stages:
        """See the base."""
        stages = [stage.scaled(factor) for stage in self._options.stages]
        return Stages(self._options.model_copy(update={"stages": stages}))

    def _when(self, expected: Floats) -> Floats:
        """The times by which `expected` (> 0, at most the total) arrivals are expected.

        Inside a stage of start rate r and slope a this solves r·t + a·t²/2 = y; the form below loses no
        digits when a is small or negative.
        """
        stage = np.searchsorted(self._expected, expected, side="left") - 1
        y = expected - self._expected[stage]
        rate = self._start_rates[stage]
        duration_s = self._durations_s[stage]
        slope = (self._end_rates[stage] - rate) / duration_s
        root = np.sqrt(np.maximum(rate * rate + 2 * slope * y, 0.0))
        times_s: Floats = self._begins_s[stage] + np.minimum(2 * y / (rate + root), duration_s)
        return times_s
