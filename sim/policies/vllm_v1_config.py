"""What vLLM V1's scheduler can be told, and which of its rules hold in which version."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal, Self

from pydantic import Field, model_validator
from pydantic_core import PydanticCustomError

from sim.errors import ScenarioError
from sim.gpu import Gpu
from sim.options import Count, CountOrZero, OneOf, Share
from sim.policies.base import EngineLimits, EngineOptions
from sim.policies.grid.head_of_line import HEAD_OF_LINE_HELP, HeadOfLine
from sim.policies.grid.pacing import PACING_MEANING, PACINGS, AlwaysOptions, PacingOptions
from sim.policies.grid.pressure import PressureKind
from sim.policies.grid.victims import PLACE_HELP, VICTIM_HELP, VictimPlace, VictimRule
from sim.queues.base import QUEUE_ORDERS, QueueOrderOptions
from sim.queues.fcfs import FcfsOptions


@dataclass(frozen=True)
class VersionRules:
    """The rules that differ between versions of vLLM V1; the defaults are those of 0.33.0.

    Source: the wheels of 0.9.2, 0.11.2, 0.14.1, 0.18.0, 0.22.1, 0.26.0, 0.30.0 and 0.33.0
    (`v1/core/sched/scheduler.py`, `v1/core/block_pool.py`); versions in between were not looked up.
    """

    misfit_skips: bool = False
    """Without chunked prefill, a prompt over the rest of the budget is skipped instead of ending admission."""
    has_async: bool = True
    async_by_default: bool = True
    foresees_length_end: bool = True
    """Async scheduling does not plan past `max_tokens`."""
    has_reserve_full_isl: bool = True
    has_watermark: bool = True
    keyless_to_front: bool = True
    """Freed blocks that carry no key go to the front of the free list."""
    pads_admissions: bool = True
    """An admission of one token is padded with drafts."""
    has_prefill_interval: bool = True
    has_active_seqs: bool = True
    has_scheduled_tokens: bool = True
    has_adaptive_threshold: bool = True
    threshold_spares_lone: bool = True
    """The long-prefill threshold does not apply to a request that is alone in the engine."""
    unplans_victims: bool = True
    """Priority: a victim that was already planned in this step is taken out of it."""
    walks_on_after_self_preemption: bool = True
    """Priority: a requester that was its own victim does not end the walk over the running requests."""


_V0_30 = VersionRules(
    has_prefill_interval=False,
    has_active_seqs=False,
    has_adaptive_threshold=False,
    threshold_spares_lone=False,
    walks_on_after_self_preemption=False,
)
_V0_22 = replace(_V0_30, has_watermark=False, keyless_to_front=False, pads_admissions=False)
_V0_18 = replace(_V0_22, has_reserve_full_isl=False)
_V0_14 = replace(_V0_18, has_scheduled_tokens=False)
_V0_11 = replace(_V0_14, misfit_skips=True, async_by_default=False, foresees_length_end=False)
_V0_9 = replace(_V0_11, has_async=False, unplans_victims=False)

VERSIONS: dict[tuple[int, int, int], VersionRules] = {
    (0, 33, 0): VersionRules(),
    (0, 30, 0): _V0_30,
    (0, 26, 0): _V0_30,
    (0, 22, 1): _V0_22,
    (0, 18, 0): _V0_18,
    (0, 14, 1): _V0_14,
    (0, 11, 2): _V0_11,
    (0, 9, 2): _V0_9,
}
"""Newest first. A version that lies between two rows behaves as the older of them."""

NEWEST, *_, OLDEST = (".".join(map(str, row)) for row in VERSIONS)
"""The ends of VERSIONS, as a scenario names them."""


def rules_for(version: str, place: str = "engine.vllm_version") -> tuple[VersionRules, str]:
    """The rules of a version such as `"0.19"`, and the row of VERSIONS that they were taken from.

    `"0.19"` means any 0.19.x and takes the newest row that is not newer. Raises ScenarioError.
    """
    rows = ", ".join(".".join(map(str, row)) for row in VERSIONS)
    parts = version.removeprefix("v").split(".")
    if not all(part.isdecimal() for part in parts) or not 2 <= len(parts) <= 3:
        raise ScenarioError(place, f"{version!r} is not a version", valid=f"known: {rows}")
    wanted = tuple(int(part) for part in parts) + (10**6,) * (3 - len(parts))
    for row, rules in VERSIONS.items():
        if row <= wanted:
            return rules, ".".join(map(str, row))
    raise ScenarioError(place, f"{version!r} is older than any version that was looked up", valid=f"known: {rows}")


DEFAULT_TOKENS, DEFAULT_SEQS = 2048, 128
"""What vLLM's `SchedulerConfig` says by itself, where no GPU is known."""


