"""Sarathi-Serve's five schedulers: chunked prefill beside decodes, and the baselines that its paper compares with.

Requests are admitted first come, first served with KV for their whole prompt. A decode wants one free block
even when its last block has room, so that preemption starts when none is free. A victim's KV is lost and it
waits at the front of the queue; its answer so far becomes part of its prompt, and `max_tokens` is counted
from there, so that only a stop token ends it where a run without preemptions would have ended. No answer
ends at `max_model_len`.

Source: microsoft/sarathi-serve @96f9911 (0.1.8), `sarathi/core/scheduler/`, and Agrawal et al. 2024, "Taming
Throughput-Latency Tradeoff in LLM Inference with Sarathi-Serve".
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar, Literal, Self

from pydantic import Field

from sim.errors import ScenarioError
from sim.options import Count
from sim.policies.base import About, EngineLimits
from sim.policies.grid.composition import (
    Alternating,
    ClosedBatch,
    Composition,
    DecodesFirst,
    PrefillFirst,
    chosen,
)
from sim.policies.grid.config import UNLIMITED_TOKENS, GridConfig, GridOptions
from sim.policies.grid.draft import Draft
from sim.policies.grid.engine import GridPolicy
from sim.policies.grid.reservation import ReservationKind
from sim.request import Request

_COPIES = "Sarathi-Serve 0.1.8 @96f9911"


class SarathiBaseOptions(GridOptions):
    """What each of the five can be told."""

    pipeline_parallel_size: Count = Field(default=1, description="pipeline stages")


class ChunkedOptions(SarathiBaseOptions):
    """For those that split prompts."""

    chunk_size: Count = Field(default=512, description="tokens of a step that prefills may fill")

    def largest_pass(self, longest: int) -> tuple[int, int]:
        return self.chunk_size + self.max_num_seqs, self.max_num_seqs


class SarathiOptions(ChunkedOptions):
    """What the scheduler called `sarathi` can be told."""

    policy: Literal["sarathi"] = Field(description="Sarathi-Serve: chunked prefill beside decodes")
    enable_dynamic_chunking_schedule: bool = Field(
        default=False, description="smaller chunks for a prompt as more of it is done"
    )
    low_chunk_size: Count | None = Field(default=None, description="last chunk size of the schedule, tokens")
    high_chunk_size: Count | None = Field(default=None, description="first chunk size of the schedule, tokens")
    chunk_schedule_max_tokens: Count | None = Field(default=None, description="prompt tokens that the schedule spans")
    chunk_schedule_stages: Count | None = Field(default=None, description="chunk sizes in the schedule")


class SarathiVllmOptions(SarathiBaseOptions):
    """What its copy of vLLM's first scheduler can be told."""

    policy: Literal["sarathi-vllm"] = Field(description="Sarathi-Serve's vLLM baseline: prefills before decodes")
    max_batched_tokens: Count | None = Field(
        default=None, description="tokens of a step of prefills; default: max_model_len"
    )

    def largest_pass(self, longest: int) -> tuple[int, int]:
        return self.max_batched_tokens or longest, self.max_num_seqs


class SarathiOrcaOptions(SarathiBaseOptions):
    """What its Orca baseline can be told."""

    policy: Literal["sarathi-orca"] = Field(description="Sarathi-Serve's Orca baseline: whole prompts beside decodes")
    kv_admission: ReservationKind = Field(
        default="max_model_len",
        description="KV that must be free for an admission: prompt, max_tokens or max_model_len",
    )


class SarathiFasterTransformerOptions(SarathiBaseOptions):
    """What its FasterTransformer baseline can be told."""

    policy: Literal["sarathi-faster-transformer"] = Field(
        description="Sarathi-Serve's FasterTransformer baseline: nobody joins a batch until all of it is done"
    )
    kv_admission: ReservationKind = Field(
        default="max_model_len",
        description="KV that must be free for an admission: prompt, max_tokens or max_model_len",
    )

    def largest_pass(self, longest: int) -> tuple[int, int]:
        return longest, self.max_num_seqs


class SarathiSimpleChunkingOptions(ChunkedOptions):
    """What the scheduler without mixed steps can be told."""

    policy: Literal["sarathi-simple-chunking"] = Field(
        description="Sarathi-Serve's chunked prefill alone: steps of prefills and of decodes take turns"
    )


class SarathiBase(GridPolicy):
    """What the five have in common."""

    longest_overrun = UNLIMITED_TOKENS
    budget_option: ClassVar[str] = ""
    """The option that holds the token budget of a step, if there is one."""
    chunked: ClassVar[bool] = False

    @classmethod
    @abstractmethod
    def compose(cls) -> Composition:
        """The phases of a step, where a scenario asks for no others."""

    @classmethod
    def preset(cls, options: GridOptions, limits: EngineLimits) -> Self:
        assert isinstance(options, SarathiBaseOptions)
        budget = getattr(options, cls.budget_option) or limits.max_model_len if cls.budget_option else UNLIMITED_TOKENS
        return cls(
            GridConfig.resolve(
                options,
                limits,
                token_budget=budget,
                chunked=cls.chunked,
                prompt_limit=limits.max_model_len if cls.chunked else min(limits.max_model_len, budget),
                num_stages=options.pipeline_parallel_size,
                longest_overrun=cls.longest_overrun,
            ),
            chosen(options.step_composition, cls.compose()),
        )

    def requeue(self, victim: Request, draft: Draft) -> None:
        cut = victim.num_output_tokens + victim.max_tokens
        victim.num_target_tokens = min(victim.output_tokens, cut)
        super().requeue(victim, draft)


