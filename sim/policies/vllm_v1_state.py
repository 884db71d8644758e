"""What both V1 planners keep about a request, a batch and a step in the making."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sim.request import NEVER, Request
from sim.step import Admission, BlockedBy, Preemption, Step


class V1State:
    """What the scheduler keeps about a request besides its counters."""

    __slots__ = (
        "decoding_lane",
        "epoch",
        "is_mid_prefill",
        "is_passed_over",
        "last_decode_call",
        "num_draft_tokens",
        "num_in_flight_tokens",
        "num_placeholders",
        "num_stale_tokens",
        "num_verifications",
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
        self.num_draft_tokens = 0
        """Drafts that wait to be verified."""
        self.num_in_flight_tokens = 0
        """Tokens of steps whose results are not processed."""
        self.num_placeholders = 0
        """Outputs that are scheduled but not received (async only)."""
        self.num_stale_tokens = 0
        """Tokens in flight that were scheduled before its last preemption."""
        self.num_verifications = 0
        self.seat = NEVER
        """Number of its last admission: the running requests are in this order."""


@dataclass(slots=True)
class Row:
    """One request's part of a batch."""

    request: Request
    num_tokens: int
    num_drafts: int
    epoch: int
    is_chunk: bool
    is_padded: bool = False
    """Its drafts are dummies of an admission: never accepted."""
    samples: bool = False
    num_sampled: int = 0
    """Tokens that came back for it; filled in by `update`."""


@dataclass(slots=True)
class V1Step(Step):
    """A step with the rows of its batch, in order; a planner may keep steady decodes out of `rows`."""

    rows: Sequence[Row] = ()


@dataclass(slots=True)
class Plan:
    """A step in the making."""

    budget: int
    threshold: int
    """Most tokens of one request; 0: no limit."""
    gate_is_open: bool
    rows: dict[Request, Row] = field(default_factory=dict)
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    joined: list[Request] = field(default_factory=list)
    left: list[Request] = field(default_factory=list)
    num_running_rows: int = 0
    """How many of the rows are running requests; the admitted ones follow."""
    num_new_blocks: int = 0
    carries_prefill: bool = False
    blocked_by: BlockedBy = BlockedBy.NOTHING
