"""Orca without selective batching: who is in an iteration is the same, what it takes is the sum of its passes."""

import functools

import numpy as np
import pytest

from sim.build import run
from sim.clients import Clients
from sim.clock import NS_PER_MS, Clock
from sim.core import EngineCore
from sim.cost.base import Coverage, Resource, Target
from sim.cost.in_passes import InPasses
from sim.cost.linear import Linear, LinearOptions
from sim.engine import Engine
from sim.errors import InvariantError
from sim.metrics.load import step_arrays
from sim.metrics.shares import work_shares
from sim.pass_record import PassRecorder
from sim.policies.base import EngineLimits
from sim.policies.orca import Orca, OrcaOptions
from sim.replica import price_model, replica
from sim.scenario import parse_scenario
from sim.step import Pass, PassesShape, StepArrays, StepShape
from tests.laws.test_fleets import same
from tests.laws.test_laws import columns

COST = Linear(LinearOptions(base_ms=10, per_prefill_token_us=1000, per_decode_us=1000))


def serve(rows, **options):
    """Tables of requests (prompt tokens, output tokens) that come at once."""
    prompt_tokens, output_tokens = np.array(rows).T
    traffic = columns(len(rows), prompt_tokens=prompt_tokens, output_tokens=output_tokens)
    policy = Orca.build(OrcaOptions(policy="orca", **options), EngineLimits(100, 1, 1000, ("all",)))
    clock, recorder = Clock(), PassRecorder()
    engine = Engine(clock, EngineCore(policy), InPasses(COST), recorder)
    clients = Clients(clock, engine, recorder, traffic)
    clients.start()
    clock.run()
    clients.stop()
    return recorder.tables()


def times_ms(tables):
    """How long each iteration takes."""
    return ((tables.iterations["end_ns"] - tables.iterations["start_ns"]) / NS_PER_MS).tolist()


def test_an_iteration_takes_as_long_as_its_passes_together():
    # 10 ms a pass and 1 ms a token. Two prompts of 3 tokens and one of 5: 16 + 15 ms, together 21. Then two answers at
    # the same place and one that is ahead: 12 + 11 ms, together 13. Then one answer alone.
    rows = [(3, 3), (3, 2), (5, 2)]
    split = serve(rows, selective_batching=False)
    assert times_ms(serve(rows)) == [21, 13, 11]
    assert times_ms(split) == [16 + 15, 12 + 11, 11]
    assert {name: column.tolist() for name, column in split.passes.items()} == {
        "iteration": [0, 0, 1, 1, 2],
        "is_prompt": [1, 1, 0, 0, 0],
        "num_requests": [2, 1, 2, 1, 1],
        "length": [3, 5, 3, 5, 4],
    }
    assert split.requests["finished_ns"].tolist() == [65 * NS_PER_MS, 54 * NS_PER_MS, 54 * NS_PER_MS]


def test_prompts_and_answers_of_one_length_share_no_pass():
    # The second request's prompt of 5 tokens is computed while the first one's answer has a context of 5.
    tables = serve([(5, 2), (5, 2)], max_batch_size=1, selective_batching=False)
    both = PassesShape(1, 5, 25, 5, ((5, 0),), 2)
    both.passes = (Pass(True, 1, 5), Pass(False, 1, 5))
    assert times_ms(tables) == [15, 11, 15, 11]
    assert InPasses(COST).price(both) == 26 * NS_PER_MS == COST.price(both) + 10 * NS_PER_MS


def test_requests_of_equal_lengths_take_what_they_take_with_it():
    rows = [(7, 9)] * 8
    assert same(serve(rows, selective_batching=False), serve(rows))


def test_requests_of_different_lengths_take_the_sum_of_single_ones():
    rows = [(7 + 3 * i, 4) for i in range(6)]
    alone = [times_ms(serve([row])) for row in rows]
    assert times_ms(serve(rows, selective_batching=False)) == [sum(steps) for steps in zip(*alone, strict=True)]


def rows_in_passes(tables):
    """Requests in all passes of each iteration."""
    return np.bincount(tables.passes["iteration"], weights=tables.passes["num_requests"]).tolist()


MANY = np.random.default_rng(1).integers(1, 20, (30, 2)).tolist()


def test_who_is_in_an_iteration_is_the_same():
    split, shared = serve(MANY, selective_batching=False), serve(MANY)
    timeless = [name for name in shared.iterations if not name.endswith("_ns")]
    assert {name: split.iterations[name].tolist() for name in timeless} == {
        name: shared.iterations[name].tolist() for name in timeless
    }
    assert same(split, shared, ("chunks", "segments"))
    assert rows_in_passes(split) == (split.iterations["num_decode"] + split.iterations["num_prefills"]).tolist()


