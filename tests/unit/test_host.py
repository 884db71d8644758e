"""Host time as an axis: every kind to the nanosecond, with every cost, and what makes no sense."""

import numpy as np
import pytest

import sim
from sim.cost.base import COST_MODELS, Target
from sim.cost.host import HOST_TIMES, bundled_tables
from sim.cost.hosted import Hosted
from sim.cost.linear import Linear, LinearOptions
from sim.errors import InvariantError, ScenarioError
from sim.gpu import load_gpu
from sim.model import load_model
from sim.planning.explain import explain
from sim.replica import cost_model
from sim.report.console import explanation_report
from sim.step import StepArrays, StepShape

H100 = Target(load_model("llama-3.1-8b"), load_gpu("h100-sxm"), 1, 2.0)
SHAPE = StepShape(3, 600, 130_000, 300, ((20, 0), (7, 5)), 4)
"""Five requests with 30 tokens."""


def host(**options):
    cls = HOST_TIMES.load(options["kind"])
    return cls.build(cls.Options(**options))


@pytest.mark.parametrize(
    ("options", "expected_ns"),
    [
        ({"kind": "free"}, 0),
        ({"kind": "constant", "step_us": 312.3456}, 312_346),
        ({"kind": "linear"}, 0),
        ({"kind": "linear", "step_us": 100.0, "per_request_us": 15.5, "per_token_us": 0.25}, 100_000 + 77_500 + 7_500),
        ({"kind": "linear", "per_request_us": 0.0001}, 1),  # half a nanosecond goes up
        ({"kind": "measured", "points": [[0, 10.0], [4, 20.0], [8, 60.0]]}, 30_000),
        ({"kind": "measured", "points": [[5, 10.0], [6, 20.0]], "step_us": 1.5}, 11_500),
        ({"kind": "measured", "points": [[1, 10.0], [3, 20.0]]}, 30_000),  # the last line goes on
        ({"kind": "measured", "points": [[6, 10.0], [7, 15.0]]}, 5_000),  # so does the first one
        ({"kind": "measured", "points": [[7, 10.0], [8, 20.0]], "step_us": 3.0}, 3_000),  # but not below nothing
    ],
)
def test_each_kind_to_the_nanosecond(options, expected_ns):
    hosted = Hosted(Linear.build(LinearOptions(base_ms=1.0, host_us=500.0), H100), host(**options))
    assert (hosted.host_ns(SHAPE), type(hosted.host_ns(SHAPE))) == (expected_ns, int)


def test_the_bundled_tables_are_the_scheduler_s_steps_per_second():
    sync = host(kind="measured", table="vllm-0.33-sync")
    # 2240, 570 and 280 steps per second with 32, 128 and 256 requests
    assert [sync.ns(n, n) for n in (32, 80, 128, 256)] == [446_429, 1_100_407, 1_754_386, 3_571_429]
    assert [sync.ns(n, 10**6) for n in (1, 512)] == [24_067, 7_205_514]
    assert list(bundled_tables()) == [
        f"vllm-0.33-{mode}{caching}" for mode in ("sync", "async") for caching in ("", "-prefix-caching")
    ]
    for name in bundled_tables():
        own = host(kind="measured", table=name)
        assert 13_000 < (own.ns(256, 256) - own.ns(32, 32)) / 224 < 18_000


def test_all_but_the_host_time_is_the_cost_model_s_own():
    linear = Linear.build(LinearOptions(base_ms=5.0, per_decode_us=3.0, host_us=70.0, relative_error=0.1), H100)
    hosted = Hosted(linear, host(kind="constant", step_us=1.0))
    steps = StepArrays(*[np.array([1, 4], dtype=np.int64)] * 8, *[np.empty(0, dtype=np.int64)] * 3)
    decodes = SHAPE._replace(prefills=())
    assert hosted.price(SHAPE) == linear.price(SHAPE)
    assert hosted.price_decode_run(decodes, 5).tolist() == linear.price_decode_run(decodes, 5).tolist()
    assert {k: v.tolist() for k, v in hosted.breakdown(steps).items()} == {
        k: v.tolist() for k, v in linear.breakdown(steps).items()
    }
    assert (hosted.coverage(steps), hosted.facts()) == (None, {})
    drawn, ours = linear.perturbed(np.random.default_rng(1)), hosted.perturbed(np.random.default_rng(1))
    assert drawn is not None
    assert ours is not None
    assert (ours.price(SHAPE), ours.host_ns(SHAPE)) == (drawn.price(SHAPE), 1_000)
    exact = Linear.build(LinearOptions(base_ms=5.0), H100)
    assert Hosted(exact, host(kind="free")).perturbed(np.random.default_rng(1)) is None
    with pytest.raises(InvariantError, match="from another cost model"):
        Hosted.build(LinearOptions(base_ms=1.0), H100)


