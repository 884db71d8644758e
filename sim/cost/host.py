"""What the host takes to plan an iteration, as an axis of its own: any cost model runs with any of these.

A cost model has host times of its own; `cost.host` replaces them. The time passes before the iteration starts on
the device. Whether the device waits for it is the engine's matter: one that plans ahead of results (async
scheduling) hides it behind the iteration that runs, one that does not exposes all of it, and no switch here can
make it overlap, for what is planned during an iteration does not know that iteration's results. `free` is the bound
of all ways to hide it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from bisect import bisect_right
from functools import cache
from importlib import resources
from itertools import pairwise
from typing import Any, ClassVar, Literal, Self, cast

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from sim.errors import did_you_mean
from sim.options import CountOrZero, NonNegative, Options
from sim.registry import Registry


class HostOptions(Options):
    """Base of every host time's options."""

    kind: str = Field(description="name of a model of host time")

    def describe(self) -> str:
        """These options in a few words, for whoever reads the results."""
        return self.kind


class HostTime(ABC):
    """Time of the host before an iteration. Pure; contexts do not matter to it."""

    Options: ClassVar[type[HostOptions]]

    @classmethod
    @abstractmethod
    def build(cls, options: HostOptions) -> Self:
        """`options` is an instance of `cls.Options`."""

    @abstractmethod
    def ns(self, num_requests: int, num_tokens: int) -> int:
        """Time before an iteration of so many requests (padding included) with so many tokens in all, ns, >= 0."""


class FreeOptions(HostOptions):
    """Nothing to choose."""

    kind: Literal["free"] = Field(default="free", description="the host takes no time")

    def describe(self) -> str:
        return "free"


class Free(HostTime):
    """What if the scheduler were free?"""

    Options = FreeOptions

    @classmethod
    def build(cls, options: HostOptions) -> Self:
        return cls()

    def ns(self, num_requests: int, num_tokens: int) -> int:
        """None."""
        return 0


class ConstantOptions(HostOptions):
    """The same for every batch."""

    kind: Literal["constant"] = Field(description="the same before every iteration")
    step_us: NonNegative = Field(description="before every iteration, µs")

    def describe(self) -> str:
        return f"constant, {self.step_us:g} µs"


class Constant(HostTime):
    """A fixed time."""

    Options = ConstantOptions

    def __init__(self, step_us: float) -> None:
        self._ns = int(step_us * 1e3 + 0.5)

    @classmethod
    def build(cls, options: HostOptions) -> Self:
        return cls(cast(ConstantOptions, options).step_us)

    def ns(self, num_requests: int, num_tokens: int) -> int:
        """The same for every batch."""
        return self._ns


class LinearOptions(HostOptions):
    """A sum of terms; one that is left out takes no time."""

    kind: Literal["linear"] = Field(description="linear in requests and tokens")
    step_us: NonNegative = Field(default=0.0, description="before every iteration, µs")
    per_request_us: NonNegative = Field(default=0.0, description="each request in the iteration, µs")
    per_token_us: NonNegative = Field(default=0.0, description="each token scheduled in it, prompts included, µs")

    def describe(self) -> str:
        terms = {"": self.step_us, " per request": self.per_request_us, " per token": self.per_token_us}
        return f"linear, {' + '.join([f'{us:g} µs{what}' for what, us in terms.items() if us]) or '0 µs'}"


class Linear(HostTime):
    """A fixed time, one for each request and one for each token."""

    Options = LinearOptions

    def __init__(self, options: LinearOptions) -> None:
        self._step_ns = options.step_us * 1e3
        self._request_ns = options.per_request_us * 1e3
        self._token_ns = options.per_token_us * 1e3

    @classmethod
    def build(cls, options: HostOptions) -> Self:
        return cls(cast(LinearOptions, options))

    def ns(self, num_requests: int, num_tokens: int) -> int:
        """The sum of the terms, rounded to ns."""
        return int(self._step_ns + num_requests * self._request_ns + num_tokens * self._token_ns + 0.5)