def test_batches_of_a_pipeline_have_passes_of_their_own():
    tables = serve(MANY, selective_batching=False, n_workers=2, max_batch_size=2)
    assert set(tables.iterations["lane"]) == {0, 1}
    assert rows_in_passes(tables) == (tables.iterations["num_decode"] + tables.iterations["num_prefills"]).tolist()


SCENARIO = {
    "name": "passes",
    "seed": 1,
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "engine": {"policy": "orca", "max_batch_size": 6, "max_model_len": 512, "selective_batching": False},
    "traffic": [
        {
            "name": "chat",
            "arrivals": {"kind": "poisson", "rate_per_s": 10.0},
            "prompt_tokens": {"kind": "uniform", "low": 1, "high": 30},
            "output_tokens": {"kind": "uniform", "low": 1, "high": 12},
        }
    ],
    "run": {"num_requests": 120},
}


@functools.cache
def passes():
    return run(SCENARIO)


def test_prices_terms_and_causes_add_up():
    results = passes()
    iterations, chunks = results.tables.iterations, results.tables.chunks
    num_passes = np.bincount(results.tables.passes["iteration"])
    assert num_passes.max() > 3
    rounding_ns = np.abs(sum(results.breakdown.values()) - (iterations["end_ns"] - iterations["start_ns"]))
    assert (rounding_ns <= 0.5 * num_passes + 1e-3).all()
    for causes in (results.ttft_causes, results.itl_causes):
        assert np.array_equal(sum(causes.parts.values()), causes.values_ns)
    cost = price_model(replica(parse_scenario(SCENARIO)))
    mixed = np.flatnonzero((iterations["num_decode"] > 0) & (iterations["num_prefills"] > 0))
    expected = []
    for row in mixed.tolist():
        here = results.tables.passes["iteration"] == row
        own = [
            Pass(*(int(results.tables.passes[name][i]) for name in Pass._fields)) for i in np.flatnonzero(here).tolist()
        ]
        prices_ns = {
            is_prompt: sum(cost.price(p.shape) for p in own if p.is_prompt == is_prompt) for is_prompt in (0, 1)
        }
        expected.append(prices_ns[0] / sum(prices_ns.values()))
    assert len(mixed) > 10
    assert results.shares.decode[mixed].tolist() == pytest.approx(expected, rel=1e-6)
    sums = np.bincount(chunks["iteration"], weights=results.shares.chunk)
    assert sums[sums > 0].tolist() == pytest.approx(np.ones(np.count_nonzero(sums)).tolist())


def test_a_saved_run_says_the_same(tmp_path):
    passes().save(tmp_path)
    loaded = type(passes()).load(tmp_path)
    assert loaded.summary() == passes().summary()
    assert loaded.tables.passes == {}


class Counted(Linear):
    """Batches of more than one request are beyond what was measured."""

    def coverage(self, steps):
        rows = steps.num_decode + np.bincount(steps.prefill_iteration, minlength=len(steps.num_decode))
        return np.where(rows > 1, Coverage.EXTRAPOLATED, Coverage.MEASURED).astype(np.int8)


def test_an_iteration_is_as_far_from_what_was_measured_as_its_furthest_pass():
    tables = serve([(3, 3), (3, 2), (5, 2)], selective_batching=False)
    far, near = Coverage.EXTRAPOLATED, Coverage.MEASURED
    counted = InPasses(Counted(COST._options))
    assert counted.coverage(step_arrays(tables)).tolist() == [far, far, near]
    assert InPasses(COST).coverage(step_arrays(tables)) is None
    distinct = serve([(3, 2), (5, 2)], selective_batching=False)
    assert counted.coverage(step_arrays(distinct)).tolist() == [near, near]


def test_steps_that_are_single_passes_are_priced_as_without():
    cost, shape = InPasses(COST), StepShape(2, 8, 34, 5, num_sampled=2)
    arrays = StepArrays(**{name: np.zeros(0, dtype=np.int64) for name in StepArrays._fields})
    assert cost.price(shape) == COST.price(shape)
    assert cost.price_decode_run(shape, 3).tolist() == COST.price_decode_run(shape, 3).tolist()
    assert cost.host_ns(shape) == COST.host_ns(shape)
    assert cost.facts() == COST.facts()
    assert cost.breakdown(arrays).keys() == set(Resource)
    assert cost.coverage(arrays) is None
    with pytest.raises(InvariantError):
        InPasses.build(LinearOptions(base_ms=1), Target(None, None, 1, 2.0))


def test_shares_of_an_iteration_alone_are_of_its_passes():
    # 10 ms a pass: two prompts of 3 and one of 5 in 31 ms, divided by what each would cost alone.
    tables = serve([(3, 1), (3, 1), (5, 1)], selective_batching=False)
    shares = work_shares(tables, InPasses(COST))
    assert shares.decode.tolist() == [0.0]
    assert shares.chunk.tolist() == pytest.approx([13 / 41, 13 / 41, 15 / 41])
