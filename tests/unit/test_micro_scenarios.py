"""Scenarios small enough to check by hand, as whole logs with times: a prompt token and a decode step take 1 ms.

That slots reserved for the longest answer stop the head of the queue, and when a second group starts under
static and under iteration-level batching, is in test_orca.py and test_static.py.
"""

import itertools

import pytest

from sim.clock import NS_PER_MS, Clock, Priority
from sim.core import EngineCore
from sim.cost.linear import Linear, LinearOptions
from sim.engine import Engine
from sim.policies.base import EngineLimits
from sim.policies.vllm_v1 import VllmV1, VllmV1Options
from sim.record import Recorder
from sim.request import Request

COST = LinearOptions(base_ms=0, per_prefill_token_us=1000, per_decode_us=1000)


def run(requests, **options):
    """One line a step that computes: start and end, ms, decodes and prompt tokens."""
    limits = EngineLimits(max_model_len=2000, block_size=16, num_gpu_blocks=1000)
    options = VllmV1Options(policy="vllm-v1", async_scheduling=False, max_num_seqs=8, **options)
    clock, recorder = Clock(), Recorder()
    engine = Engine(clock, EngineCore(VllmV1.build(options, limits)), Linear(COST), recorder)
    for request in requests:
        clock.call_at(request.arrival_ns, Priority.ARRIVE, lambda request=request: engine.submit(request))
    clock.run()
    iterations = recorder.tables().iterations
    columns = ("start_ns", "end_ns", "num_decode", "prefill_tokens")
    rows = zip(*(iterations[name].tolist() for name in columns), strict=True)
    return [(start_ns / NS_PER_MS, end_ns / NS_PER_MS, *rest) for start_ns, end_ns, *rest in rows]


def answer_and_late_prompt():
    """A stream of 20 tokens, and a prompt of 1,000 tokens that comes while its fifth is computed (4 to 5 ms)."""
    return [Request(0, 1, 20), Request(1, 1000, 1, arrival_ns=4_500_000)]


def gaps_of_the_stream(log):
    """Between its tokens, ms: it gets one in every step until it is over."""
    return [later[1] - earlier[1] for earlier, later in itertools.pairwise(log[:20])]


START = [(0, 1, 0, 1), *[(time, time + 1, 1, 0) for time in range(1, 5)]]


def test_a_token_budget_bounds_the_stall_of_running_answers():
    # 1 decode and 99 prompt tokens a step: 10 steps take 990 tokens, the eleventh the last 10.
    log = run(answer_and_late_prompt(), max_num_batched_tokens=100)
    assert log == [
        *START,
        *[(5 + 100 * i, 105 + 100 * i, 1, 99) for i in range(10)],
        (1005, 1016, 1, 10),
        *[(time, time + 1, 1, 0) for time in range(1016, 1020)],
    ]
    assert max(gaps_of_the_stream(log)) == 100


@pytest.mark.parametrize(
    "options",
    [{"max_num_batched_tokens": 2048}, {"max_num_batched_tokens": 2048, "enable_chunked_prefill": False}],
    ids=["large budget", "no chunking"],
)
def test_a_whole_prompt_stalls_running_answers_for_all_of_it(options):
    log = run(answer_and_late_prompt(), **options)
    assert log == [*START, (5, 1006, 1, 1000), *[(time, time + 1, 1, 0) for time in range(1006, 1020)]]
    assert max(gaps_of_the_stream(log)) == 1001
