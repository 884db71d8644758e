"""Routing by prompt: to the replica that was sent the longest part of it before, unless the load is too uneven.

The idea of SGLang's cache-aware router (`sgl-router`, policy `cache_aware`): the router keeps its own record of what it
sent where and never asks the engines what they still hold. Its record is a tree of texts that forgets the
oldest; this one forgets nothing.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Literal, cast

import numpy as np
from pydantic import Field

from sim.options import CountOrZero, Positive, Share
from sim.request import Request
from sim.routing.base import ReplicaView, Rotation, RoutingOptions, RoutingPolicy


class PrefixAffinityOptions(RoutingOptions):
    """Options of `kind: prefix_affinity`."""

    kind: Literal["prefix_affinity"] = Field(
        default="prefix_affinity",
        description="the replica that was sent the longest part of the prompt before, unless loads are too uneven",
    )
    min_match: Share = Field(
        default=0.3, description="the part of a prompt that a replica must have seen to be chosen for it"
    )
    balance_abs: CountOrZero = Field(
        default=64, description="requests that the fullest replica may have more than the emptiest one"
    )
    balance_rel: Positive = Field(
        default=1.5, description="times as many requests that the fullest may have; the load is uneven beyond both"
    )


class PrefixAffinity(RoutingPolicy):
    """Falls back to the fewest open requests: without a match, and while the load is uneven."""

    Options = PrefixAffinityOptions

    def __init__(self, options: PrefixAffinityOptions, num_replicas: int) -> None:
        self._options = options
        self._num_replicas = num_replicas
        self._rotation = Rotation()
        self._sent: dict[tuple[int, Hashable], list[int]] = {}
        """Text so far and the stream that follows it -> how many tokens of the stream each replica was sent."""
        self._texts: dict[tuple[int, Hashable, int], int] = {}
        """Text so far and the run that follows it -> number of the longer text; 0 is the empty one."""

    @classmethod
    def build(cls, options: RoutingOptions, num_replicas: int, rng: np.random.Generator) -> PrefixAffinity:
        return cls(cast(PrefixAffinityOptions, options), num_replicas)

    def pick(self, request: Request, session: int, now_ns: int, replicas: Sequence[ReplicaView]) -> int:
        matched = self._matched_tokens(request)
        longest = max(matched)
        open_requests = [replica.num_requests for replica in replicas]
        if longest < self._options.min_match * request.prompt_tokens or not longest or self._is_uneven(open_requests):
            chosen = self._rotation.smallest(open_requests)
        else:
            chosen = self._rotation.smallest([-tokens for tokens in matched])
        self._remember(request, chosen)
        return chosen

    def _is_uneven(self, open_requests: list[int]) -> bool:
        most, fewest = max(open_requests), min(open_requests)
        return most - fewest > self._options.balance_abs and most > fewest * self._options.balance_rel

    def _matched_tokens(self, request: Request) -> list[int]:
        """Leading prompt tokens that each replica was sent before."""
        matched = [0] * self._num_replicas
        text, matching = 0, list(range(self._num_replicas))
        for stream, length in request.tokens.prefix:
            sent = self._sent.get((text, stream))
            if sent is None:
                break
            for i in matching:
                matched[i] += min(sent[i], length)
            matching = [i for i in matching if sent[i] >= length]
            text = self._texts.get((text, stream, length), -1)
        return matched

    def _remember(self, request: Request, replica: int) -> None:
        text, tokens = 0, request.tokens
        for stream, length in tokens.prefix:
            self._note(text, stream, length, replica)
            text = self._texts.setdefault((text, stream, length), len(self._texts) + 1)
        if tokens.output_stream is not None and tokens.shared_tokens == request.prompt_tokens:
            self._note(text, tokens.output_stream, request.max_tokens, replica)

    def _note(self, text: int, stream: Hashable, length: int, replica: int) -> None:
        sent = self._sent.setdefault((text, stream), [0] * self._num_replicas)
        sent[replica] = max(sent[replica], length)
