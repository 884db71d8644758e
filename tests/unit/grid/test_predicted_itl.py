"""Admission for latency: what is predicted is what comes, and a target holds where memory alone would break it."""

import pytest

import sim
from sim.core import EngineCore
from sim.cost.linear import Linear, LinearOptions
from sim.errors import ScenarioError
from sim.policies.base import POLICIES, EngineLimits, StepPredictor
from sim.policies.grid.pacing import Situation
from sim.policies.grid.predicted_itl import PredictedItl, PredictedItlOptions
from sim.request import Request
from sim.step import StepShape, decodes_of, longer

LINEAR = Linear(
    LinearOptions(
        base_ms=5.0, per_decode_us=100.0, per_context_token_ns=1000.0, host_us=500.0, host_us_per_request=10.0
    )
)
PREDICTOR = StepPredictor(LINEAR.price, LINEAR.host_ns)


def opens(options, decodes, *, plans_ahead=False):
    rule = PredictedItl.build(
        PredictedItlOptions(kind="predicted_itl", **options),
        lambda shape: PREDICTOR.interval_ns(shape, plans_ahead=plans_ahead),
    )
    return rule.opens(Situation(0, None, 1, 1, 1, 0, decodes))


def test_sums_are_those_of_the_contexts():
    contexts = [3, 50, 7]
    shape = decodes_of(contexts, decodes_of([11], StepShape()))
    assert shape == StepShape(4, 71, 3**2 + 50**2 + 7**2 + 11**2, 50, num_sampled=4)
    assert longer(shape, 6) == decodes_of([17, 9, 56, 13], StepShape())


def test_it_opens_up_to_the_target_to_the_nanosecond():
    # device 5 ms + 3 × 0.1 + (10 + 20 + 30 + 3) × 0.001 = 5.363 ms; host 0.5 + 3 × 0.01 = 0.53 ms
    decodes = decodes_of([10, 20, 30], StepShape())
    assert opens({"max_itl_ms": 5.893}, decodes)
    assert not opens({"max_itl_ms": 5.892999}, decodes)
    assert opens({"max_itl_ms": 5.363}, decodes, plans_ahead=True)
    assert not opens({"max_itl_ms": 5.362999}, decodes, plans_ahead=True)
    # each of three contexts longer by 40 tokens: 0.12 ms more
    assert opens({"max_itl_ms": 6.013, "lookahead_tokens": 40}, decodes)
    assert not opens({"max_itl_ms": 6.012999, "lookahead_tokens": 40}, decodes)


def test_a_host_slower_than_the_device_sets_the_pace_of_an_engine_that_plans_ahead():
    predictor = StepPredictor(lambda _: 3, lambda _: 5)
    assert predictor.interval_ns(StepShape(1), plans_ahead=False) == 8
    assert predictor.interval_ns(StepShape(1), plans_ahead=True) == 5


def test_whoever_would_be_alone_is_admitted_whatever_the_target():
    assert opens({"max_itl_ms": 0.001}, decodes_of([1000], StepShape()))
    assert opens({"max_itl_ms": 0.001}, None)
    assert not opens({"max_itl_ms": 0.001}, decodes_of([1, 1], StepShape()))


ENGINES = {
    "vllm-v0": {},
    "vllm-v0, chunked": {"enable_chunked_prefill": True, "max_num_batched_tokens": 1024},
    "sarathi": {"chunk_size": 1024},
    "sarathi-vllm": {},
    "sarathi-orca": {},
    "vllm-v1, sync": {"async_scheduling": False},
    "vllm-v1, async": {"async_scheduling": True},
    "vllm-v1, sync, caching": {"async_scheduling": False, "enable_prefix_caching": True},
}


def built(name, options, predictor=PREDICTOR, max_itl_ms=1e3):
    policy = name.partition(",")[0]
    cls = POLICIES.load(policy)
    pacing = {"kind": "predicted_itl", "max_itl_ms": max_itl_ms}
    given = cls.Options.model_validate({"policy": policy, "prefill_pacing": pacing, **options})
    return cls.build(given, EngineLimits(2048, 16, 10_000, predictor=predictor))


def planned(core):
    """The next step, with as many in flight before it as the engine has."""
    while core.num_in_flight >= core.depth:
        core.complete()
    return core.plan(0)


@pytest.mark.parametrize("name", ENGINES)
def test_the_step_that_is_predicted_is_the_one_that_comes(name):
    asked = []
    policy = built(name, ENGINES[name], StepPredictor(lambda shape: asked.append(shape) or 1, lambda _: 0))
    core = EngineCore(policy)
    num_running = 0
    for num_new in (1, 3, 2, 4):
        requests = [Request(num_running + i, 10 + 7 * (num_running + i), 500) for i in range(num_new)]
        core.admit((), requests)
        num_running += num_new
        asked.clear()
        assert len(planned(core).admitted) == num_new
        assert len(asked) == num_new - (num_running == num_new)  # of the very first one nothing is asked
        following = planned(core)
        assert (following.shape.num_decode, following.chunks) == (num_running, [])
        assert asked[-1:] in ([], [following.shape])


DEVICE = {"kind": "linear", "base_ms": 5.0, "per_decode_us": 100.0}


def scenario(engine, cost=None):
    return {
        "model": "llama-3.1-8b",
        "hardware": {"gpu": "h100-sxm"},
        "engine": {"max_model_len": 2048, "num_gpu_blocks": 20_000, "max_num_seqs": 250, **engine},
        "cost": cost or {**DEVICE, "host_us": 500.0, "host_us_per_request": 10.0},
        "traffic": [
            {
                "name": "chat",
                "arrivals": {"kind": "closed_loop", "num_clients": 200},
                "prompt_tokens": {"kind": "uniform", "low": 20, "high": 60},
                "output_tokens": {"kind": "uniform", "low": 50, "high": 150},
            }
        ],
        "run": {"num_requests": 400},
    }