def server_defaults(gpu: Gpu) -> tuple[int, int]:
    """vLLM's own `(max_num_batched_tokens, max_num_seqs)` of an API server on a GPU when the user sets neither.

    Source: vLLM 0.33.0 `engine/arg_utils.py`; the class of 160 GiB and more came between 0.26 and 0.30.
    """
    gib = gpu.memory_bytes / 2**30
    if gib >= 160:
        return 16384, 1024
    if gib >= 70 and "a100" not in gpu.name:
        return 8192, 1024
    return 2048, 256


NOT_MODELLED = {
    "speculative_config": "drafts are planned in the replay of logs, but their acceptance and cost have no model",
    "num_speculative_tokens": "drafts are planned in the replay of logs, but their acceptance and cost have no model",
    "num_lookahead_slots": "drafts are planned in the replay of logs, but their acceptance and cost have no model",
    "kv_transfer_config": "prefill and decode run in one engine",
    "kv_connector": "prefill and decode run in one engine",
    "data_parallel_size": "one engine is simulated, without ranks in lockstep",
    "enable_lora": "requests have no adapters",
    "max_loras": "requests have no adapters",
    "max_num_queued_reqs": "nothing is refused for the length of the queue",
    "max_num_queued_tokens": "nothing is refused for the length of the queue",
    "scheduler_cls": "the scheduler is vLLM's own; name another policy instead",
    "max_num_partial_prefills": "vLLM's V1 scheduler never used it, and 0.30 dropped it",
    "max_long_partial_prefills": "vLLM's V1 scheduler never used it, and 0.30 dropped it",
    "swap_space": "the V1 scheduler recomputes and never swaps",
    "preemption_mode": "the V1 scheduler recomputes and never swaps",
    "num_scheduler_steps": "multi-step scheduling belongs to V0",
    "scheduler_delay_factor": "it belongs to V0",
}
"""Options of `vllm serve` that would change decisions and have no meaning here, with the reason."""


class SchedulerOptions(EngineOptions):
    """Scheduler options of vLLM, under their own names."""

    policy: Literal["vllm-v1"] = Field(description="vLLM's V1 scheduler")
    vllm_version: str = Field(default=NEWEST, description="version whose behaviour is copied")
    max_num_seqs: Count | None = Field(default=None, description="requests that may run at once")
    """Default: that of vLLM's API server on the GPU at hand."""
    max_num_active_seqs: Count | None = Field(
        default=None, description="requests that admission fills up to; default: max_num_seqs"
    )
    max_num_batched_tokens: Count | None = Field(default=None, description="token budget of a step")
    """Default: that of vLLM's API server on the GPU at hand."""
    max_num_scheduled_tokens: Count | None = Field(
        default=None, description="smaller budget for the scheduler alone; default: max_num_batched_tokens"
    )
    scheduling_policy: Literal["fcfs", "priority"] = Field(
        default="fcfs", description="order of the waiting queue and choice of victims (--scheduling-policy)"
    )
    enable_chunked_prefill: bool = Field(default=True, description="whether a prompt may be split over steps")
    enable_prefix_caching: bool = Field(default=True, description="whether equal prompt beginnings share KV blocks")
    long_prefill_token_threshold: CountOrZero = Field(
        default=0, description="most tokens of one request in a step; 0: no limit"
    )
    long_prefill_token_threshold_adaptive: bool = Field(
        default=False, description="raise that limit to an equal share of max_num_batched_tokens"
    )
    scheduler_reserve_full_isl: bool | None = Field(
        default=None, description="admit a prompt only when all of it would fit; default: on where the version has it"
    )
    watermark: Share = Field(default=0.0, description="part of the KV blocks that admission leaves free")
    prefill_schedule_interval: Count = Field(default=1, description="steps between prefills while anything decodes")
    async_scheduling: bool | None = Field(
        default=None, description="plan a step before the last one's results are in; default: the version's own"
    )
    pipeline_parallel_size: Count = Field(default=1, description="pipeline stages")

    def on_gpu(self, gpu: Gpu) -> Self:
        default_tokens, default_seqs = server_defaults(gpu)
        if not self.enable_chunked_prefill and self.max_model_len is not None:
            default_tokens = max(default_tokens, self.max_model_len)
        num_tokens = self.max_num_batched_tokens or default_tokens
        num_seqs = self.max_num_seqs or min(default_seqs, num_tokens)
        return self.model_copy(update={"max_num_batched_tokens": num_tokens, "max_num_seqs": num_seqs})

    def largest_pass(self, longest: int) -> tuple[int, int]:
        return self.max_num_batched_tokens or DEFAULT_TOKENS, self.max_num_seqs or DEFAULT_SEQS

    def notes(self) -> Iterator[str]:
        _, row = rules_for(self.vllm_version)
        if row != self.vllm_version.removeprefix("v"):
            yield f"vLLM {self.vllm_version} is simulated by the rules of {row}, the newest version looked up up to it"


