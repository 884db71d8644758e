"""The engine that all presets of the grid share: its phases, and the state that they change.

A waiting request is admitted with KV for what its engine reserves, prefills in one or more steps, and then
decodes one token in each step that decodes. Those who decode are kept as a `RunningBatch`, so that a step in
which blocks suffice costs what it changes; where they might not, those who run are visited one by one, in
their order, as the engines themselves do. Which phases a step has is the composition's matter.
"""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Iterable
from typing import ClassVar, Self

from sim.errors import InvariantError
from sim.kv.base import blocks_for
from sim.kv.counted import CountedCache
from sim.policies.base import EngineLimits, EngineOptions, Policy
from sim.policies.grid.composition import Composition
from sim.policies.grid.config import GridConfig, GridOptions
from sim.policies.grid.draft import Draft, GridState, GridStep
from sim.policies.grid.members import Members
from sim.policies.grid.pacing import PACINGS, Situation
from sim.policies.grid.pressure import recompute, relieve
from sim.policies.grid.reservation import Reservation
from sim.queues.base import Setting, build_order
from sim.request import NEVER, Request, Status
from sim.step import NOTHING_ENDED, Admission, BlockedBy, Chunk, Finished, Step, StepShape


class GridPolicy(Policy):
    """One point of the grid. A preset is a subclass that resolves its options to a config and a composition."""

    Options: ClassVar[type[EngineOptions]] = GridOptions

    def __init__(self, config: GridConfig, composition: Composition) -> None:
        limits, num_stages = config.limits, config.num_stages
        self.config = config
        self.composition = composition
        self.pressure = config.pressure
        self.max_in_flight = self.num_stages = num_stages
        self.kv = self._build_kv()
        self.num_cpu_blocks = self.free_cpu_blocks = config.num_cpu_blocks
        self._block_size = limits.block_size
        self._reservation = Reservation(
            config.reservation,
            limits.block_size,
            limits.max_model_len,
            config.watermark_blocks,
            config.needs_free_block and config.pressure != "pause",
        )
        kv_tokens = limits.num_gpu_blocks * limits.block_size
        self.queue = build_order(config.queue_order, Setting(limits.class_names, config.max_num_seqs, kv_tokens))
        self.follows_arrival_order = self.queue.is_arrival_order
        self.pacing = PACINGS.load(config.pacing.kind).build(config.pacing)
        self._swapped: deque[Request] = deque()
        self.members = Members(limits.block_size, num_stages, self.queue, keeps_arrival_order=config.sorts_running)
        self._num_executed = 0
        self._planned_ns = 0

    @classmethod
    def build(cls, options: EngineOptions, limits: EngineLimits) -> Self:
        assert isinstance(options, GridOptions)
        return cls.preset(options, limits)

    @classmethod
    @abstractmethod
    def preset(cls, options: GridOptions, limits: EngineLimits) -> Self:
        """The engine that these options describe. Raises ScenarioError for options that contradict each other."""

    def _build_kv(self) -> CountedCache:
        return CountedCache(self.config.limits.num_gpu_blocks, self.config.limits.block_size)

    # ------------------------------------------------------------------ the door, the queue, the exit

    def longest_answer(self, request: Request) -> int:
        """Tokens after which the engine ends the answer, whatever the model says. Pure."""
        room = self.config.limits.max_model_len + self.config.longest_overrun - request.prompt_tokens
        return min(request.max_tokens, room)

    def never_fits(self, request: Request) -> str | None:
        limit, longest_answer = self.config.prompt_limit, self.longest_answer(request)
        if not 1 <= request.prompt_tokens <= limit:
            return f"its prompt of {request.prompt_tokens} tokens is not between 1 and {limit}"
        if longest_answer < 1:
            return f"its prompt leaves no room for an answer within {self.config.limits.max_model_len} tokens"
        return self._reservation.never_fits(request, longest_answer, self.kv.usable_blocks)

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        request.num_target_tokens = min(request.output_tokens, self.longest_answer(request))
        request.policy_state = GridState()
        self.queue.add(request, request.queued_ns)

    def cancel(self, request: Request) -> bool:
        state: GridState = request.policy_state
        if request in self.members:
            self.unseat(request)
        elif state.num_cpu_blocks:
            self._swapped.remove(request)
        else:
            self.queue.remove(request)
        self.end(request)
        return True

    def unseat(self, request: Request) -> None:
        """Take a request out of those that run and bring its counters up to date. Its blocks stay its own."""
        self.members.unseat(request)

    def end(self, request: Request) -> None:
        """The request is over: its blocks are free, on the GPU and in host memory."""
        state: GridState = request.policy_state
        if request.status is Status.RUNNING or state.num_cpu_blocks:
            self.queue.released(request, request.num_output_tokens)
        request.status = Status.OVER
        self.release(request)
        self.free_cpu_blocks += state.num_cpu_blocks
        state.num_cpu_blocks = 0

    def release(self, request: Request) -> None:
        """Give back the blocks of a request that runs no more."""
        self.kv.free(request)

    def requeue(self, victim: Request, draft: Draft) -> None:
        """A victim waits again: now, or when the step is planned."""
        if self.config.requeues_at_once:
            self.queue.put_back(victim, draft.now_ns)
        else:
            draft.to_requeue.append(victim)

    # ------------------------------------------------------------------ the step

    def plan(self, now_ns: int) -> GridStep:
        self._planned_ns = now_ns
        lane = self._num_executed % self.num_stages
        draft = Draft(now_ns, lane)
        if self.num_stages > 1:
            self.members.gather(lane)
        self.composition.fill(self, draft)
        while draft.paused and not (draft.chunks or draft.decodes or self.members.in_flight):
            recompute(self, self.members.last(), draft.paused[0], draft)
            draft.paused.clear()
            self.decode(draft)
        for victim, _, _ in draft.preempted:
            victim.policy_state.stale_tokens = NEVER
        for victim in draft.to_requeue:
            self.queue.put_back(victim, now_ns)
        self._swapped.extend(draft.swapped_out)
        return self._finish(draft)

    def _finish(self, draft: Draft) -> GridStep:
        """Advance everybody's counters to what they will be when the step has run, and describe it."""
        batch, joined = self.members.lanes[draft.lane], self.members.joined[draft.lane]
        num_decode = len(batch) if draft.decodes else 0
        context_sum, context_sum_sq, context_max = batch.context_sums() if num_decode else (0, 0, 0)
        if num_decode:
            self.members.joined[draft.lane] = {}
            self.members.advance(draft.lane)
        chunks = [self._advance_chunk(request, num_tokens) for request, num_tokens in draft.chunks]
        if num_decode or chunks:
            self._num_executed += 1
            self.pacing.planned(len(draft.admitted), len(self.queue))
        shape = StepShape(
            num_decode,
            context_sum,
            context_sum_sq,
            context_max,
            tuple([(chunk.num_tokens, chunk.context) for chunk in chunks]),
            num_decode + sum([chunk.is_last for chunk in chunks]),
            0,
            draft.num_swapped_blocks,
            len(draft.admitted),
        )
        step = GridStep(
            shape,
            len(self.members),
            self.num_waiting,
            self.kv.used_blocks,
            draft.num_new_blocks,
            self.members.live_tokens,
            draft.blocked_by if self.num_waiting else BlockedBy.NOTHING,
            batch.tick,
            draft.lane,
            chunks,
            list(joined) if num_decode else (),
            draft.left,
            draft.admitted,
            draft.preempted,
            draft.chunks,
            [chunk.request.policy_state.epoch for chunk in chunks],
            draft.swapped_out,
            draft.swapped_in,
            dropped=draft.dropped,
        )
        self.members.in_flight.append(step)
        return step

    def _advance_chunk(self, request: Request, num_tokens: int) -> Chunk:
        state: GridState = request.policy_state
        start, end = request.num_computed_tokens, request.num_computed_tokens + num_tokens
        request.num_computed_tokens = end
        first = max(start, min(state.num_cached, end - 1))
        return Chunk(request, end - first, first, end == state.num_to_prefill)

    # ------------------------------------------------------------------ phases

    def decode(self, draft: Draft) -> None:
        """Everybody who can decode does. Where blocks are short, victims make room, last ones first."""
        batch = self.members.lanes[draft.lane]
        if not self.members.idle and self.num_stages == 1:
            growing = [r for r in batch.at_context(0) if r.num_blocks * self._block_size <= batch.context(r)]
            if len(growing) + self._reservation.needs_free_block <= self.kv.free_blocks or not batch:
                for request in growing:
                    self.kv.allocate(request, 1)
                draft.num_new_blocks += len(growing)
                self._publish(batch.at_context(self._block_size - 1))
                draft.decodes = len(batch) > 0
                draft.num_tokens += len(batch)
                return
        self._decode_one_by_one(draft)

    def _decode_one_by_one(self, draft: Draft) -> None:
        rest = deque(self.members)
        while rest:
            request = rest.popleft()
            if request.policy_state.is_decoding and not self._is_in_flight(request):
                self.decode_one(request, rest, draft)

    def _is_in_flight(self, request: Request) -> bool:
        return self.num_stages > 1 and self.members.is_in_flight(request)

    def decode_one(self, request: Request, rest: deque[Request], draft: Draft) -> bool:
        """Give a request its slot, preempting from the end of `rest` or itself. Mutates `rest`; whether it decodes."""
        if not self.make_room(request, rest, draft):
            return False
        if blocks_for(self.members.context(request) + 1, self._block_size) > request.num_blocks:
            self.kv.allocate(request, 1)
            draft.num_new_blocks += 1
        self._publish([request])
        self.members.join_lane(request, draft.lane)
        draft.decodes = True
        draft.num_tokens += 1
        return True

    def _publish(self, requests: Iterable[Request]) -> None:
        """These decode: with prefix caching, blocks that their next tokens fill are known from now on."""

    def make_room(self, request: Request, rest: deque[Request], draft: Draft) -> bool:
        """Preempt from the end of `rest`, or the request itself, until it has a slot. Whether it has one now."""
        while not self._has_slot(request):
            if self.pressure == "pause":
                self.members.leave_out(request, draft)
                draft.paused.append(request)
                return False
            victim = rest.pop() if rest else request
            relieve(self, victim, request, draft)
            if victim is request:
                return False
        return True

    def _has_slot(self, request: Request) -> bool:
        if self._reservation.needs_free_block:
            return self.kv.free_blocks > 0
        return self.kv.free_blocks > 0 or self.members.context(request) < request.num_blocks * self._block_size

    def continue_prefills(self, draft: Draft) -> None:
        """Those who run and are not through their prefill get what is left of the budget, in their order."""
        waiting_for_more = [r for r in self.members.prefilling if not self._is_in_flight(r)]
        for request in waiting_for_more:
            left = request.policy_state.num_to_prefill - request.num_computed_tokens
            num_tokens = min(left, self.budget_left(draft, request.num_computed_tokens))
            if num_tokens > 0:
                self.prefill(request, num_tokens, draft)
        self.members.move_to_end(waiting_for_more)

    def prefill(self, request: Request, num_tokens: int, draft: Draft) -> None:
        """A piece of the request's prefill runs in this step."""
        draft.chunks.append((request, num_tokens))
        draft.num_tokens += num_tokens
        request.policy_state.last_pass_ns = draft.now_ns

    def swap_in(self, draft: Draft) -> None:
        """Bring back those who are swapped out, first come first served, while they fit."""
        while self._swapped:
            request = self._swapped[0]
            if self.touched_blocks(request) > self.kv.usable_blocks:
                self._swapped.popleft()
                self._drop(request, draft)
                continue
            draft.blocked_by = self.obstacle_to_return(request, draft)
            if draft.blocked_by is not BlockedBy.NOTHING:
                return
            self._swapped.popleft()
            self._bring_back(request, draft)

    def obstacle_to_return(self, request: Request, draft: Draft) -> BlockedBy:
        """What keeps the first of those who are swapped out there. Pure."""
        if len(self.members) >= self.config.max_num_seqs:
            return BlockedBy.SLOTS
        if self.tokens_left(request) > self.budget_left(draft, request.num_computed_tokens):
            return BlockedBy.BUDGET
        if self.touched_blocks(request) > self.kv.free_blocks - self._reservation.watermark_blocks:
            return BlockedBy.KV
        return BlockedBy.NOTHING

    def _bring_back(self, request: Request, draft: Draft) -> None:
        state: GridState = request.policy_state
        draft.swapped_in.append(request)
        draft.num_swapped_blocks += state.num_cpu_blocks
        num_blocks = self.touched_blocks(request)
        self.kv.allocate(request, num_blocks)
        draft.num_new_blocks += num_blocks
        self.free_cpu_blocks += state.num_cpu_blocks
        state.num_cpu_blocks = 0
        request.status = Status.RUNNING
        self.members.seat(request)
        if state.is_decoding:
            self.members.join_lane(request, draft.lane)
            draft.decodes = True
            draft.num_tokens += 1
        else:
            self.members.prefilling[request] = None
            self.prefill(request, self.tokens_left(request), draft)

    def admit(self, draft: Draft, num_running: int | None = None) -> None:
        """Bring in waiting requests, from the head, until one does not fit or its time has not come.

        `num_running`: what the pacing rule takes for the number of those who run, if not what it is.
        """
        if num_running is None:
            num_running = len(self.members)
        self.queue.begin_admission(draft.now_ns)
        while True:
            if not self._pacing_opens(num_running, draft):
                draft.blocked_by = BlockedBy.ADMISSION
                return
            head = self.queue.head(draft.now_ns)
            if head is None:
                return
            num_tokens = self.tokens_for(head, draft)
            if self.is_hopeless(head, num_tokens):
                self.queue.remove(head)
                self._drop(head, draft)
                continue
            draft.blocked_by = self.obstacle(head, num_tokens, draft)
            if draft.blocked_by is not BlockedBy.NOTHING:
                self.queue.refused(head)
                return
            self._admit_one(head, num_tokens, draft)

    def _pacing_opens(self, num_running: int, draft: Draft) -> bool:
        earliest_ns = None
        if self.pacing.reads_clock:
            earliest_ns = min([r.queued_ns for r in self.queue], default=None)
        return self.pacing.opens(
            Situation(
                draft.now_ns,
                earliest_ns,
                len(self.queue),
                num_running,
                self.members.num_decoding,
                len(draft.admitted),
            )
        )

    def tokens_for(self, head: Request, draft: Draft) -> int:
        """Tokens that a waiting request would get: all that are known, or what the budget leaves of them. Pure."""
        state: GridState = head.policy_state
        is_stale = state.stale_tokens != NEVER
        left = state.num_to_prefill - state.stale_tokens if is_stale else head.num_tokens
        if not self.config.chunked:
            return left
        return min(left, self.budget_left(draft, state.stale_tokens if is_stale else 0))

    def budget_left(self, draft: Draft, num_done: int) -> int:
        """Tokens that a prefill of which `num_done` are done may still get in this step. Pure."""
        return self.config.token_budget - draft.num_tokens

    def is_hopeless(self, head: Request, num_tokens: int) -> bool:
        """Whether the engine gives up the head of the queue: it is too long. Pure."""
        return head.num_tokens > self.config.prompt_limit or self.never_admitted(head)

    def never_admitted(self, head: Request) -> bool:
        """Whether the engine drops a request because the watermark will never admit it. Pure."""
        most = self.kv.usable_blocks - self._reservation.watermark_blocks
        return self.config.drops_what_never_fits and self._reservation.blocks(head) > most

    def obstacle(self, head: Request, num_tokens: int, draft: Draft) -> BlockedBy:
        """What keeps the head of the queue out of this step. Pure."""
        if len(self.members) >= self.config.max_num_seqs:
            return BlockedBy.SLOTS
        if not 0 < num_tokens <= self.budget_left(draft, 0):
            return BlockedBy.BUDGET
        if self._reservation.blocks(head) > self.kv.free_blocks - self._reservation.watermark_blocks:
            return BlockedBy.KV
        return BlockedBy.NOTHING

    def _admit_one(self, head: Request, num_tokens: int, draft: Draft) -> None:
        self.queue.take(head, draft.now_ns)
        state: GridState = head.policy_state
        num_used = self.kv.used_blocks
        state.num_cached = self._hold(head)
        draft.num_new_blocks += self.kv.used_blocks - num_used
        state.num_to_prefill = head.num_tokens
        draft.admitted.append(Admission(head, state.num_cached, head.status is Status.PREEMPTED))
        head.status = Status.RUNNING
        self.members.seat(head)
        self.members.prefilling[head] = None
        self.prefill(head, num_tokens, draft)

    def _hold(self, head: Request) -> int:
        """Take the blocks of an admission. Returns how many of its tokens are in them already."""
        self.kv.allocate(head, self._reservation.blocks(head))
        return 0

    def _drop(self, request: Request, draft: Draft) -> None:
        draft.dropped.append(request)
        self.end(request)

    def touched_blocks(self, request: Request) -> int:
        """Blocks that a swapped request needs to go on: those of its tokens and of the next one."""
        held = request.num_blocks or request.policy_state.num_cpu_blocks
        if not request.policy_state.is_decoding:
            return int(held)
        return max(held, blocks_for(request.num_computed_tokens + 1, self._block_size))

    def tokens_left(self, request: Request) -> int:
        """Tokens that a request which runs or is swapped out has to compute next, by itself: one when it decodes."""
        state: GridState = request.policy_state
        return 1 if state.is_decoding else state.num_to_prefill - request.num_computed_tokens

    # ------------------------------------------------------------------ results

    def update(self, step: Step) -> Finished:
        if not self.members.in_flight or self.members.in_flight[0] is not step:
            raise InvariantError("the results of a step come out of turn")
        planned = self.members.in_flight.popleft()
        if step.is_empty:
            return NOTHING_ENDED
        finished: list[Request] = []
        departed: list[Request] = []
        for chunk, epoch in zip(planned.chunks, planned.epochs, strict=True):
            if chunk.is_last and chunk.request.status is Status.RUNNING and chunk.request.policy_state.epoch == epoch:
                self._end_prefill(chunk.request, step.lane, finished, departed)
        if step.shape.num_decode:
            self._take_in_decodes(step, finished, departed)
        for request in finished:
            self.unseat(request)
            self.end(request)
        return Finished(finished, finished, departed) if finished or departed else NOTHING_ENDED

    def _end_prefill(self, request: Request, lane: int, finished: list[Request], departed: list[Request]) -> None:
        """The prefill yields a token; from the next step on the request decodes."""
        state: GridState = request.policy_state
        state.is_decoding = True
        del self.members.prefilling[request]
        request.num_output_tokens += 1
        self.queue.served(request, request.num_output_tokens)
        if request.num_output_tokens == request.num_target_tokens:
            finished.append(request)
            return
        if request.num_output_tokens == request.cancel_after_tokens:
            departed.append(request)
        self.members.join_lane(request, lane)

    def _take_in_decodes(self, step: Step, finished: list[Request], departed: list[Request]) -> None:
        batch = self.members.lanes[step.lane]
        due = self.members.in_order(batch.due.pop_tick(step.tick))
        for request in due:
            num_received = request.num_output_tokens + step.tick - request.joined_tick
            if num_received < request.num_target_tokens:
                departed.append(request)
                batch.postpone(request, request.num_target_tokens - num_received)
            else:
                finished.append(request)

    def wake_ns(self) -> int | None:
        if self.composition.wants_another_try:
            return self._planned_ns
        return self.queue.next_change_ns(self._planned_ns)

    # ------------------------------------------------------------------ for drivers, logs and tests

    def batch(self, step: Step) -> list[tuple[Request, int]]:
        assert isinstance(step, GridStep)
        rows = list(step.rows)
        if step.shape.num_decode:
            late = {r for r in step.swapped_in if r.policy_state.is_decoding}
            members = [r for r in self.members if r.policy_state.lane == step.lane]
            rows += [(r, 1) for r in members if r not in late] + [(r, 1) for r in step.swapped_in if r in late]
        return rows

    def running(self) -> list[Request]:
        return list(self.members)

    def waiting(self) -> list[Request]:
        return list(self.queue)

    def swapped(self) -> list[Request]:
        """Requests whose KV is in host memory, in the order in which they come back."""
        return list(self._swapped)

    @property
    def num_swapped(self) -> int:
        """How many are swapped out."""
        return len(self._swapped)

    @property
    def num_unfinished(self) -> int:
        return len(self.members) + len(self.queue) + len(self._swapped)

    @property
    def num_waiting(self) -> int:
        """Those who wait, swapped out ones included."""
        return len(self.queue) + len(self._swapped)

    @property
    def free_blocks(self) -> int:
        return self.kv.free_blocks

    @property
    def usable_blocks(self) -> int:
        return self.kv.usable_blocks

    def check_integrity(self) -> None:
        held = sum(r.num_blocks for r in self.members)
        if held != self.kv.used_blocks:
            raise InvariantError(f"running requests hold {held} blocks, the pool misses {self.kv.used_blocks}")
        if any(r.num_blocks for r in self.queue) or any(r.num_blocks for r in self._swapped):
            raise InvariantError("a waiting request holds KV blocks")
        if len(self.members) > self.config.max_num_seqs:
            raise InvariantError(f"{len(self.members)} requests run, {self.config.max_num_seqs} may")
        in_host_memory = sum(r.policy_state.num_cpu_blocks for r in self._swapped)
        if in_host_memory != self.num_cpu_blocks - self.free_cpu_blocks:
            raise InvariantError(f"swapped requests hold {in_host_memory} blocks of host memory")