def scenario(cost, **engine):
    return {
        "model": "llama-3.1-8b",
        "hardware": {"gpu": "h100-sxm"},
        "engine": {"policy": "vllm-v1", "max_num_batched_tokens": 64, "num_gpu_blocks": 100, "max_model_len": 128}
        | engine,
        "cost": cost,
        "traffic": [
            {
                "name": "one",
                "arrivals": {"kind": "closed_loop", "num_clients": 1},
                "prompt_tokens": 10,
                "output_tokens": 3,
            }
        ],
        "run": {"num_requests": 1},
    }


def spans_ms(cost, **engine):
    iterations = sim.run(scenario(cost, **engine)).tables.iterations
    return [(start / 1e6, end / 1e6) for start, end in zip(iterations["start_ns"], iterations["end_ns"], strict=True)]


TEN_MS = {"kind": "constant", "step_ms": 10.0}


@pytest.mark.parametrize(
    ("host_us", "is_async", "expected"),
    [
        (4_000.0, False, [(4, 14), (18, 28), (32, 42)]),  # every step waits for the host
        (4_000.0, True, [(4, 14), (14, 24), (24, 34)]),  # only the first does: the rest is planned meanwhile
        (15_000.0, False, [(15, 25), (40, 50), (65, 75)]),
        (15_000.0, True, [(15, 25), (30, 40), (45, 55)]),  # the host is the bottleneck
    ],
)
def test_host_time_hides_behind_the_device_only_where_the_engine_plans_ahead(host_us, is_async, expected):
    for own in ({"kind": "constant", "step_us": host_us}, {"kind": "linear", "per_request_us": host_us}):
        assert spans_ms(TEN_MS | {"host": own}, async_scheduling=is_async) == expected
    assert spans_ms(TEN_MS | {"host_us": host_us}, async_scheduling=is_async) == expected
    assert spans_ms(TEN_MS | {"host": {"kind": "free"}}, async_scheduling=is_async) == [(0, 10), (10, 20), (20, 30)]


@pytest.mark.parametrize("kind", ["roofline", "linear", "constant"])
def test_it_goes_with_every_cost(kind):
    needed = {"linear": {"base_ms": 1.0}, "constant": {"step_ms": 1.0}}.get(kind, {})
    given = {"kind": kind, **needed, "host": {"kind": "constant", "step_us": 7}}
    cost = cost_model(sim.parse_scenario(scenario(given)))
    own = COST_MODELS.load(kind)
    assert cost.host_ns(SHAPE) == 7_000
    assert cost.price(SHAPE) == own.build(own.Options(kind=kind, **needed), H100).price(SHAPE)


def test_results_and_explanation_say_whose_host_time_it_was():
    given = sim.run(scenario(TEN_MS | {"host": {"kind": "measured", "table": "vllm-0.33-async", "step_us": 300.0}}))
    said = "measured (vllm-0.33-async), 473.9 µs for 32 requests to 3509 µs for 256 + 300 µs"
    assert given.summary()["provenance"]["host"] == said
    assert f"host time: {said}, in place of that of constant itself" in given.facts.provenance["notes"]
    own = sim.run(scenario({"kind": "linear", "base_ms": 1.0, "host_us": 5.0}))
    assert own.facts.provenance["host"] == "that of linear itself: host_us 5, host_us_per_request 0"
    assert own.facts.provenance["notes"] == []
    explanation = explain(sim.parse_scenario(scenario(TEN_MS | {"host": {"kind": "free"}})))
    assert explanation["host"] == "free"
    *_, last = explanation_report(explanation, "it")
    assert str(last) == "host time before every step: free"


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"kind": "linear"}, "linear, 0 µs"),
        ({"kind": "linear", "step_us": 2.0, "per_token_us": 0.1}, "linear, 2 µs + 0.1 µs per token"),
        ({"kind": "constant", "step_us": 2.5}, "constant, 2.5 µs"),
        (
            {"kind": "measured", "points": [[1, 2.0], [2, 3.0]]},
            "measured (points of the scenario), 2 µs for 1 requests to 3 µs for 2",
        ),
    ],
)
def test_each_kind_says_what_it_is(options, expected):
    assert HOST_TIMES.load(options["kind"]).Options(**options).describe() == expected


def test_the_resolved_scenario_runs_by_itself_and_is_the_same():
    results = sim.run(scenario({"kind": "roofline", "host": {"kind": "linear", "per_request_us": 9.0}}))
    resolved = results.facts.provenance["scenario"]
    assert resolved["cost"]["host"] == {"kind": "linear", "step_us": 0.0, "per_request_us": 9.0, "per_token_us": 0.0}
    assert "host_us" not in resolved["cost"]
    again = sim.run(resolved)
    assert again.facts.provenance["scenario_sha256"] == results.facts.provenance["scenario_sha256"]


