"""vLLM V1's scheduler at the cost of what changes: the production planner.

Steady decodes are not walked. They are members of a `RunningBatch`, which knows how many there are, what
their contexts add up to, who needs a block and who ends in a given tick. Everybody else who runs (in
prefill, just past it, or with the last token in flight) is handled one by one, with the reference's rules. When the
budget cannot serve all who run, the members are unfolded and the step is walked like the reference does.

Equal to `VllmV1Reference` step by step. Covers FCFS without pipeline and drafts, sync and async, with and
without prefix caching; `build` falls back to the reference for the rest.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import cast

from sim.batch import RunningBatch, TickCalendar
from sim.errors import InvariantError
from sim.kv.base import blocks_for
from sim.kv.counted import NO_HIT
from sim.policies.base import About, Axes, EngineLimits, EngineOptions
from sim.policies.vllm_v1_axes import VllmV1Axes, is_moved
from sim.policies.vllm_v1_config import NEWEST, OLDEST, V1Config, VllmV1Options, refuse_too_many_active
from sim.policies.vllm_v1_reference import VllmV1Reference
from sim.policies.vllm_v1_state import Plan, Row, V1State, V1Step
from sim.request import NEVER, RUNNING, Request
from sim.step import (
    BLOCKED_BY_KV,
    BLOCKED_BY_SLOTS,
    NOT_BLOCKED,
    NOTHING_ENDED,
    BlockedBy,
    Finished,
    SteadyRun,
    Step,
    StepShape,
    make_shape,
)

Chunks = Sequence[tuple[Request, int]]
"""Running requests in prefill, in running order, and the tokens that each gets in a step."""

Completing = Sequence[tuple[Request, int]]
"""Members, in running order, that have a block full of known tokens after a step, and those tokens."""


class VllmV1(VllmV1Reference):
    """The V1 scheduler, O(changes) per step."""

    about = About(
        batching="continuous batching: running requests first, then new prompts in chunks, up to a token budget",
        copies=f"vLLM's V1 scheduler, {OLDEST} to {NEWEST} (vllm_version)",
        proof=f"step logs of the real scheduler of {NEWEST}: 55 of 55; what older versions did otherwise is taken from "
        "their sources",
        note="the fast planner covers FCFS, sync and async, with and without prefix caching; priority and pipeline "
        "stages run on the plain reference planner; speculative decoding is not offered in scenarios. Where they are "
        "not given, budget and sequences are those of vLLM's API server on the GPU (8192 and 1024 on an H100)",
    )
    own_axes = Axes(
        "every step",
        "prefills and decodes, prompts in chunks",
        "running in order of admission, then new",
        "the step's chunk, the whole prompt reserved",
        "recompute",
        "last of those who run; front of the queue",
        "stops admission",
        "always",
        "fcfs",
        "requests, tokens",
    )

    def __init__(self, config: V1Config) -> None:
        if not is_covered(config):
            raise InvariantError("the fast V1 planner was given options that only the reference covers")
        super().__init__(config)
        self._batch = RunningBatch(config.block_size)
        self._others: dict[Request, None] = {}
        """Who runs but is not in the batch of steady decodes."""
        self._newcomers: list[Request] = []
        """Members that have not decoded yet."""
        self._num_updated_ticks = 0
        self._planned_ahead_tick = NEVER
        """Async: a tick after which the next step was planned before its results were taken in, although by now they
        have been: steady steps are advanced in another order than they happen in."""
        self._ending: dict[int, list[Request]] = {}
        """Async: members that end with the tick in flight, by tick."""
        self._departures = TickCalendar()
        """Members whose client leaves after the tick."""
        self._last_step: V1Step | None = None

    @classmethod
    def build(cls, options: EngineOptions, limits: EngineLimits) -> VllmV1Reference:  # type: ignore[override]  # falls back
        own = cast("VllmV1Options", options)
        config = V1Config.resolve(own, limits)
        refuse_too_many_active(config)
        return VllmV1Axes(config, own, limits) if is_moved(own) else planner_for(config)

    # ------------------------------------------------------------------ who is in the batch

    def _before_unseating(self, request: Request) -> None:
        if request in self._others:
            del self._others[request]
        else:
            self._leave_batch(request)

    def _is_anything_decoding(self) -> bool:
        return self._batch.num_decode > 0 or not all(r.policy_state.is_mid_prefill for r in self._others)

    def _join_batch(self, request: Request, num_outputs: int) -> bool:
        """From the next tick on the request decodes in each until it ends, is preempted or starves.

        `num_outputs` counts those in flight. False, and nothing happens, if lengths allow no more.
        """
        if num_outputs >= request.max_tokens and self.rules.foresees_length_end:
            return False
        if request.prompt_tokens + num_outputs >= self._max_model_len:
            return False
        num_target_tokens = request.num_target_tokens
        # A stop token in flight is not foreseen: such a request decodes once more, for nothing.
        self._batch.join(request, num_target_tokens - num_outputs if num_target_tokens > num_outputs else 1)
        if request.policy_state.decoding_lane == NEVER:
            self._newcomers.append(request)
        if num_outputs < request.cancel_after_tokens < num_target_tokens:
            self._departures.add(self._batch.tick + request.cancel_after_tokens - num_outputs, request)
        return True

    def _greet_newcomers(self) -> list[Request]:
        """Those who decode in the step in the making and did not in the last one."""
        joined = [r for r in self._newcomers if r.status is RUNNING]
        self._newcomers = []
        for request in joined:
            request.policy_state.decoding_lane = 0
        return joined

    def _leave_batch(self, request: Request) -> None:
        """Make a member's counters real again. A token of its that is in flight becomes a row of its own."""
        batch = self._batch
        joined_tick = request.joined_tick
        num_in_flight = batch.tick - self._num_updated_ticks and batch.tick - max(joined_tick, self._num_updated_ticks)
        batch.leave(request)
        request.num_blocks = -(-request.num_computed_tokens // self._block_size)
        if self._is_caching and batch.tick > joined_tick:
            # What its last step made hits: async, the token of that step was not known yet.
            self.kv.publish(request, request.num_computed_tokens - self._is_async)
        if num_in_flight and self._last_step is not None:
            state: V1State = request.policy_state
            request.num_output_tokens -= num_in_flight
            state.num_in_flight_tokens += num_in_flight
            if self._is_async:
                state.num_placeholders += num_in_flight
            row = Row(request, num_in_flight, state.epoch, is_chunk=False)
            row.is_last = True
            self._last_step.rows = {**(self._last_step.rows or {}), request: row}

    # ------------------------------------------------------------------ steps that change nothing

    def plan(self, now_ns: int) -> V1Step:
        blocked_by = self._unchanged_but_for()
        if blocked_by is None:
            return self._plan_step()
        batch, kv = self._batch, self.kv
        num_decode = batch.num_decode
        context_sum, context_sum_sq, context_max = batch.context_sums()
        num_new_blocks = self._advance_members()
        # Of the class of all other steps: where objects of two classes alternate, attributes are found by name.
        self._last_step = step = Plan(0, 0)
        step.shape = make_shape((num_decode, context_sum, context_sum_sq, context_max, (), num_decode, 0, 0, 0))
        step.num_running, step.num_waiting, step.blocked_by = len(self._running), len(self._waiting), blocked_by
        step.used_blocks, step.num_new_blocks = kv.usable_blocks - kv.free_blocks, num_new_blocks
        step.live_tokens, step.lane, step.tick = context_sum + num_decode, 0, batch.tick
        if self._newcomers:
            step.joined = self._greet_newcomers()
        return step

    def update(self, step: Step) -> Finished:
        if not isinstance(step, V1Step):
            return super().update(step)
        tick = step.tick
        if step.rows or tick in self._batch.due or tick in self._departures or tick in self._ending:
            return self._take_in_step(step)
        self._num_updated_ticks = tick
        return NOTHING_ENDED

    def steady_run(self, min_steps: int, max_steps: int) -> SteadyRun | None:
        batch = self._batch
        if self._others or self._newcomers:
            return None
        for calendar in (batch.due, self._departures):
            next_tick = calendar.next_tick() if calendar else None
            if next_tick is not None and next_tick - batch.tick < max_steps:
                max_steps = next_tick - batch.tick
        if max_steps < min_steps:
            return None
        blocked_by = self._unchanged_but_for()
        if blocked_by is None:
            return None
        num_new_blocks = batch.num_growing(max_steps)
        if sum(num_new_blocks) > self.kv.free_blocks:
            del num_new_blocks[bisect_right(list(accumulate(num_new_blocks)), self.kv.free_blocks) :]
        if len(num_new_blocks) < min_steps:
            return None
        return SteadyRun(
            StepShape(batch.num_decode, *batch.context_sums(), (), batch.num_decode),
            num_new_blocks,
            len(self._running),
            len(self._waiting),
            blocked_by,
            self.kv.used_blocks,
            batch.context_sum,
        )

    def advance_steady(self, num_steps: int) -> None:
        if self.kv.num_open:
            self._planned_ahead_tick = self._batch.tick
            for _ in range(num_steps):
                self._advance_members()
        else:
            self.kv.take(sum(self._batch.num_growing(num_steps)))
            self._batch.advance(num_steps)
        self._num_updated_ticks = self._planned_ahead_tick = self._batch.tick

    def _unchanged_but_for(self) -> BlockedBy | None:
        """Why the head of the queue waits, if a plan can do nothing but give each decode its token; else None."""
        if self._others or self._gate is not None:
            return None
        if not self._waiting:
            blocked_by = NOT_BLOCKED
        elif len(self._running) >= self._max_running:
            blocked_by = BLOCKED_BY_SLOTS
        elif self._is_stuck_for_blocks(self._waiting[0]):
            blocked_by = BLOCKED_BY_KV
        else:
            return None
        batch = self._batch
        num_decode, tick = batch.num_decode, batch.tick
        if not num_decode or num_decode > self._token_budget or (self._is_async and tick in batch.due):
            return None
        if len(batch.at_residue[tick % self._block_size]) > self.kv.free_blocks:
            return None
        return blocked_by

    def _is_stuck_for_blocks(self, head: Request) -> bool:
        """Whether the whole prompt of the head would not fit now: then not later either, while nobody ends.

        Found out only where the last step met this obstacle. Usually the head fits, as the plan will see for itself.
        """
        last_step = self._last_step
        if last_step is None or last_step.blocked_by is not BLOCKED_BY_KV:
            return False
        if self._is_caching or head.policy_state.num_stale_tokens or self._batch.num_decode >= self._token_budget:
            return False
        certain = self.config.scheduler_reserve_full_isl and self.config.enable_chunked_prefill
        return certain and not self._fits(head.num_tokens, NO_HIT, 0)

    def _advance_members(self) -> int:
        """One step that does nothing but let the members decode; their blocks fit. Returns how many they took."""
        batch = self._batch
        growing = batch.at_residue[batch.tick % self._block_size]
        if growing:
            self.kv.allocate_each(growing)
        if self._is_caching:
            self._publish_completed(self._completing())
        batch.tick += 1
        return len(growing)

    # ------------------------------------------------------------------ the running requests

    def _plan_running(self, plan: Plan) -> None:
        batch = self._batch
        if self._is_async and batch.tick != self._num_updated_ticks:
            self._retire_foreseen_ends(plan)
        chunking = self._join_ready(plan) if self._others else ()
        if self._newcomers:
            plan.joined = self._greet_newcomers()
        chunks = self._share_budget(chunking, plan)
        if chunks is None:
            self._unfold()
            super()._plan_running(plan)
            return
        completing = self._completing() if self._is_caching else ()
        growing = batch.at_residue[batch.tick % self._block_size]
        num_new_blocks = len(growing)
        for request, num_tokens in chunks:
            num_new_blocks += self._new_blocks(request, num_tokens)
        if num_new_blocks <= self.kv.free_blocks:
            if growing:
                self.kv.allocate_each(growing)
                plan.num_new_blocks = len(growing)
            for request, num_tokens in chunks:
                self._publish_completed(completing, before=request)
                self._schedule_running(request, num_tokens, plan)
        else:
            self._place_under_pressure(chunks, completing, plan)
        plan.budget -= batch.num_decode
        if completing:
            self._publish_completed(completing)

    def _retire_foreseen_ends(self, plan: Plan) -> None:
        """Async: whoever gets its last possible token from the tick in flight is not planned again."""
        tick = self._batch.tick
        for request in self._batch.due.pop_tick(tick):
            if self._foresees_end(request):
                self._leave_batch(request)
                self._others[request] = None
                request.policy_state.decoding_lane = NEVER
                plan.left.append(request)
            else:
                self._ending.setdefault(tick, []).append(request)

    def _foresees_end(self, request: Request) -> bool:
        """Whether a member that is due ends by a length limit, not by a stop token."""
        if request.prompt_tokens + request.num_target_tokens == self.config.max_model_len:
            return True
        return self.rules.foresees_length_end and request.num_target_tokens == request.max_tokens

    def _join_ready(self, plan: Plan) -> list[Request]:
        """Whoever is past its prefill joins the batch. Returns those still in it, in running order."""
        chunking: list[Request] = []
        spent: list[Request] = []
        for request in self._others:
            if request.policy_state.is_mid_prefill:
                chunking.append(request)
            elif not self._join_batch(request, request.num_output_tokens + request.policy_state.num_placeholders):
                spent.append(request)
        self._others = dict.fromkeys(chunking + spent)
        if not plan.gate_is_open:
            return []
        return sorted(chunking, key=_seat) if len(chunking) > 1 else chunking

    def _share_budget(self, chunking: Sequence[Request], plan: Plan) -> Chunks | None:
        """Tokens for each prefill when every decode gets its own; None when somebody would starve.

        A lone prefill behind all decodes takes what they leave.
        """
        budget = plan.budget - self._batch.num_decode
        if not chunking:
            return () if budget >= 0 else None
        chunks = [(request, self._tokens_wanted(request, plan)) for request in chunking]
        if sum(num_tokens for _, num_tokens in chunks) <= budget:
            return [chunk for chunk in chunks if chunk[1] > 0]
        if budget < 0 or len(chunks) > 1 or chunks[0][0] is not next(reversed(self._running)):
            return None
        return [(chunks[0][0], budget)] if budget else []

    def _place_under_pressure(self, chunks: Chunks, completing: Completing, plan: Plan) -> None:
        """Not everything fits: ask in running order, preempting from the tail.

        Only requests that need a block are visited. The tail cannot have been visited before, unless it is
        the requester; then the walk is over, because nobody stands behind it.
        """
        wanted = dict(chunks)
        for request in sorted([*self._batch.at_context(0), *wanted], key=_seat):
            if request.status is not RUNNING:
                continue
            num_tokens = wanted.get(request, 0)
            self._make_room(request, self._new_blocks(request, num_tokens) if num_tokens else 1, plan)
            if request.status is not RUNNING:
                return
            if num_tokens:
                self._publish_completed(completing, before=request)
                self._schedule_running(request, num_tokens, plan)
            else:
                plan.num_new_blocks += 1
                self.kv.allocate_each([request])

    def _completing(self) -> Completing:
        """Who completes a block in the step in the making, if that cannot wait until the member leaves the batch."""
        batch = self._batch
        tick = batch.tick
        completing: list[tuple[Request, int]] = []
        if self._is_async and self.kv.num_open:
            ready = [r for r in batch.at_context(0) if r.kv_state.is_open]
            completing = [(r, r.num_computed_tokens + tick - r.joined_tick) for r in ready]
        is_known = self._is_async and self._num_updated_ticks == tick != self._planned_ahead_tick
        if is_known or (self.kv.num_open and not self._is_async):
            full = [r for r in batch.at_context(self._block_size - 1) if not r.policy_state.num_placeholders]
            completing += [(r, batch.context(r) + 1) for r in full if is_known or r.kv_state.is_open]
        return sorted(completing, key=lambda pair: pair[0].policy_state.seat) if len(completing) > 1 else completing

    def _publish_completed(self, completing: Completing, before: Request | None = None) -> None:
        """Make the blocks of members hits: of all, or of those that stand before a request. May be repeated.

        The order is what counts: of several blocks with equal tokens the one published first is hit.
        """
        publish, batch = self.kv.publish, self._batch
        for member, num_tokens in completing:
            if before is not None and _seat(member) > _seat(before):
                return
            if member in batch:
                publish(member, num_tokens)

    def _unfold(self) -> None:
        for request in list(self._batch):
            self._leave_batch(request)
            self._others[request] = None

    # ------------------------------------------------------------------ the step

    def _finish_plan(self, plan: Plan) -> None:
        batch, others = self._batch, self._others
        if plan.preempted:
            plan.joined = [r for r in plan.joined if r.status is RUNNING]
        num_sampled = num_decode = batch.num_decode
        if not num_decode:
            for request, _, _ in plan.admitted:
                others[request] = None
            super()._finish_plan(plan)
            return
        # The step is priced by those who decode in it; whoever completes its prefill in it is one of them afterwards.
        context_sum, context_sum_sq, context_max = batch.context_sums()
        batch.tick = plan.tick = batch.tick + 1
        live_tokens = context_sum + num_decode
        prefills: list[tuple[int, int]] = []
        if plan.rows:
            plan.chunks = chunks = list(plan.rows.values())
            for row in chunks:
                self._advance(row)
                request, is_last = row.request, row.is_last
                num_sampled += is_last
                prefills.append((row.num_tokens, row.context))
                if is_last and self._join_batch(request, request.num_output_tokens + 1):
                    others.pop(request, None)
                    live_tokens += request.num_computed_tokens
                else:
                    others[request] = None
        for request in others:
            live_tokens += request.num_computed_tokens
        self._count_executed(plan)
        sums = num_decode, context_sum, context_sum_sq, context_max
        plan.shape = make_shape((*sums, tuple(prefills), num_sampled, 0, 0, len(plan.admitted)))
        plan.live_tokens, plan.lane = live_tokens, 0
        self._last_step = plan

    def _decoders(self, lane: int) -> Iterable[Request]:
        return self._others  # only in a walked step do decodes have rows, and then the batch is empty

    # ------------------------------------------------------------------ results

    def _take_in_members(self, step: Step, finished: list[Request], departed: list[Request]) -> None:
        tick = step.tick
        if not tick:
            return
        self._num_updated_ticks = tick
        if tick in self._batch.due:
            finished += self._batch.due.pop_tick(tick)
        if tick in self._ending:
            finished += [r for r in self._ending.pop(tick) if r.due_tick == tick]
        if len(finished) > 1:
            finished.sort(key=_seat)
        if tick in self._departures:
            leaving = self._departures.pop_tick(tick)
            departed.extend([r for r in leaving if r in self._batch and self._num_received(r) == r.cancel_after_tokens])
            departed.sort(key=_seat)

    def _num_received(self, member: Request) -> int:
        """Outputs of a member whose results are in."""
        return member.num_output_tokens + max(0, self._num_updated_ticks - member.joined_tick)

    # ------------------------------------------------------------------ for drivers, logs and tests

    def batch(self, step: Step) -> list[tuple[Request, int]]:
        rows = dict(super().batch(step))
        return [(r, rows.get(r, 1)) for r in self._running if r in rows or r in self._batch]

    def check_integrity(self) -> None:
        for request in self._batch:
            request.num_blocks = blocks_for(self._batch.context(request), self.config.block_size)
        super().check_integrity()


def is_covered(config: V1Config) -> bool:
    """Whether the fast planner has a form for these options."""
    return config.policy == "fcfs" and config.pipeline_parallel_size == 1 and not config.num_speculative_tokens


def planner_for(config: V1Config) -> VllmV1Reference:
    """The fastest planner that covers the options."""
    return VllmV1(config) if is_covered(config) else VllmV1Reference(config)


def _seat(request: Request) -> int:
    state: V1State = request.policy_state
    return state.seat
