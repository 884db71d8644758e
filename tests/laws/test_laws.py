"""Laws that hold for every policy, KV pool and traffic, whatever the policy decides.

A newly registered policy is run through all of them with its default options; a line in VARIANTS gives it
tight ones.
"""

import functools
import itertools
from collections import Counter
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from sim.clients import Clients
from sim.clock import NS_PER_MS, Clock, to_ns
from sim.core import EngineCore
from sim.cost.in_passes import InPasses
from sim.cost.linear import Linear, LinearOptions
from sim.engine import Engine
from sim.metrics.causes import Causes
from sim.metrics.latency import request_latencies
from sim.metrics.shares import work_shares
from sim.metrics.tokens import TokenTimes
from sim.pass_record import PassRecorder
from sim.policies.base import POLICIES, EngineLimits, Policy, StepPredictor
from sim.reception import NEVER_FITS
from sim.record import Recorder, Tables
from sim.request import NEVER, Outcome
from sim.workload.base import ClientPool, Traffic
from sim.workload.draw import draw_traffic
from sim.workload.traffic import TrafficClass

NUM_SLOTS = 4
TOKEN_BUDGET = 32
AGE_S = 0.01
HALF = {"slots": {"floor": 0.5}, "kv": {"floor": 0.5}}
DROPS_LATE = {"kind": "edf", "ttft_ms": 25.0, "drop_late": True}
STARVES_S = 0.02
LEVELS = {
    "kind": "mlfq",
    "skip_join": True,
    "quantum_ms": 3.0,
    "profile_base_ms": 1.0,
    "profile_prefill_ms": 0.3,
    "starvation_threshold_s": STARVES_S,
}
NOISY = {"kind": "lognormal", "sigma": 0.5}
PREDICTED_ITL = {"kind": "predicted_itl", "max_itl_ms": 1.19, "lookahead_tokens": 3}
"""By `COST` two requests always meet it together, three while their contexts are short, four never."""
VARIANTS = {
    "static": {
        "padded": {"max_batch_size": NUM_SLOTS},
        "early exit": {"max_batch_size": NUM_SLOTS, "compute": "early_exit"},
        "streaming": {"max_batch_size": NUM_SLOTS, "release": "streaming"},
        "shortest prompt": {"max_batch_size": NUM_SLOTS, "compute": "shortest_prompt", "release": "streaming"},
        "early exit, streaming": {"max_batch_size": NUM_SLOTS, "compute": "early_exit", "release": "streaming"},
        "window": {"max_batch_size": NUM_SLOTS, "max_queue_delay_ms": 7.0},
        "no batching": {"max_batch_size": 1},
        "Triton": {
            "max_batch_size": NUM_SLOTS,
            "preferred_batch_size": (2, NUM_SLOTS),
            "max_queue_delay_ms": 7.0,
            "queue_order": {"kind": "triton", "priority_levels": 2, "default_timeout_ms": 20.0},
        },
    },
    "orca": {
        "prompt + max_tokens": {"max_batch_size": NUM_SLOTS},
        "max_model_len": {"max_batch_size": NUM_SLOTS, "reserve": "max_model_len"},
        "earliest deadline": {"max_batch_size": NUM_SLOTS, "queue_order": {"kind": "edf"}},
        "drops late": {"max_batch_size": NUM_SLOTS, "queue_order": DROPS_LATE},
        "levels": {"max_batch_size": NUM_SLOTS, "queue_order": LEVELS},
        "no selective batching": {"max_batch_size": NUM_SLOTS, "selective_batching": False},
        "two workers": {"max_batch_size": NUM_SLOTS // 2, "n_workers": 2},
        "power of two, buddies": {"max_batch_size": NUM_SLOTS, "reserve": "power_of_two", "allocator": "buddy"},
        "true length, buddies": {"max_batch_size": NUM_SLOTS, "reserve": "output_tokens", "allocator": "buddy"},
    },
    "sarathi": {
        "chunks": {"max_num_seqs": NUM_SLOTS, "chunk_size": TOKEN_BUDGET},
        "dynamic chunks": {
            "max_num_seqs": NUM_SLOTS,
            "enable_dynamic_chunking_schedule": True,
            "low_chunk_size": 4,
            "high_chunk_size": 16,
            "chunk_schedule_max_tokens": 32,
            "chunk_schedule_stages": 4,
        },
        "pipeline": {"max_num_seqs": NUM_SLOTS, "chunk_size": 16, "pipeline_parallel_size": 2},
        "swap": {"max_num_seqs": NUM_SLOTS, "chunk_size": TOKEN_BUDGET, "preemption": "swap", "num_cpu_blocks": 100},
        "pause": {"max_num_seqs": NUM_SLOTS, "chunk_size": TOKEN_BUDGET, "preemption": "pause"},
        "reject": {"max_num_seqs": NUM_SLOTS, "chunk_size": TOKEN_BUDGET, "preemption": "reject"},
        "levels": {"max_num_seqs": NUM_SLOTS, "chunk_size": TOKEN_BUDGET, "queue_order": LEVELS},
        "oldest, in order": {
            "max_num_seqs": NUM_SLOTS,
            "chunk_size": TOKEN_BUDGET,
            "victim": "oldest",
            "victim_goes_to": "arrival_order",
        },
        "prefill first, fewest outputs": {
            "max_num_seqs": NUM_SLOTS,
            "chunk_size": TOKEN_BUDGET,
            "step_composition": "prefill_first",
            "victim": "fewest_outputs",
        },
        "pipeline, itself": {
            "max_num_seqs": NUM_SLOTS,
            "chunk_size": 16,
            "pipeline_parallel_size": 2,
            "victim": "itself",
        },
    },
    "sarathi-vllm": {
        "predicted ITL": {
            "max_num_seqs": NUM_SLOTS,
            "max_batched_tokens": TOKEN_BUDGET,
            "prefill_pacing": PREDICTED_ITL,
            "queue_order": {"kind": "vtc"},
        },
        "whole prompts": {"max_num_seqs": NUM_SLOTS, "max_batched_tokens": TOKEN_BUDGET},
        "closed batch, itself": {
            "max_num_seqs": NUM_SLOTS,
            "max_batched_tokens": TOKEN_BUDGET,
            "step_composition": "closed_batch",
            "victim": "itself",
        },
    },
    "sarathi-orca": {
        "max_model_len": {"max_num_seqs": NUM_SLOTS},
        "max_tokens": {"max_num_seqs": NUM_SLOTS, "kv_admission": "max_tokens"},
        "max_tokens, skip": {"max_num_seqs": NUM_SLOTS, "kv_admission": "max_tokens", "head_of_line": "skip"},
    },
    "sarathi-faster-transformer": {
        "max_model_len": {"max_num_seqs": NUM_SLOTS},
        "grows": {"max_num_seqs": NUM_SLOTS, "kv_admission": "prompt"},
        "swaps": {"max_num_seqs": NUM_SLOTS, "kv_admission": "prompt", "preemption": "swap", "num_cpu_blocks": 100},
    },
    "sarathi-simple-chunking": {"chunks": {"max_num_seqs": NUM_SLOTS, "chunk_size": TOKEN_BUDGET}},
    "vllm-v0": {
        "default": {"max_num_seqs": NUM_SLOTS, "max_num_batched_tokens": TOKEN_BUDGET},
        "chunked": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "enable_chunked_prefill": True,
        },
        "few tokens": {"max_num_seqs": NUM_SLOTS, "max_num_batched_tokens": 4, "enable_chunked_prefill": True},
        "priority": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "scheduling_policy": "priority",
        },
        "swap": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "preemption_mode": "swap",
            "num_cpu_blocks": 100,
        },
        "chunked, swap": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "enable_chunked_prefill": True,
            "preemption_mode": "swap",
            "num_cpu_blocks": 100,
        },
        "chunked, pause": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "enable_chunked_prefill": True,
            "preemption": "pause",
        },
        "prefix caching": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "enable_prefix_caching": True,
        },
        "predicted ITL": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "enable_chunked_prefill": True,
            "prefill_pacing": PREDICTED_ITL,
        },
        "decodes first, skip, newest to the tail": {
            "max_num_seqs": NUM_SLOTS,
            "head_of_line": "skip",
            "max_num_batched_tokens": TOKEN_BUDGET,
            "step_composition": "decodes_first",
            "victim": "newest",
            "victim_goes_to": "tail",
        },
        "alternating, lowest priority, swap": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "step_composition": "alternating",
            "victim": "lowest_priority",
            "preemption": "swap",
            "num_cpu_blocks": 100,
        },
        "chunked, most blocks": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "enable_chunked_prefill": True,
            "victim": "most_blocks",
        },
        "few tokens, oldest": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": 4,
            "enable_chunked_prefill": True,
            "victim": "oldest",
        },
        "every fourth step": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "prefill_pacing": {"kind": "every_n_steps", "n": 4},
        },
    },
    "vtc": {
        "fcfs": {"running_max_req_size": NUM_SLOTS, "queue_order": {"kind": "fcfs"}},
        "paper": {"running_max_req_size": NUM_SLOTS, "queue_order": {"kind": "vtc"}},
        "predicted": {"running_max_req_size": NUM_SLOTS, "queue_order": {"kind": "vtc_len_predict"}},
        "round robin": {"running_max_req_size": NUM_SLOTS, "queue_order": {"kind": "mdrr_fair", "quantum": 30.0}},
        "quotas": {"running_max_req_size": NUM_SLOTS, "queue_order": {"kind": "quotas", "classes": {"all": HALF}}},
        "aging": {"running_max_req_size": NUM_SLOTS, "queue_order": {"kind": "priority_aging", "age_s": AGE_S}},
        "shortest rest": {"running_max_req_size": NUM_SLOTS, "queue_order": {"kind": "srpt", "prediction": NOISY}},
    },
    "fastserve": {
        "fcfs": {"max_batch_size": NUM_SLOTS, "scheduler": "fcfs"},
        "srpt": {"max_batch_size": NUM_SLOTS, "scheduler": "srpt"},
        "mlfq": {"max_batch_size": NUM_SLOTS, "scheduler": "mlfq"},
        "skip-join, offloading ahead": {
            "max_batch_size": NUM_SLOTS,
            "proactive_offloading": True,
            "starvation_period": 20,
            "starvation_threshold_s": 0.02,
        },
    },
    "vllm-v1": {
        "async": {"max_num_seqs": NUM_SLOTS, "max_num_batched_tokens": TOKEN_BUDGET},
        "sync": {"max_num_seqs": NUM_SLOTS, "max_num_batched_tokens": TOKEN_BUDGET, "async_scheduling": False},
        "swap": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "async_scheduling": False,
            "enable_prefix_caching": False,
            "preemption": "swap",
        },
        "pause": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "async_scheduling": False,
            "preemption": "pause",
        },
        "reject": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "async_scheduling": False,
            "preemption": "reject",
        },
        "fair, every third step": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "queue_order": {"kind": "vtc"},
            "prefill_pacing": {"kind": "every_n_steps", "n": 3},
        },
        "predicted ITL, async": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "prefill_pacing": PREDICTED_ITL,
        },
        "levels": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "async_scheduling": False,
            "queue_order": LEVELS,
        },
        "drops late": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "async_scheduling": False,
            "queue_order": DROPS_LATE,
        },
        "skip, newest, in order": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "head_of_line": "skip",
            "victim": "newest",
            "victim_goes_to": "arrival_order",
        },
        "oldest, to the tail": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "victim": "oldest",
            "victim_goes_to": "tail",
        },
        "fewest outputs, reject": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "async_scheduling": False,
            "victim": "fewest_outputs",
            "preemption": "reject",
        },
        "most blocks, nothing reserved": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": 9,
            "scheduler_reserve_full_isl": False,
            "victim": "most_blocks",
        },
        "lowest priority, swap": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "async_scheduling": False,
            "enable_prefix_caching": False,
            "victim": "lowest_priority",
            "preemption": "swap",
        },
        "0.9, priority": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "vllm_version": "0.9.2",
            "scheduling_policy": "priority",
        },
        "0.11, itself": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "vllm_version": "0.11.2",
            "victim": "itself",
        },
        "0.11, no prefix caching": {
            "max_num_seqs": NUM_SLOTS,
            "max_num_batched_tokens": TOKEN_BUDGET,
            "vllm_version": "0.11.2",
            "enable_prefix_caching": False,
        },
    },
}
"""Policy -> name -> options."""
CASES = [(policy, variant) for policy in POLICIES for variant in VARIANTS.get(policy, {"defaults": {}})]
SLOT_OPTIONS = ("max_batch_size", "max_num_seqs", "running_max_req_size")

