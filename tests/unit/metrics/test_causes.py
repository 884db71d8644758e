"""What latencies are made of: small worlds worked out by hand, and bands of percentiles."""

from __future__ import annotations

import numpy as np
import pytest

from sim.cost.linear import Linear, LinearOptions
from sim.metrics.bands import Attribution, report_causes
from sim.metrics.causes import Cause, Causes
from sim.metrics.shares import WorkShares, work_shares
from sim.metrics.tokens import TokenTimes
from sim.step import BlockedBy, StepShape


def shares_of(tables, decode_part=0.5):
    """Decodes take a part of each mixed step; chunks share the rest equally."""
    iterations, iteration = tables.iterations, tables.chunks["iteration"]
    mixed = (iterations["num_decode"] > 0) & (iterations["num_prefills"] > 0)
    decode = np.where(iterations["num_decode"] > 0, np.where(mixed, decode_part, 1.0), 0.0)
    return WorkShares(decode, 1.0 / np.bincount(iteration, minlength=1)[iteration])


def plain(parts):
    return {cause.value: values.tolist() for cause, values in parts.items()}


def ttft(tables, rows, is_streaming=True):
    return plain(Causes(tables, shares_of(tables)).ttft(np.array(rows), is_streaming))


def itl(tables):
    tokens = TokenTimes(tables)
    gaps = tokens.gaps(np.ones(tokens.num_requests, dtype=np.bool_))
    return gaps.values_ns.tolist(), plain(Causes(tables, shares_of(tables)).itl(gaps, tokens))


def test_a_request_that_meets_a_busy_engine(world):
    first = world.request(0, prompt=8, output=4)
    late = world.request(5, prompt=6, output=1, queued_ns=12)
    world.step(20, prefill=[first], host_ns=3)  # 3 to 23
    world.step(10, decode=[first], host_ns=2, blocked_by=BlockedBy.SLOTS)  # 25 to 35
    world.step(40, decode=[first], prefill=[late], finish=[late], host_ns=1)  # 36 to 76
    world.step(10, decode=[first], finish=[first])
    tables = world.tables()
    assert ttft(tables, [0, 1]) == {
        "client": [0, 7],
        "slots": [0, 12],
        "step": [0, 11],
        "prefill": [20, 20],
        "decode": [0, 20],
        "host": [3, 1],
    }
    assert itl(tables) == (
        [10, 12, 41],
        {"others_prefill": [0, 0, 20], "decode": [10, 10, 20], "host": [0, 2, 1]},
    )


def test_chunks_of_several_prompts_and_an_idle_wait(world):
    one = world.request(0, prompt=12, output=1)
    other = world.request(0, prompt=4, output=1)
    world.now_ns = 50
    world.step(10, prefill=[(one, 6, 0, False), (other, 4, 0, True)], finish=[other])
    world.step(8, prefill=[(one, 6, 6, True)], finish=[one])
    assert ttft(world.tables(), [0, 1]) == {
        "admission": [50, 50],
        "prefill": [13, 5],
        "others_prefill": [5, 5],
    }


def test_a_preempted_request_waits_and_computes_again(world):
    old = world.request(0, prompt=8, output=6)
    young = world.request(0, prompt=8, output=3)
    world.step(10, prefill=[old, young])
    world.step(10, decode=[old, young])  # 20
    world.step(10, decode=[old], preempt=[young], blocked_by=BlockedBy.KV)  # 30
    world.step(10, decode=[old], host_ns=2, blocked_by=BlockedBy.KV)  # 42
    world.step(20, decode=[old], prefill=[(young, 5, 0, False)], host_ns=1)  # 63
    world.step(6, decode=[old], finish=[old, young], prefill=[(young, 4, 5, True)], host_ns=3)  # 72
    assert young.num_preemptions == 1
    values, parts = itl(world.tables())
    assert values == [9, 10, 10, 10, 12, 21, 52]
    assert {cause: row[-1] for cause, row in parts.items()} == {
        "preemption": 23,
        "recompute": 13,
        "others_prefill": 0,
        "decode": 13,
        "host": 3,
    }


