"""Prompts that begin with one of a few common texts, such as system prompts, documents or few-shot examples."""

from __future__ import annotations

from typing import Annotated, Literal

import numpy as np
from pydantic import Field

from sim.options import NonNegative, Options
from sim.workload.base import Ints
from sim.workload.fields import LengthField


class SharedPrefix(Options):
    """Groups of requests, each with a prefix of its own.

    The load of SGLang's `generated-shared-prefix` data set and of vLLM's `prefix_repetition`: as there,
    the length of the prefix comes on top of the length of what follows it.
    """

    kind: Literal["shared"] = "shared"
    groups: Annotated[int, Field(ge=1, le=1_000_000, strict=True)] = Field(description="number of different prefixes")
    tokens: LengthField = Field(description="length of a prefix, drawn once for each group, tokens")
    skew: NonNegative = Field(
        default=0.0,
        le=10,
        description="exponent of Zipf's law: group number i (from 1) is chosen in proportion to 1 / i^skew; "
        "0: all equally often",
    )

    def draw_groups(self, num: int, rng: np.random.Generator) -> Ints:
        """A group for each of `num` requests, counted from 0."""
        weights = np.arange(1, self.groups + 1, dtype=np.float64) ** -self.skew
        upper = np.cumsum(weights)
        groups: Ints = np.searchsorted(upper, rng.random(num) * upper[-1], side="right")
        return groups
