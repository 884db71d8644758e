"""How a scenario describes a fleet."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import Field

from sim.options import Count, OneOf, Options
from sim.routing.base import ROUTING, RoutingOptions

NumReplicas = Annotated[Count, Field(le=100_000)]
"""Engines, each of which takes memory here."""


class ReplicaGroup(Options):
    """Replicas that differ from the scenario's own engine. What is left out is as there."""

    replicas: NumReplicas = Field(default=1, description="how many of them")
    hardware: dict[str, Any] | None = Field(default=None, description="what changes in `hardware`")
    engine: dict[str, Any] | None = Field(default=None, description="what changes in `engine`, as in a variant")
    cost: dict[str, Any] | None = Field(default=None, description="what changes in `cost`")

    def overlay(self) -> dict[str, Any]:
        """What changes in the scenario."""
        return self.model_dump(include={"hardware", "engine", "cost"}, exclude_none=True)


def _round_robin() -> RoutingOptions:
    return ROUTING.load("round_robin").Options(kind="round_robin")


class FleetOptions(Options):
    """Several engines behind a router."""

    replicas: NumReplicas = Field(default=1, description="engines like the scenario's own")
    others: list[ReplicaGroup] = Field(default_factory=list, description="further engines that differ from it")
    router: Annotated[RoutingOptions, OneOf(ROUTING)] = Field(
        default_factory=_round_robin, description="who decides where a request goes"
    )
