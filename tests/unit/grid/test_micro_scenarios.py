"""Engines of the grid on scenarios that can be checked by hand: a prompt token and a decode step take 1 ms."""

import itertools

import pytest

from sim.clock import NS_PER_MS, Clock, Priority
from sim.core import EngineCore
from sim.cost.linear import Linear, LinearOptions
from sim.engine import Engine
from sim.policies.base import POLICIES, EngineLimits
from sim.record import Recorder
from sim.request import Outcome, Request

COST = LinearOptions(base_ms=0, per_prefill_token_us=1000, per_decode_us=1000)


def simulate(policy, requests, *, num_gpu_blocks=1000, block_size=16, cost=COST, max_model_len=2000, **options):
    cls = POLICIES.load(policy)
    limits = EngineLimits(max_model_len=max_model_len, block_size=block_size, num_gpu_blocks=num_gpu_blocks)
    clock, recorder = Clock(), Recorder()
    built = cls.build(cls.Options(policy=policy, **options), limits)
    engine = Engine(clock, EngineCore(built), Linear(cost), recorder)
    for request in requests:
        clock.call_at(request.arrival_ns, Priority.ARRIVE, lambda request=request: engine.submit(request))
    clock.run()
    built.check_integrity()
    return recorder.tables()


def steps(tables, *columns):
    """One tuple per iteration."""
    return list(zip(*(tables.iterations[name].tolist() for name in columns), strict=True))


def log(tables):
    """Start and end, ms, decodes and prompt tokens of each iteration."""
    rows = steps(tables, "start_ns", "end_ns", "num_decode", "prefill_tokens")
    return [(start_ns / NS_PER_MS, end_ns / NS_PER_MS, *rest) for start_ns, end_ns, *rest in rows]


def answer_and_late_prompt():
    """A stream of 20 tokens, and a prompt of 1,000 tokens that comes while its fifth is computed (4 to 5 ms)."""
    return [Request(0, 1, 20), Request(1, 1000, 1, arrival_ns=4_500_000)]


START = [(0, 1, 0, 1), *[(time, time + 1, 1, 0) for time in range(1, 5)]]


@pytest.mark.parametrize(
    ("policy", "options"),
    [("vllm-v0", {"max_num_batched_tokens": 2048}), ("sarathi-vllm", {"max_batched_tokens": 2048})],
)
def test_prefill_first_stalls_running_answers_for_a_whole_prompt(policy, options):
    found = log(simulate(policy, answer_and_late_prompt(), **options))
    assert found == [*START, (5, 1005, 0, 1000), *[(time, time + 1, 1, 0) for time in range(1005, 1020)]]
    ends = [end for _, end, decodes, _ in found if decodes]
    assert max(later - earlier for earlier, later in itertools.pairwise(ends)) == 1001


@pytest.mark.parametrize(
    ("policy", "options"),
    [
        ("vllm-v0", {"max_num_batched_tokens": 100, "enable_chunked_prefill": True}),
        ("sarathi", {"chunk_size": 100}),
    ],
)
def test_decodes_first_within_a_budget_bounds_the_stall(policy, options):
    assert log(simulate(policy, answer_and_late_prompt(), **options)) == [
        *START,
        *[(5 + 100 * i, 105 + 100 * i, 1, 99) for i in range(10)],
        (1005, 1016, 1, 10),
        *[(time, time + 1, 1, 0) for time in range(1016, 1020)],
    ]


def test_sarathi_gives_prefills_what_decodes_leave_of_the_chunk():
    requests = [Request(0, 2, 12), Request(1, 2, 12), Request(2, 2, 12), Request(3, 12, 3, arrival_ns=7_000_000)]
    tables = simulate("sarathi", requests, chunk_size=8)
    assert steps(tables, "num_decode", "prefill_tokens")[:5] == [(0, 6), (3, 0), (3, 5), (3, 5), (3, 2)]


def test_slots_reserved_for_the_longest_answer_stop_the_head_and_nobody_passes():
    """100 slots of KV; 1 + 59, 1 + 49 and 1 + 29 tokens: the second does not fit beside the first."""
    requests = [Request(0, 1, 59), Request(1, 1, 49, arrival_ns=1), Request(2, 1, 29, arrival_ns=2)]
    tables = simulate("sarathi-orca", requests, num_gpu_blocks=100, block_size=1, kv_admission="max_tokens")
    admitted, finished = tables.requests["admitted_iteration"], tables.requests["finished_iteration"]
    assert admitted.tolist() == [0, finished[0] + 1, finished[0] + 1]


@pytest.mark.parametrize(("policy", "second_group"), [("sarathi-faster-transformer", 10), ("sarathi-orca", 1)])
def test_a_second_group_waits_for_all_of_the_first_or_for_a_place(policy, second_group):
    """Four places; outputs 10, 1, 1, 1 and four more of 1: iterations are counted from 0."""
    requests = [Request(i, 1, 10 if i == 0 else 1) for i in range(8)]
    tables = simulate(policy, requests, max_num_seqs=4)
    assert (
        tables.requests["admitted_iteration"].tolist()
        == [0] * 4
        + {
            10: [10] * 4,
            1: [1, 1, 1, 2],
        }[second_group]
    )


