"""A request: facts that arrive with it, and the state that a policy keeps about it while it lives.

The life of a request, in the words used everywhere: it *arrives* at its client, is *queued* when it
reaches an engine, is *admitted* in the step that first gives it tokens, yields its *first token* in the
step that computes the last of its prompt, *finishes* when its last token exists, and is *released* when
its answer has left and its KV blocks are free (later than the finish only for request-level batching).
In between it may be *preempted*: its KV is lost, its generated tokens are kept.
"""

from __future__ import annotations

from enum import IntEnum
from typing import Any

from sim.tokens import UNIQUE, TokenRuns


class Status(IntEnum):
    """Where a request is in its policy."""

    WAITING = 0
    RUNNING = 1
    PREEMPTED = 2
    OVER = 3


WAITING, RUNNING, PREEMPTED, OVER = Status
"""The same, for what is done for every request: a member looked up in its enum costs as much as ten globals."""


class Outcome(IntEnum):
    """How a request ended; the integer is what the requests table stores."""

    FINISHED = 0
    CANCELLED = 1
    REJECTED = 2
    TIMED_OUT = 3
    UNFINISHED = 4


_FINISHED = Outcome.FINISHED


NEVER = -1
"""Stands in integer columns for a time, iteration or count that did not happen."""


class Request:
    """One request. Everything counts tokens unless the name says otherwise."""

    __slots__ = (
        # facts
        "index",
        "id",
        "class_index",
        "arrival_ns",
        "prompt_tokens",
        "output_tokens",
        "max_tokens",
        "priority",
        "cancel_after_tokens",
        "tokens",
        # the policy's
        "status",
        "num_computed_tokens",
        "num_output_tokens",
        "num_target_tokens",
        "num_blocks",
        "joined_tick",
        "due_tick",
        "queued_ns",
        # the recorder's
        "admitted_iteration",
        "first_token_iteration",
        "finished_iteration",
        "num_preemptions",
        "recomputed_tokens",
        "cached_prompt_tokens",
        "cancelled_ns",
        "num_delivered_tokens",
        "outcome",
        "turned_away_by",
        "is_recorded",
        "segment_iteration",
        "segment_lane",
        "segment_first_tick",
        # what one implementation alone keeps: the prefix cache's blocks, the V1 planner's bookkeeping
        "kv_state",
        "policy_state",
    )

    def __init__(
        self,
        index: int,
        prompt_tokens: int,
        output_tokens: int,
        max_tokens: int | None = None,
        arrival_ns: int = 0,
        class_index: int = 0,
        priority: int = 0,
        cancel_after_tokens: int = NEVER,
        tokens: TokenRuns = UNIQUE,
        id: int | str | None = None,
    ) -> None:
        """`output_tokens` is how long the answer would get; `max_tokens` (default: the same) cuts it.

        Policies see `max_tokens`, never `output_tokens`: an answer that ends before `max_tokens` ends by
        a stop token that nobody can foresee. `id` breaks ties where an engine compares request ids.
        """
        self.index = index
        self.id: int | str = index if id is None else id
        self.class_index = class_index
        self.arrival_ns = arrival_ns
        self.prompt_tokens = prompt_tokens
        self.output_tokens = output_tokens
        if max_tokens is None:
            max_tokens = output_tokens
        self.max_tokens = max_tokens
        self.priority = priority
        self.cancel_after_tokens = cancel_after_tokens
        self.tokens = tokens

        self.status = WAITING
        self.num_computed_tokens = self.num_output_tokens = self.num_blocks = 0
        self.num_target_tokens = output_tokens if output_tokens < max_tokens else max_tokens
        self.joined_tick = self.due_tick = self.queued_ns = NEVER

        self.admitted_iteration = self.first_token_iteration = self.finished_iteration = NEVER
        self.segment_iteration = self.segment_lane = self.segment_first_tick = NEVER
        self.cancelled_ns = self.turned_away_by = NEVER
        self.num_preemptions = self.recomputed_tokens = self.cached_prompt_tokens = self.num_delivered_tokens = 0
        self.outcome = _FINISHED
        self.is_recorded = False

        self.kv_state: Any = None
        self.policy_state: Any = None

    def __repr__(self) -> str:
        return f"Request({self.id}, {self.prompt_tokens}+{self.output_tokens})"

    def refuse(self, reason: int) -> None:
        """It is not let in, and over; `reason` is a number of `RunFacts.turn_away_reasons`."""
        self.status = Status.OVER
        self.outcome = Outcome.REJECTED
        self.turned_away_by = reason

    @property
    def num_tokens(self) -> int:
        """Tokens that are known: the prompt and the outputs received so far."""
        return self.prompt_tokens + self.num_output_tokens
