"""Routing by conversation: all turns of one go to the same replica."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from sim.request import Request
from sim.routing.base import ReplicaView, Rotation, RoutingOptions, RoutingPolicy


class SessionStickyOptions(RoutingOptions):
    """Options of `kind: session_sticky`."""

    kind: Literal["session_sticky"] = Field(
        default="session_sticky", description="all turns of a conversation to the same replica"
    )


class SessionSticky(RoutingPolicy):
    """The first turn goes to the replica with the fewest open requests, the others follow it."""

    Options = SessionStickyOptions

    def __init__(self) -> None:
        self._rotation = Rotation()
        self._replica_of: dict[int, int] = {}

    @classmethod
    def build(cls, options: RoutingOptions, num_replicas: int, rng: np.random.Generator) -> SessionSticky:
        return cls()

    def pick(self, request: Request, session: int, now_ns: int, replicas: Sequence[ReplicaView]) -> int:
        chosen = self._replica_of.get(session)
        if chosen is None:
            chosen = self._replica_of[session] = self._rotation.smallest([r.num_requests for r in replicas])
        return chosen
