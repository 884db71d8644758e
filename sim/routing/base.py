"""Contract of the routing policies: which replica a request goes to.

A router stands between clients and engines. It knows what it sent where and what was answered, may ask the engines for
what they would report (queue lengths, KV usage), and decides at once; a request stays where it was sent.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import numpy as np
from pydantic import Field

from sim.options import Options
from sim.registry import Registry
from sim.request import Request


class RoutingOptions(Options):
    """Base of every routing policy's options."""

    kind: str = Field(description="name of a routing policy")


class ReplicaView(ABC):
    """What a router knows of one replica."""

    num_requests: int
    """Sent there, neither answered nor given up by their client: the router's own count."""
    num_tokens: int
    """Prompts and `max_tokens` of these requests: the most that they can still take."""

    @abstractmethod
    def num_waiting(self) -> int:
        """Requests in the engine's waiting queue."""

    @abstractmethod
    def num_running(self) -> int:
        """Requests that the engine has admitted and not released."""

    @abstractmethod
    def kv_usage(self) -> float:
        """The part of the engine's KV blocks that is in use, 0 to 1."""


class RoutingPolicy(ABC):
    """Decides for each request. One instance serves one fleet for one run."""

    Options: ClassVar[type[RoutingOptions]]
    sends: ClassVar[bool] = True
    """False: nothing is sent, requests wait in one queue for all replicas. `pick` is then never called."""

    @classmethod
    @abstractmethod
    def build(cls, options: RoutingOptions, num_replicas: int, rng: np.random.Generator) -> RoutingPolicy:
        """A fresh policy. `rng` is its own stream: what it draws shifts nothing else."""

    @abstractmethod
    def pick(self, request: Request, session: int, now_ns: int, replicas: Sequence[ReplicaView]) -> int:
        """The position of the replica that gets the request. Mutates the policy's own memory only.

        `session` is equal for requests of one conversation and different for all others.
        """


class Rotation:
    """The smallest of some scores; of several equal ones the first after the last that was chosen.

    With a fixed order an idle fleet would send everything to its first replica.
    """

    def __init__(self) -> None:
        self._last = -1

    def smallest(self, scores: Sequence[float]) -> int:
        """The position chosen. Remembers it."""
        num, best = len(scores), min(scores)
        position = self._last
        for _ in range(num):
            position = position + 1 if position + 1 < num else 0
            if scores[position] == best:
                break
        self._last = position
        return position


ROUTING: Registry[RoutingPolicy] = Registry(
    "routing policy",
    "sim.routing.base:RoutingPolicy",
    {
        "round_robin": "sim.routing.blind:RoundRobin",
        "random": "sim.routing.blind:Random",
        "least_requests": "sim.routing.least:LeastRequests",
        "power_of_two": "sim.routing.least:PowerOfTwo",
        "least_tokens": "sim.routing.least:LeastTokens",
        "kv_usage": "sim.routing.least:KVUsage",
        "vllm_dp": "sim.routing.vllm_dp:VllmDP",
        "prefix_affinity": "sim.routing.prefix_affinity:PrefixAffinity",
        "session_sticky": "sim.routing.session_sticky:SessionSticky",
        "shared_queue": "sim.routing.shared_queue:SharedQueueRouting",
    },
)
