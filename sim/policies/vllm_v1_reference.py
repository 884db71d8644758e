"""vLLM V1's scheduler, written down plainly: every step walks the whole batch.

There is no prefill phase and no decode phase. Each request has `num_computed_tokens`, and each step tries
to bring it up to the tokens that are known or on their way. A decode is a request with one token missing; a
chunked prefill is one with many. Running requests come first, in the order of their admission, then waiting
ones, until the step's token budget is spent.

This is the twin that the fast planner must equal, and the scheduler for what the fast planner does not
cover. Rules: vLLM 0.33.0 `v1/core/sched/scheduler.py` and `async_scheduler.py`; what older versions did
otherwise is in `vllm_v1_config.VERSIONS`.
"""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

from sim.errors import InvariantError
from sim.kv.base import blocks_for
from sim.kv.counted import CountedCache, Hit
from sim.kv.prefix import PrefixCache
from sim.policies.base import EngineLimits, EngineOptions, Policy
from sim.policies.vllm_v1_config import V1Config, VllmV1Options
from sim.request import Request, Status
from sim.step import Admission, BlockedBy, Chunk, Finished, Preemption, Step, StepShape


class V1State:
    """What the scheduler keeps about a request besides its counters."""

    __slots__ = (
        "epoch",
        "is_mid_prefill",
        "is_passed_over",
        "last_decode_call",
        "num_draft_tokens",
        "num_in_flight_tokens",
        "num_placeholders",
        "num_stale_tokens",
        "num_verifications",
    )

    def __init__(self) -> None:
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


@dataclass(slots=True, kw_only=True)
class V1Step(Step):
    """A step with the rows of its batch, in order."""

    rows: list[Row]


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
    num_new_blocks: int = 0
    carries_prefill: bool = False
    blocked_by: BlockedBy = BlockedBy.NOTHING


