"""No routing: requests wait in one queue, and replicas take them when they can run them.

It is what Triton does for the instances of a model: its batcher forms a batch when an instance is free to run it, and
`instance_group.count` is the number of replicas here (Triton core 73aad7c, `dynamic_batch_scheduler.cc`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal

import numpy as np
from pydantic import Field

from sim.errors import InvariantError
from sim.request import Request
from sim.routing.base import ReplicaView, RoutingOptions, RoutingPolicy


class SharedQueueOptions(RoutingOptions):
    """Options of `kind: shared_queue`."""

    kind: Literal["shared_queue"] = Field(
        default="shared_queue",
        description="nobody: requests wait in one queue until a replica takes them (Triton's instances)",
    )


class SharedQueueRouting(RoutingPolicy):
    """Says only that nobody is to be asked."""

    Options = SharedQueueOptions
    sends: ClassVar[bool] = False

    @classmethod
    def build(cls, options: RoutingOptions, num_replicas: int, rng: np.random.Generator) -> SharedQueueRouting:
        return cls()

    def pick(self, request: Request, session: int, now_ns: int, replicas: Sequence[ReplicaView]) -> int:
        raise InvariantError("with one queue for all replicas, nobody sends requests to one of them")