class VllmV1Options(SchedulerOptions):
    """What a scenario may say: options of `vllm serve`. Those that have no model here are refused by name."""

    preemption: PressureKind = Field(
        default="recompute", description="when a block is lacking: recompute (vLLM's own), swap, pause or reject"
    )
    victim: VictimRule = Field(default="own", description=VICTIM_HELP)
    victim_goes_to: VictimPlace = Field(default="front", description=PLACE_HELP)
    num_cpu_blocks: CountOrZero = Field(default=2048, description="KV blocks of host memory, for preemption: swap")
    prefill_pacing: Annotated[PacingOptions, OneOf(PACINGS)] = Field(
        default=AlwaysOptions(), description=PACING_MEANING
    )
    head_of_line: HeadOfLine = Field(default="stop", description=HEAD_OF_LINE_HELP)
    queue_order: Annotated[QueueOrderOptions, OneOf(QUEUE_ORDERS)] = Field(
        default=FcfsOptions(), description="who is next in the waiting queue, instead of vLLM's own order"
    )

    @model_validator(mode="before")
    @classmethod
    def _name_what_is_not_modelled(cls, given: Any) -> Any:
        for option, reason in NOT_MODELLED.items():
            if isinstance(given, Mapping) and option in given:
                raise PydanticCustomError(
                    "not_modelled",
                    "{found}; {valid}",
                    {"found": f"vLLM's option {option!r} is not modelled", "valid": reason},
                )
        return given


