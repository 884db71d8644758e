"""Arrival processes: when requests come, or how soon clients ask again.

Every open process begins at time 0, and its first request comes one gap later (a burst: at its own time).
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np
from pydantic import Field, model_validator

from sim.clock import NS_PER_S
from sim.errors import ScenarioError
from sim.options import Count, Positive, PositiveSeconds, Seconds
from sim.workload.base import ArrivalOptions, Arrivals, Ints
from sim.workload.fields import ConstantDuration, DurationField, refusal
from sim.workload.times import check_number, expected_number, partial_sums, times_ns, up_to


class RateOptions(ArrivalOptions):
    """An open process with a rate."""

    rate_per_s: Positive = Field(le=1e9, description="mean requests per second")


R = TypeVar("R", bound=RateOptions)


class GammaOptions(RateOptions):
    """A gamma renewal process; its burstiness is given in one of two ways."""

    burstiness: Positive | None = Field(
        default=None,
        ge=1e-6,
        description="shape of the gaps' gamma distribution, as in `vllm bench serve`: below 1 is burstier",
    )
    cv: Positive | None = Field(
        default=None,
        ge=1e-6,
        le=1e3,
        description="coefficient of variation of the gaps, 1 / sqrt(burstiness): above 1 is burstier",
    )
    rescale: bool = Field(
        default=False,
        description="stretch time so that the last request comes at exactly number / rate, as `vllm bench serve` does",
    )

    @model_validator(mode="after")
    def _check(self) -> GammaOptions:
        if (self.burstiness is None) == (self.cv is None):
            found = "neither burstiness nor cv is given" if self.cv is None else "both burstiness and cv are given"
            raise refusal(found, "give one of them")
        return self


class Constant(Arrivals):
    """Equal gaps: request number i (from 1) comes at i / rate."""

    Options = RateOptions

    def __init__(self, options: RateOptions) -> None:
        self._options = options

    @classmethod
    def build(cls, options: ArrivalOptions) -> Constant:
        """The process for its options."""
        return cls(RateOptions.model_validate(options))

    def draw(self, num_requests: int | None, duration_ns: int | None, rng: np.random.Generator) -> Ints:
        """See the base."""
        rate = self._options.rate_per_s
        size = expected_number(rate, num_requests, duration_ns, slack=2)
        with np.errstate(over="ignore"):
            times_s = np.arange(1, size + 1) / rate
        return up_to(duration_ns, times_ns(times_s))[:num_requests]

    def scaled(self, factor: float) -> Constant:
        """See the base."""
        return Constant(_at_rate(self._options, factor))


class Poisson(Arrivals):
    """Exponential gaps."""

    Options = RateOptions

    def __init__(self, options: RateOptions) -> None:
        self._options = options

    @classmethod
    def build(cls, options: ArrivalOptions) -> Poisson:
        """The process for its options."""
        return cls(RateOptions.model_validate(options))

    def draw(self, num_requests: int | None, duration_ns: int | None, rng: np.random.Generator) -> Ints:
        """See the base."""
        mean_s = 1 / self._options.rate_per_s
        expected_number(self._options.rate_per_s, num_requests, duration_ns)
        times_s = partial_sums(lambda size: rng.exponential(mean_s, size), num_requests, _limit_s(duration_ns))
        return up_to(duration_ns, times_ns(times_s))

    def scaled(self, factor: float) -> Poisson:
        """See the base."""
        return Poisson(_at_rate(self._options, factor))


class Gamma(Arrivals):
    """Gamma-distributed gaps.

    Shape `burstiness`, scale 1 / (rate × burstiness): the arrival process of `vllm bench serve`
    (vllm/benchmarks/serve.py). With `rescale` the realised rate has no variance; without a number of
    requests, rescaling then assumes rate × duration of them.
    """

    Options = GammaOptions

    def __init__(self, options: GammaOptions) -> None:
        self._options = options

    @classmethod
    def build(cls, options: ArrivalOptions) -> Gamma:
        """The process for its options."""
        return cls(GammaOptions.model_validate(options))

    def draw(self, num_requests: int | None, duration_ns: int | None, rng: np.random.Generator) -> Ints:
        """See the base."""
        rate, rescale = self._options.rate_per_s, self._options.rescale
        shape = self._options.burstiness or (self._options.cv or 1.0) ** -2
        expected = expected_number(rate, num_requests, duration_ns)
        size = (num_requests or max(1, expected)) if rescale else num_requests
        times_s = partial_sums(
            lambda size: rng.gamma(shape, 1 / (rate * shape), size), size, np.inf if rescale else _limit_s(duration_ns)
        )
        if rescale and times_s[-1] > 0:
            times_s *= len(times_s) / rate / times_s[-1]
        return up_to(duration_ns, times_ns(times_s))

    def scaled(self, factor: float) -> Gamma:
        """See the base."""
        return Gamma(_at_rate(self._options, factor))


class BurstOptions(ArrivalOptions):
    """Requests that come together."""

    num_requests: Count = Field(description="requests of a burst")
    at_s: Seconds = Field(default=0.0, description="when the (first) burst comes, seconds")
    spread_s: Seconds = Field(
        default=0.0, description="a burst's requests come at random within so many seconds; 0: all at once"
    )
    every_s: PositiveSeconds | None = Field(
        default=None, description="bursts come again so many seconds apart; default: once"
    )

    @model_validator(mode="after")
    def _check(self) -> BurstOptions:
        if self.every_s is not None and self.spread_s > self.every_s:
            found = f"spread_s {self.spread_s:g} is above every_s {self.every_s:g}"
            raise refusal(found, "a burst must end before the next one")
        return self


class Burst(Arrivals):
    """Many requests at once, once or repeatedly. `at_s: 0` is a batch that is all there at the start."""

    Options = BurstOptions

    def __init__(self, options: BurstOptions) -> None:
        self._options = options

    @classmethod
    def build(cls, options: ArrivalOptions) -> Burst:
        """The process for its options."""
        return cls(BurstOptions.model_validate(options))

    @property
    def ends_by_itself(self) -> bool:
        """See the base."""
        return self._options.every_s is None

    def draw(self, num_requests: int | None, duration_ns: int | None, rng: np.random.Generator) -> Ints:
        """See the base."""
        options, bursts = self._options, 1
        if options.every_s is not None:
            rate = options.num_requests / options.every_s
            bursts = -(-expected_number(rate, num_requests, duration_ns, slack=2) // options.num_requests)
        size = check_number(bursts * options.num_requests)
        begins_s = options.at_s + np.arange(bursts) * (options.every_s or 0.0)
        spreads_s = np.sort(rng.uniform(0.0, options.spread_s, size).reshape(bursts, -1), axis=1)
        return up_to(duration_ns, times_ns((begins_s[:, None] + spreads_s).reshape(-1)))[:num_requests]

    def scaled(self, factor: float) -> Burst:
        """The same bursts, with time running `factor` times as fast."""
        options = self._options
        update = {"at_s": options.at_s / factor, "spread_s": options.spread_s / factor}
        every_s = None if options.every_s is None else options.every_s / factor
        return Burst(options.model_copy(update={**update, "every_s": every_s}))


class ClosedLoopOptions(ArrivalOptions):
    """A fixed number of clients, each with one request at a time."""

    num_clients: Count = Field(description="clients")
    think_time_s: DurationField = Field(
        default=ConstantDuration(value_s=0.0), description="from an answer to the client's next request"
    )


class ClosedLoop(Arrivals):
    """Clients that send their next request some time after the answer to the last one."""

    Options = ClosedLoopOptions
    is_closed = True

    def __init__(self, options: ClosedLoopOptions) -> None:
        self._options = options

    @classmethod
    def build(cls, options: ArrivalOptions) -> ClosedLoop:
        """The process for its options."""
        return cls(ClosedLoopOptions.model_validate(options))

    @property
    def clients(self) -> int | None:
        """See the base."""
        return self._options.num_clients

    def draw(self, num_requests: int | None, duration_ns: int | None, rng: np.random.Generator) -> Ints:
        """Think times, nanoseconds, one per request."""
        if num_requests is None:
            raise ScenarioError("", "a closed loop needs a number of requests")
        return self._options.think_time_s.draw(check_number(num_requests), rng)

    def scaled(self, factor: float) -> ClosedLoop:
        """`factor` times as many clients, rounded, at least one."""
        num_clients = max(1, round(self._options.num_clients * factor))
        return ClosedLoop(self._options.model_copy(update={"num_clients": num_clients}))


def _at_rate(options: R, factor: float) -> R:
    return options.model_copy(update={"rate_per_s": options.rate_per_s * factor})


def _limit_s(duration_ns: int | None) -> float:
    return np.inf if duration_ns is None else duration_ns / NS_PER_S
