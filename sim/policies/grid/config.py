"""What an engine of the grid can be told: the axes that a scenario may override, and where presets fix them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from sim.errors import ScenarioError
from sim.options import Count, CountOrZero, NonNegative, OneOf, Share
from sim.policies.base import EngineLimits, EngineOptions
from sim.policies.grid.composition import StepComposition
from sim.policies.grid.head_of_line import HEAD_OF_LINE_HELP, HeadOfLine, refuse_skipping
from sim.policies.grid.pacing import PACING_MEANING, PACINGS, AlwaysOptions, PacingOptions
from sim.policies.grid.pressure import PressureKind
from sim.policies.grid.reservation import ReservationKind
from sim.policies.grid.victims import PLACE_HELP, VICTIM_HELP, VictimPlace, VictimRule, refuse_pointless
from sim.queues.base import QUEUE_ORDERS, QueueOrderOptions
from sim.queues.fcfs import FcfsOptions

UNLIMITED_TOKENS = 10**12
"""A token budget that no step reaches."""


class GridOptions(EngineOptions):
    """The axes along which every engine of the grid can be moved."""

    max_num_seqs: Count = Field(default=128, description="requests that may run at once")
    watermark: Share = Field(default=0.01, description="part of the KV blocks that admission leaves free")
    step_composition: StepComposition | None = Field(
        default=None,
        description="what a step consists of: decodes_first (prefills beside them), prefill_first, alternating "
        "(one or the other), or closed_batch (nobody joins until all are done); default: the engine's own",
    )
    kv_admission: ReservationKind = Field(
        default="prompt",
        description="KV that must be free for an admission: prompt (and a watermark), max_tokens or max_model_len",
    )
    preemption: PressureKind = Field(
        default="recompute", description="when a decode finds no block: recompute, swap, pause or reject"
    )
    victim: VictimRule = Field(default="own", description=VICTIM_HELP)
    victim_goes_to: VictimPlace = Field(default="front", description=PLACE_HELP)
    swap_space: NonNegative = Field(default=4.0, description="host memory for KV that is swapped out, GiB per GPU")
    num_cpu_blocks: CountOrZero | None = Field(
        default=None, description="KV blocks of host memory; default: what swap_space holds"
    )
    prefill_pacing: Annotated[PacingOptions, OneOf(PACINGS)] = Field(
        default=AlwaysOptions(), description=PACING_MEANING
    )
    head_of_line: HeadOfLine = Field(default="stop", description=HEAD_OF_LINE_HELP)
    queue_order: Annotated[QueueOrderOptions, OneOf(QUEUE_ORDERS)] = Field(
        default=FcfsOptions(), description="who is next in the waiting queue"
    )


@dataclass(frozen=True)
class GridConfig:
    """The axes of one engine, resolved."""

    limits: EngineLimits
    max_num_seqs: int
    token_budget: int
    """Tokens of a step: a prefill may fill what those that are in it already leave."""
    chunked: bool
    """Whether a prompt may be split over steps."""
    prompt_limit: int
    """Known tokens of the longest request that is admitted; longer ones are dropped when they are next."""
    pacing: PacingOptions
    queue_order: QueueOrderOptions
    reservation: ReservationKind = "prompt"
    watermark_blocks: int = 0
    head_of_line: HeadOfLine = "stop"
    drops_what_never_fits: bool = False
    """A head that the watermark will never admit is dropped; otherwise it blocks the queue for ever."""
    pressure: PressureKind = "recompute"
    victim: VictimRule = "own"
    victim_goes_to: VictimPlace = "front"
    num_cpu_blocks: int = 0
    needs_free_block: bool = True
    """Whether a decode wants a free block even when its last block has room."""
    sorts_running: bool = True
    """Whether those who run are kept in order of arrival; otherwise in order of their admission."""
    requeues_at_once: bool = True
    """Whether a victim can be admitted again in the step that preempts it."""
    returns_cut_prefills: bool = True
    """Whether a prefill that is swapped out can come back with a piece of what is left of it, not only with all."""
    num_stages: int = 1
    """Pipeline stages, each with a batch in flight."""
    enable_prefix_caching: bool = False
    longest_overrun: int = 0
    """Tokens that an answer may go beyond `max_model_len`."""

    @classmethod
    def resolve(cls, options: GridOptions, limits: EngineLimits, **preset: Any) -> GridConfig:
        """The axes that the options choose, and `preset` for the rest. Raises ScenarioError for contradictions."""
        _refuse_contradictions(options, is_chunked=preset["chunked"])
        reserves_all = options.kv_admission != "prompt"
        num_cpu_blocks = options.num_cpu_blocks
        if num_cpu_blocks is None:
            num_cpu_blocks = int(options.swap_space * 2**30) // limits.block_bytes if limits.block_bytes else 0
        axes = {
            "max_num_seqs": options.max_num_seqs,
            "reservation": options.kv_admission,
            "watermark_blocks": 0 if reserves_all else int(options.watermark * limits.num_gpu_blocks),
            "needs_free_block": not reserves_all,
            "pressure": options.preemption,
            "victim": options.victim,
            "victim_goes_to": options.victim_goes_to,
            "num_cpu_blocks": num_cpu_blocks,
            "pacing": options.prefill_pacing,
            "queue_order": options.queue_order,
            "head_of_line": options.head_of_line,
        }
        config = cls(limits, **{**axes, **preset})
        refuse_pointless(config.victim, config.victim_goes_to, config.pressure, config.queue_order.kind)
        _refuse_lost_results(config)
        refuse_skipping(config.head_of_line, config.queue_order.kind)
        return config


def _refuse_contradictions(options: GridOptions, *, is_chunked: bool) -> None:
    """Raise ScenarioError where one option leaves another nothing to say."""
    if options.step_composition == "closed_batch" and is_chunked:
        raise ScenarioError(
            "engine.step_composition",
            "'closed_batch' needs whole prompts",
            valid="chunks are admitted over several steps, and nobody joins a closed batch after its first",
            remedy="Choose sarathi-orca, sarathi-vllm, or vllm-v0 with enable_chunked_prefill: false.",
        )
    if options.kv_admission != "prompt":
        for name in ("preemption", "watermark", "victim", "victim_goes_to"):
            if name in options.model_fields_set:
                raise ScenarioError(
                    f"engine.{name}",
                    f"has no meaning with kv_admission {options.kv_admission!r}",
                    valid="KV for the whole request is reserved, so nobody is preempted and nothing kept free",
                    remedy=f"Leave {name} out, or set kv_admission: prompt.",
                )


def _refuse_lost_results(config: GridConfig) -> None:
    """Raise ScenarioError where a pipeline would lose what is in flight for somebody who makes room."""
    if config.num_stages > 1 and config.pressure in ("swap", "pause"):
        raise ScenarioError(
            "engine.preemption",
            f"{config.pressure!r} needs the results of a step before the next one is planned",
            valid="in a pipeline a victim may have a pass in flight, whose result nobody would take in",
            remedy="Set pipeline_parallel_size: 1, or choose recompute or reject.",
        )
