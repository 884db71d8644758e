"""vLLM V0: prefills before decodes, or chunked prefill; victims are recomputed or swapped.

By default a step prefills or decodes, and nothing is prefilled while anybody is swapped out. With chunked
prefill, those who run are served in queue order within the token budget, and new prompts get what is left.
Under `scheduling_policy: priority` a waiting request with a smaller (priority, arrival) drives out those who
run with a larger one, and is admitted in the next step at the earliest.

Source: vLLM 0.6.3.post1, `core/scheduler.py`, `core/block_manager.py`, `config.py`, `engine/arg_utils.py`.
Not modelled: several sequences per request, multi-step scheduling, lookahead slots, asynchronous output
processing, pipeline stages, LoRA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import Literal, Self

from pydantic import Field

from sim.errors import ScenarioError
from sim.kv.counted import CountedCache
from sim.kv.hashed import HashedCache
from sim.options import Count, NonNegative
from sim.policies.base import About, EngineLimits
from sim.policies.grid.composition import Composition, PrefillFirst, chosen
from sim.policies.grid.config import GridConfig, GridOptions
from sim.policies.grid.draft import Draft, GridState, GridStep
from sim.policies.grid.engine import GridPolicy
from sim.policies.grid.pacing import DelayFactorOptions
from sim.policies.grid.phases import Phases
from sim.policies.grid.pressure import recompute
from sim.request import NEVER, Request
from sim.step import BlockedBy

LONG_CONTEXT = 32768
"""`max_model_len` above which chunked prefill is on by default."""


class VllmV0Options(GridOptions):
    """Options of `vllm serve` 0.6.3, under their own names, beside the grid's axes."""

    policy: Literal["vllm-v0"] = Field(description="vLLM's V0 scheduler")
    max_num_seqs: Count = Field(default=256, description="requests that may run at once")
    max_num_batched_tokens: Count | None = Field(default=None, description="token budget of a step")
    """Default: 512 with chunked prefill, else `max_model_len`, at least 2048."""
    enable_chunked_prefill: bool | None = Field(
        default=None, description="whether a prompt may be split over steps; default: for max_model_len above 32768"
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs", description="priority: the smallest (priority, arrival) first, by force (--scheduling-policy)"
    )
    enable_prefix_caching: bool = Field(default=False, description="whether equal prompt beginnings share KV blocks")
    preemption_mode: Literal["recompute", "swap"] | None = Field(
        default=None, description="vLLM's name for preemption; default: recompute"
    )
    scheduler_delay_factor: NonNegative = Field(
        default=0.0, description="vLLM's name for prefill_pacing {kind: delay_factor}; 0: no delay"
    )

    def largest_pass(self, longest: int) -> tuple[int, int]:
        return self.budget(longest), self.max_num_seqs

    def chunks(self, max_model_len: int) -> bool:
        """Whether prompts are split."""
        if self.enable_chunked_prefill is None:
            return max_model_len > LONG_CONTEXT
        return self.enable_chunked_prefill

    def budget(self, max_model_len: int) -> int:
        """Tokens of a step."""
        default = 512 if self.chunks(max_model_len) else max(max_model_len, 2048)
        return self.max_num_batched_tokens or default


