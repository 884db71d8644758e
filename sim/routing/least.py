"""Routing to whom has least of something: of all replicas, or of two drawn at random."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
from pydantic import Field

from sim.request import Request
from sim.routing.base import ReplicaView, Rotation, RoutingOptions, RoutingPolicy

_NUM_DRAWN = 4096


class LeastRequestsOptions(RoutingOptions):
    """Options of `kind: least_requests`."""

    kind: Literal["least_requests"] = Field(
        default="least_requests", description="the replica with the fewest open requests"
    )


class LeastRequests(RoutingPolicy):
    """The replica with the fewest open requests, as the router counts them (least connections)."""

    Options = LeastRequestsOptions

    def __init__(self) -> None:
        self._rotation = Rotation()

    @classmethod
    def build(cls, options: RoutingOptions, num_replicas: int, rng: np.random.Generator) -> LeastRequests:
        return cls()

    def pick(self, request: Request, session: int, now_ns: int, replicas: Sequence[ReplicaView]) -> int:
        return self._rotation.smallest([replica.num_requests for replica in replicas])


class LeastTokensOptions(RoutingOptions):
    """Options of `kind: least_tokens`."""

    kind: Literal["least_tokens"] = Field(
        default="least_tokens",
        description="the replica whose open requests have the fewest tokens: prompts and max_tokens",
    )


class LeastTokens(RoutingPolicy):
    """The replica whose open requests have the fewest tokens: their prompts and `max_tokens`."""

    Options = LeastTokensOptions

    def __init__(self) -> None:
        self._rotation = Rotation()

    @classmethod
    def build(cls, options: RoutingOptions, num_replicas: int, rng: np.random.Generator) -> LeastTokens:
        return cls()

    def pick(self, request: Request, session: int, now_ns: int, replicas: Sequence[ReplicaView]) -> int:
        return self._rotation.smallest([replica.num_tokens for replica in replicas])


class KVUsageOptions(RoutingOptions):
    """Options of `kind: kv_usage`."""

    kind: Literal["kv_usage"] = Field(
        default="kv_usage", description="the replica with the smallest part of its KV blocks in use"
    )


class KVUsage(RoutingPolicy):
    """The replica with the smallest part of its KV blocks in use now.

    Blocks are taken when a request is admitted: of a burst that arrives between two steps nothing is seen yet.
    """

    Options = KVUsageOptions

    def __init__(self) -> None:
        self._rotation = Rotation()

    @classmethod
    def build(cls, options: RoutingOptions, num_replicas: int, rng: np.random.Generator) -> KVUsage:
        return cls()

    def pick(self, request: Request, session: int, now_ns: int, replicas: Sequence[ReplicaView]) -> int:
        return self._rotation.smallest([replica.kv_usage() for replica in replicas])


class PowerOfTwoOptions(RoutingOptions):
    """Options of `kind: power_of_two`."""

    kind: Literal["power_of_two"] = Field(
        default="power_of_two", description="of two replicas drawn at random the one with fewer open requests"
    )


class PowerOfTwo(RoutingPolicy):
    """Of two different replicas drawn at random the one with fewer open requests; the first one if they have as many.

    Mitzenmacher 2001, "The Power of Two Choices in Randomized Load Balancing".
    """

    Options = PowerOfTwoOptions

    def __init__(self, num_replicas: int, rng: np.random.Generator) -> None:
        self._num_replicas = num_replicas
        self._rng = rng
        self._drawn: list[tuple[int, int]] = []

    @classmethod
    def build(cls, options: RoutingOptions, num_replicas: int, rng: np.random.Generator) -> PowerOfTwo:
        return cls(num_replicas, rng)

    def pick(self, request: Request, session: int, now_ns: int, replicas: Sequence[ReplicaView]) -> int:
        if self._num_replicas == 1:
            return 0
        if not self._drawn:
            first = self._rng.integers(self._num_replicas, size=_NUM_DRAWN)
            step = self._rng.integers(1, self._num_replicas, size=_NUM_DRAWN)
            second = (first + step) % self._num_replicas
            self._drawn = list(zip(first.tolist(), second.tolist(), strict=True))
        one, other = self._drawn.pop()
        return other if replicas[other].num_requests < replicas[one].num_requests else one
