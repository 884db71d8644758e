"""vLLM's own balancing of data-parallel engines: four times the waiting requests plus the running ones.

Source: vLLM, `v1/engine/core_client.py`, `DPLBAsyncMPClient.get_core_engine_for_request`: the engine with the
smallest 4·waiting + running, the first of equal ones; the client adds one to `waiting` of the engine that
it chose, and gets true counts from the coordinator every 100 ms.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, cast

import numpy as np
from pydantic import Field

from sim.clock import NS_PER_MS
from sim.options import NonNegative
from sim.request import NEVER, Request
from sim.routing.base import ReplicaView, RoutingOptions, RoutingPolicy

_WAITING_COUNTS = 4


class VllmDPOptions(RoutingOptions):
    """Options of `kind: vllm_dp`."""

    kind: Literal["vllm_dp"] = Field(
        default="vllm_dp", description="the smallest 4 x waiting + running, as vLLM balances data-parallel engines"
    )
    stats_interval_ms: NonNegative = Field(
        default=100.0, le=1e9, description="how old the engines' counts may be, ms; 0: asked for each request"
    )


class VllmDP(RoutingPolicy):
    """Counts are read at the first request after they have become too old."""

    Options = VllmDPOptions

    def __init__(self, options: VllmDPOptions) -> None:
        self._interval_ns = round(options.stats_interval_ms * NS_PER_MS)
        self._read_ns = NEVER
        self._scores: list[int] = []

    @classmethod
    def build(cls, options: RoutingOptions, num_replicas: int, rng: np.random.Generator) -> VllmDP:
        return cls(cast(VllmDPOptions, options))

    def pick(self, request: Request, session: int, now_ns: int, replicas: Sequence[ReplicaView]) -> int:
        if self._read_ns == NEVER or now_ns - self._read_ns >= self._interval_ns:
            self._read_ns = now_ns
            self._scores = [_WAITING_COUNTS * replica.num_waiting() + replica.num_running() for replica in replicas]
        chosen = self._scores.index(min(self._scores))
        self._scores[chosen] += _WAITING_COUNTS
        return chosen