class VllmV0(GridPolicy):
    """The V0 scheduler, for requests of one sequence."""

    Options = VllmV0Options
    about = About(
        batching="a step prefills or decodes, prefills first; or chunks of prompts beside decodes",
        copies="vLLM 0.6.3.post1, V0 scheduler",
        proof="step logs of the real scheduler: 17 of 17",
        note="requests of one sequence; no multi-step scheduling, no lookahead slots, no pipeline stages",
    )
    longest_overrun = 1

    def __init__(self, config: GridConfig, composition: Composition) -> None:
        super().__init__(config, composition)
        self._cache = self.kv if isinstance(self.kv, HashedCache) else None
        self._last_decode_ns = NEVER

    def _build_kv(self) -> CountedCache:
        limits = self.config.limits
        pool = HashedCache if self.config.enable_prefix_caching else CountedCache
        return pool(limits.num_gpu_blocks, limits.block_size)

    @classmethod
    def preset(cls, options: GridOptions, limits: EngineLimits) -> Self:
        assert isinstance(options, VllmV0Options)
        _refuse_contradictions(options)
        is_chunked, budget = options.chunks(limits.max_model_len), options.budget(limits.max_model_len)
        if is_chunked and options.enable_prefix_caching and budget % limits.block_size:
            raise ScenarioError(
                "engine.max_num_batched_tokens",
                f"{budget} is no multiple of block_size {limits.block_size}",
                valid="chunked prefill with prefix caching needs one",
            )
        own: dict[str, object] = {}
        if options.preemption_mode:
            own["pressure"] = options.preemption_mode
        if options.scheduler_delay_factor:
            own["pacing"] = DelayFactorOptions(kind="delay_factor", factor=options.scheduler_delay_factor)
        config = GridConfig.resolve(
            options,
            limits,
            token_budget=budget,
            chunked=is_chunked,
            prompt_limit=limits.max_model_len if is_chunked else min(limits.max_model_len, budget),
            drops_what_never_fits=True,
            sorts_running=False,
            requeues_at_once=False,
            returns_cut_prefills=False,
            longest_overrun=cls.longest_overrun,
            enable_prefix_caching=options.enable_prefix_caching,
            **own,
        )
        own_steps = _composition(is_chunked, options.scheduling_policy)
        policy = cls(config, chosen(options.step_composition, own_steps))
        policy.follows_arrival_order &= options.scheduling_policy == "fcfs"
        return policy

    def is_hopeless(self, head: Request, num_tokens: int) -> bool:
        """The limit applies to the tokens of the step: with chunked prefill a long prompt is never too long."""
        if num_tokens > self.config.prompt_limit:
            return True
        return self.never_admitted(head)

    # ------------------------------------------------------------------ prefix caching

    def cut(self, left: int, budget: int) -> int:
        if self._cache is None or left <= budget:
            return min(left, budget)
        return budget - budget % self._block_size

    def plan(self, now_ns: int) -> GridStep:
        step = super().plan(now_ns)
        if self._cache is not None:
            self._cache.end_step()
            if step.shape.num_decode:
                self._last_decode_ns = now_ns
        return step

    def unseat(self, request: Request) -> None:
        state: GridState = request.policy_state
        if state.lane != NEVER and request not in self.members.joined[state.lane]:
            state.last_pass_ns = self._last_decode_ns
        super().unseat(request)

    def release(self, request: Request) -> None:
        if self._cache is None:
            self.kv.free(request)
        elif request.num_blocks:
            self._cache.release(request, request.policy_state.last_pass_ns)

    def _hold(self, head: Request) -> int:
        return super()._hold(head) if self._cache is None else self._cache.hold(head, head.num_tokens)

    def _publish(self, requests: Iterable[Request]) -> None:
        if self._cache is not None:
            for request in requests:
                self._cache.publish(request, self.members.context(request) + 1)


def _refuse_contradictions(options: VllmV0Options) -> None:
    """Raise ScenarioError where vLLM's own option and the axis of the grid both choose."""
    own = {
        "preemption": ("preemption_mode", options.preemption_mode is not None),
        "prefill_pacing": ("scheduler_delay_factor", options.scheduler_delay_factor > 0),
        "queue_order": ("scheduling_policy", options.scheduling_policy == "priority"),
        "step_composition": ("scheduling_policy", options.scheduling_policy == "priority"),
        "victim": ("scheduling_policy", options.scheduling_policy == "priority"),
        "head_of_line": ("scheduling_policy", options.scheduling_policy == "priority"),
        "victim_goes_to": ("scheduling_policy", options.scheduling_policy == "priority"),
    }
    for axis, (name, is_chosen) in own.items():
        if is_chosen and axis in options.model_fields_set:
            raise ScenarioError(f"engine.{axis}", f"contradicts {name}", remedy=f"Leave one of {axis} and {name} out.")
    if options.enable_prefix_caching and "swap" in (options.preemption, options.preemption_mode):
        raise ScenarioError("engine.preemption", "swapping shared blocks is not modelled", remedy="Choose recompute.")
    if options.enable_prefix_caching and options.victim != "own":
        raise ScenarioError(
            "engine.victim",
            "a victim may have filled a block in the step that preempts it, and others may share it by then",
            valid="with prefix caching vLLM V0's own rule chooses among those not yet visited",
            remedy="Set enable_prefix_caching: false, or leave victim out.",
        )
    if options.enable_prefix_caching and options.kv_admission != "prompt":
        raise ScenarioError(
            "engine.kv_admission", "shared blocks are held for known tokens alone", valid="prefix caching needs prompt"
        )
    if options.scheduling_policy == "priority" and options.enable_chunked_prefill:
        raise ScenarioError(
            "engine.scheduling_policy", "priority has no effect with chunked prefill", valid="vLLM V0 ignores it there"
        )


def _composition(is_chunked: bool, scheduling_policy: str) -> Composition:
    if is_chunked:
        return QueueOrderWithinBudget()
    return PriorityByForce() if scheduling_policy == "priority" else PrefillFirst()


