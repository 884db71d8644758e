"""Random lives of a V1 scheduler: a small pool, so that blocks, seats and budget all bind."""

from dataclasses import dataclass, field, replace
from random import Random

from sim.policies.vllm_v1_config import VERSIONS, V1Config
from sim.request import NEVER, Request
from sim.tokens import Run, TokenRuns

NEWEST = next(iter(VERSIONS.values()))

Timetable = dict[int, list[int]]
"""Engine call -> requests, by their place in `Life.requests`."""


@dataclass(frozen=True)
class Life:
    """Who arrives when, and whose client leaves before a call plans or while its batch is computed."""

    config: V1Config
    facts: list[dict[str, object]]
    """What each request is made with."""
    arrivals: Timetable
    cancels: Timetable = field(default_factory=dict)
    cancels_in_flight: Timetable = field(default_factory=dict)
    """Cancelled between a plan and the results that are taken in after it, as the SimPy driver does."""
    cancelled_victims: frozenset[int] = frozenset()
    """Preemptions, counted from 0, whose victim is cancelled while the batch is computed."""
    aborts: bool = True
    """Whether a request is dropped when its client has all the tokens that it waits for."""

    def requests(self) -> list[Request]:
        """A fresh set of the life's requests."""
        return [Request(index, **facts) for index, facts in enumerate(self.facts)]


def random_life(rng: Random) -> Life:
    """A life with everything that the fast planner covers. Any source of draws will do, hypothesis' own too."""
    config = _random_config(rng)
    burst, longest_answer = rng.choice([0.2, 0.6, 0.95]), rng.choice([8, 20, 60])
    cancelled_victims = frozenset(rng.randint(0, 9) for _ in range(2))
    life = Life(config, [], {}, {}, {}, cancelled_victims, aborts=rng.random() < 0.8)
    call = 0
    for index in range(rng.randint(3, 50)):
        call += 0 if rng.random() < burst else rng.randint(1, 12)
        life.facts.append(_random_facts(rng, config.max_model_len, longest_answer))
        life.arrivals.setdefault(call, []).append(index)
        cancels = rng.choice([life.cancels, life.cancels_in_flight])
        if rng.random() < 0.2:
            cancels.setdefault(call + rng.randint(0, rng.choice([10, 60, 200])), []).append(index)
    return replace(life, config=replace(config, num_gpu_blocks=_random_pool(rng, life)))


def _random_config(rng: Random) -> V1Config:
    max_model_len = rng.choice([48, 120, 400])
    config = V1Config(
        num_gpu_blocks=1,
        block_size=rng.choice([1, 4, 16]),
        max_num_seqs=rng.choice([2, 5, 12, 40]),
        max_num_active_seqs=rng.choice([None, None, None, 2]),
        max_num_batched_tokens=rng.choice([3, 8, 32, 128, 512]),
        max_num_scheduled_tokens=rng.choice([None, None, None, 6]),
        max_model_len=max_model_len,
        enable_prefix_caching=rng.random() < 0.5,
        enable_chunked_prefill=rng.random() < 0.9,
        long_prefill_token_threshold=rng.choice([0, 0, 0, 5, 20]),
        long_prefill_token_threshold_adaptive=rng.random() < 0.1,
        scheduler_reserve_full_isl=rng.random() < 0.7,
        watermark=rng.choice([0.0, 0.0, 0.0, 0.1]),
        prefill_schedule_interval=rng.choice([1, 1, 1, 3]),
        async_scheduling=rng.random() < 0.5,
        rules=rng.choice([*VERSIONS.values(), *[NEWEST] * len(VERSIONS)]),
    )
    if config.enable_chunked_prefill:
        return config
    return replace(config, max_num_batched_tokens=max(512, max_model_len), max_num_scheduled_tokens=None)


def _random_facts(rng: Random, max_model_len: int, longest_answer: int) -> dict[str, object]:
    prompt_tokens = rng.randint(1, max_model_len - 1)
    if rng.random() < 0.6:
        prompt_tokens = min(prompt_tokens, rng.randint(1, 40))
    output_tokens = rng.randint(1, longest_answer)
    num_shared = rng.randint(0, prompt_tokens) if rng.random() < 0.5 else 0
    return {
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "max_tokens": output_tokens if rng.random() < 0.6 else output_tokens + rng.randint(1, 20),
        "cancel_after_tokens": rng.randint(1, 20) if rng.random() < 0.1 else NEVER,
        "tokens": TokenRuns((Run(rng.randint(0, 2), num_shared),), rng.choice([None, None, "answer"])),
    }


def _random_pool(rng: Random, life: Life) -> int:
    """A part of the blocks that a full batch ends with, mostly enough for each request alone."""
    config = life.config
    num_blocks = [
        -(-min(r.prompt_tokens + r.num_target_tokens, config.max_model_len) // config.block_size)
        for r in life.requests()
    ]
    wanted = int(sum(num_blocks[: config.max_running]) * rng.uniform(0.3, 1.1))
    return 1 + (wanted if rng.random() < 0.1 else max(wanted, *num_blocks))
