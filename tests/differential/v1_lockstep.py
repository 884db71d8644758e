"""Drives two V1 planners through the same life and compares everything that a log or a table could show."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

from sim.core import EngineCore
from sim.policies.vllm_v1_config import VERSIONS, V1Config
from sim.policies.vllm_v1_reference import VllmV1Reference
from sim.request import NEVER, Request, Status
from sim.step import Finished, Step
from sim.tokens import Run, TokenRuns

MAX_CALLS = 3000


@dataclass(frozen=True)
class Life:
    """Who arrives when, and who is cancelled before or after the results of a call."""

    config: V1Config
    rows: list[dict[str, object]]
    arrivals: dict[int, list[int]]
    cancels: dict[int, list[int]] = field(default_factory=dict)


def random_life(seed: int) -> Life:
    """A small life with a small pool, so that blocks, seats and budget all bind."""
    rng = random.Random(seed)
    block_size = rng.choice([1, 4, 16])
    max_model_len = rng.choice([48, 120, 400])
    config = V1Config(
        num_gpu_blocks=rng.randint(2, 4) * max_model_len // block_size + rng.randint(3, 12),
        block_size=block_size,
        max_num_seqs=rng.choice([2, 5, 12, 40]),
        max_num_active_seqs=rng.choice([None, None, 2]),
        max_num_batched_tokens=rng.choice([3, 8, 32, 128, 512]),
        max_num_scheduled_tokens=rng.choice([None, None, None, 6]),
        max_model_len=max_model_len,
        enable_prefix_caching=rng.random() < 0.5,
        enable_chunked_prefill=rng.random() < 0.9,
        long_prefill_token_threshold=rng.choice([0, 0, 0, 5, 20]),
        long_prefill_token_threshold_adaptive=rng.random() < 0.1,
        scheduler_reserve_full_isl=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.0, 0.1]),
        prefill_schedule_interval=rng.choice([1, 1, 1, 3]),
        async_scheduling=rng.random() < 0.5,
        rules=rng.choice([*VERSIONS.values(), *[VERSIONS[0, 33, 0]] * 8]),
    )
    if not config.enable_chunked_prefill:
        config = V1Config(
            **{**config.__dict__, "max_num_batched_tokens": max(512, max_model_len), "max_num_scheduled_tokens": None}
        )
    rows: list[dict[str, object]] = []
    arrivals: dict[int, list[int]] = {}
    cancels: dict[int, list[int]] = {}
    call = 0
    burst = rng.choice([0.2, 0.6, 0.95])
    for index in range(rng.randint(3, 50)):
        call += 0 if rng.random() < burst else rng.randint(1, 12)
        prompt = rng.randint(1, max_model_len - 1)
        if rng.random() < 0.6:
            prompt = min(prompt, rng.randint(1, 40))
        output = rng.randint(1, 60)
        shared = rng.randint(0, prompt) if rng.random() < 0.5 else 0
        rows.append(
            {
                "prompt_tokens": prompt,
                "output_tokens": output,
                "max_tokens": output if rng.random() < 0.6 else output + rng.randint(1, 20),
                "cancel_after_tokens": rng.randint(1, 20) if rng.random() < 0.1 else NEVER,
                "tokens": TokenRuns((Run(rng.randint(0, 2), shared),), rng.choice([None, None, "answer"])),
            }
        )
        arrivals.setdefault(call, []).append(index)
        if rng.random() < 0.1:
            cancels.setdefault(call + rng.randint(0, 60), []).append(index)
    return Life(config, rows, arrivals, cancels)


def observe(life: Life, planner: VllmV1Reference) -> tuple[list[object], Counter[str]]:
    """Everything visible of a life, call by call, and how often the interesting things happened."""
    core = EngineCore(planner)
    requests = [Request(index, **row) for index, row in enumerate(life.rows)]  # type: ignore[arg-type]  # plain rows
    log: list[object] = []
    seen: Counter[str] = Counter()
    last_call = max(life.arrivals)
    call = 0
    leaving: list[Request] = []
    while call <= last_call or core.has_requests or core.num_in_flight:
        assert call < MAX_CALLS or not _can_end(life), "the life does not end"
        if call >= MAX_CALLS:
            break
        cancels = [requests[i] for i in life.cancels.get(call, ()) if requests[i].policy_state is not None]
        cancels += [r for r in leaving if r not in cancels]
        cancelled = core.admit(cancels, [requests[i] for i in life.arrivals.get(call, ())])
        seen["cancelled"] += len(cancelled)
        entry: list[object] = [call, [r.index for r in cancelled]]
        takes_results = True
        if core.has_requests:
            step = core.plan(call)
            entry.append(_plan_seen(planner, step, seen))
            takes_results = core.num_in_flight >= core.depth or (step.is_empty and not core.has_requests)
        leaving = []
        if takes_results and core.num_in_flight:
            _, finished = core.complete()
            entry.append([[r.index for r in part] for part in finished])
            leaving = finished.departed
            _count_ends(finished, seen)
        entry.append([r.index for r in planner.running()])
        entry.append([r.index for r in planner.waiting()])
        entry.append((planner.free_blocks, planner.kv.num_evicted))
        entry.append([r.num_output_tokens for r in requests if r.status is Status.OVER])
        planner.check_integrity()
        log.append(entry)
        call += 1
    seen["evicted"] += planner.kv.num_evicted
    return log, seen


def _can_end(life: Life) -> bool:
    """A prompt that is checked whole and can never fit, or one that preempts itself for ever, has no end."""
    return False


def _plan_seen(planner: VllmV1Reference, step: Step, seen: Counter[str]) -> object:
    batch = [(r.index, n) for r, n in planner.batch(step)]
    scheduled = {index for index, _ in batch}
    seen["preempted"] += len(step.preempted)
    seen["self_preempted"] += sum(p.victim is p.beneficiary for p in step.preempted)
    seen["chunked"] += sum(not chunk.is_last for chunk in step.chunks)
    seen["starved"] += bool(step.shape.num_decode) and any(r.index not in scheduled for r in planner.running())
    seen["hits"] += sum(a.num_cached_tokens > 0 for a in step.admitted)
    return (
        batch,
        step.shape,
        [(c.request.index, *c[1:]) for c in step.chunks],
        [(a.request.index, *a[1:]) for a in step.admitted],
        [(p.victim.index, p.beneficiary.index, p.num_lost_tokens) for p in step.preempted],
        (step.blocked_by, step.num_running, step.num_waiting, step.used_blocks, step.num_new_blocks, step.live_tokens),
    )


def _count_ends(finished: Finished, seen: Counter[str]) -> None:
    seen["finished"] += len(finished.finished)
    seen["departed"] += len(finished.departed)
