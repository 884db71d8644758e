"""A step: the changes that one iteration makes, and the aggregates that price it.

Nothing here grows with the number of running requests. Those who decode advance one token in every step
that decodes; a step names only who joined them, who left, and who prefills.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sim.request import Request


class BlockedBy(IntEnum):
    """Why the head of the waiting queue stayed out of a step; the integer is what tables store."""

    NOTHING = 0
    """Nobody waits, or the head's turn simply has not come (it arrived while the step ran)."""
    SLOTS = 1
    """As many requests run as may run."""
    KV = 2
    """Its KV blocks do not fit (a step that preempted counts here)."""
    BUDGET = 3
    """The step's token budget is spent."""
    ADMISSION = 4
    """A pacing rule or a batching window holds it back, or the batch in progress admits nobody."""


NOT_BLOCKED, BLOCKED_BY_SLOTS, BLOCKED_BY_KV, *_ = BlockedBy
"""The usual ones by themselves, for what is done in every step (see `sim.request.RUNNING`)."""


class StepShape(NamedTuple):
    """What a cost model may see of one iteration: sums over its rows, each kept up at O(changes).

    A decode row computes one token on top of `context` cached ones. Rows computed for nobody (padding,
    finished members of a padded batch) are included in the sums and counted again in `num_padding_tokens`.
    """

    num_decode: int = 0
    decode_context_sum: int = 0
    decode_context_sum_sq: int = 0
    decode_context_max: int = 0
    prefills: tuple[tuple[int, int], ...] = ()
    """One `(num_tokens, context)` per prefill chunk: tokens to compute, tokens already in cache."""
    num_sampled: int = 0
    """Rows whose logits are needed: decodes and final chunks."""
    num_padding_tokens: int = 0
    num_swapped_blocks: int = 0
    num_new_requests: int = 0
    """Requests admitted in this step (they cost the host more than known ones)."""

    @property
    def prefill_tokens(self) -> int:
        """Tokens over all prefill chunks."""
        return sum([num_tokens for num_tokens, _ in self.prefills])


def decodes_of(contexts: Iterable[int], batch: StepShape) -> StepShape:
    """A step in which requests with these contexts decode beside those of `batch`. Pure."""
    num, total, total_sq, longest = batch[:4]
    for context in contexts:
        num += 1
        total += context
        total_sq += context * context
        longest = max(longest, context)
    return StepShape(num, total, total_sq, longest, num_sampled=num)


def longer(shape: StepShape, num_tokens: int) -> StepShape:
    """The same requests decoding with contexts that are all so many tokens longer. Pure."""
    num, total, total_sq, longest = shape[:4]
    gained = num * num_tokens
    return shape._replace(
        decode_context_sum=total + gained,
        decode_context_sum_sq=total_sq + num_tokens * (2 * total + gained),
        decode_context_max=longest + num_tokens,
    )


class Pass(NamedTuple):
    """A forward pass of requests in the same phase and of the same length, which run as one matrix."""

    is_prompt: bool
    """Whether it computes their prompts; otherwise a token of each."""
    num_requests: int
    length: int
    """Tokens of each prompt, or the context of each decode."""

    @property
    def shape(self) -> StepShape:
        """Of an iteration that consists of this pass alone."""
        _, number, length = self
        if self.is_prompt:
            return StepShape(prefills=((length, 0),) * number, num_sampled=number, num_new_requests=number)
        return StepShape(number, number * length, number * length * length, length, num_sampled=number)


class PassesShape(StepShape):
    """Of an iteration that runs as several passes, one after the other; its own fields are the sums over them."""

    passes: tuple[Pass, ...] = ()


@dataclass(slots=True)
class Chunk:
    """A piece of one request's prefill."""

    request: Request
    num_tokens: int
    context: int
    """Its tokens already in cache."""
    is_last: bool
    """It completes the prefill, so a token is sampled."""


class Admission(NamedTuple):
    """A request that enters the batch, and how many of its tokens the prefix cache supplied."""

    request: Request
    num_cached_tokens: int
    is_resumed: bool


class Preemption(NamedTuple):
    """`victim` lost its KV so that `beneficiary` could go on (the same request: it gave up itself)."""

    victim: Request
    beneficiary: Request
    num_lost_tokens: int