MAX_MODEL_LEN = 40
BLOCK_SIZE = 4
POOLS = {"ample": 1000, "tight": 14}
"""Blocks. The longest request takes 10 of the tight pool, so that pairs of them do not fit."""
COST = LinearOptions(
    kind="linear",
    base_ms=1.0,
    per_decode_us=50.0,
    per_prefill_token_us=100.0,
    per_context_token_ns=300.0,
    per_prefill_pair_ns=200.0,
    host_us=20.0,
)


def columns(num_requests, seed=0, **given):
    """Traffic of one class; what is not given has harmless values."""
    rng = np.random.default_rng(seed)
    nobody = np.full(num_requests, NEVER, dtype=np.int64)
    output_tokens = given.get("output_tokens", rng.integers(1, 13, num_requests))
    traffic = Traffic(
        class_names=("all",),
        pools=(ClientPool(),),
        class_index=np.zeros(num_requests, dtype=np.int64),
        arrival_ns=np.zeros(num_requests, dtype=np.int64),
        think_ns=np.zeros(num_requests, dtype=np.int64),
        prompt_tokens=rng.integers(1, 26, num_requests),
        output_tokens=output_tokens,
        max_tokens=output_tokens,
        priority=rng.integers(0, 3, num_requests),
        cancel_after_ns=nobody,
        cancel_after_tokens=nobody,
        leaves_at_deadline=np.zeros(num_requests, dtype=np.bool_),
    )
    return replace(traffic, **given)


