"""What an engine of the grid can be told: the axes that a scenario may override, and where presets fix them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any

from pydantic import Field

from sim.errors import ScenarioError
from sim.options import Count, CountOrZero, NonNegative, OneOf, Share
from sim.policies.base import EngineLimits, EngineOptions
from sim.policies.grid.pacing import PACINGS, AlwaysOptions, PacingOptions
from sim.policies.grid.pressure import PressureKind
from sim.policies.grid.reservation import ReservationKind
from sim.queues.base import QUEUE_ORDERS, QueueOrderOptions
from sim.queues.fcfs import FcfsOptions

UNLIMITED_TOKENS = 10**12
"""A token budget that no step reaches."""


class GridOptions(EngineOptions):
    """The axes along which every engine of the grid can be moved."""

    max_num_seqs: Count = Field(default=128, description="requests that may run at once")
    watermark: Share = Field(default=0.01, description="part of the KV blocks that admission leaves free")
    kv_admission: ReservationKind = Field(
        default="prompt",
        description="KV that must be free for an admission: prompt (and a watermark), max_tokens or max_model_len",
    )
    preemption: PressureKind = Field(
        default="recompute", description="when a decode finds no block: recompute, swap, pause or reject"
    )
    swap_space: NonNegative = Field(default=4.0, description="host memory for KV that is swapped out, GiB per GPU")
    num_cpu_blocks: CountOrZero | None = Field(
        default=None, description="KV blocks of host memory; default: what swap_space holds"
    )
    prefill_pacing: Annotated[PacingOptions, OneOf(PACINGS)] = Field(
        default=AlwaysOptions(), description="when waiting requests may be admitted although there is room"
    )
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
    drops_what_never_fits: bool = False
    """A head that the watermark will never admit is dropped; otherwise it blocks the queue for ever."""
    pressure: PressureKind = "recompute"
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
        reserves_all = options.kv_admission != "prompt"
        if reserves_all:
            for name in ("preemption", "watermark"):
                if name in options.model_fields_set:
                    raise ScenarioError(
                        f"engine.{name}",
                        f"has no meaning with kv_admission {options.kv_admission!r}",
                        valid="KV for the whole request is reserved, so nobody is preempted and nothing kept free",
                        remedy=f"Leave {name} out, or set kv_admission: prompt.",
                    )
        num_cpu_blocks = options.num_cpu_blocks
        if num_cpu_blocks is None:
            num_cpu_blocks = int(options.swap_space * 2**30) // limits.block_bytes if limits.block_bytes else 0
        axes = {
            "max_num_seqs": options.max_num_seqs,
            "reservation": options.kv_admission,
            "watermark_blocks": 0 if reserves_all else int(options.watermark * limits.num_gpu_blocks),
            "needs_free_block": not reserves_all,
            "pressure": options.preemption,
            "num_cpu_blocks": num_cpu_blocks,
            "pacing": options.prefill_pacing,
            "queue_order": options.queue_order,
        }
        return cls(limits, **{**axes, **preset})
