"""Iteration time linear in what the batch holds: the model that serving papers fit to their engines."""

from __future__ import annotations

from typing import Literal, cast

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from sim.cost.base import CostModel, CostOptions, Resource, Target, decode_contexts, prefill_sums, prefill_sums_of
from sim.options import NonNegative
from sim.step import StepArrays, StepShape


class LinearOptions(CostOptions):
    """Options of `kind: linear`. A term that is left out costs nothing."""

    kind: Literal["linear"] = "linear"
    base_ms: NonNegative = Field(description="every iteration, ms (weights are read once, kernels are launched)")
    per_decode_us: NonNegative = Field(default=0.0, description="each decoding request, µs")
    per_prefill_token_us: NonNegative = Field(default=0.0, description="each prefill token, µs")
    per_context_token_ns: NonNegative = Field(
        default=0.0, description="each token of KV that a decoding request reads (its context and itself), ns"
    )
    per_prefill_pair_ns: NonNegative = Field(
        default=0.0,
        description="each pair of a prefill token and a token that it attends to, ns: "
        "a chunk of n on a context of c has n·c + n(n+1)/2",
    )
    host_us: NonNegative = Field(default=0.0, description="host time before every iteration, µs")
    host_us_per_request: NonNegative = Field(
        default=0.0, description="host time before every iteration for each request in it, µs"
    )
    relative_error: NonNegative = Field(
        default=0.0,
        description="typical relative error of the fit that these figures are from; no price depends on it, "
        "`servesim run --cost-uncertainty` does",
    )


_DEVICE_TIMES = ("base_ms", "per_decode_us", "per_prefill_token_us", "per_context_token_ns", "per_prefill_pair_ns")


class Linear(CostModel):
    """A sum of terms, one per aggregate. Base is overhead, tokens are compute, context is bandwidth."""

    Options = LinearOptions

    def __init__(self, options: LinearOptions) -> None:
        self._options = options
        self._base_ns = options.base_ms * 1e6
        self._decode_ns = options.per_decode_us * 1e3
        self._prefill_token_ns = options.per_prefill_token_us * 1e3
        self._context_token_ns = options.per_context_token_ns
        self._prefill_pair_ns = options.per_prefill_pair_ns
        self._host_ns = options.host_us * 1e3
        self._host_request_ns = options.host_us_per_request * 1e3

    @classmethod
    def build(cls, options: CostOptions, target: Target) -> Linear:
        """Needs nothing of the target: its figures are in the coefficients."""
        return cls(cast(LinearOptions, options))

    def price(self, shape: StepShape) -> int:
        """The sum of the terms, rounded to ns; at least 1."""
        num_decode = shape.num_decode
        ns = self._base_ns + num_decode * self._decode_ns
        if shape.prefills:
            tokens, pairs, _ = prefill_sums(shape.prefills)
            ns += tokens * self._prefill_token_ns + pairs * self._prefill_pair_ns
        ns += (shape.decode_context_sum + num_decode) * self._context_token_ns
        return int(ns + 0.5) or 1

    def price_decode_run(self, shape: StepShape, num_steps: int) -> NDArray[np.int64]:
        """As `price`, for contexts that grow by one token a step."""
        num_decode = shape.num_decode
        ns = self._base_ns + num_decode * self._decode_ns
        run = ns + (decode_contexts(shape, num_steps) + num_decode) * self._context_token_ns
        return np.maximum((run + 0.5).astype(np.int64), 1)

    def host_ns(self, shape: StepShape) -> int:
        """Fixed part and a part per request."""
        num_requests = shape.num_decode + len(shape.prefills)
        return int(self._host_ns + num_requests * self._host_request_ns + 0.5)

    def perturbed(self, rng: np.random.Generator) -> Linear | None:
        """All figures by one factor, log-normal with the fit's error; None where that is not given."""
        error = self._options.relative_error
        if not error:
            return None
        factor = float(np.exp(error * rng.standard_normal()))
        scaled = {name: getattr(self._options, name) * factor for name in _DEVICE_TIMES}
        return Linear(self._options.model_copy(update=scaled))

    def breakdown(self, steps: StepArrays) -> dict[Resource, NDArray[np.float64]]:
        """The terms, each under its resource."""
        tokens, pairs, _ = prefill_sums_of(steps)
        num_decode = steps.num_decode
        return {
            Resource.COMPUTE: num_decode * self._decode_ns
            + (tokens * self._prefill_token_ns + pairs * self._prefill_pair_ns),
            Resource.BANDWIDTH: (steps.decode_context_sum + num_decode) * self._context_token_ns,
            Resource.COMMUNICATION: np.zeros(len(num_decode)),
            Resource.OVERHEAD: np.full(len(num_decode), self._base_ns),
        }