NUM_REQUESTS = 61
"""No multiple of any batch, so that the last one is not full."""
AFTER_THINKING = {
    "arrival_ns": np.full(NUM_REQUESTS, NEVER, dtype=np.int64),
    "think_ns": np.random.default_rng(3).integers(0, 9 * NS_PER_MS, NUM_REQUESTS),
    "pools": (ClientPool(num_clients=6),),
}


def poisson(rate_per_ms=0.15, seed=1):
    gaps_ns = np.random.default_rng(seed).exponential(NS_PER_MS / rate_per_ms, NUM_REQUESTS)
    return np.cumsum(gaps_ns).astype(np.int64)


def some(values, seed):
    """A value for about every second request, NEVER for the others."""
    return np.where(np.random.default_rng(seed).random(NUM_REQUESTS) < 0.5, values, NEVER)


def patience_ns(seed=2):
    return some(np.random.default_rng(seed).integers(0, 40 * NS_PER_MS, NUM_REQUESTS), seed)


def traffic_of(**given):
    return columns(NUM_REQUESTS, **given)


def drawn(**fields):
    """Traffic as a scenario describes it."""
    poisson = {"kind": "poisson", "rate_per_s": 150}
    classes = [TrafficClass.model_validate({"name": "all", "arrivals": poisson, **fields})]
    return draw_traffic(classes, arrivals=None, num_requests=NUM_REQUESTS, duration_ns=None, seed=6, folder=Path())


def up_to(high):
    return {"kind": "uniform", "low": 1, "high": high}


CONVERSATION = {
    "conversation": {"turns": up_to(6), "think_time_s": {"kind": "uniform", "low_s": 0, "high_s": 0.009}},
    "prefix": {"groups": 2, "tokens": 5},
    "cancel": {"kind": "after_tokens", "probability": 0.1, "tokens": 2},
    "prompt_tokens": up_to(5),
    "output_tokens": up_to(7),
}
"""Some conversations outgrow MAX_MODEL_LEN and end early."""


