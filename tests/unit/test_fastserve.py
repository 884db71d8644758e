"""FastServe: which queue a request joins, sinks to and is promoted to, and what happens without blocks."""

import pytest

from sim.clock import NS_PER_MS
from sim.errors import ScenarioError
from sim.policies.base import EngineLimits
from sim.policies.fastserve import FastServe
from sim.request import Request, Status


def engine(num_gpu_blocks=100, block_size=16, max_model_len=5000, **options):
    return FastServe.build(
        FastServe.Options(policy="fastserve", **options), EngineLimits(max_model_len, block_size, num_gpu_blocks)
    )


def levels(policy):
    return [(r.index, r.policy_state.level) for r in policy.waiting()]


def run(policy, arrivals, num_steps, pass_ms=5.0):
    """Indexes and tokens of each batch, and everybody's queue after it; each pass takes `pass_ms`."""
    log = []
    for step_number in range(num_steps):
        for r in arrivals.get(step_number, ()):
            policy.add(r)
        now_ns = round(step_number * pass_ms * NS_PER_MS)
        step = policy.plan(now_ns)
        batch = [(r.index, num_tokens) for r, num_tokens in policy.batch(step)]
        policy.update(step)
        policy.settle(now_ns + round(pass_ms * NS_PER_MS))
        policy.check_integrity()
        log.append((batch, levels(policy)))
    return log


@pytest.mark.parametrize(
    ("prompt_tokens", "level"), [(5, 0), (60, 0), (61, 1), (310, 2), (360, 2), (361, 3), (4096, 6), (4900, 6)]
)
def test_a_prompt_joins_the_first_queue_that_grants_its_prefill(prompt_tokens, level):
    """4 ms and 0.1 ms a token: 310 tokens take 35 ms, more than 10 and 20, so they skip to the queue with 40."""
    policy = engine()
    policy.add(Request(0, prompt_tokens, 10))
    assert levels(policy) == [(0, level)]


def test_without_skipping_everybody_joins_the_highest_queue():
    policy = engine(scheduler="mlfq")
    policy.add(Request(0, 310, 10))
    assert levels(policy) == [(0, 0)]


def test_short_requests_pass_a_long_one_that_sinks():
    """Whole log: 7 ms a pass, so whoever had two passes at the top sinks, and the last of a batch comes first."""
    long, short = Request(0, 40, 9), Request(1, 40, 2)
    assert run(engine(max_batch_size=1), {0: [long], 3: [short]}, 7, pass_ms=7) == [
        ([(0, 40)], [(0, 0)]),
        ([(0, 1)], [(0, 1)]),
        ([(0, 1)], [(0, 1)]),
        ([(1, 40)], [(1, 0), (0, 1)]),
        ([(1, 1)], [(0, 1)]),
        ([(0, 1)], [(0, 1)]),
        ([(0, 1)], [(0, 2)]),
    ]


def test_the_starving_are_promoted_and_those_who_never_ran_count_as_starving():
    long = Request(0, 200, 50)  # joins queue 2
    short = [Request(i, 10, 50) for i in range(1, 3)]
    log = run(engine(max_batch_size=1, starvation_period=6), {0: [long, *short]}, 7, pass_ms=4)
    assert log[4][1] == [(2, 0), (1, 1), (0, 2)]
    assert log[5][1] == [(0, 0), (2, 1), (1, 1)]
    assert log[6][0] == [(0, 200)]


def test_fcfs_swaps_out_the_last_who_comes_back_before_anybody_new():
    """Whole log: three blocks of four tokens; the second request gives way when the first needs its second block."""
    policy = engine(num_gpu_blocks=3, block_size=4, scheduler="fcfs")
    requests = [Request(0, 4, 3), Request(1, 5, 3), Request(2, 1, 1)]
    log, swaps = [], []
    for r in requests:
        policy.add(r)
    for _ in range(6):
        step = policy.plan(0)
        swaps.append([(s.request.index, s.is_out, s.num_blocks) for s in policy.swaps])
        log.append([(r.index, num_tokens) for r, num_tokens in policy.batch(step)])
        assert step.shape.num_swapped_blocks == sum(num_blocks for *_, num_blocks in swaps[-1])
        policy.update(step)
        policy.check_integrity()
    assert log == [[(0, 4), (1, 5)], [(0, 1)], [(0, 1)], [(2, 1), (1, 1)], [(1, 1)], []]
    assert swaps == [[], [(1, True, 2)], [], [(1, False, 2)], [], []]
    assert (policy.num_unfinished, policy.free_blocks, policy.kv.used_cpu_blocks) == (0, 3, 0)


def test_srpt_takes_those_with_the_fewest_tokens_to_come():
    policy = engine(scheduler="srpt", max_batch_size=1)
    log = run(policy, {0: [Request(0, 8, 9)], 2: [Request(1, 8, 3)]}, 6)
    assert [batch for batch, _ in log] == [[(0, 8)], [(0, 1)], [(1, 8)], [(1, 1)], [(1, 1)], [(0, 1)]]


def test_a_full_host_pool_is_reported_with_its_size():
    policy = engine(num_gpu_blocks=3, block_size=4, scheduler="fcfs", num_cpu_blocks=1)
    for r in (Request(0, 4, 3), Request(1, 5, 3)):
        policy.add(r)
    policy.update(policy.plan(0))
    with pytest.raises(ScenarioError) as caught:
        policy.plan(0)
    assert str(caught.value) == (
        "engine.num_cpu_blocks: 2 blocks of Request(1, 5+3) do not fit in host memory, which has 1 and 1 of them free."
        " Give the host more blocks: an engine stops here."
    )


def test_cancelling_frees_what_is_held_wherever_it_is():
    policy = engine(num_gpu_blocks=3, block_size=4, scheduler="fcfs")
    requests = [Request(0, 4, 8), Request(1, 5, 3), Request(2, 1, 1)]
    for r in requests:
        policy.add(r)
    policy.update(policy.plan(0))
    in_flight = policy.plan(0)
    assert [r.status for r in requests] == [Status.RUNNING, Status.PREEMPTED, Status.WAITING]
    for r in requests:
        assert policy.cancel(r)
    assert policy.update(in_flight).finished == []
    policy.check_integrity()
    assert (policy.num_unfinished, policy.free_blocks, policy.kv.used_cpu_blocks) == (0, 3, 0)


@pytest.mark.parametrize(
    ("given", "request_", "expected"),
    [
        ({"max_tokens_per_batch": 50}, (51, 1), "its prompt of 51 tokens exceeds max_tokens_per_batch 50"),
        ({"num_gpu_blocks": 4}, (60, 6), "it takes 5 KV blocks, those to be kept free included, of 4"),
        ({"num_gpu_blocks": 4}, (60, 5), None),
        (
            {"num_gpu_blocks": 11, "proactive_offloading": True, "max_batch_size": 8},
            (60, 5),
            "it takes 12 KV blocks, those to be kept free included, of 11",
        ),
        (
            {"max_model_len": 60},
            (60, 1),
            "its prompt of 60 tokens leaves no room for an answer within max_model_len 60",
        ),
    ],
)
def test_what_can_never_run(given, request_, expected):
    assert engine(**given).never_fits(Request(0, *request_)) == expected