def test_a_variant_changes_it_alone():
    base = scenario({"kind": "roofline", "host": {"kind": "linear", "per_request_us": 9.0}})
    overlays = {"free": {"cost": {"host": {"kind": "free"}}}, "own": {"cost": {"host": None, "host_us": 1.0}}}
    variants = sim.parse_scenario(base | {"compare": overlays}).variants()
    assert [cost_model(variant).host_ns(SHAPE) for variant in variants.values()] == [0, 1_000 + 5 * 15_000]


def test_a_host_time_of_ones_own_needs_permission(tmp_path, monkeypatch):
    (tmp_path / "their_host.py").write_text(
        "from sim.cost.host import Constant, ConstantOptions\n"
        "class TheirOptions(ConstantOptions):\n    kind: str\n"
        "class Theirs(Constant):\n    Options = TheirOptions\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    data = scenario(TEN_MS | {"host": {"kind": "their_host:Theirs", "step_us": 8.0}})
    with pytest.raises(ScenarioError, match="host time 'their_host:Theirs' would run code from outside servesim"):
        sim.parse_scenario(data)
    assert cost_model(sim.parse_scenario(data, allow_imports=True)).host_ns(SHAPE) == 8_000


@pytest.mark.parametrize(
    ("cost", "key", "reason"),
    [
        (TEN_MS | {"host_us": 1.0, "host": {"kind": "free"}}, "cost", "given twice: host_us and host"),
        (
            {"kind": "roofline", "host_us": 1.0, "host_us_per_request": 1.0, "host": {"kind": "free"}},
            "cost",
            "given twice: host_us, host_us_per_request and host",
        ),
        (TEN_MS | {"host": {"kind": "fast"}}, "cost.host.kind", "unknown host time 'fast'; known: free, constant"),
        (TEN_MS | {"host": 300}, "cost.host", "expected a mapping with 'kind'"),
        (TEN_MS | {"host": {"kind": "constant"}}, "cost.host.step_us", "is missing"),
        (TEN_MS | {"host": {"kind": "constant", "step_us": -1.0}}, "cost.host.step_us", "at least 0, got -1"),
        (TEN_MS | {"host": {"kind": "linear", "per_token_us": -1.0}}, "cost.host.per_token_us", "at least 0, got -1"),
        (TEN_MS | {"host": {"kind": "free", "step_us": 1.0}}, "cost.host.step_us", "unknown key"),
        (TEN_MS | {"host": {"kind": "measured"}}, "cost.host", "nothing is given; give one of them"),
        (
            TEN_MS | {"host": {"kind": "measured", "table": "vllm-0.33-sync", "points": [[1, 1.0], [2, 2.0]]}},
            "cost.host",
            "both table and points are given",
        ),
        (TEN_MS | {"host": {"kind": "measured", "table": "vllm-0.33-snc"}}, "cost.host.table", "unknown table"),
        (TEN_MS | {"host": {"kind": "measured", "points": []}}, "cost.host.points", "0 of at least two points"),
        (TEN_MS | {"host": {"kind": "measured", "points": [[1, 1.0]]}}, "cost.host.points", "1 of at least two"),
        (
            TEN_MS | {"host": {"kind": "measured", "points": [[2, 1.0], [1, 2.0]]}},
            "cost.host.points",
            "1 requests come after 2",
        ),
        (
            TEN_MS | {"host": {"kind": "measured", "points": [[2, 1.0], [2, 2.0]]}},
            "cost.host.points",
            "2 requests come after 2",
        ),
        (
            TEN_MS | {"host": {"kind": "measured", "points": [[1, 2.0], [2, 1.0]]}},
            "cost.host.points",
            "1 µs for 2 requests is less than 2 µs for 1",
        ),
        (
            TEN_MS | {"host": {"kind": "measured", "points": [[1, -2.0], [2, 1.0]]}},
            "cost.host.points[0][1]",
            "at least 0, got -2",
        ),
        (
            TEN_MS | {"host": {"kind": "measured", "points": [[1, 1.0, 9.0], [2, 2.0]]}},
            "cost.host.points[0]",
            "expected a list of at most 2, got a list of 3",
        ),
    ],
)
def test_what_makes_no_sense_is_one_message(cost, key, reason):
    with pytest.raises(ScenarioError) as caught:
        sim.parse_scenario(scenario(cost))
    message = str(caught.value)
    assert message.startswith(f"scenario: {key}: ")
    assert reason in message
    assert "\n" not in message
