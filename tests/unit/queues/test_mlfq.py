"""Multi-level feedback as a queue order: joins, quanta and starvation worked out by hand, and whole runs."""

import pytest

from sim.clock import NS_PER_MS
from sim.queues.base import Setting
from sim.queues.mlfq import Mlfq, MlfqOptions
from sim.request import Request
from tests.unit.queues.small import simulate

QUANTUM_MS = 10
PER_TOKEN = {"profile_base_ms": 0.0, "profile_prefill_ms": 1.0}
"""A prompt token takes 1 ms."""


def queue(**options):
    return Mlfq.build(MlfqOptions(kind="mlfq", quantum_ms=float(QUANTUM_MS), **options), Setting(("all",)))


def request(index, prompt=1, output=1, **given):
    return Request(index, prompt, output, **given)


def serve(order, at_ms):
    """Indexes in the order in which all who wait are given away at a time."""
    out = []
    while (head := order.head(at_ms * NS_PER_MS)) is not None:
        order.take(head, at_ms * NS_PER_MS)
        out.append(head.index)
    assert len(order) == 0
    return out


PROMPTS = {0: 41, 1: 35, 2: 11, 3: 5, 4: 10, 5: 40}
"""By their prefills, in ms, they join the levels 3, 2, 1, 0, 0, 2, whose quanta are 80, 40, 20 and 10 ms."""


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"skip_join": True, **PER_TOKEN}, [3, 4, 2, 1, 5, 0]),
        ({"skip_join": True, "profile_base_ms": 6.0, "profile_prefill_ms": 1.0}, [2, 3, 4, 0, 1, 5]),
        ({"skip_join": True, "profile_base_ms": 0.0, "profile_prefill_ms": 0.0}, [0, 1, 2, 3, 4, 5]),
        (PER_TOKEN, [0, 1, 2, 3, 4, 5]),
    ],
    ids=["skip-join", "time beside tokens", "prefills in no time", "all in the highest"],
)
def test_a_request_joins_the_first_level_whose_quantum_holds_its_prefill(options, expected):
    order = queue(**options)
    for index, prompt in PROMPTS.items():
        order.add(request(index, prompt), 0)
    assert [r.index for r in order] == expected
    assert serve(order, 0) == expected


def run_for(order, target, start_ms, time_ns):
    order.take(target, start_ms * NS_PER_MS)
    order.put_back(target, start_ms * NS_PER_MS + time_ns)


def test_who_has_used_up_a_quantum_waits_in_front_of_the_next_level():
    order, [first, second, late] = queue(), [request(i) for i in range(3)]
    order.add(first, 0)
    order.add(second, 0)
    run_for(order, first, 0, 10 * NS_PER_MS)  # the whole quantum, and no more
    assert [r.index for r in order] == [0, 1]
    run_for(order, first, 20, 1)
    assert [r.index for r in order] == [1, 0]
    run_for(order, second, 30, 70 * NS_PER_MS)  # 10 + 20 of the levels 0 and 1, and the 40 of level 2
    assert [r.index for r in order] == [0, 1]
    run_for(order, first, 100, 20 * NS_PER_MS)  # 1 ns more than the 20 of level 1
    order.add(late, 130 * NS_PER_MS)
    assert [r.index for r in order] == [2, 0, 1]
    run_for(order, second, 130, 1)
    run_for(order, first, 140, 39 * NS_PER_MS)  # in front of level 2 and not of level 3, where the other one is
    assert serve(order, 200) == [2, 0, 1]


def test_who_starves_comes_before_all_levels_and_the_longest_first():
    order = queue(skip_join=True, starvation_threshold_s=0.1, **PER_TOKEN)
    low, middle, high, other = request(0, 35), request(1, 15), request(2, 1), request(3, 1)
    order.add(low, 0)
    order.add(middle, 50 * NS_PER_MS)
    order.add(high, 60 * NS_PER_MS)
    before_ns = 100 * NS_PER_MS - 1
    assert (order.head(before_ns), order.next_change_ns(before_ns)) == (high, before_ns + 1)
    assert (order.head(before_ns + 1), order.next_change_ns(before_ns + 1)) == (low, None)
    order.head(150 * NS_PER_MS)
    order.add(other, 150 * NS_PER_MS)
    assert [r.index for r in order] == [0, 1, 2, 3]
    run_for(order, low, 150, 10 * NS_PER_MS)  # a fresh quantum of the highest level
    assert [r.index for r in order] == [1, 0, 2, 3]
    run_for(order, low, 160, 1)
    assert [r.index for r in order] == [1, 2, 3, 0]
    assert serve(order, 260) == [1, 2, 3, 0]


def test_a_wait_that_only_an_attempt_interrupts_goes_on():
    """Request-level batching takes requests out and puts them back at once while they wait for company."""
    order = queue(skip_join=True, starvation_threshold_s=0.1, **PER_TOKEN)
    low, high = request(0, 35), request(1, 1)
    order.add(low, 0)
    order.add(high, 0)
    run_for(order, low, 90, 0)
    assert order.next_change_ns(90 * NS_PER_MS) == 100 * NS_PER_MS
    assert order.head(100 * NS_PER_MS) is low
    run_for(order, low, 100, 0)
    assert serve(order, 100) == [0, 1]


