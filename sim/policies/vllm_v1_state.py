"""What both V1 planners keep about a request, a batch and a step in the making."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from sim.request import NEVER, Request
from sim.step import NOT_BLOCKED, Admission, Chunk, Preemption, Step


class V1State:
    """What the scheduler keeps about a request besides its counters."""

    num_draft_tokens = 0
    """Drafts that wait to be verified."""
    __slots__ = (
        "decoding_lane",
        "epoch",
        "is_mid_prefill",
        "is_passed_over",
        "last_decode_call",
        "num_in_flight_tokens",
        "num_placeholders",
        "num_stale_tokens",
        "seat",
    )

    def __init__(self) -> None:
        self.decoding_lane = NEVER
        """Lane in whose last decoding step it decoded."""
        self.epoch = 0
        """Preemptions so far: tells tokens of before a preemption from those after it."""
        self.is_mid_prefill = False
        """After its last planned step some of its known tokens are still not computed."""
        self.is_passed_over = False
        """It stood at the head of the queue with stale tokens in flight and was skipped."""
        self.last_decode_call = -(10**9)
        self.num_in_flight_tokens = 0
        """Tokens of steps whose results are not processed."""
        self.num_placeholders = 0
        """Outputs that are scheduled but not received (async only)."""
        self.num_stale_tokens = 0
        """Tokens in flight that were scheduled before its last preemption."""
        self.seat = NEVER
        """Number of its last admission: the running requests are in this order."""


class SpeculativeState(V1State):
    """What it keeps where drafts are made: everywhere else there are none, and none is counted."""

    __slots__ = ("num_draft_tokens", "num_verifications")

    def __init__(self) -> None:
        super().__init__()
        self.num_draft_tokens = 0
        self.num_verifications = 0


class Row(Chunk):
    """One request's part of a batch: a chunk of its prefill, or (`is_chunk` is False) its decode."""

    __slots__ = ("epoch", "is_chunk", "is_padded", "num_drafts", "num_sampled")

    def __init__(self, request: Request, num_tokens: int, epoch: int, *, is_chunk: bool = True) -> None:
        """A row whose step is in the making: `context` and `is_last` are set when the request advances."""
        self.request = request
        self.num_tokens = num_tokens
        self.context = 0
        self.is_last = False
        """A token is sampled, for decodes too."""
        self.epoch = epoch
        self.is_chunk = is_chunk
        self.num_drafts = 0
        self.is_padded = False
        """Its drafts are dummies of an admission: never accepted."""
        self.num_sampled = 0
        """Tokens that came back for it; filled in by `update`."""


@dataclass(slots=True)
class V1Step(Step):
    """A step with the rows of its batch, in order; a planner may keep steady decodes out of `rows`."""

    rows: dict[Request, Row] | None = None
    """None: nobody has one."""


class Plan(V1Step):
    """A step in the making, which is the step when it is made.

    Lists and rows are the planner's to fill; what counts the batch is set when everybody is placed: shape,
    live tokens and lane by `_finish_plan`, the rest by `_plan_step`.
    """

    __slots__ = ("budget", "carries_prefill", "gate_is_open", "threshold")

    rows: dict[Request, Row]
    joined: list[Request]
    left: list[Request]
    admitted: list[Admission]
    preempted: list[Preemption]

    def __init__(self, budget: int, threshold: int) -> None:
        self.budget = budget
        """Tokens that may still be planned."""
        self.threshold = threshold
        """Most tokens of one request; 0: no limit."""
        self.gate_is_open = True
        self.tick = 0
        self.dropped = ()
        self.carries_prefill = False
        self.num_new_blocks = 0
        self.blocked_by = NOT_BLOCKED
        self.rows, self.chunks = {}, ()
        self.joined, self.left = [], []
        self.admitted, self.preempted = [], []


class PrefillGate:
    """`prefill_schedule_interval`: while anything decodes, prefill is planned only every so many steps."""

    def __init__(self, interval: int) -> None:
        self._interval = interval
        self._num_steps = interval
        """Executed since the last one with prefill."""
        self._has_backlog = False

    def is_due(self) -> bool:
        """Whether the next step may prefill whoever decodes: its turn has come, or a backlog opens the gate."""
        return self._has_backlog or self._num_steps + 1 >= self._interval

    def planned(self, plan: Plan, waiting: Iterable[Request]) -> None:
        """Who waits still when a step has admitted whom it could is a backlog. Mutates the gate."""
        if plan.gate_is_open and not plan.preempted:
            self._has_backlog = any(not r.policy_state.is_passed_over for r in waiting)

    def executed(self, plan: Plan) -> None:
        """A step computes something. Mutates the gate."""
        self._num_steps = 0 if plan.carries_prefill else self._num_steps + 1
