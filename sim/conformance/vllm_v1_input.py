"""The input of a vLLM V1 log, checked: options and requests in the words of the file, turned into ours."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from pydantic import Field, StrictInt

from sim.conformance.fields import LoggedRequest, refuse_unknown, validated
from sim.conformance.golden import Golden
from sim.errors import GoldenError, ScenarioError, did_you_mean
from sim.options import Count, CountOrZero
from sim.policies.base import EngineLimits
from sim.policies.vllm_v1_config import SchedulerOptions, V1Config, rules_for
from sim.request import Request
from sim.tokens import Run, TokenRuns


class LoggedOptions(SchedulerOptions):
    """A log's `config`: options of the scheduler, and what else the scheduler is built with.

    What a log leaves out has the defaults of vLLM's own `SchedulerConfig`, not those of `vllm serve`.
    """

    num_gpu_blocks: Count
    block_size: Count = 16
    max_model_len: Count = 8192
    max_num_seqs: Count = 128
    use_v2_model_runner: bool = False
    num_speculative_tokens: CountOrZero = 0
    spec_accept_pattern: Annotated[tuple[CountOrZero, ...], Field(min_length=1)] | None = None


class VllmRequest(LoggedRequest):
    """One of a vLLM log's `requests`."""

    arrival_time: float | None = None
    """Only its order matters, and only to the priority policy; default: the place in the file."""
    output_stream: StrictInt | None = None


RENAMED = {"policy": "scheduling_policy"}
"""Keys of a log's `config` that are called otherwise in a scenario."""
CONFIG_KEYS = (
    "num_gpu_blocks",
    "block_size",
    "max_num_seqs",
    "max_num_active_seqs",
    "max_num_batched_tokens",
    "max_num_scheduled_tokens",
    "max_model_len",
    "policy",
    "enable_prefix_caching",
    "enable_chunked_prefill",
    "long_prefill_token_threshold",
    "long_prefill_token_threshold_adaptive",
    "scheduler_reserve_full_isl",
    "watermark",
    "prefill_schedule_interval",
    "pipeline_parallel_size",
    "use_v2_model_runner",
    "num_speculative_tokens",
    "spec_accept_pattern",
)
OPTIONAL_KEYS = ("max_steps",)
"""What else the input may say that changes decisions. Other keys only describe it."""


def read_config(golden: Golden) -> V1Config:
    """What the logged scheduler was built with. Raises GoldenError."""
    given = golden.field("config", dict)
    mode, version = golden.field("mode", str), golden.field("version", str)
    if mode not in ("sync", "async"):
        raise GoldenError(f"{golden.path}: mode", f"is {mode!r}", valid="known: sync, async")
    place = f"{golden.path}: config"
    refuse_unknown(place, given, CONFIG_KEYS)
    renamed = {RENAMED.get(key, key): value for key, value in given.items()}
    own = {"policy": "vllm-v1", "vllm_version": version, "async_scheduling": mode == "async"}
    options = validated(LoggedOptions, renamed | own, place, RENAMED)
    return _resolve(golden, options)


def _resolve(golden: Golden, options: LoggedOptions) -> V1Config:
    limits = EngineLimits(options.max_model_len, options.block_size, options.num_gpu_blocks)
    try:
        config = V1Config.resolve(options, limits)
    except ScenarioError as error:
        key = error.place.removeprefix("engine.")
        where = {"async_scheduling": "mode", "vllm_version": "version"}.get(key, f"config.{key}")
        raise GoldenError(f"{golden.path}: {where}", error.found, valid=error.valid, remedy=error.remedy) from error
    return replace(
        config,
        use_v2_model_runner=options.use_v2_model_runner,
        num_speculative_tokens=options.num_speculative_tokens,
        spec_accept_pattern=options.spec_accept_pattern,
    )


def note_on_version(golden: Golden) -> str:
    """Which version's rules are taken for a version that was not looked up; empty for one that was."""
    version = golden.field("version", str)
    _, row = rules_for(version)
    return "" if version == row else f"rules of {row}"


def read_max_steps(golden: Golden) -> int | None:
    """The engine call before which the log was cut, or None for a log that was not. Raises GoldenError."""
    for key in golden.scenario:
        if key not in OPTIONAL_KEYS and (remedy := did_you_mean(key, OPTIONAL_KEYS)):
            raise GoldenError(str(golden.path), f"unknown key {key!r}", remedy=remedy)
    max_steps = golden.scenario.get("max_steps")
    if max_steps is None or (isinstance(max_steps, int) and not isinstance(max_steps, bool) and max_steps >= 0):
        return max_steps
    raise GoldenError(f"{golden.path}: max_steps", f"is {max_steps!r}", valid="expected a whole number or null")


def to_requests(rows: list[VllmRequest]) -> list[Request]:
    """Requests as the policy takes them; `index` is the place in the file."""
    times = [index if row.arrival_time is None else row.arrival_time for index, row in enumerate(rows)]
    rank_of = {time: rank for rank, time in enumerate(sorted(set(times)))}
    return [
        Request(
            index,
            row.prompt_tokens,
            row.output_tokens,
            max_tokens=row.max_tokens,
            priority=row.priority,
            arrival_ns=rank_of[time],
            id=row.id,
            tokens=TokenRuns(tuple(Run(*segment) for segment in row.prefix or ()), row.output_stream),
        )
        for index, (row, time) in enumerate(zip(rows, times, strict=True))
    ]
