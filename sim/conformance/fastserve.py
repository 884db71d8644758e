"""Replays logs of FastServe's schedulers and block manager.

The log has a clock of its own: a pass takes a base time, so much per prompt token and so much per decode, and
when the system is empty the clock jumps to the next arrival, if that is later.
"""

from __future__ import annotations

from collections.abc import Mapping

from sim.clock import NS_PER_S
from sim.conformance.engine_steps import Call, EngineStepsReplay
from sim.conformance.fields import validated
from sim.conformance.golden import Golden, Line
from sim.options import Count, CountOrZero, NonNegative, Options
from sim.policies.base import EngineLimits
from sim.policies.fastserve import FastServe
from sim.request import Request

DECIMALS = 6
"""Of the times in a log, milliseconds."""
EPOCH_S = 1000.0
"""Where the log's clock starts. It goes on by sums of floating-point seconds, whose rounding decides ties."""


class FastServeConfig(Options):
    """The keys of a log's `config`."""

    max_batch_size: Count
    max_tokens_per_batch: Count
    block_size: Count
    num_gpu_blocks: Count
    num_cpu_blocks: CountOrZero
    proactive_offloading: bool
    num_min_free_blocks_threshold: CountOrZero
    use_skip_join: bool
    iter_base_ms: NonNegative
    iter_prefill_ms: NonNegative
    iter_decode_ms: NonNegative
    idle_step_ms: NonNegative
    starvation_threshold_s: NonNegative
    starvation_period: Count


class FastServeReplay(EngineStepsReplay):
    """The four schedulers; MLFQ's lines also have everybody's queue."""

    VERSION = "FastServe @187a274"
    MODES = ("fcfs", "srpt", "mlfq", "sj-mlfq")
    Config = FastServeConfig
    config: FastServeConfig
    policy: FastServe

    def __init__(self, golden: Golden) -> None:
        super().__init__(golden)
        self._clock_s = self._start_s = EPOCH_S
        self.policy.read_clock = lambda _: self._clock_s
        self._levels: dict[str, int] = {}
        self._promoted: list[str] = []

    def now_ns(self) -> int:
        return round(self._clock_s * NS_PER_S)

    def _build_policy(self) -> FastServe:
        config = self.config
        is_mlfq = self.mode not in ("fcfs", "srpt")
        options = {
            "policy": "fastserve",
            "scheduler": ("sj-mlfq" if config.use_skip_join else "mlfq") if is_mlfq else self.mode,
            "max_batch_size": config.max_batch_size,
            "max_tokens_per_batch": config.max_tokens_per_batch,
            "block_size": config.block_size,
            "num_cpu_blocks": config.num_cpu_blocks,
            "proactive_offloading": config.proactive_offloading,
            "num_min_free_blocks_threshold": config.num_min_free_blocks_threshold,
            "starvation_threshold_s": config.starvation_threshold_s,
            "starvation_period": config.starvation_period,
            "profile_base_ms": config.iter_base_ms,
            "profile_prefill_ms": config.iter_prefill_ms,
        }
        longest = max(row.prompt_tokens + row.max_tokens for row in self.rows)
        limits = EngineLimits(longest, config.block_size, config.num_gpu_blocks)
        return FastServe.build(validated(FastServe.Options, options, f"{self.golden.path}: config"), limits)

    def _call(self) -> Call:
        if not self.policy.num_unfinished:
            self._clock_s = max(self._clock_s, EPOCH_S + self._step * self.config.idle_step_ms / 1e3)
        self._start_s = self._clock_s
        call = super()._call()
        shape = call.planned.shape
        if not call.planned.is_empty:
            config = self.config
            prefill_ms = config.iter_prefill_ms * shape.prefill_tokens
            decode_ms = config.iter_decode_ms * shape.num_decode
            self._clock_s += (config.iter_base_ms + prefill_ms + decode_ms) / 1e3
        self.policy.settle(self.now_ns())
        return call

    def _own_fields(self, call: Call) -> Line:
        swaps = self.policy.swaps
        fields: Line = {
            "preempted": [swap.request.id for swap in swaps if swap.is_out],
            "swapped_in": [swap.request.id for swap in swaps if not swap.is_out],
            "cpu_blocks": self.policy.kv.used_cpu_blocks,
            "t_start_ms": _since_epoch_ms(self._start_s),
            "t_end_ms": _since_epoch_ms(self._clock_s),
        }
        self._promoted = []
        if self.mode in ("fcfs", "srpt"):
            return fields
        levels = {str(r.id): _level(r) for r in self.policy.waiting()}
        before, self._levels = self._levels, levels
        arrived = [row.id for row in self.rows if row.id in levels]
        self._promoted = [name for name in arrived if name in before and levels[name] < before[name]]
        return fields | {"level": levels, "promoted": self._promoted}

    def _own_counters(self, call: Call, line: Line) -> Mapping[str, int]:
        return {"swapped_in": len(line["swapped_in"]), "promoted": len(self._promoted)}


def _level(request: Request) -> int:
    level: int = request.policy_state.level
    return level


def _since_epoch_ms(time_s: float) -> float:
    return round((time_s - EPOCH_S) * 1e3, DECIMALS)
