"""vLLM V1's scheduler, written down plainly: every step walks the whole batch.

There is no prefill phase and no decode phase. Each request has `num_computed_tokens`, and each step tries
to bring it up to the tokens that are known or on their way. A decode is a request with one token missing; a
chunked prefill is one with many. Running requests come first, in the order of their admission, then waiting
ones, until the step's token budget is spent.

This is the twin that the fast planner must equal, and the scheduler for what the fast planner does not
cover. Rules: vLLM 0.33.0 `v1/core/sched/scheduler.py` and `async_scheduler.py`; what older versions did
otherwise is in `vllm_v1_config.VERSIONS`. Admission and preemption are in `vllm_v1_base`.
"""

from __future__ import annotations

from collections.abc import Iterable

from sim.errors import InvariantError
from sim.kv.base import blocks_for
from sim.policies.vllm_v1_base import VllmV1Base
from sim.policies.vllm_v1_config import V1Config
from sim.policies.vllm_v1_state import Plan, Row, SpeculativeState, V1State, V1Step
from sim.request import NEVER, OVER, RUNNING, Request
from sim.step import NOTHING_ENDED, Finished, Step, StepShape, make_finished


class VllmV1Reference(VllmV1Base):
    """The V1 scheduler, O(batch) per step."""

    def __init__(self, config: V1Config) -> None:
        super().__init__(config)
        self._decoding: list[list[Request]] = [[] for _ in range(config.pipeline_parallel_size)]
        """Who decoded in each lane's last decoding step."""

    def _is_anything_decoding(self) -> bool:
        return not all(r.policy_state.is_mid_prefill for r in self._running)

    # ------------------------------------------------------------------ the running requests

    def _walks_on(self) -> bool:
        """Whether those behind somebody who was preempted for its own sake still have their turn."""
        return self.config.policy == "priority" and self.rules.walks_on_after_self_preemption

    def _plan_running(self, plan: Plan) -> None:
        running = list(self._running)
        position = 0
        while position < len(running) and plan.budget > 0:
            request = running[position]
            num_tokens = 0 if self._misses_turn(request, plan) else self._tokens_wanted(request, plan)
            if num_tokens <= 0:
                position += 1
                continue
            for victim in self._make_room(request, self._new_blocks(request, num_tokens), plan):
                position -= running.index(victim) < position
                running.remove(victim)
            if request.status is not RUNNING:
                if self._walks_on():
                    continue
                break
            self._schedule_running(request, num_tokens, plan)
            position += 1

    def _misses_turn(self, request: Request, plan: Plan) -> bool:
        """Whether a running request keeps its seat and its blocks but is not looked at in this step."""
        state: V1State = request.policy_state
        return (
            self._has_last_token_in_flight(request)
            or self._pipeline_turn_is_ahead(request)
            or (state.is_mid_prefill and not plan.gate_is_open)
        )

    def _has_last_token_in_flight(self, request: Request) -> bool:
        """Async: the token that reaches `max_tokens` is already scheduled."""
        state: V1State = request.policy_state
        num_placeholders = state.num_placeholders
        if not num_placeholders or not self.rules.foresees_length_end:
            return False
        return request.num_computed_tokens + 2 - num_placeholders >= request.prompt_tokens + request.max_tokens

    def _pipeline_turn_is_ahead(self, request: Request) -> bool:
        """Async pipeline: a decode comes up again one round of the pipeline after its last one."""
        stagger = self.config.decode_stagger
        return stagger > 1 and self._num_calls - request.policy_state.last_decode_call < stagger

    def _tokens_wanted(self, request: Request, plan: Plan) -> int:
        state: V1State = request.policy_state
        num_tokens = request.num_tokens + state.num_draft_tokens + state.num_placeholders - request.num_computed_tokens
        if 0 < plan.threshold < num_tokens:
            num_tokens = plan.threshold
        return min(num_tokens, plan.budget, self.config.max_model_len - 1 - request.num_computed_tokens)

    def _new_blocks(self, request: Request, num_tokens: int) -> int:
        needed = blocks_for(request.num_computed_tokens + num_tokens, self.config.block_size)
        return max(0, needed - request.num_blocks)

    def _schedule_running(self, request: Request, num_tokens: int, plan: Plan) -> None:
        state: V1State = request.policy_state
        num_blocks = self._new_blocks(request, num_tokens)
        self.kv.allocate(request, num_blocks)
        plan.num_new_blocks += num_blocks
        if self._is_caching:
            self._publish_planned(request, num_tokens)
        plan.rows[request] = row = Row(request, num_tokens, state.epoch, is_chunk=state.is_mid_prefill)
        if state.num_draft_tokens:
            num_base = request.num_tokens + state.num_placeholders - request.num_computed_tokens
            row.num_drafts = max(0, num_tokens - num_base)
            request.policy_state.num_draft_tokens = 0
        plan.budget -= num_tokens
        plan.carries_prefill |= state.is_mid_prefill

    # ------------------------------------------------------------------ the step

    def _finish_plan(self, plan: Plan) -> None:
        rows = list(plan.rows.values())
        for row in rows:
            self._advance(row)
        if rows:
            self._count_executed(plan)
        plan.chunks = chunks = [row for row in rows if row.is_chunk]
        decodes = [row.request for row in rows if not row.is_chunk]
        contexts = [row.context for row in rows if not row.is_chunk]
        plan.shape = StepShape(
            num_decode=len(decodes),
            decode_context_sum=sum(contexts),
            decode_context_sum_sq=sum(context * context for context in contexts),
            decode_context_max=max(contexts, default=0),
            prefills=tuple((chunk.num_tokens, chunk.context) for chunk in chunks),
            num_sampled=len(decodes) + sum(chunk.is_last for chunk in chunks),
            num_new_requests=len(plan.admitted),
        )
        plan.lane = self._num_executed % self.config.pipeline_parallel_size
        self._change_decoding(plan.lane, decodes, plan)
        plan.live_tokens = sum(r.num_computed_tokens for r in self._running)

    def _advance(self, row: Row) -> None:
        request = row.request
        state: V1State = request.policy_state
        row.context = context = request.num_computed_tokens
        num_tokens = row.num_tokens
        request.num_computed_tokens = num_computed = context + num_tokens
        state.num_in_flight_tokens += num_tokens
        if num_computed < request.prompt_tokens + request.num_output_tokens + state.num_placeholders:
            state.is_mid_prefill = True
            return
        state.is_mid_prefill = False
        row.is_last = True
        state.last_decode_call = self._num_calls
        if self._is_async:
            state.num_placeholders += 1 + row.num_drafts
            if self._is_speculative:
                request.policy_state.num_draft_tokens = self.config.num_speculative_tokens

    def _change_decoding(self, lane: int, decodes: list[Request], plan: Plan) -> None:
        """Note who decodes in this lane now and did not in its last decoding step, and the reverse."""
        if not decodes:
            return
        now = set(decodes)
        for request in decodes:
            if request.policy_state.decoding_lane != lane:
                request.policy_state.decoding_lane = lane
                plan.joined.append(request)
        for request in self._decoders(lane):
            if request not in now and request.policy_state.decoding_lane == lane:
                request.policy_state.decoding_lane = NEVER
                plan.left.append(request)
        self._decoding[lane] = decodes

    def _decoders(self, lane: int) -> Iterable[Request]:
        """Whoever may have decoded in the lane's last decoding step."""
        return self._decoding[lane]

    # ------------------------------------------------------------------ results

    def update(self, step: Step) -> Finished:
        if not isinstance(step, V1Step):
            raise InvariantError(f"vllm-v1 was given a {type(step).__name__} that it did not plan")
        return self._take_in_step(step)

    def _take_in_step(self, step: V1Step) -> Finished:
        finished: list[Request] = []
        departed: list[Request] = []
        rows = step.rows.values() if step.rows else ()
        for row in rows:
            if row.request.status is not OVER:
                self._take_in(row, finished, departed)
        self._take_in_members(step, finished, departed)
        for request in finished:
            self._leave(request)
        if self._is_speculative and not self._is_async:
            self._draft_anew(row.request for row in rows)
        return make_finished((finished, finished, departed)) if finished or departed else NOTHING_ENDED

    def _take_in_members(self, step: Step, finished: list[Request], departed: list[Request]) -> None:
        """Room for a planner that keeps some decodes out of the rows."""

    def _take_in(self, row: Row, finished: list[Request], departed: list[Request]) -> None:
        """The tokens of one row exist. Names the request in one of the lists when that ends something."""
        request = row.request
        state: V1State = request.policy_state
        is_stale = row.epoch != state.epoch
        if is_stale:
            state.num_stale_tokens -= row.num_tokens
        else:
            state.num_in_flight_tokens -= row.num_tokens
        if not row.is_last:
            return
        row.num_sampled = num_sampled = self._num_sampled(row) if row.num_drafts else 1
        num_before, num_target_tokens = request.num_output_tokens, request.num_target_tokens
        num_outputs = num_before + num_sampled
        if num_outputs > num_target_tokens:
            num_outputs = num_target_tokens
        request.num_output_tokens = num_outputs
        if not is_stale:
            if self._is_async:
                state.num_placeholders -= 1 + row.num_drafts
            num_wasted = 1 + row.num_drafts + num_before - num_outputs
            if num_wasted:  # drafts were rejected, or tokens beyond the end are dropped
                request.num_computed_tokens -= num_wasted
            if self._is_caching:
                self.kv.publish(request, request.num_computed_tokens - state.num_in_flight_tokens)
        if num_outputs == num_target_tokens:
            finished.append(request)
        elif num_before < request.cancel_after_tokens <= num_outputs:
            departed.append(request)

    def _num_sampled(self, row: Row) -> int:
        """Tokens that the model returns for a row with drafts that samples: one, and the drafts that it accepts."""
        pattern = self.config.spec_accept_pattern
        if row.is_padded or not pattern:
            return 1
        state: SpeculativeState = row.request.policy_state
        accepted = pattern[state.num_verifications % len(pattern)]
        state.num_verifications += 1
        return 1 + min(row.num_drafts, accepted)

    def _draft_anew(self, requests: Iterable[Request]) -> None:
        """Sync: whoever is past its prefill has a full set of drafts for the next step."""
        for request in requests:
            if request.status is not OVER:
                state: SpeculativeState = request.policy_state
                state.num_draft_tokens = 0 if state.is_mid_prefill else self.config.num_speculative_tokens

    # ------------------------------------------------------------------ for drivers, logs and tests

    def batch(self, step: Step) -> list[tuple[Request, int]]:
        assert isinstance(step, V1Step)
        return [(row.request, row.num_tokens) for row in step.rows.values()] if step.rows else []

    def check_integrity(self) -> None:
        held = sum(r.num_blocks for r in self._running)
        if not self._is_caching and held != self.kv.used_blocks:
            raise InvariantError(f"running requests hold {held} blocks, the pool misses {self.kv.used_blocks}")
        if any(r.num_blocks for r in self._waiting):
            raise InvariantError("a waiting request holds KV blocks")
        if len(self._running) > self.config.max_num_seqs:
            raise InvariantError(f"{len(self._running)} requests run, {self.config.max_num_seqs} may")
        if not self._running:
            self.kv.check_drained()