def test_a_prompt_that_is_preempted_half_way_computes_its_tokens_twice(world):
    victim = world.request(0, prompt=10, output=1)
    other = world.request(0, prompt=4, output=2)
    world.step(10, prefill=[(victim, 6, 0, False)])
    world.step(7, prefill=[other], preempt=[victim])
    world.step(5, decode=[other], finish=[other])
    world.step(20, prefill=[(victim, 8, 0, False)])
    world.step(4, prefill=[(victim, 2, 8, True)], finish=[victim])
    assert ttft(world.tables(), [0]) == {"preemption": [12], "recompute": [15], "prefill": [19]}


def test_a_decode_that_steps_leave_out_waits_for_budget(world):
    favoured = world.request(0, prompt=8, output=5)
    starved = world.request(0, prompt=8, output=4)
    world.step(10, prefill=[favoured, starved])
    world.step(10, decode=[favoured, starved])
    world.step(10, decode=[favoured])
    world.step(10, decode=[favoured])
    world.step(12, decode=[favoured, starved], host_ns=2, finish=[favoured, starved])
    values, parts = itl(world.tables())
    assert values[-1] == 34
    assert {cause: row[-1] for cause, row in parts.items()} == {"budget": 22, "decode": 12, "host": 0}


def test_an_answer_that_is_held_until_its_batch_ends(world):
    short = world.request(0, prompt=5, output=1)
    long = world.request(0, prompt=5, output=3)
    world.step(10, prefill=[short, long], finish=[short], release=[])
    world.step(6, decode=[long])
    world.step(6, decode=[long], finish=[long], release=[short, long])
    assert ttft(world.tables(), [0, 1], is_streaming=False) == {
        "prefill": [5, 5],
        "others_prefill": [5, 5],
        "decode": [0, 12],
        "batch_end": [12, 0],
    }


def test_shares_are_what_a_step_would_cost_without_its_prefills(world):
    a, b, c = (world.request(0, prompt=p, output=2) for p in (10, 10, 30))
    world.step(5, prefill=[a])
    shape = StepShape(num_decode=1, decode_context_sum=10, prefills=((10, 0), (30, 0)), num_sampled=3)
    world.step(5, decode=[a], finish=[a], prefill=[b, c], shape=shape)
    cost = Linear(LinearOptions(kind="linear", base_ms=0.02, per_decode_us=20.0, per_prefill_token_us=4.0))
    shares = work_shares(world.tables(), cost)
    assert shares.decode.tolist() == [0.0, 40 / 200]
    assert shares.chunk.tolist() == [1.0, 60 / 200, 140 / 200]


def test_a_band_weighs_latencies_by_how_much_of_it_they_fill():
    values = np.array([40, 10, 30]) * 1_000_000
    attribution = Attribution(
        values, np.array([1, 2, 1]), {Cause.DECODE: values - 1_000_000, Cause.HOST: values * 0 + 1_000_000}
    )
    everything = attribution.band(0, 100)
    assert (everything.mean_ms, everything.parts_ms) == (22.5, {"decode": 21.5, "host": 1.0})
    assert attribution.band(75, 100).mean_ms == 40
    assert attribution.band(62.5, 100).parts_ms == pytest.approx({"decode": (0.5 * 29 + 39) / 1.5, "host": 1.0})
    assert attribution.band(50, 50) is None
    assert Attribution(values[:0], values[:0], {}).band(0, 100) is None


def test_the_verdict_says_what_the_tail_has_more_of():
    quick, slow = np.full(95, 10_000_000), np.full(5, 50_000_000)
    values = np.concatenate([quick, slow])
    waits = np.concatenate([quick * 0, slow - 14_000_000])
    ones = np.ones(100, dtype=np.int64)
    ttft = Attribution(values, ones, {Cause.KV: waits, Cause.PREFILL: values - waits})
    flat = Attribution(quick, ones[:95], {Cause.DECODE: quick})
    assert report_causes(ttft, flat).verdicts == [
        "TTFT around p99 is 50 ms, 40 ms more than around the median; of these, 90 % waiting for KV blocks, "
        "10 % its own prefill",
        "ITL is the same for all, 10 ms: 100 % decodes in the same steps",
    ]
    nothing = Attribution(values[:0], ones[:0], {})
    assert report_causes(nothing, nothing).model_dump() == {"ttft": {}, "itl": {}, "verdicts": []}