TRAFFIC = {
    "poisson": traffic_of(arrival_ns=poisson()),
    "all at 0": traffic_of(),
    "closed loop": traffic_of(**AFTER_THINKING),
    "few connections": traffic_of(
        arrival_ns=poisson(), cancel_after_ns=patience_ns(), pools=(ClientPool(max_connections=3),)
    ),
    "leaves after a time": traffic_of(arrival_ns=poisson(), cancel_after_ns=patience_ns()),
    "two clients": traffic_of(
        class_names=("all", "other"),
        pools=(ClientPool(), ClientPool()),
        class_index=np.random.default_rng(7).integers(0, 2, NUM_REQUESTS),
        arrival_ns=poisson(),
        cancel_after_ns=patience_ns(),
    ),
    "leaves at a deadline": traffic_of(
        arrival_ns=poisson(), cancel_after_ns=patience_ns(), leaves_at_deadline=np.ones(NUM_REQUESTS, dtype=np.bool_)
    ),
    "leaves after tokens": traffic_of(
        arrival_ns=poisson(), cancel_after_tokens=some(np.arange(NUM_REQUESTS) % 5 + 1, seed=4)
    ),
    "stops early": traffic_of(arrival_ns=poisson(), max_tokens=np.full(NUM_REQUESTS, 15, dtype=np.int64)),
    "some never fit": traffic_of(
        prompt_tokens=np.random.default_rng(5).integers(20, 60, NUM_REQUESTS), **AFTER_THINKING
    ),
    "common prefixes": drawn(
        prefix={"groups": 3, "tokens": up_to(14)}, prompt_tokens=up_to(12), output_tokens=up_to(12)
    ),
    "conversations": drawn(**CONVERSATION),
    "conversations in a closed loop": drawn(
        **CONVERSATION, arrivals={"kind": "closed_loop", "num_clients": 6, "think_time_s": 0.004}
    ),
}


@dataclass(frozen=True)
class Run:
    policy: Policy
    options: dict[str, object]
    traffic: Traffic
    tables: Tables

    @property
    def rows(self):
        """Rows of the traffic that became requests, in order: those of the requests table."""
        return self.tables.requests["request"]

    @property
    def asked(self):
        """Tokens of the longest answer that each request may get."""
        asked = np.minimum(self.traffic.output_tokens, self.traffic.max_tokens)
        longest = MAX_MODEL_LEN + self.policy.longest_overrun
        return np.minimum(asked, longest - self.traffic.prompt_tokens)[self.rows]

    def outcomes(self):
        return Counter(Outcome(value) for value in self.tables.requests["outcome"])