def test_without_a_threshold_nobody_is_brought_to_the_top():
    order = queue(skip_join=True, starvation_threshold_s=None, **PER_TOKEN)
    order.add(request(0, 35), 0)
    order.add(request(1, 1), 10**17)
    assert (order.head(10**18).index, order.next_change_ns(0)) == (1, None)


def test_who_leaves_is_forgotten():
    order = queue(skip_join=True, starvation_threshold_s=0.1, **PER_TOKEN)
    gone, stays, runs = request(0, 35), request(1, 35), request(2, 1)
    for waiting in (gone, stays, runs):
        order.add(waiting, 0)
    order.take(runs, 0)
    order.remove(gone)
    order.released(runs, 1)
    assert order._job_of.keys() == {stays}
    assert serve(order, 100) == [1]


def steps(tables):
    """Of each step: start and end, ms, decodes and prompt tokens."""
    columns = ("start_ns", "end_ns", "num_decode", "prefill_tokens")
    rows = zip(*(tables.iterations[name].tolist() for name in columns), strict=True)
    return [(start_ns / NS_PER_MS, end_ns / NS_PER_MS, *rest) for start_ns, end_ns, *rest in rows]


def two_that_outgrow_the_pool():
    """At 20 ms both hold 20 tokens after four decodes, and the second is preempted; meanwhile a third one has come."""
    return [Request(0, 8, 12), Request(1, 4, 10), Request(2, 2, 2, arrival_ns=19 * NS_PER_MS)]


BEFORE = [(0, 12, 0, 12), *[(start, start + 2, 2, 0) for start in (12, 14, 16, 18)], (20, 21, 1, 0)]
SYNC = {"async_scheduling": False, "enable_prefix_caching": False, "max_num_seqs": 3, "max_num_batched_tokens": 32}


def test_a_preempted_request_comes_back_at_the_level_that_it_sank_to():
    first_come = simulate("vllm-v1", two_that_outgrow_the_pool(), 20, **SYNC)
    assert steps(first_come) == [
        *BEFORE,
        *[(start, start + 1, 1, 0) for start in range(21, 27)],  # the 9 tokens of the victim do not fit
        (27, 38, 0, 11),
        (38, 40, 2, 0),
        *[(start, start + 1, 1, 0) for start in range(40, 43)],
    ]
    levels = simulate("vllm-v1", two_that_outgrow_the_pool(), 20, queue_order={"kind": "mlfq"}, **SYNC)
    assert steps(levels) == [
        *BEFORE,
        (21, 24, 1, 2),
        (24, 26, 2, 0),
        *[(start, start + 1, 1, 0) for start in range(26, 30)],
        (30, 39, 0, 9),
        *[(start, start + 1, 1, 0) for start in range(39, 43)],
    ]
    long_quantum = {"kind": "mlfq", "quantum_ms": 20.0}
    same = simulate("vllm-v1", two_that_outgrow_the_pool(), 20, queue_order=long_quantum, **SYNC)
    assert steps(same) == steps(first_come)


@pytest.mark.parametrize("policy", ["sarathi", "vllm-v0", "vllm-v1"])
def test_every_engine_that_preempts_lets_new_requests_pass_those_who_have_sunk(policy):
    order = {"kind": "mlfq", "quantum_ms": 1.0}
    for options, expected in (({}, [0, 2, 1]), ({"queue_order": order}, [2, 0, 1])):
        options = options | ({"async_scheduling": False} if policy == "vllm-v1" else {})
        requests = simulate(policy, two_that_outgrow_the_pool(), 20, max_num_seqs=3, **options).requests
        assert requests["num_preemptions"].tolist()[1] == 1
        assert requests["finished_ns"].argsort().tolist() == expected


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("static", {"max_batch_size": 1}),
        ("orca", {"max_batch_size": 1}),
        ("vtc", {"running_max_req_size": 1}),
        ("sarathi", {"max_num_seqs": 1}),
        ("vllm-v0", {"max_num_seqs": 1}),
        ("vllm-v1", {"max_num_seqs": 1, "async_scheduling": False}),
    ],
)
def test_every_engine_lets_short_prompts_pass_and_nobody_starve(policy, options):
    """Each request takes its prompt and a decode: the first one 10 ms, the long one 14 ms, the others 2 or 3 ms."""
    rows = [(9, 0), (13, 1), (1, 2), (2, 3), (2, 14), (1, 15)]
    requests = [Request(i, prompt, 2, arrival_ns=at_ms * NS_PER_MS) for i, (prompt, at_ms) in enumerate(rows)]
    order = {"kind": "mlfq", "skip_join": True, **PER_TOKEN, "quantum_ms": 10.0, "starvation_threshold_s": 0.017}
    tables = simulate(policy, requests, 40, queue_order=order, **options)
    # At 10 ms the two short ones pass the long one, and at 15 ms the third. At 18 ms the long one starves.
    assert tables.requests["admitted_ns"].argsort().tolist() == [0, 2, 3, 4, 1, 5]
    assert (tables.requests["admitted_ns"] / NS_PER_MS).tolist() == [0, 18, 10, 12, 15, 32]
