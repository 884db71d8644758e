"""vLLM V1 moved along the grid's axes: who is next, who may pass, when, and what happens when memory is short.

The plain planner, with one rule replaced for each axis that a scenario overrides. Without an override the
engine is vLLM's own, and none of this runs.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from sim.errors import ScenarioError
from sim.kv.base import blocks_for
from sim.policies.base import EngineLimits
from sim.policies.grid.head_of_line import MISFITS, refuse_skipping
from sim.policies.grid.pacing import Situation, build_pacing
from sim.policies.grid.victims import Standing, choose, put_back, refuse_pointless
from sim.policies.vllm_v1_config import V1Config, VllmV1Options
from sim.policies.vllm_v1_reference import VllmV1Reference
from sim.policies.vllm_v1_state import Plan, Row, V1State, V1Step
from sim.queues.base import QueueOrder, Setting, build_order
from sim.queues.priority import PriorityOptions
from sim.request import NEVER, Request, Status
from sim.step import BlockedBy, Preemption, StepShape, decodes_of


def is_moved(options: VllmV1Options) -> bool:
    """Whether a scenario overrides an axis."""
    under_pressure = (options.preemption, options.victim, options.victim_goes_to)
    at_admission = (options.prefill_pacing.kind, options.queue_order.kind, options.head_of_line)
    return under_pressure != ("recompute", "own", "front") or at_admission != ("always", "fcfs", "stop")


class QueueView:
    """A queue order under the names of the deque that the planners keep."""

    def __init__(self, order: QueueOrder) -> None:
        self.order = order
        self.now_ns = 0

    def __bool__(self) -> bool:
        return self.order.head(self.now_ns) is not None

    def __len__(self) -> int:
        return len(self.order)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.order)

    def __getitem__(self, index: int) -> Request:
        head = self.order.head(self.now_ns)
        if head is None or index:
            raise IndexError(index)
        return head

    def __delitem__(self, index: int) -> None:
        self.order.take(self[index], self.now_ns)

    def popleft(self) -> Request:
        """The head leaves."""
        head = self[0]
        del self[0]
        return head

    def extendleft(self, requests: Iterable[Request]) -> None:
        """Those who were passed over return."""
        for request in requests:
            self.order.put_back(request, self.now_ns)

    def remove(self, request: Request) -> None:
        """Somebody who waited is over."""
        self.order.remove(request)


class VllmV1Axes(VllmV1Reference):
    """The plain planner with the axes that its options choose."""

    def __init__(self, config: V1Config, options: VllmV1Options, limits: EngineLimits) -> None:
        """Raises ScenarioError for options that contradict each other."""
        _refuse_contradictions(config, options)
        super().__init__(config)
        kv_tokens = self.kv.usable_blocks * limits.block_size
        own = PriorityOptions(kind="priority") if config.policy == "priority" else options.queue_order
        order = build_order(own, Setting(limits.class_names, config.max_num_seqs, kv_tokens))
        self._waiting = self._view = QueueView(order)  # type: ignore[assignment]  # a deque as far as planners know
        self._order = order
        self._pacing = build_pacing(
            options.prefill_pacing,
            limits.predictor,
            plans_ahead=config.max_in_flight > 1,
            num_stages=config.pipeline_parallel_size,
        )
        self._pressure = options.preemption
        self._victim = options.victim
        self._victim_goes_to = options.victim_goes_to
        self._skips = options.head_of_line == "skip"
        self.follows_arrival_order = order.is_arrival_order and not self._skips
        self.deadlines = order if order.drops_late else None
        self.reads_clock = self._pacing.reads_clock or self._pacing.reads_batch or order.reads_clock
        self.may_swap = options.preemption == "swap"
        self._swapped: deque[Request] = deque()
        self._cpu_blocks: dict[Request, int] = {}
        self._free_cpu_blocks = options.num_cpu_blocks
        self._num_swapped_blocks = 0
        self._num_paused = 0
        self._was_decoding = False

    # ------------------------------------------------------------------ the step

    def plan(self, now_ns: int) -> V1Step:
        self._view.now_ns = now_ns
        self._num_swapped_blocks = 0
        plan = super().plan(now_ns)
        plan.shape = plan.shape._replace(num_swapped_blocks=self._num_swapped_blocks)
        plan.num_waiting += len(self._swapped)
        if not plan.is_empty:
            self._pacing.planned(len(plan.admitted), len(self._order))
        return plan

    def _plan_running(self, plan: Plan) -> None:
        self._num_paused = 0
        super()._plan_running(plan)
        while self._num_paused and not plan.rows:
            self._num_paused = 0
            victim = next(reversed(self._running))
            self._unseat(victim)
            super()._preempt(victim, victim, plan)
            super()._plan_running(plan)
        if not plan.preempted:
            self._return_swapped(plan)

    def _misses_turn(self, request: Request, plan: Plan) -> bool:
        if super()._misses_turn(request, plan):
            return True
        if self._pressure != "pause":
            return False
        is_short = self._new_blocks(request, self._tokens_wanted(request, plan)) > self.kv.free_blocks
        self._num_paused += is_short
        return is_short

    # ------------------------------------------------------------------ memory pressure

    def _walks_on(self) -> bool:
        return self._victim != "own" or super()._walks_on()

    def _unplans_victims(self) -> bool:
        return self._victim != "own" or super()._unplans_victims()

    def _choose_victim(self, requester: Request) -> Request:
        if self._victim == "own":
            return super()._choose_victim(requester)
        return choose(self._victim, [_standing(member, requester) for member in self._running])

    def _before_unseating(self, request: Request) -> None:
        self._was_decoding = request.policy_state.decoding_lane != NEVER

    def _preempt(self, victim: Request, beneficiary: Request, plan: Plan) -> None:
        if self._pressure == "swap":
            self._swap_out(victim, beneficiary, plan)
        elif self._pressure == "reject":
            if self._was_decoding:
                plan.left.append(victim)
            plan.dropped = [*plan.dropped, victim]
            victim.status = Status.OVER
            self._order.released(victim, victim.num_output_tokens)
            self.kv.free(victim)
        else:
            super()._preempt(victim, beneficiary, plan)

    def _requeue(self, victim: Request) -> None:
        put_back(self._order, victim, self._victim_goes_to, self._view.now_ns)

    def _swap_out(self, victim: Request, beneficiary: Request, plan: Plan) -> None:
        num_blocks = victim.num_blocks
        if num_blocks > self._free_cpu_blocks:
            raise ScenarioError(
                "engine.num_cpu_blocks",
                "the blocks of host memory do not hold what is swapped out",
                remedy="Raise it, or choose another rule for preemption.",
            )
        self._free_cpu_blocks -= num_blocks
        self._cpu_blocks[victim] = num_blocks
        self._num_swapped_blocks += num_blocks
        self.kv.free(victim)
        victim.status = Status.PREEMPTED
        plan.preempted.append(Preemption(victim, beneficiary, 0))
        self._swapped.append(victim)

    def _return_swapped(self, plan: Plan) -> None:
        """Those whose KV is in host memory come back before anybody new, first come first served, while they fit."""
        while self._swapped and plan.budget > 0 and len(self._running) < self._max_running:
            request = self._swapped[0]
            num_tokens = self._tokens_wanted(request, plan)
            needed = blocks_for(request.num_computed_tokens + num_tokens, self.config.block_size)
            if needed + (self._watermark_blocks if self._running else 0) > self.kv.free_blocks:
                return
            self._swapped.popleft()
            num_blocks = self._take_from_host(request)
            self._num_swapped_blocks += num_blocks
            self._running[request] = None
            request.status = Status.RUNNING
            self.kv.allocate(request, num_blocks)
            plan.num_new_blocks += num_blocks
            self._schedule_running(request, num_tokens, plan)

    def _take_from_host(self, request: Request) -> int:
        num_blocks = self._cpu_blocks.pop(request)
        self._free_cpu_blocks += num_blocks
        return num_blocks

    def _leave(self, request: Request) -> None:
        if request in self._cpu_blocks:
            self._swapped.remove(request)
            self._take_from_host(request)
            self._order.released(request, request.num_output_tokens)
            request.status = Status.OVER
            return
        if request.status is Status.RUNNING:
            self._order.released(request, request.num_output_tokens)
        super()._leave(request)

    # ------------------------------------------------------------------ the queue

    def _enqueue(self, request: Request) -> None:
        self._order.add(request, request.queued_ns)

    def _admit_waiting(self, plan: Plan) -> None:
        if self._swapped:
            plan.blocked_by = BlockedBy.KV
            return
        self._order.begin_admission(self._view.now_ns)
        super()._admit_waiting(plan)
        if self._skips and plan.blocked_by in MISFITS:
            self._admit_behind(plan)

    def _admit_behind(self, plan: Plan) -> None:
        """Bring in whoever fits behind a head that does not, in their order. What holds back the head is noted."""
        reason = plan.blocked_by
        passed_over: list[Request] = []
        while plan.blocked_by in MISFITS and self._waiting and self.kv.free_blocks:
            passed_over.append(self._waiting.popleft())
            plan.blocked_by = BlockedBy.NOTHING
            super()._admit_waiting(plan)
        plan.blocked_by = reason
        self._waiting.extendleft(reversed(passed_over))

    def _admit(self, head: Request, plan: Plan) -> bool:
        num_decoding = sum([not r.policy_state.is_mid_prefill for r in self._running])
        num_admitted = len(plan.admitted)
        earliest_ns = min([r.queued_ns for r in self._order]) if self._pacing.reads_clock else None
        situation = Situation(
            self._view.now_ns,
            earliest_ns,
            len(self._order),
            len(self._running) - num_admitted,
            num_decoding,
            num_admitted,
            self._next_decodes(head) if self._pacing.reads_batch else None,
        )
        if not self._pacing.opens(situation):
            plan.blocked_by = BlockedBy.ADMISSION
            return False
        if super()._admit(head, plan):
            return True
        self._order.refused(head)
        return False

    def _next_decodes(self, head: Request) -> StepShape:
        """All who run and `head`, decoding in the step after the one at hand. O(batch)."""
        running = [r.num_tokens + r.policy_state.num_placeholders for r in self._running]
        return decodes_of([*running, head.num_tokens], StepShape())

    def wake_ns(self) -> int | None:
        return self._order.next_change_ns(self._view.now_ns) if self.num_unfinished else None

    # ------------------------------------------------------------------ results

    def _take_in(self, row: Row, finished: list[Request], departed: list[Request]) -> None:
        num_before = row.request.num_output_tokens
        super()._take_in(row, finished, departed)
        for output in range(num_before + 1, row.request.num_output_tokens + 1):
            self._order.served(row.request, output)

    @property
    def num_unfinished(self) -> int:
        return super().num_unfinished + len(self._swapped)

    @property
    def num_waiting(self) -> int:
        return super().num_waiting + len(self._swapped)


def _standing(member: Request, requester: Request) -> Standing:
    state: V1State = member.policy_state
    return Standing(member, member.num_output_tokens, member.num_blocks, not state.is_mid_prefill, member is requester)


def _refuse_contradictions(config: V1Config, options: VllmV1Options) -> None:
    chosen = {
        "queue_order": options.queue_order.kind != "fcfs",
        "victim": options.victim != "own",
        "victim_goes_to": options.victim_goes_to != "front",
        "head_of_line": options.head_of_line != "stop",
    }
    for axis, is_moved_along in chosen.items():
        if config.policy == "priority" and is_moved_along:
            raise ScenarioError(
                f"engine.{axis}",
                "contradicts scheduling_policy priority",
                valid="it orders the queue and chooses victims",
                remedy="Leave one of them out; queue_order: {kind: priority} orders the queue alone.",
            )
    refuse_skipping(options.head_of_line, options.queue_order.kind)
    refuse_pointless(options.victim, options.victim_goes_to, options.preemption, options.queue_order.kind)
    if options.preemption == "recompute":
        return
    if config.enable_prefix_caching and options.preemption == "swap":
        raise ScenarioError(
            "engine.preemption",
            "swapping shared blocks is not modelled",
            remedy="Set enable_prefix_caching: false, or choose another rule.",
        )
    if config.max_in_flight > 1:
        raise ScenarioError(
            "engine.preemption",
            f"{options.preemption} needs the results of a step before the next one is planned",
            remedy="Set async_scheduling: false and pipeline_parallel_size: 1.",
        )
