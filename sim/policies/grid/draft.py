"""A step in the making, and what the grid's engine keeps about a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sim.request import NEVER, Request
from sim.step import Admission, BlockedBy, Preemption, Step


class GridState:
    """What the engine keeps about a request besides its counters."""

    __slots__ = (
        "epoch",
        "is_decoding",
        "lane",
        "last_pass_ns",
        "num_cached",
        "num_cpu_blocks",
        "num_to_prefill",
        "seat",
        "stale_tokens",
    )

    def __init__(self) -> None:
        self.epoch = 0
        """Preemptions so far: tells results of before a preemption from those after it."""
        self.is_decoding = False
        """Its prefill is complete and its first token exists."""
        self.lane = NEVER
        """Lane in whose batch of decodes it is."""
        self.num_to_prefill = 0
        """Tokens that were known when it was admitted: all of them are prefilled."""
        self.seat = NEVER
        """While it runs: those who run are in the order of these numbers."""
        self.last_pass_ns = NEVER
        """When its last pass was planned, but for decodes in a lane's batch."""
        self.num_cached = 0
        """Tokens that the prefix cache supplied at its admission."""
        self.num_cpu_blocks = 0
        """Blocks that it holds in host memory."""
        self.stale_tokens = NEVER
        """While the step that preempted it is planned: how many of the tokens to prefill were done by then."""


@dataclass(slots=True)
class GridStep(Step):
    """A step with what only logs ask about it."""

    rows: Sequence[tuple[Request, int]] = ()
    """Prefills as the budget counts them, tokens that are found in cache included."""
    epochs: Sequence[int] = ()
    """Epoch of each chunk's request."""
    swapped_out: Sequence[Request] = ()
    swapped_in: Sequence[Request] = ()


@dataclass(slots=True)
class Draft:
    """A step in the making."""

    now_ns: int
    lane: int
    num_tokens: int = 0
    """Tokens planned so far, decodes included."""
    chunks: list[tuple[Request, int]] = field(default_factory=list)
    """Prefills in batch order: the request and its tokens."""
    served: dict[Request, int] = field(default_factory=dict)
    """Those who were given their decode one by one, and how many blocks each took for it."""
    decodes: bool = False
    """Whether the lane's batch of decodes runs."""
    admitted: list[Admission] = field(default_factory=list)
    preempted: list[Preemption] = field(default_factory=list)
    swapped_out: list[Request] = field(default_factory=list)
    swapped_in: list[Request] = field(default_factory=list)
    dropped: list[Request] = field(default_factory=list)
    left: list[Request] = field(default_factory=list)
    paused: list[Request] = field(default_factory=list)
    to_requeue: list[Request] = field(default_factory=list)
    """Victims that wait again when the step is planned."""
    num_new_blocks: int = 0
    num_swapped_blocks: int = 0
    blocked_by: BlockedBy = BlockedBy.NOTHING