class MeasuredOptions(HostOptions):
    """Times by the number of requests, given here or bundled."""

    kind: Literal["measured"] = Field(description="a table by the number of requests")
    table: str | None = Field(
        default=None,
        description="a bundled table, such as vllm-0.33-sync: vLLM's scheduler by itself, without preparing inputs",
    )
    points: tuple[tuple[CountOrZero, NonNegative], ...] | None = Field(
        default=None, description="[requests in the iteration, µs], at least two, rising"
    )
    step_us: NonNegative = Field(default=0.0, description="what the table leaves out, before every iteration, µs")

    @model_validator(mode="after")
    def _check(self) -> MeasuredOptions:
        if (self.table is None) == (self.points is None):
            given = "nothing is given" if self.table is None else "both table and points are given"
            raise _refusal(given, "give one of them")
        if self.table is not None and self.table not in bundled_tables():
            known = list(bundled_tables())
            raise _refusal(
                f"unknown table {self.table!r}", f"known: {', '.join(known)}", did_you_mean(self.table, known), "table"
            )
        if self.points is not None:
            _check_points(self.points)
        return self

    def measured(self) -> tuple[tuple[int, float], ...]:
        """The points, bundled ones or those given: requests and µs."""
        return self.points or bundled_tables()[str(self.table)]

    def describe(self) -> str:
        (fewest, low_us), *_, (most, high_us) = self.measured()
        more = f" + {self.step_us:g} µs" if self.step_us else ""
        where = self.table or "points of the scenario"
        return f"measured ({where}), {low_us:.4g} µs for {fewest} requests to {high_us:.4g} µs for {most}{more}"


class Measured(HostTime):
    """Straight lines between the points; the first and the last of them go on, down to no time at least."""

    Options = MeasuredOptions

    def __init__(self, points: tuple[tuple[int, float], ...], step_us: float) -> None:
        """`points` are as the options check them."""
        self._requests = [requests for requests, _ in points]
        self._us = [us for _, us in points]
        self._step_us = step_us

    @classmethod
    def build(cls, options: HostOptions) -> Self:
        own = cast(MeasuredOptions, options)
        return cls(own.measured(), own.step_us)

    def ns(self, num_requests: int, num_tokens: int) -> int:
        """Rounded to ns."""
        requests, us = self._requests, self._us
        i = min(max(bisect_right(requests, num_requests) - 1, 0), len(requests) - 2)
        slope = (us[i + 1] - us[i]) / (requests[i + 1] - requests[i])
        return int((max(us[i] + (num_requests - requests[i]) * slope, 0.0) + self._step_us) * 1e3 + 0.5)


HOST_TIMES: Registry[HostTime] = Registry(
    "host time",
    "sim.cost.host:HostTime",
    {
        "free": "sim.cost.host:Free",
        "constant": "sim.cost.host:Constant",
        "linear": "sim.cost.host:Linear",
        "measured": "sim.cost.host:Measured",
    },
)


@cache
def bundled_tables() -> dict[str, tuple[tuple[int, float], ...]]:
    """Name -> points (requests, µs a step) of `sim/data/host_times.json`, which says how they were measured."""
    text = (resources.files("sim") / "data" / "host_times.json").read_text(encoding="utf-8")
    tables: dict[str, list[tuple[int, float]]] = json.loads(text)["tables"]
    return {
        name: tuple([(requests, 1e6 / steps_per_s) for requests, steps_per_s in rows]) for name, rows in tables.items()
    }


def _check_points(points: tuple[tuple[int, float], ...]) -> None:
    if len(points) < 2:
        raise _refusal(
            f"{len(points)} of at least two points", "between two points times are interpolated", key="points"
        )
    for (requests, us), (more_requests, more_us) in pairwise(points):
        if more_requests <= requests:
            found = f"{more_requests} requests come after {requests}"
            raise _refusal(found, "numbers of requests rise", "Sort the points, and give each number once.", "points")
        if more_us < us:
            found = f"{more_us:g} µs for {more_requests} requests is less than {us:g} µs for {requests}"
            raise _refusal(found, "times do not fall with more requests", "Smooth what was measured.", "points")


def _refusal(found: str, valid: str, remedy: str = "", key: str = "") -> PydanticCustomError:
    place: dict[str, Any] = {"key": key} if key else {}
    return PydanticCustomError("refused", "{found}", {"found": found, "valid": valid, "remedy": remedy, **place})