class PriorityByForce(PrefillFirst):
    """When nothing was admitted, the head of the queue drives out those who run with a larger (priority, arrival)."""

    def is_one_decode(self, engine: Phases) -> bool:
        return False  # every step puts those who run in order

    def before_decodes(self, engine: Phases, draft: Draft) -> None:
        engine.members.put_in_order(sorted(engine.members, key=_rank))
        head = engine.queue.head(draft.now_ns)
        if head is None:
            return
        rest = list(engine.members)
        while rest and _rank(rest[-1]) > _rank(head) and engine.obstacle(head, head.num_tokens, draft):
            victim = rest.pop()
            recompute(engine, victim, head, draft)
            draft.to_requeue.remove(victim)
            engine.queue.put_back(victim, draft.now_ns)
        for request in sorted(engine.queue, key=_rank):
            engine.queue.remove(request)
            engine.queue.add(request, draft.now_ns)

    def steady_obstacle(self, engine: Phases, draft: Draft) -> BlockedBy | None:
        return None if len(engine.queue) else super().steady_obstacle(engine, draft)


class QueueOrderWithinBudget(Composition):
    """Those who run take tokens in queue order while the budget lasts; who was left out stands first next time."""

    batch = "every step"
    step = "prefills and decodes"
    order = "queue order within the budget, then returns, then new prefills"

    def is_one_decode(self, engine: Phases) -> bool:
        return engine.members.num_decoding <= engine.config.token_budget

    def fill(self, engine: Phases, draft: Draft) -> None:
        if not self._fill_undisturbed(engine, draft):
            self._fill_one_by_one(engine, draft)

    def _fill_undisturbed(self, engine: Phases, draft: Draft) -> bool:
        """A step that has tokens and blocks for all who run. False, and nothing changed, where it might not."""
        members, budget = engine.members, engine.config.token_budget
        lefts = [engine.tokens_left(r) for r in members.prefilling]
        num_before_last = members.num_decoding + sum(lefts[:-1])
        is_cut = members.num_decoding + sum(lefts) > budget
        has_last_no_tokens = bool(lefts) and engine.cut(lefts[-1], budget - num_before_last) <= 0
        if num_before_last > budget or has_last_no_tokens or (is_cut and not members.prefill_stands_last):
            return False
        if engine.num_swapped or not engine.decode_all(draft):
            return False
        prefilling = list(members.prefilling)
        for request, left in zip(prefilling, lefts, strict=True):
            engine.prefill(request, engine.cut(left, engine.budget_left(draft, 0)), draft)
        members.move_to_end(prefilling)
        running_chunks, draft.chunks = draft.chunks, []
        engine.admit(draft, num_running=0)
        draft.chunks += running_chunks
        return True

    def _fill_one_by_one(self, engine: Phases, draft: Draft) -> None:
        rest = deque(engine.members)
        decodes, prefills = self._walk(engine, rest, draft)
        for request in rest:
            if request.policy_state.is_decoding:
                engine.members.leave_out(request, draft)
        running_chunks, draft.chunks = draft.chunks, []
        if not draft.preempted:
            engine.swap_in(draft)
        swapped_chunks, draft.chunks = draft.chunks, []
        engine.admit(draft, num_running=len(rest))
        back = sorted(draft.swapped_in, key=lambda r: not r.policy_state.is_decoding)
        new = [request for request, _ in draft.chunks]
        draft.chunks += running_chunks + swapped_chunks
        stay = [request for request in decodes + prefills if request in engine.members]
        engine.members.put_in_order([*rest, *draft.paused, *back, *stay, *new])

    def _walk(self, engine: Phases, rest: deque[Request], draft: Draft) -> tuple[list[Request], list[Request]]:
        """Serve those who run from the front of `rest`; who is left there was left out. Returns decodes, prefills."""
        decodes: list[Request] = []
        prefills: list[Request] = []
        while rest:
            request = rest[0]
            num_tokens = engine.cut(engine.tokens_left(request), engine.budget_left(draft, 0))
            if num_tokens <= 0:
                break
            rest.popleft()
            if request.policy_state.is_decoding:
                if engine.decode_one(request, rest, draft):
                    decodes.append(request)
            elif _fills_its_blocks(engine, request) or engine.make_room(request, rest, draft):
                engine.prefill(request, num_tokens, draft)
                prefills.append(request)
        return decodes, prefills

    def steady_obstacle(self, engine: Phases, draft: Draft) -> BlockedBy | None:
        if not engine.num_swapped:
            return engine.steady_obstacle(draft)
        obstacle = engine.steady_obstacle_to_return(draft)
        return engine.steady_obstacle(draft) if obstacle is not None and len(engine.queue) else obstacle


def _fills_its_blocks(engine: Phases, request: Request) -> bool:
    """A prefill whose last block is full touches no block; otherwise it wants a free one, although it takes none."""
    return int(request.policy_state.num_to_prefill) % engine.config.limits.block_size == 0


def _rank(request: Request) -> tuple[int, int]:
    return request.priority, request.queued_ns