def policy_of(name, options, num_gpu_blocks, class_names, cost=COST):
    cls = POLICIES.load(name)
    by_token = cls.Options.model_fields["block_size"].default == 1
    block_size = 1 if by_token else BLOCK_SIZE
    limits = EngineLimits(MAX_MODEL_LEN, block_size, num_gpu_blocks * BLOCK_SIZE // block_size, class_names)
    predicts = Linear(cost)
    limits = replace(limits, predictor=StepPredictor(predicts.price, predicts.host_ns))
    return cls.build(cls.Options(policy=name, **options), limits)


def priced(policy, cost=COST):
    """The cost model and the recorder that a policy needs."""
    model = Linear(cost)
    return (InPasses(model), PassRecorder()) if policy.runs_in_passes else (model, Recorder())


def simulate(name, options, num_gpu_blocks, traffic, cost=COST, aborts=True, until_ns=None, macro_steps=True):
    policy = policy_of(name, options, num_gpu_blocks, traffic.class_names, cost)
    clock, (model, recorder) = Clock(), priced(policy, cost)
    engine = Engine(clock, EngineCore(policy), model, recorder, aborts=aborts, macro_steps=macro_steps)
    clients = Clients(clock, engine, recorder, traffic)
    clients.start()
    clock.run(until_ns)
    clients.stop()
    return Run(policy, options, traffic, recorder.tables())


def options_of(case):
    return VARIANTS.get(case[0], {}).get(case[1], {})


@functools.cache
def run_of(case, pool, traffic, aborts=True):
    return simulate(case[0], options_of(case), POOLS[pool], TRAFFIC[traffic], aborts=aborts)


def each_of(cases):
    return pytest.mark.parametrize("case", cases, ids=[": ".join(case) for case in cases])


def cases_whose_policy(applies):
    """Those that a law is about which holds for some policies only, so that the others need not be skipped."""
    return [case for case in CASES if applies(policy_of(case[0], options_of(case), POOLS["ample"], ("all",)))]


every_case = each_of(CASES)
every_pool = pytest.mark.parametrize("pool", POOLS)
every_traffic = pytest.mark.parametrize("traffic", TRAFFIC)
abort_or_not = pytest.mark.parametrize("aborts", [True, False], ids=["aborts", "computes on"])


def everywhere(test):
    return every_case(every_pool(every_traffic(test)))


def token_times(tables, request):
    """When each token of a request existed, in order of its segments."""
    iterations, segments = tables.iterations, tables.segments
    tick_end_ns = [iterations["end_ns"][(iterations["lane"] == i) & (iterations["num_decode"] > 0)] for i in range(4)]
    times = []
    for i in np.flatnonzero(segments["request"] == request):
        if segments["iteration"][i] != NEVER:
            times.append(int(iterations["end_ns"][segments["iteration"][i]]))
        if segments["num_ticks"][i]:
            first = segments["first_tick"][i]
            times.extend(tick_end_ns[segments["lane"][i]][first : first + segments["num_ticks"][i]].tolist())
    return times


@everywhere
def test_requests_are_conserved(case, pool, traffic):
    run = run_of(case, pool, traffic)
    assert run.rows.tolist() == rows_that_arrive(run)
    assert run.outcomes()[Outcome.UNFINISHED] == 0


def rows_that_arrive(run):
    """All rows but the turns of conversations that follow one without its whole answer."""
    traffic, requests = run.traffic, run.tables.requests
    rows = np.arange(len(traffic))
    if traffic.has_next_turn is None:
        return rows.tolist()
    whole = np.minimum(traffic.output_tokens, traffic.max_tokens)[run.rows]
    is_answered = np.zeros(len(traffic), dtype=np.bool_)
    is_answered[run.rows] = (requests["outcome"] == Outcome.FINISHED) & (requests["output_tokens"] == whole)
    arrives = np.append(True, is_answered[:-1] | ~traffic.has_next_turn[:-1])
    return rows[arrives].tolist()


@every_case
def test_a_run_that_is_cut_counts_who_was_in_the_system(case):
    traffic = TRAFFIC["poisson"]
    until_ns = int(traffic.arrival_ns[30])
    run = simulate(case[0], options_of(case), POOLS["tight"], traffic, until_ns=until_ns)
    requests = run.tables.requests
    assert requests["request"].tolist() == list(range(31))
    assert run.outcomes()[Outcome.UNFINISHED] >= run.policy.num_unfinished > 0
    assert (requests["released_ns"][requests["outcome"] == Outcome.UNFINISHED] == NEVER).all()


@everywhere
def test_kv_is_free_after_the_last_request(case, pool, traffic):
    policy = run_of(case, pool, traffic).policy
    policy.check_integrity()
    assert (policy.free_blocks, policy.num_unfinished, policy.num_waiting) == (policy.usable_blocks, 0, 0)
    assert (policy.running(), policy.waiting()) == ([], [])


@everywhere
def test_clock_is_monotone_and_the_device_does_one_thing_at_a_time(case, pool, traffic):
    run = run_of(case, pool, traffic)
    iterations = run.tables.iterations
    assert (iterations["start_ns"] < iterations["end_ns"]).all()
    previous = "end_ns" if run.policy.num_stages == 1 else "start_ns"  # stages follow each other
    assert (iterations["start_ns"][1:] >= iterations[previous][:-1]).all()


@everywhere
def test_causes_come_before_effects(case, pool, traffic):
    tables = run_of(case, pool, traffic).tables
    requests, iterations = tables.requests, tables.iterations
    marks = ["arrival_ns", "queued_ns", "admitted_ns", "first_token_ns", "finished_ns"]
    for earlier, later in itertools.pairwise(marks):
        happened = requests[later] != NEVER
        assert (requests[earlier][happened] != NEVER).all()
        assert (requests[earlier][happened] <= requests[later][happened]).all()
    ended = (requests["finished_ns"] != NEVER) & (requests["outcome"] == Outcome.FINISHED)
    assert (requests["finished_ns"][ended] <= requests["released_ns"][ended]).all()
    assert (requests["admitted_ns"] < requests["first_token_ns"])[requests["first_token_ns"] != NEVER].all()
    for mark, edge in [("admitted", "start_ns"), ("first_token", "end_ns"), ("finished", "end_ns")]:
        happened = requests[f"{mark}_iteration"] != NEVER
        assert np.array_equal(happened, requests[f"{mark}_ns"] != NEVER)
        at = requests[f"{mark}_iteration"][happened]
        assert np.array_equal(iterations[edge][at], requests[f"{mark}_ns"][happened])


@everywhere
def test_the_causes_of_every_latency_add_up_to_it(case, pool, traffic):
    run = run_of(case, pool, traffic)
    tables, streams = run.tables, run.policy.streams_answers
    causes = Causes(tables, work_shares(tables, priced(run.policy)[0]))
    latency = request_latencies(tables.requests, int(tables.iterations["end_ns"].max()), streams)["ttft"]
    rows = np.flatnonzero(latency.is_known)
    tokens = TokenTimes(tables)
    gaps = tokens.gaps(np.ones(len(run.rows), dtype=np.bool_))
    for whole_ns, parts in (
        (latency.values_ns[rows], causes.ttft(rows, streams)),
        (gaps.values_ns, causes.itl(gaps, tokens)),
    ):
        assert np.array_equal(sum(parts.values(), np.zeros_like(whole_ns)), whole_ns)
        assert all(part_ns.min() >= 0 for part_ns in parts.values())


@everywhere
def test_limits_are_never_exceeded(case, pool, traffic):
    run = run_of(case, pool, traffic)
    iterations = run.tables.iterations
    num_slots = next((run.options[name] for name in SLOT_OPTIONS if name in run.options), 10**9)
    budget = run.options.get("max_num_batched_tokens", 10**9)
    assert iterations["num_running"].max() <= num_slots * run.options.get("n_workers", 1)
    assert (iterations["num_decode"] + iterations["prefill_tokens"]).max() <= budget
    assert (iterations["num_decode"] + iterations["num_prefills"] <= iterations["num_running"]).all()
    assert iterations["used_blocks"].max() <= run.policy.usable_blocks
    if not run.tables.requests["cached_prompt_tokens"].any():  # a token that several share counts for each
        assert (iterations["live_tokens"] <= iterations["used_blocks"] * BLOCK_SIZE).all()
    assert (iterations["num_new_blocks"] <= iterations["used_blocks"]).all()
    assert (iterations["num_padding_tokens"] < iterations["num_decode"] + iterations["prefill_tokens"]).all()
    for name, values in iterations.items():
        assert values.min() >= 0, name


@everywhere
def test_tokens_of_a_request_come_one_after_the_other(case, pool, traffic):
    tables = run_of(case, pool, traffic).tables
    requests = tables.requests
    for i, request in enumerate(requests["request"]):
        times = token_times(tables, request)
        assert times == sorted(set(times))
        assert (times[0] if times else NEVER) == requests["first_token_ns"][i]
        if requests["finished_ns"][i] != NEVER:
            assert times[-1] == requests["finished_ns"][i]
        if requests["outcome"][i] == Outcome.FINISHED:
            assert len(times) == requests["output_tokens"][i]
        else:
            assert len(times) >= requests["output_tokens"][i]


@everywhere
@abort_or_not
def test_answers_have_the_length_that_their_client_asked_for(case, pool, traffic, aborts):
    run = run_of(case, pool, traffic, aborts)
    requests = run.tables.requests
    asked = run.asked
    finished = requests["outcome"] == Outcome.FINISHED
    assert np.array_equal(requests["output_tokens"][finished], asked[finished])
    assert (requests["output_tokens"][~finished] <= np.maximum(asked, 0)[~finished]).all()
    if not run.policy.streams_answers:
        assert (requests["output_tokens"][~finished] == 0).all()
    cancel_after_tokens = run.traffic.cancel_after_tokens[run.rows]
    leavers = (cancel_after_tokens != NEVER) & (requests["outcome"] == Outcome.CANCELLED)
    assert np.array_equal(requests["output_tokens"][leavers], cancel_after_tokens[leavers])


@everywhere
def test_every_token_is_computed_once_and_again_only_after_a_preemption(case, pool, traffic):
    run = run_of(case, pool, traffic)
    requests, chunks, segments = run.tables.requests, run.tables.chunks, run.tables.segments
    size = len(run.traffic)
    computed = np.bincount(chunks["request"], chunks["num_tokens"], size)[run.rows]
    computed += np.bincount(segments["request"], segments["num_ticks"], size)[run.rows]
    needed = requests["prompt_tokens"] + requests["output_tokens"] - 1
    finished = requests["outcome"] == Outcome.FINISHED
    assert (computed >= needed - requests["cached_prompt_tokens"])[finished & (requests["num_preemptions"] == 0)].all()
    assert (computed <= needed + requests["recomputed_tokens"])[finished].all()


@everywhere
def test_each_decode_row_is_somebodys_token_or_padding(case, pool, traffic):
    run = run_of(case, pool, traffic)
    iterations, segments = run.tables.iterations, run.tables.segments
    for lane in np.unique(iterations["lane"]):
        ticks = (iterations["lane"] == lane) & (iterations["num_decode"] > 0)
        here = (segments["lane"] == lane) & (segments["num_ticks"] > 0)
        first, num_ticks = segments["first_tick"][here], segments["num_ticks"][here]
        size = int(ticks.sum()) + 1
        joining = np.bincount(first, minlength=size) - np.bincount(first + num_ticks, minlength=size)
        num_streams = np.cumsum(joining)[:-1]
        rows = (iterations["num_decode"] - iterations["num_padding_tokens"])[ticks]
        # A row in flight for somebody who has left meanwhile, or whose answer had ended, is nobody's. So is, in a
        # pipeline, the one of a victim.
        assert (num_streams <= rows).all()
        if traffic in ("poisson", "all at 0", "closed loop") and run.policy.num_stages == 1:
            assert np.array_equal(num_streams, rows)


IN_ORDER_OF_ARRIVAL = cases_whose_policy(lambda policy: policy.follows_arrival_order)
TIMELESS = cases_whose_policy(lambda policy: not policy.reads_clock)
"""They decide alike however long steps take."""


@each_of(IN_ORDER_OF_ARRIVAL)
@every_pool
@every_traffic
def test_nobody_is_admitted_before_an_earlier_one(case, pool, traffic):
    run = run_of(case, pool, traffic)
    requests = run.tables.requests
    admitted = np.flatnonzero(requests["admitted_iteration"] != NEVER)
    by_queue = admitted[np.lexsort((admitted, requests["queued_ns"][admitted]))]
    order = requests["admitted_iteration"][by_queue]
    assert (order[:-1] <= order[1:]).all()


def cases_with_order(kind):
    return [case for case in CASES if options_of(case).get("queue_order", {}).get("kind") == kind]


def first_admissions(run):
    """Of those who were admitted: their rows, when that was planned, and who of them (column) passed whom (row)."""
    requests = run.tables.requests
    rows = np.flatnonzero(requests["admitted_iteration"] != NEVER)
    iteration = requests["admitted_iteration"][rows]
    planned_ns = requests["admitted_ns"][rows] - run.tables.iterations["host_ns"][iteration]
    return rows, planned_ns, (iteration[:, None] > iteration) & (requests["queued_ns"][rows][:, None] < planned_ns)


@each_of(cases_with_order("mlfq"))
@every_pool
@every_traffic
def test_who_starves_is_admitted_first_and_then_who_is_in_the_highest_level(case, pool, traffic):
    """By first admissions: among those who starve, and within a level, earlier ones are not passed."""
    run = run_of(case, pool, traffic)
    requests = run.tables.requests
    rows, planned_ns, is_passed = first_admissions(run)
    prefill_ms = LEVELS["profile_base_ms"] + LEVELS["profile_prefill_ms"] * requests["prompt_tokens"][rows]
    level = np.maximum(0, np.ceil(np.log2(prefill_ms / LEVELS["quantum_ms"])))
    queued_ns = requests["queued_ns"][rows]
    starves = (planned_ns - queued_ns[:, None] >= to_ns(STARVES_S)) & (level[:, None] > 0)
    age, rank = (np.argsort(np.lexsort((rows, queued_ns, *keys))) for keys in ((), (level,)))
    may_pass = np.where(starves, age < age[:, None], rank < rank[:, None])
    may_pass = np.where(starves == starves.diagonal(), may_pass, starves.diagonal())
    assert may_pass[is_passed].all()


@each_of([case for case in cases_with_order("edf") if options_of(case)["queue_order"] == DROPS_LATE])
@every_pool
@every_traffic
def test_who_is_not_admitted_when_it_is_due_is_turned_away_then(case, pool, traffic):
    requests = run_of(case, pool, traffic).tables.requests
    due_ns = requests["arrival_ns"] + to_ns(DROPS_LATE["ttft_ms"] / 1000)
    admitted, dropped = requests["admitted_ns"] != NEVER, requests["turned_away_by"] > NEVER_FITS
    planned_by_ns = due_ns + to_ns(COST.host_us / 1e6)
    assert (requests["admitted_ns"] < planned_by_ns)[admitted].all()
    assert (requests["outcome"][dropped] == Outcome.TIMED_OUT).all()
    assert not (admitted & dropped).any()
    dropped_ns = np.maximum(due_ns, requests["queued_ns"])[dropped]
    assert np.array_equal(requests["cancelled_ns"][dropped], dropped_ns)


@each_of(cases_with_order("priority_aging"))
@every_pool
@every_traffic
def test_with_aging_nobody_waits_for_those_who_come_much_later(case, pool, traffic):
    """Whoever is passed had been there for less than the age of the difference in priority."""
    run = run_of(case, pool, traffic)
    requests, priority = run.tables.requests, run.traffic.priority[run.rows]
    admitted, _, is_passed = first_admissions(run)
    arrival_ns, levels = requests["arrival_ns"][admitted], priority[admitted]
    head_start_ns = arrival_ns - arrival_ns[:, None]
    allowed_ns = (levels[:, None] - levels) * to_ns(AGE_S)
    assert (head_start_ns <= allowed_ns)[is_passed & (requests["num_preemptions"][admitted] == 0)[:, None]].all()


def answered_ns(run):
    """When each client had its whole answer, was refused or left."""
    requests = run.tables.requests
    ends = requests["finished_ns" if run.policy.streams_answers else "released_ns"]
    gone_ns = np.where(requests["released_ns"] == NEVER, requests["queued_ns"], requests["released_ns"])
    ends = np.where(requests["outcome"] == Outcome.REJECTED, gone_ns, ends)
    return np.where(requests["cancelled_ns"] != NEVER, requests["cancelled_ns"], ends)


@every_case
@every_pool
def test_closed_loop_clients_send_when_they_have_thought_about_an_answer(case, pool):
    run = run_of(case, pool, "closed loop")
    num_clients = run.traffic.pools[0].num_clients
    started_thinking_ns = np.sort(run.tables.requests["arrival_ns"] - run.traffic.think_ns)
    assert (started_thinking_ns[:num_clients] == 0).all()
    assert np.array_equal(started_thinking_ns[num_clients:], np.sort(answered_ns(run))[:-num_clients])


@every_case
@every_pool
@pytest.mark.parametrize("traffic", ["conversations", "conversations in a closed loop"])
def test_a_turn_is_sent_when_its_client_has_thought_about_the_answer_before(case, pool, traffic):
    run = run_of(case, pool, traffic)
    later = np.flatnonzero(np.append(False, run.traffic.has_next_turn)[run.rows])
    arrival_ns = run.tables.requests["arrival_ns"][later]
    assert np.array_equal(arrival_ns, answered_ns(run)[later - 1] + run.traffic.think_ns[run.rows[later]])


@every_case
@every_pool
def test_connections_are_held_from_the_engine_queue_to_the_answer(case, pool):
    run = run_of(case, pool, "few connections")
    queued_ns, ends_ns = run.tables.requests["queued_ns"], answered_ns(run)
    was_sent = queued_ns != NEVER
    events = [(time, +1) for time in queued_ns[was_sent]] + [(time, -1) for time in ends_ns[was_sent]]
    num_connected = np.cumsum([change for _, change in sorted(events)])
    assert num_connected.max() == run.traffic.pools[0].max_connections


@every_case
@every_pool
@every_traffic
def test_same_traffic_gives_the_same_bytes(case, pool, traffic):
    first = run_of(case, pool, traffic).tables
    second = simulate(case[0], options_of(case), POOLS[pool], TRAFFIC[traffic]).tables
    for name in ("iterations", "chunks", "requests", "segments"):
        one, other = getattr(first, name), getattr(second, name)
        assert {column: values.tobytes() for column, values in one.items()} == {
            column: values.tobytes() for column, values in other.items()
        }


LONG_ANSWERS = {
    name: traffic_of(output_tokens=np.random.default_rng(9).integers(1, 20, NUM_REQUESTS), **given)
    for name, given in {
        "poisson": {"arrival_ns": poisson()},
        "leaves after a time": {"arrival_ns": poisson(), "cancel_after_ns": patience_ns()},
    }.items()
}
"""So that many steps in a row change nothing."""


@every_case
@every_pool
@pytest.mark.parametrize("traffic", LONG_ANSWERS)
def test_steps_that_are_advanced_at_once_give_the_tables_of_single_ones(case, pool, traffic):
    given = (case[0], options_of(case), POOLS[pool], LONG_ANSWERS[traffic])
    many, single = simulate(*given).tables, simulate(*given, macro_steps=False).tables
    for name in ("iterations", "chunks", "requests", "segments"):
        one, other = getattr(many, name), getattr(single, name)
        assert {column: values.tolist() for column, values in one.items()} == {
            column: values.tolist() for column, values in other.items()
        }


CHEAPER = [
    {"base_ms": 0.5},
    {"per_decode_us": 0.0},
    {"per_prefill_token_us": 20.0},
    {"per_context_token_ns": 0.0, "per_prefill_pair_ns": 0.0},
    {"host_us": 0.0},
]


def makespan_ns(run):
    return int(run.tables.iterations["end_ns"][-1])


@each_of(TIMELESS)
@every_pool
@pytest.mark.parametrize("cheaper", CHEAPER, ids=[" ".join(cheaper) for cheaper in CHEAPER])
def test_cheaper_steps_never_finish_later(case, pool, cheaper):
    # At most the first plan reads the clock: everybody has arrived, and a batch that is full waits for nobody.
    run = run_of(case, pool, "all at 0")
    cost = COST.model_copy(update=cheaper)
    faster = simulate(case[0], options_of(case), POOLS[pool], TRAFFIC["all at 0"], cost=cost)
    assert makespan_ns(faster) < makespan_ns(run)


OTHER_STEPS = [
    ("sarathi", "dynamic chunks"),
    ("sarathi", "pipeline"),
    ("sarathi", "pipeline, itself"),
    ("vllm-v0", "few tokens"),
    ("vllm-v0", "few tokens, oldest"),
    ("vllm-v0", "priority"),
    ("vllm-v0", "predicted ITL"),
    ("sarathi-vllm", "predicted ITL"),
    ("vllm-v1", "predicted ITL, async"),
    ("orca", "drops late"),
    ("vllm-v1", "drops late"),
    ("vllm-v1", "most blocks, nothing reserved"),
]
"""Their steps do not hold the prompts of a whole batch, or overlap, or the batch is broken up by force or small, or
late requests are turned away."""
SAME_SLOTS = [case for case in CASES if NUM_SLOTS in options_of(case).values() and case not in OTHER_STEPS]


@pytest.mark.parametrize("num_batches", [1, 5])
def test_static_and_continuous_are_equal_when_all_requests_are(num_batches):
    num_requests, prompt_tokens = NUM_SLOTS * num_batches, TOKEN_BUDGET // NUM_SLOTS
    traffic = columns(
        num_requests,
        prompt_tokens=np.full(num_requests, prompt_tokens, dtype=np.int64),
        output_tokens=np.full(num_requests, 6, dtype=np.int64),
    )
    cost = COST.model_copy(update={"host_us": 0.0})  # which an engine that plans ahead would hide
    makespans = {c: makespan_ns(simulate(c[0], options_of(c), 1000, traffic, cost=cost)) for c in SAME_SLOTS}
    assert len({policy for policy, _ in makespans}) >= 3
    assert set(makespans.values()) == {makespans["orca", "prompt + max_tokens"]}


def test_traffic_and_pools_make_everything_happen():
    """The laws above are about something: each kind of event occurs in the runs that they read."""
    seen = Counter()
    for case in CASES:
        for traffic in TRAFFIC:
            run = run_of(case, "tight", traffic)
            seen.update(run.outcomes())
            seen["preempted"] += run.tables.requests["num_preemptions"].sum()
            seen["cached"] += run.tables.requests["cached_prompt_tokens"].sum()
            seen["turns that never came"] += len(run.traffic) - len(run.rows)
            seen["padding"] += run.tables.iterations["num_padding_tokens"].sum()
            seen["chunked"] += (run.tables.chunks["context"] > 0).sum()
            seen.update(f"blocked by {value}" for value in run.tables.iterations["blocked_by"])
            seen["left in batch"] += (run.tables.requests["finished_ns"] != NEVER)[
                run.tables.requests["outcome"] == Outcome.CANCELLED
            ].sum()
    expected = [outcome for outcome in Outcome if outcome is not Outcome.UNFINISHED]
    expected += ["preempted", "cached", "turns that never came", "padding", "chunked", "left in batch"]
    expected += [f"blocked by {value}" for value in range(5)]
    assert [event for event in expected if not seen[event]] == []
