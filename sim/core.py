"""The engine without a clock: who is in, which batches are in flight, in which order results are taken in.

Three verbs, and nothing else changes an engine: `admit` (clients leave, requests arrive), `plan` (decide one
batch and put it in flight) and `complete` (take in the results of the oldest one). Planning ahead of results
is thus a property of the core: with a depth of 2 a batch is decided before the last one's tokens are known.
Both drivers, the one that replays step logs and the one that prices steps on SimPy, call only these.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from sim.policies.base import Policy
from sim.request import OVER, Request
from sim.step import NOTHING_ENDED, Finished, Step


class EngineCore:
    """One engine: a policy and its queue of batches in flight."""

    def __init__(self, policy: Policy) -> None:
        self.policy = policy
        self.depth = policy.max_in_flight
        """How many batches may be in flight."""
        self._in_flight: deque[Step] = deque()
        self._has_ends_to_report = False

    @property
    def num_in_flight(self) -> int:
        """Batches planned but not completed, empty ones included."""
        return len(self._in_flight)

    @property
    def has_requests(self) -> bool:
        """Whether a call would still plan: a request is unfinished, or an end is not yet reported.

        vLLM reports the ids of finished requests with the next batch, so one (empty) batch follows the
        last finish. It decides nothing, but it takes a place in the queue of batches.
        """
        return self.policy.num_unfinished > 0 or self._has_ends_to_report

    @property
    def has_work_in_flight(self) -> bool:
        """Whether a batch that computes something is in flight."""
        return any(not step.is_empty for step in self._in_flight)

    def admit(self, cancels: Iterable[Request], arrivals: Iterable[Request]) -> list[Request]:
        """Let clients leave, then requests arrive. Returns those of `cancels` that are gone now.

        One that is over already, or that its batch cannot let go of, is not among them.
        """
        policy = self.policy
        gone = [r for r in cancels if r.status is not OVER and policy.cancel(r)] if cancels else []
        for request in arrivals:
            policy.add(request)
        if gone:
            self._has_ends_to_report = True
        return gone

    def num_to_plan(self) -> int:
        """How many batches may be put in flight now: none while the policy has no request."""
        return self.depth - len(self._in_flight) if self.policy.num_unfinished else 0

    def plan(self, now_ns: int) -> Step:
        """Decide one batch and put it in flight. It may be empty; an empty one is completed like any other."""
        step = self.policy.plan(now_ns)
        self._in_flight.append(step)
        self._has_ends_to_report = False
        return step

    def complete(self) -> tuple[Step, Finished]:
        """Take in the results of the oldest batch in flight."""
        step = self._in_flight.popleft()
        finished = self.policy.update(step)
        if finished is not NOTHING_ENDED and finished.released:
            self._has_ends_to_report = True
        return step, finished