@dataclass(slots=True)
class Step:
    """One planned iteration. A policy fills it in `plan` and nobody changes it afterwards.

    `joined` decode in this step but not in the lane's last decoding step; `left` decoded there but not
    here (requests that finish or are cancelled need not be named). A lane is one of the batches that a
    pipeline keeps in flight; without pipeline there is lane 0.
    """

    shape: StepShape
    num_running: int
    """Members of the running batch after planning, scheduled or not."""
    num_waiting: int
    used_blocks: int
    num_new_blocks: int
    live_tokens: int
    """Tokens in KV that a request still needs, this step's included; what `used_blocks` holds beyond them is
    reserved, rounding, or kept for nobody (finished members of a batch that goes on). One that several
    requests share counts for each of them."""
    blocked_by: BlockedBy = BlockedBy.NOTHING
    tick: int = 0
    """The policy's own count of decoding steps, this one included (scratch of `plan` for `update`)."""
    lane: int = 0
    chunks: Sequence[Chunk] = ()
    joined: Sequence[Request] = ()
    left: Sequence[Request] = ()
    admitted: Sequence[Admission] = ()
    preempted: Sequence[Preemption] = ()
    dropped: Sequence[Request] = field(default=(), kw_only=True)
    """Requests that the engine gave up while it planned: they are over, and hold nothing."""

    @property
    def is_empty(self) -> bool:
        """Whether nothing at all is computed."""
        return self.shape.num_decode == 0 and not self.chunks


make_shape: Callable[[tuple[int, int, int, int, tuple[tuple[int, int], ...], int, int, int, int]], StepShape]
make_shape = partial(tuple.__new__, StepShape)
"""The shape with these fields, all of them: a third of the price of a call of the class, for there is one a step."""
make_admission: Callable[[tuple[Request, int, bool]], Admission] = partial(tuple.__new__, Admission)


class Finished(NamedTuple):
    """What the results of one step ended.

    `finished`: their last token exists now. `released`: their KV is free now (for request-level batching
    that may be later, all members at once; members that were cancelled but had to stay are among them,
    whether or not they finished). An answer leaves in pieces up to the finish, or whole at the release:
    `Policy.streams_answers` says which. `departed`: their client has now received the tokens after which
    it leaves; whoever drives the core cancels them.
    """

    finished: list[Request]
    released: list[Request]
    departed: list[Request]


make_finished: Callable[[tuple[list[Request], list[Request], list[Request]]], Finished] = partial(
    tuple.__new__, Finished
)
NOTHING_ENDED = Finished([], [], [])
"""What most steps end. Shared: nobody adds to a `Finished`."""


FEW_STEPS = 48
"""Up to so many steps of a run are cheaper handled one by one than as arrays."""


@dataclass(slots=True)
class SteadyRun:
    """Steps in a row in which the same requests decode and nothing else happens to anybody."""

    shape: StepShape
    """Of the first step; in each further one every context is a token longer."""
    num_new_blocks: list[int]
    """Blocks taken in each step; its length is the number of steps."""
    num_running: int
    num_waiting: int
    blocked_by: BlockedBy
    used_blocks: int
    """Before the first step."""
    live_tokens: int
    """Before the first step."""


@dataclass(slots=True)
class SteadyTimes:
    """When the steps of a steady run start and end, one entry per step: lists for a few, arrays for many."""

    start_ns: list[int] | NDArray[np.int64]
    end_ns: list[int] | NDArray[np.int64]
    host_ns: int
    """Of each step."""


_NONE: NDArray[np.int64] = np.zeros(0, dtype=np.int64)


class StepArrays(NamedTuple):
    """The shapes of many iterations as columns, for vectorised pricing and breakdowns.

    All arrays are int64. The first group has one entry per iteration, the `prefill_*` group one entry per
    chunk, where `prefill_iteration` is the position of its iteration in the first group, and so the `pass_*` group,
    which is empty where every iteration is one pass, and otherwise has the fields of each `Pass`.
    """

    num_decode: NDArray[np.int64]
    decode_context_sum: NDArray[np.int64]
    decode_context_sum_sq: NDArray[np.int64]
    decode_context_max: NDArray[np.int64]
    num_sampled: NDArray[np.int64]
    num_padding_tokens: NDArray[np.int64]
    num_swapped_blocks: NDArray[np.int64]
    num_new_requests: NDArray[np.int64]
    prefill_iteration: NDArray[np.int64]
    prefill_num_tokens: NDArray[np.int64]
    prefill_context: NDArray[np.int64]
    pass_iteration: NDArray[np.int64] = _NONE
    pass_is_prompt: NDArray[np.int64] = _NONE
    pass_num_requests: NDArray[np.int64] = _NONE
    pass_length: NDArray[np.int64] = _NONE
