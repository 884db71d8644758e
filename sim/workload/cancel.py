"""Clients that leave before their answer is complete."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from sim.clock import to_ns
from sim.options import Options, PositiveSeconds, Share
from sim.workload.fields import DurationField, LengthField


class CancelAfterTime(Options):
    """The client leaves some time after its request arrived."""

    kind: Literal["after_time"] = "after_time"
    probability: Share = Field(default=1.0, description="share of requests that this happens to")
    after_s: DurationField = Field(description="from arrival to leaving, seconds")


class CancelAfterTokens(Options):
    """The client leaves when it has received some tokens; shorter answers just finish."""

    kind: Literal["after_tokens"] = "after_tokens"
    probability: Share = Field(default=1.0, description="share of requests that this happens to")
    tokens: LengthField = Field(description="received tokens at which the client leaves")


class Deadline(Options):
    """The client leaves at a deadline and counts the request as timed out."""

    kind: Literal["deadline"] = "deadline"
    probability: Share = Field(default=1.0, description="share of requests that have the deadline")
    after_s: PositiveSeconds = Field(description="from arrival to the deadline, seconds")

    @property
    def after_ns(self) -> int:
        """From arrival to the deadline, nanoseconds."""
        return to_ns(self.after_s)


CancelField = Annotated[CancelAfterTime | CancelAfterTokens | Deadline, Field(discriminator="kind")]
"""One way of leaving."""
