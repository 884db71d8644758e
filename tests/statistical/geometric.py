"""Lengths that are geometric, the exponential in whole tokens: what makes a queue M/M/1."""

import numpy as np
from pydantic import Field

from sim.options import Positive
from sim.workload.base import LengthOptions, Lengths


class GeometricOptions(LengthOptions):
    mean: Positive = Field(description="tokens")


class Geometric(Lengths):
    Options = GeometricOptions

    def __init__(self, options: GeometricOptions) -> None:
        self._mean = options.mean

    @classmethod
    def build(cls, options: LengthOptions):
        return cls(GeometricOptions.model_validate(options))

    def draw(self, num: int, rng: np.random.Generator):
        return rng.geometric(1 / self._mean, num)
