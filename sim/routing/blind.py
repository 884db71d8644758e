"""Routing that looks at nothing: in turn, or at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from sim.request import Request
from sim.routing.base import ReplicaView, RoutingOptions, RoutingPolicy

_NUM_DRAWN = 4096


class RoundRobinOptions(RoutingOptions):
    """Options of `kind: round_robin`."""

    kind: Literal["round_robin"] = Field(default="round_robin", description="one replica after the other")


class RoundRobin(RoutingPolicy):
    """One replica after the other."""

    Options = RoundRobinOptions

    def __init__(self) -> None:
        self._last = -1

    @classmethod
    def build(cls, options: RoutingOptions, num_replicas: int, rng: np.random.Generator) -> RoundRobin:
        return cls()

    def pick(self, request: Request, session: int, now_ns: int, replicas: Sequence[ReplicaView]) -> int:
        self._last = (self._last + 1) % len(replicas)
        return self._last


class RandomOptions(RoutingOptions):
    """Options of `kind: random`."""

    kind: Literal["random"] = Field(default="random", description="any replica, each as likely")


class Random(RoutingPolicy):
    """Any replica, each as likely."""

    Options = RandomOptions

    def __init__(self, num_replicas: int, rng: np.random.Generator) -> None:
        self._num_replicas = num_replicas
        self._rng = rng
        self._drawn: list[int] = []

    @classmethod
    def build(cls, options: RoutingOptions, num_replicas: int, rng: np.random.Generator) -> Random:
        return cls(num_replicas, rng)

    def pick(self, request: Request, session: int, now_ns: int, replicas: Sequence[ReplicaView]) -> int:
        if not self._drawn:
            self._drawn = self._rng.integers(self._num_replicas, size=_NUM_DRAWN).tolist()
        return self._drawn.pop()
