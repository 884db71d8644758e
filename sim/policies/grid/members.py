"""Those who run: their order, who of them prefills, and who decodes in which lane.

A lane is one of the batches that a pipeline keeps in flight; without stages there is one. Those who decode
in a lane are its `RunningBatch`, whose members all get a token in each of its steps.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice

from sim.batch import RunningBatch
from sim.policies.grid.draft import Draft, GridState, GridStep
from sim.queues.base import QueueOrder
from sim.request import NEVER, Request
from sim.step import StepShape, decodes_of, longer


class Members:
    """The running requests of one engine."""

    def __init__(self, block_size: int, num_lanes: int, queue: QueueOrder, *, keeps_arrival_order: bool) -> None:
        """`queue` is told who decodes, for the accounts that it may keep."""
        self._queue = queue
        self._block_size = block_size
        self._order: dict[Request, None] = {}
        self._keeps_arrival_order = keeps_arrival_order
        self._is_sorted = True
        self._num_seats = 0
        """Given out since all were last put in order."""
        self.prefilling: dict[Request, None] = {}
        """Those who are not through their prefill, in the order of all."""
        self.idle: dict[Request, None] = {}
        """Those who are through it and were left out of the last step that could have had them."""
        self.lanes = [RunningBatch(block_size) for _ in range(num_lanes)]
        self.joined: list[dict[Request, None]] = [{} for _ in range(num_lanes)]
        """Those of each lane whose first decode is in its next step."""
        self.in_flight: deque[GridStep] = deque()
        """Steps whose results are not in."""

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, request: Request) -> bool:
        return request in self._order

    def __iter__(self) -> Iterator[Request]:
        return iter(self._order)

    def last(self) -> Request:
        """The last one in order."""
        return next(reversed(self._order))

    @property
    def num_decoding(self) -> int:
        """How many are through their prefill."""
        return len(self._order) - len(self.prefilling)

    @property
    def live_tokens(self) -> int:
        """Tokens that they have in KV."""
        if not self.prefilling and not self.idle and len(self.lanes) == 1:
            return self.lanes[0].context_sum
        apart = [r.num_computed_tokens for r in self.prefilling] + [r.num_computed_tokens for r in self.idle]
        return sum(apart) + sum([batch.context_sum for batch in self.lanes])

    def next_decodes(self, head: Request, *, decodes_now: bool) -> StepShape:
        """All of them and `head` in one step, without stages: that after the one at hand, if it only decodes. Pure.

        `decodes_now`: whether the lane's batch decodes in the step at hand already.
        """
        batch = self.lanes[0]
        together = StepShape(len(batch), *batch.context_sums())
        prefilled = [r.policy_state.num_to_prefill for r in self.prefilling]
        left_out = [r.num_computed_tokens for r in self.idle]
        return decodes_of([*prefilled, *left_out, head.num_tokens], longer(together, 1) if decodes_now else together)

    def context(self, request: Request) -> int:
        """Tokens that one of them has in KV, passes in flight included."""
        lane = request.policy_state.lane
        return request.num_computed_tokens if lane == NEVER else self.lanes[lane].context(request)

    def num_output_tokens(self, request: Request) -> int:
        """Tokens of the answer of one of them, those in flight included."""
        lane = request.policy_state.lane
        num_ticks = 0 if lane == NEVER else self.lanes[lane].tick - request.joined_tick
        return request.num_output_tokens + num_ticks

    def num_blocks(self, request: Request) -> int:
        """Blocks that one of them holds: what it came with, and one more whenever its tokens needed it."""
        return max(request.num_blocks, -(-self.context(request) // self._block_size))

    def advance(self, lane: int, num_ticks: int = 1) -> None:
        """So many steps of a lane in which its batch decodes. Mutates everybody in it, in O(1)."""
        self.lanes[lane].advance(num_ticks)
        self._queue.advance(num_ticks)

    @property
    def prefill_stands_last(self) -> bool:
        """Whether those who are not through their prefill stand behind all others."""
        return all(request in self.prefilling for request in islice(reversed(self._order), len(self.prefilling)))

    # ------------------------------------------------------------------ order

    def seat(self, request: Request) -> None:
        """Put a request behind all others. Mutates the order alone."""
        if self._order and self.last().queued_ns > request.queued_ns:
            self._is_sorted = False
        self._order[request] = None
        self._num_seats += 1
        request.policy_state.seat = self._num_seats

    def unseat(self, request: Request) -> None:
        """Take a request out and bring its counters, blocks among them, up to date. Mutates it."""
        state: GridState = request.policy_state
        del self._order[request]
        if state.lane == NEVER:
            self.prefilling.pop(request, None)
            self.idle.pop(request, None)
        num_forgotten = self._forget_results(request) if self.in_flight and len(self.lanes) > 1 else 0
        if state.lane != NEVER:
            self._leave_lane(request)
        request.num_computed_tokens -= num_forgotten
        request.num_output_tokens -= num_forgotten

    def sort(self) -> None:
        """Put all in order of arrival, if the engine keeps that. Equal arrivals keep their order."""
        if self._is_sorted or not self._keeps_arrival_order:
            return
        self.put_in_order(sorted(self._order, key=_arrival))
        self._is_sorted = True

    def put_in_order(self, requests: Iterable[Request]) -> None:
        """Keep all in this order from now on."""
        self._order = dict.fromkeys(requests)
        for seat, request in enumerate(self._order, 1):
            request.policy_state.seat = seat
        self._num_seats = len(self._order)
        self.prefilling = {r: None for r in self._order if r in self.prefilling}

    def move_to_end(self, requests: Iterable[Request]) -> None:
        """Let these stand behind all others, in the order given."""
        for request in requests:
            del self._order[request]
            self.seat(request)

    def in_order(self, requests: Sequence[Request]) -> Sequence[Request]:
        """Some of them, in the order of all."""
        return sorted(requests, key=_seat) if len(requests) > 1 else requests

    # ------------------------------------------------------------------ lanes

    def join_lane(self, request: Request, lane: int) -> None:
        """The request decodes in this lane from its next step on. Nothing changes for one that does already."""
        state: GridState = request.policy_state
        if state.lane == lane:
            return
        if state.lane != NEVER:
            self._leave_lane(request)
        self.idle.pop(request, None)
        state.lane = lane
        num_received, until = request.num_output_tokens, request.num_target_tokens
        if num_received < request.cancel_after_tokens < until:
            until = request.cancel_after_tokens
        self.lanes[lane].join(request, until - num_received)
        self.joined[lane][request] = None
        self._queue.start_decoding(request, num_received + 1)

    def leave_out(self, request: Request, draft: Draft) -> None:
        """A request that could decode does not in this step; it keeps its place and its blocks."""
        state: GridState = request.policy_state
        if state.lane != NEVER:
            if request not in self.joined[state.lane]:
                draft.left.append(request)
            self._leave_lane(request)
        self.idle[request] = None

    def gather(self, lane: int) -> None:
        """Pipeline: those whose batch is back decode in the lane at hand."""
        busy = {step.lane for step in self.in_flight if step.shape.num_decode}
        for other, batch in enumerate(self.lanes):
            if other != lane and other not in busy:
                for request in list(batch):
                    self.join_lane(request, lane)

    def is_in_flight(self, request: Request) -> bool:
        """Pipeline: whether a pass of the request is not back yet."""
        lane = request.policy_state.lane
        for step in self.in_flight:
            if (step.lane == lane and step.shape.num_decode) or any(chunk.request is request for chunk in step.chunks):
                return True
        return False

    def _leave_lane(self, request: Request) -> None:
        state: GridState = request.policy_state
        self.lanes[state.lane].leave(request)
        num_blocks = -(-request.num_computed_tokens // self._block_size)
        if num_blocks > request.num_blocks:
            request.num_blocks = num_blocks
        self.joined[state.lane].pop(request, None)
        state.lane = NEVER
        self._queue.stop_decoding(request)

    def _forget_results(self, request: Request) -> int:
        """Pipeline: what is in flight for a victim yields no token. Returns the decodes (0 or 1) among it."""
        num_decodes, lane = 0, request.policy_state.lane
        for step in self.in_flight:
            step.chunks = [
                replace(chunk, is_last=False) if chunk.request is request else chunk for chunk in step.chunks
            ]
            if not step.shape.num_decode:
                continue
            # Its last token may be of another lane, whose later steps are in flight too: it is in none of them.
            step.left = [*step.left, request]
            if step.lane == lane:
                num_decodes += 1
                step.joined = [other for other in step.joined if other is not request]
        return num_decodes


def _arrival(request: Request) -> int:
    return request.queued_ns


def _seat(request: Request) -> int:
    state: GridState = request.policy_state
    return state.seat