class VllmV1Reference(Policy):
    """The V1 scheduler, O(batch) per step."""

    Options: ClassVar[type[EngineOptions]] = VllmV1Options

    def __init__(self, config: V1Config) -> None:
        self.config = config
        self.rules = config.rules
        self.max_in_flight = config.max_in_flight
        self.kv = _build_kv(config)
        self._running: list[Request] = []
        self._waiting: deque[Request] = deque()
        self._num_calls = 0
        self._num_executed = 0
        self._last_prefill_executed = -config.prefill_schedule_interval
        self._has_backlog = False
        self._decoding: list[list[Request]] = [[] for _ in range(config.pipeline_parallel_size)]

    @classmethod
    def build(cls, options: EngineOptions, limits: EngineLimits) -> VllmV1Reference:
        if not isinstance(options, VllmV1Options):
            raise InvariantError(f"vllm-v1 was given {type(options).__name__}")
        return cls(V1Config.resolve(options, limits))

    # ------------------------------------------------------------------ the door, the queue, the exit

    def refused_at_the_door(self, request: Request) -> str | None:
        """vLLM's front end refuses prompts that leave no room for an answer. Pure; the reason or None."""
        if 1 <= request.prompt_tokens < self.config.max_model_len:
            return None
        return f"its prompt of {request.prompt_tokens} tokens is not below max_model_len {self.config.max_model_len}"

    def never_fits(self, request: Request) -> str | None:
        refusal = self.refused_at_the_door(request)
        if refusal is not None:
            return refusal
        longest = min(request.prompt_tokens + request.max_tokens, self.config.max_model_len) - 1
        num_blocks = blocks_for(longest, self.config.block_size)
        if num_blocks <= self.kv.usable_blocks:
            return None
        return f"it may need {num_blocks} KV blocks and the pool has {self.kv.usable_blocks}"

    def add(self, request: Request) -> None:
        request.status = Status.WAITING
        request.num_target_tokens = min(
            request.output_tokens, request.max_tokens, self.config.max_model_len - request.prompt_tokens
        )
        request.policy_state = V1State()
        self._enqueue(request)

    def cancel(self, request: Request) -> bool:
        self._remove(request)
        self._end(request)
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

    def _remove(self, request: Request) -> None:
        if request.status is Status.RUNNING:
            self._running.remove(request)
        else:
            self._waiting.remove(request)

    def _end(self, request: Request) -> None:
        request.status = Status.OVER
        self.kv.free(request)

    # ------------------------------------------------------------------ planning

    def plan(self, now_ns: int) -> V1Step:
        self._num_calls += 1
        plan = Plan(
            budget=self.config.token_budget,
            threshold=self._threshold(),
            gate_is_open=self._gate_is_open(),
        )
        self._plan_running(plan)
        if not plan.preempted:
            self._admit_waiting(plan)
        self._update_backlog(plan)
        plan.blocked_by = self._blocked_by(plan)
        return self._finish_plan(plan)

    def _threshold(self) -> int:
        config, num_requests = self.config, len(self._running) + len(self._waiting)
        threshold = config.long_prefill_token_threshold
        if self.rules.threshold_spares_lone and num_requests <= 1:
            return 0
        if config.long_prefill_token_threshold_adaptive and num_requests:
            threshold = max(threshold, config.max_num_batched_tokens // num_requests)
        return threshold

    def _gate_is_open(self) -> bool:
        """Whether prefill may be planned under `prefill_schedule_interval`; a backlog opens the gate."""
        interval = self.config.prefill_schedule_interval
        if interval <= 1 or self._has_backlog:
            return True
        if self._num_executed + 1 - self._last_prefill_executed >= interval:
            return True
        return all(_state(r).is_mid_prefill for r in self._running)

    def _update_backlog(self, plan: Plan) -> None:
        if plan.gate_is_open and not plan.preempted:
            self._has_backlog = any(not _state(r).is_passed_over for r in self._waiting)

    # ---- part A: the running requests

    def _plan_running(self, plan: Plan) -> None:
        position = 0
        while position < len(self._running) and plan.budget > 0:
            request = self._running[position]
            num_tokens = 0 if self._misses_turn(request, plan) else self._tokens_wanted(request, plan)
            if num_tokens <= 0:
                position += 1
                continue
            position -= self._make_room(request, num_tokens, plan, position)
            if request.status is not Status.RUNNING:
                if self.config.policy == "fcfs" or not self.rules.walks_on_after_self_preemption:
                    break
                continue
            self._schedule_running(request, num_tokens, plan)
            position += 1

    def _misses_turn(self, request: Request, plan: Plan) -> bool:
        """Whether a running request keeps its seat and its blocks but is not looked at in this step."""
        return (
            self._has_last_token_in_flight(request)
            or self._pipeline_turn_is_ahead(request)
            or (_state(request).is_mid_prefill and not plan.gate_is_open)
        )

    def _has_last_token_in_flight(self, request: Request) -> bool:
        """Async: the token that reaches `max_tokens` is already scheduled."""
        num_placeholders = _state(request).num_placeholders
        if not num_placeholders or not self.rules.foresees_length_end:
            return False
        return request.num_computed_tokens + 2 - num_placeholders >= request.prompt_tokens + request.max_tokens

    def _pipeline_turn_is_ahead(self, request: Request) -> bool:
        """Async pipeline: a decode comes up again one round of the pipeline after its last one."""
        config = self.config
        if not config.async_scheduling or config.pipeline_parallel_size == 1:
            return False
        return self._num_calls - _state(request).last_decode_call < config.pipeline_parallel_size

    def _tokens_wanted(self, request: Request, plan: Plan) -> int:
        state = _state(request)
        num_tokens = request.num_tokens + state.num_draft_tokens + state.num_placeholders - request.num_computed_tokens
        if 0 < plan.threshold < num_tokens:
            num_tokens = plan.threshold
        return min(num_tokens, plan.budget, self.config.max_model_len - 1 - request.num_computed_tokens)

    def _make_room(self, request: Request, num_tokens: int, plan: Plan, position: int) -> int:
        """Preempt until the request's tokens have blocks, or it is a victim itself.

        Returns by how much the walk must step back, because victims stood before `position`.
        """
        num_blocks = self._new_blocks(request, num_tokens)
        num_before = 0
        while num_blocks > self.kv.free_blocks and request.status is Status.RUNNING:
            victim = self._choose_victim()
            if self.config.policy == "priority":
                num_before += self._running.index(victim) < position - num_before
                self._unplan(victim, plan)
            self._running.remove(victim)
            self._preempt(victim, request, plan)
        return num_before

    def _new_blocks(self, request: Request, num_tokens: int) -> int:
        needed = blocks_for(request.num_computed_tokens + num_tokens, self.config.block_size)
        return max(0, needed - request.num_blocks)

    def _choose_victim(self) -> Request:
        if self.config.policy == "fcfs":
            return self._running[-1]
        return max(self._running, key=lambda r: (r.priority, r.arrival_ns))

    def _unplan(self, victim: Request, plan: Plan) -> None:
        if self.rules.unplans_victims and victim in plan.rows:
            plan.budget += plan.rows.pop(victim).num_tokens

    def _preempt(self, victim: Request, beneficiary: Request, plan: Plan) -> None:
        """Recompute later: KV is lost, outputs stay, what is in flight becomes stale."""
        state = _state(victim)
        plan.preempted.append(Preemption(victim, beneficiary, victim.num_computed_tokens))
        self.kv.free(victim)
        victim.status = Status.PREEMPTED
        victim.num_computed_tokens = 0
        state.num_draft_tokens = state.num_placeholders = 0
        state.num_stale_tokens += state.num_in_flight_tokens
        state.num_in_flight_tokens = 0
        state.is_mid_prefill = False
        state.epoch += 1
        self._requeue(victim)

    def _schedule_running(self, request: Request, num_tokens: int, plan: Plan) -> None:
        state = _state(request)
        num_blocks = self._new_blocks(request, num_tokens)
        self.kv.allocate(request, num_blocks)
        plan.num_new_blocks += num_blocks
        self._publish_planned(request, num_tokens)
        num_base = request.num_tokens + state.num_placeholders - request.num_computed_tokens
        num_drafts = max(0, num_tokens - num_base) if state.num_draft_tokens else 0
        state.num_draft_tokens = 0
        self._add_row(Row(request, num_tokens, num_drafts, state.epoch, state.is_mid_prefill), plan)
        plan.carries_prefill |= state.is_mid_prefill

    def _publish_planned(self, request: Request, num_tokens: int) -> None:
        """Blocks that this step will fill with known tokens are hits from now on, before they are computed."""
        self.kv.publish(request, min(request.num_computed_tokens + num_tokens, request.num_tokens))

    def _add_row(self, row: Row, plan: Plan) -> None:
        plan.rows[row.request] = row
        plan.budget -= row.num_tokens

    # ---- part B: admission from the waiting queue

    def _admit_waiting(self, plan: Plan) -> None:
        passed_over: list[Request] = []
        while self._waiting and plan.budget > 0 and len(self._running) < self.config.max_running:
            head = self._waiting[0]
            if _state(head).num_stale_tokens:
                _state(head).is_passed_over = True
                passed_over.append(self._waiting.popleft())
                continue
            if self._is_skipped_misfit(head, plan):
                passed_over.append(self._waiting.popleft())
                continue
            if not self._admit(head, plan):
                break
        self._waiting.extendleft(reversed(passed_over))

    def _is_skipped_misfit(self, head: Request, plan: Plan) -> bool:
        """Older versions without chunked prefill try the next request instead of stopping."""
        if self.config.enable_chunked_prefill or not self.rules.misfit_skips:
            return False
        hit = self._lookup(head)
        return self._cut(head.num_tokens - len(hit.blocks) * self.config.block_size, plan) > plan.budget

    def _admit(self, head: Request, plan: Plan) -> bool:
        """Try to bring the head of the queue into the batch. False, and nothing changed: admission ends."""
        block_size = self.config.block_size
        hit = self._lookup(head)
        num_cached = len(hit.blocks) * block_size
        num_missing = head.num_tokens - num_cached
        if num_missing >= 2 and not plan.gate_is_open:
            plan.blocked_by = BlockedBy.ADMISSION
            return False
        num_tokens = self._cut(num_missing, plan)
        num_drafts = self._admission_padding(num_missing, num_cached, plan)
        if num_tokens + num_drafts > plan.budget and (num_drafts or not self.config.enable_chunked_prefill):
            plan.blocked_by = BlockedBy.BUDGET
            return False
        num_tokens = min(num_tokens, plan.budget) + num_drafts
        num_blocks = blocks_for(num_cached + num_tokens, block_size) - len(hit.blocks)
        if not self._fits(head, hit, num_blocks):
            plan.blocked_by = BlockedBy.KV
            return False
        self._move_to_running(head, hit, num_blocks, plan)
        state = _state(head)
        self._publish_planned(head, num_tokens)
        self._add_row(Row(head, num_tokens, num_drafts, state.epoch, is_chunk=True, is_padded=num_drafts > 0), plan)
        plan.carries_prefill |= num_missing >= 2
        return True

    def _lookup(self, request: Request) -> Hit:
        """Cached blocks of a waiting request; at least one of its tokens is always computed anew."""
        return self.kv.lookup(request, (request.num_tokens - 1) // self.config.block_size)

    def _cut(self, num_tokens: int, plan: Plan) -> int:
        return plan.threshold if 0 < plan.threshold < num_tokens else num_tokens

    def _admission_padding(self, num_missing: int, num_cached: int, plan: Plan) -> int:
        """Dummy drafts that bring an admission of one token to the width of the batch's decodes."""
        num_drafts = self.config.num_speculative_tokens
        if not num_drafts or not self.rules.pads_admissions or num_missing != 1:
            return 0
        part_a = [row for row in plan.rows.values() if row.request.status is Status.RUNNING and not row.is_padded]
        if any(row.is_chunk and not self._is_admitted(row.request, plan) for row in part_a):
            return 0
        if not (plan.rows or num_cached):
            return 0
        return num_drafts if num_cached + 2 + num_drafts <= self.config.max_model_len else 0

    @staticmethod
    def _is_admitted(request: Request, plan: Plan) -> bool:
        return any(admission.request is request for admission in plan.admitted)

    def _fits(self, head: Request, hit: Hit, num_blocks: int) -> bool:
        """Whether the head's blocks of this step, and those of its whole prompt, fit. Reserves nothing."""
        config = self.config
        needed = num_blocks
        if config.scheduler_reserve_full_isl:
            whole = blocks_for(min(head.num_tokens, config.max_model_len), config.block_size)
            needed = max(needed, whole - len(hit.blocks))
        kept_free = config.watermark_blocks if self._running else 0
        return needed + hit.num_ownerless + kept_free <= self.kv.free_blocks

    def _move_to_running(self, head: Request, hit: Hit, num_blocks: int, plan: Plan) -> None:
        self._waiting.popleft()
        self._running.append(head)
        is_resumed = head.status is Status.PREEMPTED
        head.status = Status.RUNNING
        head.num_computed_tokens = len(hit.blocks) * self.config.block_size
        _state(head).is_passed_over = False
        self.kv.admit(head, hit, num_blocks)
        plan.num_new_blocks += num_blocks
        plan.admitted.append(Admission(head, head.num_computed_tokens, is_resumed))

    def _blocked_by(self, plan: Plan) -> BlockedBy:
        """What kept the head of the queue out of this step."""
        if not self._waiting or plan.blocked_by is not BlockedBy.NOTHING:
            return plan.blocked_by if self._waiting else BlockedBy.NOTHING
        if plan.preempted:
            return BlockedBy.KV
        return BlockedBy.SLOTS if len(self._running) >= self.config.max_running else BlockedBy.BUDGET

    # ---- the step

    def _finish_plan(self, plan: Plan) -> V1Step:
        """Advance everybody's counters to what they will be when the step has run, and describe it."""
        rows = list(plan.rows.values())
        chunks: list[Chunk] = []
        decodes: list[Request] = []
        contexts: list[int] = []
        for row in rows:
            context = row.request.num_computed_tokens
            self._advance(row)
            if row.is_chunk:
                chunks.append(Chunk(row.request, row.num_tokens, context, row.samples))
            else:
                decodes.append(row.request)
                contexts.append(context)
        if rows:
            self._num_executed += 1
            if plan.carries_prefill:
                self._last_prefill_executed = self._num_executed
        shape = StepShape(
            num_decode=len(decodes),
            decode_context_sum=sum(contexts),
            decode_context_sum_sq=sum(context * context for context in contexts),
            decode_context_max=max(contexts, default=0),
            prefills=tuple((chunk.num_tokens, chunk.context) for chunk in chunks),
            num_sampled=len(decodes) + sum(chunk.is_last for chunk in chunks),
            num_new_requests=len(plan.admitted),
        )
        lane = self._num_executed % self.config.pipeline_parallel_size
        joined, left = self._change_decoding(lane, decodes)
        return V1Step(
            shape=shape,
            chunks=chunks,
            joined=joined,
            left=left,
            admitted=plan.admitted,
            preempted=plan.preempted,
            blocked_by=plan.blocked_by,
            num_running=len(self._running),
            num_waiting=len(self._waiting),
            used_blocks=self.kv.used_blocks,
            num_new_blocks=plan.num_new_blocks,
            live_tokens=sum(r.num_computed_tokens for r in self._running),
            lane=lane,
            rows=rows,
        )

    def _advance(self, row: Row) -> None:
        request, state = row.request, _state(row.request)
        request.num_computed_tokens += row.num_tokens
        state.num_in_flight_tokens += row.num_tokens
        state.is_mid_prefill = request.num_computed_tokens < request.num_tokens + state.num_placeholders
        row.samples = not state.is_mid_prefill
        if not row.samples:
            return
        state.last_decode_call = self._num_calls
        if self.config.async_scheduling:
            state.num_placeholders += 1 + row.num_drafts
            state.num_draft_tokens = self.config.num_speculative_tokens

    def _change_decoding(self, lane: int, decodes: list[Request]) -> tuple[list[Request], list[Request]]:
        """Who decodes in this lane now and did not in its last decoding step, and the reverse."""
        if not decodes:
            return [], []
        before, now = set(self._decoding[lane]), set(decodes)
        left = [r for r in self._decoding[lane] if r not in now]
        joined = [r for r in decodes if r not in before]
        self._decoding[lane] = decodes
        return joined, left

    # ------------------------------------------------------------------ results

    def update(self, step: Step) -> Finished:
        if not isinstance(step, V1Step):
            raise InvariantError(f"vllm-v1 was given a {type(step).__name__} that it did not plan")
        finished: list[Request] = []
        departed: list[Request] = []
        for row in step.rows:
            if row.request.status is not Status.OVER:
                self._take_in(row, finished, departed)
        if not self.config.async_scheduling:
            self._draft_anew(row.request for row in step.rows)
        return Finished(finished, finished, departed)

    def _take_in(self, row: Row, finished: list[Request], departed: list[Request]) -> None:
        request, state = row.request, _state(row.request)
        is_stale = row.epoch != state.epoch
        row.num_sampled = num_sampled = self._num_sampled(row)
        num_rejected = row.num_drafts + 1 - num_sampled if row.samples else 0
        if is_stale:
            state.num_stale_tokens -= row.num_tokens
        else:
            state.num_in_flight_tokens -= row.num_tokens
            request.num_computed_tokens -= num_rejected
            if self.config.async_scheduling:
                state.num_placeholders -= num_rejected
        if not num_sampled:
            return
        num_before = request.num_output_tokens
        request.num_output_tokens = min(num_before + num_sampled, request.num_target_tokens)
        if not is_stale:
            if self.config.async_scheduling:
                state.num_placeholders -= request.num_output_tokens - num_before
            num_processed = request.num_computed_tokens - state.num_in_flight_tokens
            # The newest token counts as not computed, even where a verification went beyond a stop token.
            self.kv.publish(request, min(num_processed, request.num_tokens - 1))
        if request.num_output_tokens == request.num_target_tokens:
            self._remove(request)
            self._end(request)
            finished.append(request)
        elif num_before < request.cancel_after_tokens <= request.num_output_tokens:
            departed.append(request)

    def _num_sampled(self, row: Row) -> int:
        """Tokens that the model returns for a row: one, and the drafts that it accepts."""
        if not row.samples:
            return 0
        pattern = self.config.spec_accept_pattern
        if not row.num_drafts or row.is_padded or not pattern:
            return 1
        state = _state(row.request)
        accepted = pattern[state.num_verifications % len(pattern)]
        state.num_verifications += 1
        return 1 + min(row.num_drafts, accepted)

    def _draft_anew(self, requests: Iterable[Request]) -> None:
        """Sync: whoever is past its prefill has a full set of drafts for the next step."""
        for request in requests:
            if request.status is not Status.OVER and self.config.num_speculative_tokens:
                state = _state(request)
                state.num_draft_tokens = 0 if state.is_mid_prefill else self.config.num_speculative_tokens

    # ------------------------------------------------------------------ for drivers, logs and tests

    def batch(self, step: Step) -> list[tuple[Request, int]]:
        assert isinstance(step, V1Step)
        return [(row.request, row.num_tokens) for row in step.rows]

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

    def check_integrity(self) -> None:
        held = sum(r.num_blocks for r in self._running)
        if not self.config.enable_prefix_caching and held != self.kv.used_blocks:
            raise InvariantError(f"running requests hold {held} blocks, the pool misses {self.kv.used_blocks}")
        if any(r.num_blocks for r in self._waiting):
            raise InvariantError("a waiting request holds KV blocks")
        if len(self._running) > self.config.max_num_seqs:
            raise InvariantError(f"{len(self._running)} requests run, {self.config.max_num_seqs} may")
        if not self._running:
            self.kv.check_drained()


def _state(request: Request) -> V1State:
    state = request.policy_state
    assert isinstance(state, V1State)
    return state


def _priority_key(request: Request) -> tuple[int, int, int | str]:
    return request.priority, request.arrival_ns, request.id


def _build_kv(config: V1Config) -> CountedCache:
    usable_blocks = config.num_gpu_blocks - 1  # block 0 is the null block: taken once, never given back
    if not config.enable_prefix_caching:
        return CountedCache(usable_blocks, config.block_size)
    return PrefixCache(usable_blocks, config.block_size, keyless_to_front=config.rules.keyless_to_front)