def two_that_outgrow_the_pool():
    """Two prompts of a block each on four blocks of 4; after one decode each holds two, and none is free."""
    return [Request(0, 4, 4), Request(1, 4, 4, arrival_ns=1)]


PRESSURE = {"num_gpu_blocks": 4, "block_size": 4, "watermark": 0.0, "num_cpu_blocks": 8}


@pytest.mark.parametrize(
    ("preemption", "outcomes", "preemptions", "recomputed", "swapped"),
    [
        # It loses 5 tokens, is prefilled again beside the other's decodes, and loses 6.
        ("recompute", [Outcome.FINISHED] * 2, [0, 2], [0, 11], 0),
        ("swap", [Outcome.FINISHED] * 2, [0, 1], [0, 0], 4),
        ("pause", [Outcome.FINISHED] * 2, [0, 0], [0, 0], 0),
        ("reject", [Outcome.FINISHED, Outcome.REJECTED], [0, 0], [0, 0], 0),
    ],
)
def test_memory_pressure_is_a_choice(preemption, outcomes, preemptions, recomputed, swapped):
    tables = simulate("vllm-v0", two_that_outgrow_the_pool(), preemption=preemption, **PRESSURE)
    requests = tables.requests
    assert requests["outcome"].tolist() == outcomes
    assert requests["num_preemptions"].tolist() == preemptions
    assert requests["recomputed_tokens"].tolist() == recomputed
    assert tables.iterations["num_swapped_blocks"].sum() == swapped
    assert tables.iterations["used_blocks"].max() <= 4


def test_who_finds_no_block_pauses_with_its_kv_until_somebody_leaves():
    tables = simulate("vllm-v0", two_that_outgrow_the_pool(), preemption="pause", **PRESSURE | {"num_gpu_blocks": 3})
    assert steps(tables, "num_decode", "num_running", "used_blocks") == [
        (0, 1, 1),
        (0, 2, 2),
        *[(1, 2, 3)] * 3,
        *[(1, 1, 2)] * 3,
    ]
    assert tables.requests["num_preemptions"].tolist() == [0, 0]


def test_a_full_reservation_avoids_pressure():
    options = {"num_gpu_blocks": 3, "block_size": 4, "kv_admission": "max_tokens"}
    tables = simulate("vllm-v0", two_that_outgrow_the_pool(), **options)
    assert tables.requests["num_preemptions"].tolist() == [0, 0]
    assert tables.iterations["num_decode"].max() == 1


STALL = [(5, 1005, 0, 1000), *[(time, time + 1, 1, 0) for time in range(1005, 1020)]]
"""The late prompt in a step of its own."""
NO_STALL = [(5, 1006, 1, 1000), *[(time, time + 1, 1, 0) for time in range(1006, 1020)]]
"""The same with the decode in it."""
TURNS = [(5, 105, 0, 100)] + [
    row for i in range(1, 10) for row in ((4 + 101 * i, 5 + 101 * i, 1, 0), (5 + 101 * i, 105 + 101 * i, 0, 100))
]
"""A chunk of 100 tokens, a decode, and so on."""
WAITS = [*[(time, time + 1, 1, 0) for time in range(5, 20)], (20, 1020, 0, 1000)]
"""It stays out until the answer is complete."""
IN_A_ROW = [(5 + 100 * i, 105 + 100 * i, 0, 100) for i in range(10)]
BESIDE = [*[(5 + 100 * i, 105 + 100 * i, 1, 99) for i in range(10)], (1005, 1016, 1, 10)]


@pytest.mark.parametrize(
    ("policy", "step_composition", "expected"),
    [
        ("vllm-v0", "prefill_first", STALL),
        ("vllm-v0", "decodes_first", NO_STALL),
        ("vllm-v0", "alternating", STALL),
        ("vllm-v0", "closed_batch", WAITS),
        ("sarathi-orca", "prefill_first", STALL),
        ("sarathi-orca", "closed_batch", WAITS),
        ("sarathi-faster-transformer", "decodes_first", NO_STALL),
        ("sarathi", "decodes_first", [*BESIDE, *[(time, time + 1, 1, 0) for time in range(1016, 1020)]]),
        ("sarathi", "prefill_first", [*IN_A_ROW, *[(time, time + 1, 1, 0) for time in range(1005, 1020)]]),
        ("sarathi", "alternating", [*TURNS, *[(time, time + 1, 1, 0) for time in range(1014, 1020)]]),
        ("sarathi-simple-chunking", "prefill_first", [*IN_A_ROW, *[(t, t + 1, 1, 0) for t in range(1005, 1020)]]),
    ],
)
def test_one_line_changes_what_a_step_consists_of(policy, step_composition, expected):
    options = {"chunk_size": 100} if policy in ("sarathi", "sarathi-simple-chunking") else {}
    found = log(simulate(policy, answer_and_late_prompt(), step_composition=step_composition, **options))
    assert found == [*START, *expected]