class Sarathi(SarathiBase):
    """Decodes take their tokens off the chunk budget, prefills get what is left."""

    Options = SarathiOptions
    about = About(
        batching="iteration-level batching: everybody decodes in every step, chunks of prompts fill up the rest",
        copies=f"{_COPIES}, scheduler sarathi, static and dynamic chunks",
        proof="step logs of the real scheduler: 10 of 10",
        note="no answer ends at max_model_len; a request counts its max_tokens anew after a preemption",
    )
    budget_option = "chunk_size"
    chunked = True

    @classmethod
    def compose(cls) -> Composition:
        return DecodesFirst()

    def __init__(self, config: GridConfig, composition: Composition) -> None:
        super().__init__(config, composition)
        self._schedule: list[int] = []
        self._stage_tokens = 0

    @classmethod
    def preset(cls, options: GridOptions, limits: EngineLimits) -> Self:
        assert isinstance(options, SarathiOptions)
        policy = super().preset(options, limits)
        if options.enable_dynamic_chunking_schedule:
            policy._schedule, policy._stage_tokens = _chunk_schedule(options)
        return policy

    def budget_left(self, draft: Draft, num_done: int) -> int:
        if not self._schedule:
            return super().budget_left(draft, num_done)
        stage = min(num_done // self._stage_tokens, len(self._schedule) - 1)
        return self._schedule[stage] - draft.num_tokens


def _chunk_schedule(options: SarathiOptions) -> tuple[list[int], int]:
    """Chunk sizes by stage, and how many prompt tokens a stage spans. Raises ScenarioError."""
    given: dict[str, Any] = {
        name: getattr(options, name)
        for name in ("low_chunk_size", "high_chunk_size", "chunk_schedule_max_tokens", "chunk_schedule_stages")
    }
    missing = [name for name, value in given.items() if value is None]
    if missing:
        raise ScenarioError(
            f"engine.{missing[0]}", "is missing", valid="enable_dynamic_chunking_schedule needs all of its numbers"
        )
    low, high, max_tokens, stages = given.values()
    if low > high:
        raise ScenarioError("engine.low_chunk_size", f"{low} is above high_chunk_size {high}")
    unit = min(32, low)
    gap = (high - low) / (stages - 1) if stages > 1 else 0.0
    sizes = [int(low + gap * index) for index in range(stages)][::-1]
    return [round(size / unit) * unit for size in sizes], -(-max_tokens // stages)


class SarathiVllm(SarathiBase):
    """Prefills before decodes, as vLLM did before chunked prefill."""

    Options = SarathiVllmOptions
    about = About(
        batching="a step prefills or decodes; prefills go first and those who decode stall",
        copies=f"{_COPIES}, scheduler vllm",
        proof="step logs of the real scheduler: 4 of 4",
        note="no answer ends at max_model_len; prompts above the token budget are dropped",
    )
    budget_option = "max_batched_tokens"

    @classmethod
    def compose(cls) -> Composition:
        return PrefillFirst(ends_on_drop=True)


class SarathiOrca(SarathiBase):
    """Whole prompts beside decodes, KV for the longest request that the model takes."""

    Options = SarathiOrcaOptions
    about = About(
        batching="iteration-level batching: requests join and leave at every step, prompts run whole",
        copies=f"{_COPIES}, scheduler orca; what the vLLM paper calls Orca (Max)",
        proof="step logs of the real scheduler: 3 of 3",
        note="KV for max_model_len is reserved, so nobody is preempted",
    )

    @classmethod
    def compose(cls) -> Composition:
        return DecodesFirst()


class SarathiFasterTransformer(SarathiBase):
    """A batch runs until its last member is done; those who finish earlier drop out of the computation."""

    Options = SarathiFasterTransformerOptions
    about = About(
        batching="request-level batching: nobody joins until everybody is done, nothing is padded",
        copies=f"{_COPIES}, scheduler faster_transformer",
        proof="step logs of the real scheduler: 2 of 2",
        note="KV for max_model_len is reserved; members that finish drop out of the computation",
    )

    @classmethod
    def compose(cls) -> Composition:
        return ClosedBatch()


class SarathiSimpleChunking(SarathiBase):
    """Chunked prefill without mixed steps."""

    Options = SarathiSimpleChunkingOptions
    about = About(
        batching="steps of prefill chunks and steps of decodes take turns",
        copies=f"{_COPIES}, scheduler simple_chunking; chunked-prefills-only of the paper",
        proof="step logs of the real scheduler: 2 of 2",
        note="no answer ends at max_model_len",
    )
    budget_option = "chunk_size"
    chunked = True

    @classmethod
    def compose(cls) -> Composition:
        return Alternating()
