"""The engine that all presets of the grid share: its phases, and the state that they change.

A waiting request is admitted with KV for what its engine reserves, prefills in one or more steps, and then
decodes one token in each step that decodes. Those who decode are kept as a `RunningBatch`, so that a step in
which blocks suffice costs what it changes; where they might not, those who run are visited one by one, in
their order, as the engines themselves do. Which phases a step has is the composition's matter.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import bisect_right
from itertools import accumulate
from typing import ClassVar, Self, cast

from sim.errors import InvariantError
from sim.policies.base import Axes, EngineLimits, EngineOptions
from sim.policies.grid.composition import Composition
from sim.policies.grid.config import UNLIMITED_TOKENS, GridConfig, GridOptions
from sim.policies.grid.draft import Draft, GridState, GridStep
from sim.policies.grid.phases import Phases
from sim.policies.grid.pressure import recompute
from sim.request import NEVER, Request, Status
from sim.step import NOTHING_ENDED, BlockedBy, Chunk, Finished, SteadyRun, Step, StepShape


class GridPolicy(Phases):
    """One point of the grid. A preset is a subclass that resolves its options to a config and a composition."""

    Options: ClassVar[type[EngineOptions]] = GridOptions

    def __init__(self, config: GridConfig, composition: Composition) -> None:
        super().__init__(config)
        self.composition = composition
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

    @classmethod
    def axes(cls) -> Axes:
        options = cast(GridOptions, cls.Options.model_construct(policy=""))
        policy = cls.preset(options, EngineLimits(max_model_len=4096, block_size=16, num_gpu_blocks=1000))
        config, composition = policy.config, policy.composition
        never = config.reservation != "prompt"
        return Axes(
            composition.batch,
            composition.step + (", prompts in chunks" if config.chunked else ", whole prompts"),
            composition.order,
            "prompt + watermark" if config.reservation == "prompt" else config.reservation,
            "never happens" if never else config.pressure,
            "nobody" if never else "last of those not yet visited; front of the queue",
            "stops admission",
            config.pacing.kind,
            config.queue_order.kind,
            "requests" if config.token_budget >= UNLIMITED_TOKENS else "requests, tokens",
        )

    # ------------------------------------------------------------------ the step

    def plan(self, now_ns: int) -> GridStep:
        self._planned_ns = now_ns
        step = self._plan_decodes()
        if step is not None:
            return step
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
            self.put_back(victim, now_ns)
        self._swapped.extend(draft.swapped_out)
        return self._finish(draft)

    def _plan_decodes(self) -> GridStep | None:
        """A step in which all who run decode and nothing else can happen; None, and nothing changed, if it might."""
        members, batch, num_decode = self.members, self.members.lanes[0], self.members.lanes[0].num_decode
        if not num_decode or members.prefilling or self.queue or self._swapped or self.must_try_to_admit:
            return None
        num_new_blocks = self.give_all_a_slot(0) if self.composition.is_one_decode(self) else None
        if num_new_blocks is None:
            return None
        members.sort()
        joined, context_sum, context_sum_sq, context_max = members.joined[0], *batch.context_sums()
        if joined:
            members.joined[0] = {}
        members.advance(0)
        self._num_executed += 1
        self.pacing.planned(0, 0)
        step = GridStep(
            StepShape(num_decode, context_sum, context_sum_sq, context_max, (), num_decode),
            len(members),
            0,
            self.kv.used_blocks,
            num_new_blocks,
            context_sum + num_decode,
            tick=batch.tick,
            joined=list(joined),
        )
        members.in_flight.append(step)
        return step

    def _finish(self, draft: Draft) -> GridStep:
        """Advance everybody's counters to what they will be when the step has run, and describe it."""
        batch, joined = self.members.lanes[draft.lane], self.members.joined[draft.lane]
        num_decode = len(batch) if draft.decodes else 0
        context_sum, context_sum_sq, context_max = batch.context_sums() if num_decode else (0, 0, 0)
        if num_decode:
            self.members.joined[draft.lane] = {}
            self.members.advance(draft.lane)
        chunks: list[Chunk] = []
        prefills: list[tuple[int, int]] = []
        epochs: list[int] = []
        num_sampled = num_decode
        for request, num_tokens in draft.chunks:
            chunk = self._advance_chunk(request, num_tokens)
            chunks.append(chunk)
            prefills.append((chunk.num_tokens, chunk.context))
            epochs.append(request.policy_state.epoch)
            num_sampled += chunk.is_last
        if num_decode or chunks:
            self._num_executed += 1
            self.pacing.planned(len(draft.admitted), len(self.queue))
        shape = StepShape(
            num_decode,
            context_sum,
            context_sum_sq,
            context_max,
            tuple(prefills),
            num_sampled,
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
            epochs,
            draft.swapped_out,
            draft.swapped_in,
            dropped=draft.dropped,
        )
        self.members.in_flight.append(step)
        return step

    def _advance_chunk(self, request: Request, num_tokens: int) -> Chunk:
        state: GridState = request.policy_state
        first = request.num_computed_tokens
        request.num_computed_tokens = end = first + num_tokens
        if first < state.num_cached:
            first = max(first, min(state.num_cached, end - 1))
        return Chunk(request, end - first, first, end == state.num_to_prefill)

    # ------------------------------------------------------------------ results

    def update(self, step: Step) -> Finished:
        if not self.members.in_flight or self.members.in_flight[0] is not step:
            raise InvariantError("the results of a step come out of turn")
        planned = self.members.in_flight.popleft()
        num_decode = planned.shape.num_decode
        if not planned.chunks and not (num_decode and planned.tick in self.members.lanes[planned.lane].due):
            return NOTHING_ENDED
        finished: list[Request] = []
        departed: list[Request] = []
        for chunk, epoch in zip(planned.chunks, planned.epochs, strict=True):
            if chunk.is_last and chunk.request.status is Status.RUNNING and chunk.request.policy_state.epoch == epoch:
                self._end_prefill(chunk.request, step.lane, finished, departed)
        if num_decode:
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

    # ------------------------------------------------------------------ many steps at once

    def steady_run(self, min_steps: int, max_steps: int) -> SteadyRun | None:
        members, batch, limits = self.members, self.members.lanes[0], self.config.limits
        is_changing = members.in_flight or members.prefilling or members.idle or members.joined[0]
        next_tick = batch.due.next_tick()
        if is_changing or next_tick is None or self.num_stages > 1 or self.config.enable_prefix_caching:
            return None
        num_steps = min(max_steps, next_tick - batch.tick)
        if num_steps < min_steps:
            return None
        blocked_by = self.composition.steady_obstacle(self, Draft(self._planned_ns, 0, batch.num_decode))
        if blocked_by is None:
            return None
        if self.config.reservation == "prompt":
            num_new_blocks = batch.num_growing(num_steps)
        elif batch.context_max + num_steps <= limits.max_model_len:
            num_new_blocks = [0] * num_steps
        else:
            return None
        spare = self.kv.free_blocks - self.needs_free_block
        if sum(num_new_blocks) > spare:
            del num_new_blocks[bisect_right(list(accumulate(num_new_blocks)), spare) :]
        if len(num_new_blocks) < min_steps:
            return None
        return SteadyRun(
            StepShape(batch.num_decode, *batch.context_sums(), (), batch.num_decode),
            num_new_blocks,
            len(members),
            self.num_waiting,
            blocked_by,
            self.kv.used_blocks,
            batch.context_sum,
        )

    def advance_steady(self, num_steps: int) -> None:
        if self.config.reservation == "prompt":
            self.kv.take(sum(self.members.lanes[0].num_growing(num_steps)))
        self.members.advance(0, num_steps)
        self._num_executed += num_steps
        self.pacing.planned(0, len(self.queue), num_steps)

    def wake_ns(self) -> int | None:
        if not self.num_unfinished:
            return None
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
        held = sum(self.members.num_blocks(r) for r in self.members)
        if held != self.kv.used_blocks:
            raise InvariantError(f"running requests hold {held} blocks, the pool misses {self.kv.used_blocks}")
        if any(r.num_blocks for r in self.queue) or any(r.num_blocks for r in self._swapped):
            raise InvariantError("a waiting request holds KV blocks")
        if len(self.members) > self.config.max_num_seqs:
            raise InvariantError(f"{len(self.members)} requests run, {self.config.max_num_seqs} may")
        in_host_memory = sum(r.policy_state.num_cpu_blocks for r in self._swapped)
        if in_host_memory != self.num_cpu_blocks - self.free_cpu_blocks:
            raise InvariantError(f"swapped requests hold {in_host_memory} blocks of host memory")