@dataclass(frozen=True)
class V1Config:
    """Every knob of one V1 scheduler, resolved. Names are vLLM's; `policy` is its `--scheduling-policy`."""

    num_gpu_blocks: int
    """Pool size with the null block."""
    block_size: int = 16
    max_num_seqs: int = 128
    max_num_active_seqs: int | None = None
    max_num_batched_tokens: int = 2048
    max_num_scheduled_tokens: int | None = None
    max_model_len: int = 8192
    policy: Literal["fcfs", "priority"] = "fcfs"
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    long_prefill_token_threshold: int = 0
    long_prefill_token_threshold_adaptive: bool = False
    scheduler_reserve_full_isl: bool = True
    watermark: float = 0.0
    prefill_schedule_interval: int = 1
    pipeline_parallel_size: int = 1
    use_v2_model_runner: bool = False
    num_speculative_tokens: int = 0
    spec_accept_pattern: tuple[int, ...] | None = None
    """How many drafts each verification of a request accepts, cyclically: the stand-in for a model."""
    async_scheduling: bool = False
    rules: VersionRules = VersionRules()

    @property
    def token_budget(self) -> int:
        """Tokens that one step may schedule: no more than its batch holds, whatever the scheduler's own limit."""
        return min(self.max_num_scheduled_tokens or self.max_num_batched_tokens, self.max_num_batched_tokens)

    @property
    def max_running(self) -> int:
        """Requests that admission fills up to."""
        return self.max_num_active_seqs or self.max_num_seqs

    @property
    def max_in_flight(self) -> int:
        """Depth of the queue of batches. Async scheduling adds one, but V1's model runner only without stages."""
        adds_one = self.async_scheduling and (self.use_v2_model_runner or self.pipeline_parallel_size == 1)
        return self.pipeline_parallel_size + adds_one

    @property
    def decode_stagger(self) -> int:
        """Calls from one decode of a request to the next: V2's model runner goes once round the pipeline."""
        return self.pipeline_parallel_size if self.async_scheduling and self.use_v2_model_runner else 1

    @property
    def watermark_blocks(self) -> int:
        """Blocks that admission leaves free."""
        return int(self.watermark * self.num_gpu_blocks)

    @classmethod
    def resolve(cls, options: SchedulerOptions, limits: EngineLimits) -> V1Config:
        """The configuration that a scenario asks for. Raises ScenarioError for what its version lacks."""
        rules, row = rules_for(options.vllm_version)
        _refuse_unknown_to_version(options, rules, row)
        reserve, is_async = options.scheduler_reserve_full_isl, options.async_scheduling
        return cls(
            num_gpu_blocks=limits.num_gpu_blocks,
            block_size=limits.block_size,
            max_model_len=limits.max_model_len,
            max_num_seqs=options.max_num_seqs or DEFAULT_SEQS,
            max_num_active_seqs=options.max_num_active_seqs,
            max_num_batched_tokens=options.max_num_batched_tokens or DEFAULT_TOKENS,
            max_num_scheduled_tokens=options.max_num_scheduled_tokens,
            policy=options.scheduling_policy,
            enable_prefix_caching=options.enable_prefix_caching,
            enable_chunked_prefill=options.enable_chunked_prefill,
            long_prefill_token_threshold=options.long_prefill_token_threshold,
            long_prefill_token_threshold_adaptive=options.long_prefill_token_threshold_adaptive,
            scheduler_reserve_full_isl=rules.has_reserve_full_isl if reserve is None else reserve,
            watermark=options.watermark,
            prefill_schedule_interval=options.prefill_schedule_interval,
            pipeline_parallel_size=options.pipeline_parallel_size,
            use_v2_model_runner=options.pipeline_parallel_size > 1,
            async_scheduling=rules.async_by_default if is_async is None else is_async,
            rules=rules,
        )


def refuse_too_many_active(config: V1Config) -> None:
    """Raise ScenarioError where a scenario lets admission fill up to more requests than may run."""
    if config.max_running > config.max_num_seqs:
        raise ScenarioError(
            "engine.max_num_active_seqs",
            f"{config.max_running} is above max_num_seqs {config.max_num_seqs}",
            valid="admission fills up to so many of the requests that may run at once",
            remedy="Lower it, or raise max_num_seqs.",
        )


def _refuse_unknown_to_version(options: SchedulerOptions, rules: VersionRules, row: str) -> None:
    wanted = {
        "async_scheduling": bool(options.async_scheduling) and not rules.has_async,
        "scheduler_reserve_full_isl": bool(options.scheduler_reserve_full_isl) and not rules.has_reserve_full_isl,
        "watermark": options.watermark > 0 and not rules.has_watermark,
        "prefill_schedule_interval": options.prefill_schedule_interval > 1 and not rules.has_prefill_interval,
        "max_num_active_seqs": options.max_num_active_seqs is not None and not rules.has_active_seqs,
        "max_num_scheduled_tokens": options.max_num_scheduled_tokens is not None and not rules.has_scheduled_tokens,
        "long_prefill_token_threshold_adaptive": options.long_prefill_token_threshold_adaptive
        and not rules.has_adaptive_threshold,
    }
    for option, is_missing in wanted.items():
        if is_missing:
            raise ScenarioError(
                f"engine.{option}",
                f"vLLM {options.vllm_version} does not have this option (rules of {row})",
                remedy="Leave it out or name a newer vllm_version.",
            )
