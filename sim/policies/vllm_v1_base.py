"""What the two V1 planners have in common: the door, the waiting queue, admission and preemption.

These rules cost O(changes) as they stand, so each is written once. How the running requests are walked is
the planner's own.
"""

from __future__ import annotations

from abc import abstractmethod
from bisect import insort
from collections import deque
from itertools import islice
from typing import ClassVar, Self

from sim.errors import InvariantError
from sim.kv.counted import NO_HIT, CountedCache, Hit
from sim.kv.prefix import PrefixCache
from sim.policies.base import EngineLimits, EngineOptions, Policy
from sim.policies.vllm_v1_config import V1Config, VllmV1Options
from sim.policies.vllm_v1_state import Plan, PrefillGate, Row, SpeculativeState, V1State, V1Step
from sim.request import NEVER, OVER, PREEMPTED, RUNNING, WAITING, Request
from sim.step import BLOCKED_BY_SLOTS, NOT_BLOCKED, BlockedBy, Preemption, make_admission


class VllmV1Base(Policy):
    """A V1 scheduler without its walk over the running requests."""

    Options: ClassVar[type[EngineOptions]] = VllmV1Options

    def __init__(self, config: V1Config) -> None:
        self.config = config
        self.rules = config.rules
        self.max_in_flight = config.max_in_flight
        self.num_stages = config.pipeline_parallel_size
        self.kv = _build_kv(config)
        self._token_budget = config.token_budget
        self._max_running = config.max_running
        self._watermark_blocks = config.watermark_blocks
        self._reserves_prompt = config.scheduler_reserve_full_isl
        self._is_async = config.async_scheduling
        self._is_caching = config.enable_prefix_caching
        if config.policy == "priority":
            self.follows_arrival_order = False
        self._is_speculative = config.num_speculative_tokens > 0
        self._gate = PrefillGate(config.prefill_schedule_interval) if config.prefill_schedule_interval > 1 else None
        self._block_size = config.block_size
        self._max_model_len = config.max_model_len
        self._waiting: deque[Request] = deque()
        self._running: dict[Request, None] = {}
        """In the order of admission: new ones are added at the end."""
        self._num_admissions = 0
        self._num_calls = 0
        self._num_executed = 0

    @classmethod
    def build(cls, options: EngineOptions, limits: EngineLimits) -> Self:
        if not isinstance(options, VllmV1Options):
            raise InvariantError(f"vllm-v1 was given {type(options).__name__}")
        return cls(V1Config.resolve(options, limits))

    # ------------------------------------------------------------------ what a planner adds

    @abstractmethod
    def _is_anything_decoding(self) -> bool:
        """Whether a running request is past its prefill."""

    @abstractmethod
    def _plan_running(self, plan: Plan) -> None:
        """Give tokens and blocks to the running requests in their order, preempting where blocks are short."""

    @abstractmethod
    def _finish_plan(self, plan: Plan) -> None:
        """Advance everybody's counters to what they will be when the step has run, and describe it."""

    # ------------------------------------------------------------------ the door, the queue, the exit

    def refused_at_the_door(self, request: Request) -> str | None:
        """vLLM's front end refuses prompts that leave no room for an answer. Pure; the reason or None."""
        if 1 <= request.prompt_tokens < self._max_model_len:
            return None
        return f"its prompt of {request.prompt_tokens} tokens is not below max_model_len {self.config.max_model_len}"

    def never_fits(self, request: Request) -> str | None:
        refusal = self.refused_at_the_door(request)
        if refusal is not None:
            return refusal
        if request.prompt_tokens > self._token_budget and not self.config.enable_chunked_prefill:
            return f"its prompt of {request.prompt_tokens} tokens may not be split, and a step has {self._token_budget}"
        longest = request.prompt_tokens + request.max_tokens
        if longest > self._max_model_len:
            longest = self._max_model_len
        num_blocks = -((1 - longest) // self._block_size)  # the last token is never computed
        if num_blocks <= self.kv.usable_blocks:
            return None
        return f"it may need {num_blocks} KV blocks and the pool has {self.kv.usable_blocks}"

    def add(self, request: Request) -> None:
        request.status = WAITING
        if request.prompt_tokens + request.num_target_tokens > self._max_model_len:
            request.num_target_tokens = self._max_model_len - request.prompt_tokens
        request.policy_state = SpeculativeState() if self._is_speculative else V1State()
        self._enqueue(request)

    def cancel(self, request: Request) -> bool:
        self._leave(request)
        return True

    def _enqueue(self, request: Request) -> None:
        if self.config.policy == "priority":
            insort(self._waiting, request, key=_priority_key)
        else:
            self._waiting.append(request)

    def _requeue(self, victim: Request) -> None:
        if self.config.policy == "priority":
            self._enqueue(victim)
        else:
            self._waiting.appendleft(victim)

    def _leave(self, request: Request) -> None:
        """It is over, wherever it was."""
        if request.status is RUNNING:
            self._before_unseating(request)
            del self._running[request]
        else:
            self._waiting.remove(request)
        request.status = OVER
        self.kv.free(request)

    def _unseat(self, request: Request) -> None:
        """Take a request out of those that run; it will be back."""
        self._before_unseating(request)
        del self._running[request]
        request.policy_state.decoding_lane = NEVER

    def _before_unseating(self, request: Request) -> None:
        """Room for a planner that keeps more about those that run."""

    # ------------------------------------------------------------------ planning

    def plan(self, now_ns: int) -> V1Step:
        return self._plan_step()

    def _plan_step(self) -> V1Step:
        """One step by all rules."""
        self._num_calls += 1
        threshold = self._threshold() if self.config.long_prefill_token_threshold else 0
        plan = Plan(self._token_budget, threshold)
        gate = self._gate
        if gate is not None:
            plan.gate_is_open = gate.is_due() or not self._is_anything_decoding()
        self._plan_running(plan)
        waiting = self._waiting
        if waiting and not plan.preempted:
            self._admit_waiting(plan)
        if gate is not None:
            gate.planned(plan, waiting)
        if waiting:
            plan.blocked_by = self._blocked_by(plan)
        self._finish_plan(plan)
        plan.num_running, plan.num_waiting = len(self._running), len(waiting)
        plan.used_blocks = self.kv.usable_blocks - self.kv.free_blocks
        return plan

    def _threshold(self) -> int:
        """Most tokens of one request in this step; 0: no limit."""
        config = self.config
        threshold = config.long_prefill_token_threshold
        num_requests = len(self._running) + len(self._waiting)
        if self.rules.threshold_spares_lone and num_requests <= 1:
            return 0
        if config.long_prefill_token_threshold_adaptive and num_requests:
            threshold = max(threshold, config.max_num_batched_tokens // num_requests)
        return threshold

    # ---- preemption

    def _make_room(self, request: Request, num_blocks: int, plan: Plan) -> list[Request]:
        """Preempt until the request can have its blocks or is a victim itself. Returns the victims."""
        victims: list[Request] = []
        while num_blocks > self.kv.free_blocks and request.status is RUNNING:
            victim = self._choose_victim(request)
            self._unplan(victim, plan)
            self._unseat(victim)
            self._preempt(victim, request, plan)
            victims.append(victim)
        return victims

    def _unplans_victims(self) -> bool:
        """Whether a victim that is in the step already is taken out of it again."""
        return self.config.rules.unplans_victims

    def _choose_victim(self, requester: Request) -> Request:
        """Who of those who run makes room for one of them. Pure."""
        if self.config.policy == "priority":
            return max(self._running, key=lambda r: (r.priority, r.arrival_ns))
        return next(reversed(self._running))

    def _unplan(self, victim: Request, plan: Plan) -> None:
        """Take a victim out of the step. Old versions leave it in: its tokens stay spent, and their results are lost.

        What these compute for nothing is not priced.
        """
        if victim in plan.rows:
            num_tokens = plan.rows.pop(victim).num_tokens
            plan.budget += num_tokens if self._unplans_victims() else 0
            plan.num_new_blocks -= victim.num_blocks + (-victim.num_computed_tokens // self._block_size)

    def _preempt(self, victim: Request, beneficiary: Request, plan: Plan) -> None:
        """Recompute later: KV is lost, outputs stay, what is in flight becomes stale."""
        state: V1State = victim.policy_state
        plan.preempted.append(Preemption(victim, beneficiary, victim.num_computed_tokens))
        self.kv.free(victim)
        victim.status = PREEMPTED
        victim.num_computed_tokens = 0
        state.num_placeholders = 0
        if self._is_speculative:
            victim.policy_state.num_draft_tokens = 0
        state.num_stale_tokens += state.num_in_flight_tokens
        state.num_in_flight_tokens = 0
        state.epoch += 1
        self._requeue(victim)

    def _publish_planned(self, request: Request, num_tokens: int) -> None:
        """Blocks that this step will fill with known tokens are hits from now on, before they are computed."""
        self.kv.publish(request, min(request.num_computed_tokens + num_tokens, request.num_tokens))

    def _count_executed(self, plan: Plan) -> None:
        """A step that computes something: what the prefill interval counts."""
        self._num_executed += 1
        if self._gate is not None:
            self._gate.executed(plan)

    # ---- admission from the waiting queue

    def _admit_waiting(self, plan: Plan) -> None:
        waiting, running, max_running = self._waiting, self._running, self._max_running
        may_skip_misfits = self.rules.misfit_skips and not self.config.enable_chunked_prefill
        passed_over: list[Request] = []
        while waiting and plan.budget > 0 and len(running) < max_running:
            head = waiting[0]
            state: V1State = head.policy_state
            if state.num_stale_tokens:
                state.is_passed_over = True
                passed_over.append(waiting.popleft())
            elif may_skip_misfits and self._is_misfit(head, plan):
                passed_over.append(waiting.popleft())
            elif not self._admit(head, plan):
                break
        if passed_over:
            waiting.extendleft(reversed(passed_over))

    def _is_misfit(self, head: Request, plan: Plan) -> bool:
        """Older versions without chunked prefill then try the next request instead of stopping."""
        hit = self._lookup(head)
        return self._cut(head.num_tokens - len(hit.blocks) * self.config.block_size, plan) > plan.budget

    def _admit(self, head: Request, plan: Plan) -> bool:
        """Try to bring the head of the queue into the batch. False, and nothing changed: admission ends."""
        state: V1State = head.policy_state
        num_missing = num_known = head.prompt_tokens + head.num_output_tokens
        hit, num_cached = NO_HIT, 0
        if self._is_caching:
            hit = self._lookup(head)
            num_cached = len(hit.blocks) * self._block_size
            num_missing -= num_cached
        if num_missing >= 2 and not plan.gate_is_open:
            plan.blocked_by = BlockedBy.ADMISSION
            return False
        num_tokens = self._cut(num_missing, plan) if plan.threshold else num_missing
        num_drafts = self._admission_padding(num_missing, num_cached, plan) if self._is_speculative else 0
        if num_tokens + num_drafts > plan.budget:
            if num_drafts or not self.config.enable_chunked_prefill:
                plan.blocked_by = BlockedBy.BUDGET
                return False
            num_tokens = plan.budget
        num_tokens += num_drafts
        num_blocks = -(-num_tokens // self._block_size)  # cached tokens fill whole blocks
        if not self._fits(num_known, hit, num_blocks):
            plan.blocked_by = BlockedBy.KV
            return False
        self.kv.admit(head, hit, num_blocks)
        plan.num_new_blocks += num_blocks
        plan.admitted.append(make_admission((head, num_cached, head.status is PREEMPTED)))
        self._waiting.popleft()
        self._running[head] = None
        self._num_admissions = state.seat = self._num_admissions + 1
        state.is_passed_over = False
        head.status = RUNNING
        head.num_computed_tokens = num_cached
        if self._is_caching:
            self._publish_planned(head, num_tokens)
        plan.rows[head] = row = Row(head, num_tokens, state.epoch)
        if num_drafts:
            row.num_drafts, row.is_padded = num_drafts, True
        plan.budget -= num_tokens
        if num_missing >= 2:
            plan.carries_prefill = True
        return True

    def _lookup(self, request: Request) -> Hit:
        """Cached blocks of a waiting request; at least one of its tokens is always computed anew."""
        return self.kv.lookup(request, (request.num_tokens - 1) // self.config.block_size)

    def _cut(self, num_tokens: int, plan: Plan) -> int:
        return plan.threshold if 0 < plan.threshold < num_tokens else num_tokens

    def _admission_padding(self, num_missing: int, num_cached: int, plan: Plan) -> int:
        """Dummy drafts that bring an admission of one token to the width of the batch's decodes."""
        num_drafts = self.config.num_speculative_tokens
        if not self.rules.pads_admissions or num_missing != 1:
            return 0
        running_rows = list(islice(plan.rows.values(), len(plan.rows) - len(plan.admitted)))
        if any(row.is_chunk for row in running_rows) or not (running_rows or num_cached):
            return 0
        return num_drafts if num_cached + 2 + num_drafts <= self.config.max_model_len else 0

    def _fits(self, num_known: int, hit: Hit, num_blocks: int) -> bool:
        """Whether a waiting request's blocks of this step, and those of all its known tokens, fit. Reserves nothing."""
        needed = num_blocks
        if self._reserves_prompt:
            if num_known > self._max_model_len:
                num_known = self._max_model_len
            whole = -(-num_known // self._block_size) - len(hit.blocks)
            if whole > needed:
                needed = whole
        if self._running:
            needed += self._watermark_blocks
        return needed + hit.num_ownerless <= self.kv.free_blocks

    def _blocked_by(self, plan: Plan) -> BlockedBy:
        """What kept the head of the queue out of this step."""
        if plan.blocked_by is not NOT_BLOCKED:
            return plan.blocked_by
        if plan.preempted:
            return BlockedBy.KV
        return BLOCKED_BY_SLOTS if len(self._running) >= self._max_running else BlockedBy.BUDGET

    # ------------------------------------------------------------------ for drivers, logs and tests

    def running(self) -> list[Request]:
        return list(self._running)

    def waiting(self) -> list[Request]:
        return list(self._waiting)

    @property
    def num_unfinished(self) -> int:
        return len(self._running) + len(self._waiting)

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def free_blocks(self) -> int:
        return self.kv.free_blocks

    @property
    def usable_blocks(self) -> int:
        return self.kv.usable_blocks


def _priority_key(request: Request) -> tuple[int, int, int | str]:
    return request.priority, request.arrival_ns, request.id


def _build_kv(config: V1Config) -> CountedCache:
    usable_blocks = config.num_gpu_blocks - 1  # block 0 is the null block: taken once, never given back
    if not config.enable_prefix_caching:
        return CountedCache(usable_blocks, config.block_size)
    return PrefixCache(usable_blocks, config.block_size, keyless_to_front=config.rules.keyless_to_front)
