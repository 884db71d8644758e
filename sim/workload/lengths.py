"""Length distributions, in tokens."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from sim.errors import TraceError
from sim.options import Count, NonNegative, Positive
from sim.workload.base import Ints, LengthOptions, Lengths
from sim.workload.fields import refusal
from sim.workload.files import MAX_TOKENS, no_requests, read_table


class ConstantOptions(LengthOptions):
    """Always the same length."""

    value: Count = Field(description="tokens")


class Constant(Lengths):
    """Always the same length. A plain integer in a scenario means this."""

    Options = ConstantOptions

    def __init__(self, options: ConstantOptions) -> None:
        self._value = options.value

    @classmethod
    def build(cls, options: LengthOptions) -> Constant:
        """The distribution for its options."""
        return cls(ConstantOptions.model_validate(options))

    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        """See the base."""
        return np.full(num, self._value, dtype=np.int64)


class UniformOptions(LengthOptions):
    """Whole numbers between two bounds."""

    low: Count = Field(description="shortest, tokens")
    high: Count = Field(description="longest, tokens")

    @model_validator(mode="after")
    def _check(self) -> UniformOptions:
        if self.low > self.high:
            raise refusal(f"low {self.low} is above high {self.high}", "low must not exceed high")
        return self


class Uniform(Lengths):
    """Every whole number from `low` to `high`, both included, equally likely."""

    Options = UniformOptions

    def __init__(self, options: UniformOptions) -> None:
        self._options = options

    @classmethod
    def build(cls, options: LengthOptions) -> Uniform:
        """The distribution for its options."""
        return cls(UniformOptions.model_validate(options))

    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        """See the base."""
        return rng.integers(self._options.low, self._options.high, num, dtype=np.int64, endpoint=True)


class LognormalOptions(LengthOptions):
    """A lognormal, its spread given in one of two ways."""

    mean: Positive = Field(le=MAX_TOKENS, description="mean before rounding and before `min` and `max` cut, tokens")
    cv: Positive | None = Field(default=None, le=1e3, description="standard deviation / mean, before the cut")
    sigma: Positive | None = Field(default=None, le=10, description="standard deviation of the logarithm")
    min: Count = Field(default=1, description="shorter lengths become this, tokens")
    max: Count = Field(default=MAX_TOKENS, description="longer lengths become this, tokens")

    @model_validator(mode="after")
    def _check(self) -> LognormalOptions:
        if (self.cv is None) == (self.sigma is None):
            raise refusal(
                "neither cv nor sigma is given" if self.cv is None else "both cv and sigma are given",
                "give one of them",
            )
        if self.min > self.max:
            raise refusal(f"min {self.min} is above max {self.max}", "min must not exceed max")
        return self


class Lognormal(Lengths):
    """A lognormal, rounded to whole tokens; what lies outside `[min, max]` is moved to the bound.

    `mean` is that of the lognormal itself, so bounds that bind move the mean of what is drawn.
    """

    Options = LognormalOptions

    def __init__(self, options: LognormalOptions) -> None:
        self._options = options
        self._sigma = options.sigma or math.sqrt(math.log1p((options.cv or 0.0) ** 2))

    @classmethod
    def build(cls, options: LengthOptions) -> Lognormal:
        """The distribution for its options."""
        return cls(LognormalOptions.model_validate(options))

    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        """See the base."""
        mu = math.log(self._options.mean) - self._sigma**2 / 2
        lengths = np.rint(rng.lognormal(mu, self._sigma, num))
        return np.clip(lengths, self._options.min, self._options.max).astype(np.int64)


Quantile = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
"""A share as the key of a mapping; JSON has it as text."""


class EmpiricalOptions(LengthOptions):
    """Measured lengths, given in one of three ways."""

    path: str | None = Field(default=None, description="CSV file with a header; its lengths are equally likely")
    column: str | None = Field(default=None, description="column of the file; default: its only one")
    values: list[Count] | None = Field(default=None, min_length=1, description="lengths, tokens")
    weights: list[NonNegative] | None = Field(
        default=None, description="how likely each of `values` is, in proportion; default: equally"
    )
    quantiles: dict[Quantile, Positive] | None = Field(
        default=None, description="share of lengths not above -> length in tokens, from 0 to 1; linear in between"
    )

    @model_validator(mode="after")
    def _check(self) -> EmpiricalOptions:
        given = [name for name in ("path", "values", "quantiles") if getattr(self, name) is not None]
        if len(given) != 1:
            raise refusal(f"{' and '.join(given) or 'nothing'} is given", "give one of path, values, quantiles")
        if self.column is not None and self.path is None:
            raise refusal("column is given without path", "column names a column of the file")
        self._check_weights()
        if self.quantiles is not None:
            check_quantiles(self.quantiles)
        return self

    def _check_weights(self) -> None:
        if self.weights is None:
            return
        if self.values is None or len(self.values) != len(self.weights):
            found = f"{len(self.weights)} weights for {len(self.values or ())} values"
            raise refusal(found, "give one weight for each of values")
        if not 0 < sum(self.weights) < math.inf:
            raise refusal(f"the weights add up to {sum(self.weights):g}", "their sum must be above 0")


def check_quantiles(quantiles: dict[float, float]) -> None:
    """Raises a validation error unless this is an inverse distribution function of lengths."""
    points = sorted(quantiles.items())
    if len(points) < 2 or points[0][0] != 0 or points[-1][0] != 1:
        raise refusal(f"quantiles are given for {[p for p, _ in points]}", "0 and 1 must be among them")
    for (low, at_low), (high, at_high) in pairwise(points):
        if at_low > at_high:
            raise refusal(
                f"the quantile {at_high:g} at {high:g} is below {at_low:g} at {low:g}", "quantiles must not fall"
            )
    if points[0][1] < 1 or points[-1][1] > MAX_TOKENS:
        raise refusal(
            f"quantiles reach from {points[0][1]:g} to {points[-1][1]:g}", f"lengths lie between 1 and {MAX_TOKENS}"
        )


class Empirical(Lengths):
    """Measured lengths: drawn from a list or a file with replacement, or from a table of quantiles."""

    Options = EmpiricalOptions

    def __init__(self, options: EmpiricalOptions) -> None:
        self._quantiles = sorted((options.quantiles or {}).items())
        self._values = np.array(options.values or (), dtype=np.int64)
        cumulative = np.cumsum(options.weights or (0.0,))
        self._cumulative = None if options.weights is None else cumulative / cumulative[-1]
        if options.path is not None:
            self._values = _read_column(Path(options.path), options.column)

    @classmethod
    def build(cls, options: LengthOptions) -> Empirical:
        """The distribution for its options. Reads the file; raises TraceError."""
        return cls(EmpiricalOptions.model_validate(options))

    def draw(self, num: int, rng: np.random.Generator) -> Ints:
        """See the base."""
        if self._quantiles:
            return from_quantiles(self._quantiles, rng.random(num))
        if self._cumulative is None:
            return self._values[rng.integers(len(self._values), size=num)]
        return self._values[np.searchsorted(self._cumulative, rng.random(num), side="right")]


def from_quantiles(points: list[tuple[float, float]], shares: NDArray[np.float64]) -> Ints:
    """Lengths at the given shares of a distribution whose inverse is linear between `(share, length)` points."""
    at, lengths = np.array(points, dtype=np.float64).T
    drawn: Ints = np.rint(np.interp(shares, at, lengths)).astype(np.int64)
    return drawn


def _read_column(path: Path, column: str | None) -> Ints:
    table = read_table(path)
    if column is None and len(table.header) > 1:
        raise TraceError(
            f"{path}:1",
            f"the file has {len(table.header)} columns",
            valid=f"columns: {', '.join(table.header)}",
            remedy="Name one of them as column.",
        )
    if not table.rows:
        raise no_requests(path)
    return table.counts(column or table.header[0])
