"""Logs of vLLM's V0 scheduler."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from sim.conformance.engine_steps import Call, EngineStepsReplay
from sim.conformance.golden import Line
from sim.errors import GoldenError, ScenarioError
from sim.options import Count, CountOrZero, NonNegative, Options, Positive, Share
from sim.policies.base import EngineLimits, Policy
from sim.policies.vllm_v0 import VllmV0, VllmV0Options


class VllmV0Config(Options):
    """A log's `config`."""

    max_num_batched_tokens: Count
    max_num_seqs: Count
    max_model_len: Count
    delay_factor: NonNegative = 0.0
    enable_chunked_prefill: bool = False
    preemption_mode: Literal["recompute", "swap"] | None = None
    policy: Literal["fcfs", "priority"] = "fcfs"
    block_size: Count = 16
    num_gpu_blocks: Count
    num_cpu_blocks: CountOrZero
    watermark: Share = 0.01
    enable_prefix_caching: bool = False
    seconds_per_step: Positive = 1.0


class VllmV0Replay(EngineStepsReplay):
    """Adds what is swapped, ignored, cancelled and found in cache."""

    VERSION = "vllm 0.6.3.post1 (PyPI), V0 scheduler"
    MODES = ("default", "chunked", "priority")
    Config = VllmV0Config
    config: VllmV0Config
    policy: VllmV0

    def _build_policy(self) -> Policy:
        config = self.config
        mode = "chunked" if config.enable_chunked_prefill else "priority" if config.policy == "priority" else "default"
        if mode != self.mode:
            raise GoldenError(f"{self.golden.path}: mode", f"is {self.mode!r}", valid=f"its config says {mode!r}")
        self.ns_per_step = round(config.seconds_per_step * self.ns_per_step)
        options = VllmV0Options(
            policy="vllm-v0",
            max_num_batched_tokens=config.max_num_batched_tokens,
            max_num_seqs=config.max_num_seqs,
            scheduler_delay_factor=config.delay_factor,
            enable_chunked_prefill=config.enable_chunked_prefill,
            preemption_mode=config.preemption_mode,
            scheduling_policy=config.policy,
            num_cpu_blocks=config.num_cpu_blocks,
            watermark=config.watermark,
            enable_prefix_caching=config.enable_prefix_caching,
        )
        limits = EngineLimits(config.max_model_len, config.block_size, config.num_gpu_blocks)
        try:
            return VllmV0.build(options, limits)
        except ScenarioError as error:
            raise GoldenError(f"{self.golden.path}: config", f"{error.place}: {error.found}") from error

    def _own_fields(self, call: Call) -> Line:
        planned = call.planned
        out = {p.victim for p in planned.preempted}
        swapped_out = set(getattr(planned, "swapped_out", ()))
        return {
            "prefill": [chunk.request.id for chunk in planned.chunks],
            "preempted": [r.id for r in call.running_before if r in out - swapped_out],
            "swapped_out": [r.id for r in call.running_before if r in swapped_out],
            "swapped_in": [r.id for r in getattr(planned, "swapped_in", ())],
            "ignored": [r.id for r in planned.dropped],
            "cancelled": [r.id for r in call.cancelled],
            "cached": {r.id: num_cached for r, num_cached, _ in planned.admitted if num_cached},
            "swapped": [r.id for r in self.policy.swapped()],
            "cpu_blocks": self.policy.num_cpu_blocks - self.policy.free_cpu_blocks,
        }

    def _own_counters(self, call: Call, line: Line) -> Mapping[str, int]:
        names = ("swapped_out", "ignored", "cancelled")
        return {name: len(line[name]) for name in names} | {"cached_tokens": sum(line["cached"].values())}
