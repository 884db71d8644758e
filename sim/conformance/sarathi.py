"""Logs of Sarathi-Serve's five schedulers."""

from __future__ import annotations

from collections.abc import Mapping

from sim.conformance.engine_steps import Call, EngineStepsReplay
from sim.conformance.golden import Line
from sim.errors import GoldenError, ScenarioError
from sim.options import Count, Options
from sim.policies.base import POLICIES, EngineLimits, Policy
from sim.policies.grid.composition import Alternating
from sim.policies.sarathi import SarathiBase

POLICY_OF = {
    "sarathi": "sarathi",
    "vllm": "sarathi-vllm",
    "orca": "sarathi-orca",
    "faster_transformer": "sarathi-faster-transformer",
    "simple_chunking": "sarathi-simple-chunking",
}
"""Log's mode -> policy."""


class SarathiConfig(Options):
    """A log's `config`: options of the scheduler, and what else it is built with."""

    num_gpu_blocks: Count
    block_size: Count = 16
    max_model_len: Count
    max_num_seqs: Count = 128
    pipeline_parallel_size: Count = 1
    chunk_size: Count | None = None
    max_batched_tokens: Count | None = None
    enable_dynamic_chunking_schedule: bool | None = None
    low_chunk_size: Count | None = None
    high_chunk_size: Count | None = None
    chunk_schedule_max_tokens: Count | None = None
    chunk_schedule_stages: Count | None = None


class SarathiReplay(EngineStepsReplay):
    """One of the five, by the log's mode."""

    VERSION = "sarathi-serve 0.1.8 @96f9911"
    MODES = tuple(POLICY_OF)
    Config = SarathiConfig
    config: SarathiConfig
    policy: SarathiBase

    def _build_policy(self) -> Policy:
        config = self.config
        cls = POLICIES.load(POLICY_OF[self.mode])
        given = config.model_dump(exclude={"num_gpu_blocks", "max_model_len", "block_size"}, exclude_none=True)
        for key in given:
            if key not in cls.Options.model_fields:
                raise GoldenError(f"{self.golden.path}: config", f"{key!r} has no meaning in mode {self.mode!r}")
        limits = EngineLimits(config.max_model_len, config.block_size, config.num_gpu_blocks)
        try:
            return cls.build(cls.Options(policy=POLICY_OF[self.mode], **given), limits)
        except ScenarioError as error:
            key = error.place.removeprefix("engine.")
            raise GoldenError(f"{self.golden.path}: config.{key}", error.found, valid=error.valid) from error

    def _own_fields(self, call: Call) -> Line:
        line: Line = {
            "prefill": [chunk.request.id for chunk in call.planned.chunks],
            "ignored": [r.id for r in call.planned.dropped],
        }
        composition = self.policy.composition
        if isinstance(composition, Alternating):
            line["next_turn"] = "PREFILL" if composition.is_prefill_turn else "DECODE"
        if self.core.depth > 1:
            line["in_flight"] = self.core.num_in_flight
        return line

    def _own_counters(self, call: Call, line: Line) -> Mapping[str, int]:
        return {"ignored": len(line["ignored"])}