V1 = {"policy": "vllm-v1", "async_scheduling": False}


def pacing(max_itl_ms, **more):
    return {"prefill_pacing": {"kind": "predicted_itl", "max_itl_ms": max_itl_ms, **more}}


def decode_itl_ms(results):
    """How long each step took that only decodes and follows another step at once, host time included; the longest."""
    iterations = results.tables.iterations
    is_plain = (iterations["num_prefills"] == 0)[1:] & (iterations["num_prefills"] == 0)[:-1]
    return float((iterations["end_ns"][1:] - iterations["end_ns"][:-1])[is_plain].max()) / 1e6


@pytest.mark.parametrize(
    ("engine", "most"),
    [
        # 5.5 ms + 0.11 ms for each request
        (V1 | pacing(20.0), 131),
        (V1 | pacing(10.0), 40),
        ({"policy": "sarathi"} | pacing(10.0), 40),
        ({"policy": "vllm-v0"} | pacing(10.0), 40),
        # 5 ms + 0.1 ms for each, the host hidden
        (V1 | {"async_scheduling": True} | pacing(10.0), 50),
        # memory and slots alone
        (V1, 200),
        ({"policy": "vllm-v0"}, 200),
        # a target below what one request takes
        (V1 | pacing(5.0), 1),
        (V1 | {"async_scheduling": True} | pacing(0.001), 1),
        ({"policy": "sarathi"} | pacing(0.001), 1),
        ({"policy": "sarathi-orca"} | pacing(0.001), 1),
        ({"policy": "vllm-v0"} | pacing(0.001), 1),
        ({"policy": "vllm-v0", "enable_chunked_prefill": True} | pacing(0.001), 1),
    ],
)
def test_as_many_run_as_the_target_allows(engine, most):
    results = sim.run(scenario(engine))
    assert results.tables.iterations["num_running"].max() == most
    assert results.summary()["outcomes"]["finished"] == 400
    target = engine.get("prefill_pacing", {}).get("max_itl_ms", 27.5)
    is_free = most in (1, 200)
    assert is_free or decode_itl_ms(results) <= target
    assert decode_itl_ms(results) > 0.95 * min(target, 27.5)


def test_the_host_time_of_the_scenario_is_part_of_the_prediction():
    results = sim.run(scenario(V1 | pacing(10.0), DEVICE | {"host": {"kind": "constant", "step_us": 3000.0}}))
    assert results.tables.iterations["num_running"].max() == 20


def test_looking_ahead_holds_the_target_while_contexts_grow():
    """By the roofline contexts cost time, and answers of up to 150 tokens make them longer than at admission."""
    cost = {"kind": "roofline"}
    free, at_once, ahead, stricter = (
        sim.run(scenario(V1 | engine, cost))
        for engine in ({}, pacing(8.0), pacing(8.0, lookahead_tokens=150), pacing(7.3, lookahead_tokens=150))
    )
    assert decode_itl_ms(free) > 9
    assert decode_itl_ms(free) > decode_itl_ms(at_once) > 8.0
    assert 7.6 < decode_itl_ms(ahead) <= 8.0
    assert 6.9 < decode_itl_ms(stricter) <= 7.3
    running = [results.tables.iterations["num_running"].max() for results in (free, at_once, ahead, stricter)]
    assert running == sorted(running, reverse=True)
    assert len(set(running)) == 4


def test_those_who_are_held_back_wait_for_admission():
    results = sim.run(scenario(V1 | pacing(10.0)))
    assert results.summary()["limits"]["shares"]["admission"] > 0.5


@pytest.mark.parametrize("name", ENGINES)
def test_a_replay_without_prices_refuses_it(name):
    with pytest.raises(ScenarioError, match="asks a cost model what steps will take, and the replay of a log has none"):
        built(name, ENGINES[name], predictor=None)


@pytest.mark.parametrize(
    ("engine", "key", "reason"),
    [
        (V1 | pacing(0.0), "engine.prefill_pacing.max_itl_ms", "above 0, got 0"),
        (V1 | pacing(-5.0), "engine.prefill_pacing.max_itl_ms", "above 0, got -5"),
        (V1 | pacing(5.0, lookahead_tokens=-1), "engine.prefill_pacing.lookahead_tokens", "at least 0, got -1"),
        (V1 | {"prefill_pacing": {"kind": "predicted_itl"}}, "engine.prefill_pacing.max_itl_ms", "is missing"),
        (V1 | pacing(5.0, max_ttft_ms=3.0), "engine.prefill_pacing.max_ttft_ms", "unknown key"),
        (V1 | pacing(5.0) | {"pipeline_parallel_size": 2}, "engine.prefill_pacing", "with 2 pipeline stages"),
        (
            {"policy": "sarathi", "pipeline_parallel_size": 2} | pacing(5.0),
            "engine.prefill_pacing",
            "with 2 pipeline stages",
        ),
        (
            {"policy": "vllm-v0", "scheduler_delay_factor": 0.5} | pacing(5.0),
            "engine.prefill_pacing",
            "contradicts scheduler_delay_factor",
        ),
    ],
)
def test_what_makes_no_sense_is_one_message(engine, key, reason):
    with pytest.raises(ScenarioError) as caught:
        sim.run(scenario(engine))
    message = str(caught.value)
    assert f"scenario: {key}: " in message
    assert reason in message
    assert "\n" not in message
