import json
from pathlib import Path

import numpy as np
import pytest
from pydantic import ValidationError

from sim.clock import NS_PER_S
from sim.errors import ScenarioError, TraceError
from sim.request import NEVER
from sim.tokens import UNIQUE
from sim.workload.base import ClientPool, Traffic
from sim.workload.draw import draw_traffic
from sim.workload.traffic import TrafficClass

COLUMNS = (
    *("class_index", "arrival_ns", "think_ns", "prompt_tokens", "output_tokens", "max_tokens", "priority"),
    *("cancel_after_ns", "cancel_after_tokens", "leaves_at_deadline"),
)
RANDOM = {
    "prompt_tokens": {"kind": "uniform", "low": 1, "high": 10**6},
    "output_tokens": {"kind": "uniform", "low": 1, "high": 10**6},
}
POISSON = {"kind": "poisson", "rate_per_s": 5.0}


def one_class(**fields) -> dict:
    """A class with lengths of 10 and 5 unless its fields say otherwise."""
    has_lengths = {"trace", "lengths", "prompt_tokens", "output_tokens"} & set(fields)
    return {"name": "c", **({} if has_lengths else {"prompt_tokens": 10, "output_tokens": 5}), **fields}


def draw(*classes, arrivals=None, num=None, duration_s=None, seed=1, folder=Path()) -> Traffic:
    models = [TrafficClass.model_validate(fields) for fields in classes]
    if arrivals is not None:
        arrivals = TrafficClass.model_validate(one_class(arrivals=arrivals)).arrivals
    duration_ns = None if duration_s is None else round(duration_s * NS_PER_S)
    return draw_traffic(models, arrivals=arrivals, num_requests=num, duration_ns=duration_ns, seed=seed, folder=folder)


def table(traffic: Traffic, *names: str) -> list[tuple]:
    return list(zip(*(getattr(traffic, name).tolist() for name in names), strict=True))


def everything(traffic: Traffic) -> list[tuple]:
    return table(traffic, *COLUMNS)


# --- one class ------------------------------------------------------------------------------------


def test_one_open_class_in_full():
    chat = one_class(arrivals={"kind": "constant", "rate_per_s": 2}, max_tokens=8, priority=-3, max_connections=4)
    traffic = draw(chat, num=2)
    assert traffic.class_names == ("c",)
    assert traffic.pools == (ClientPool(max_connections=4),)
    assert everything(traffic) == [
        (0, 500_000_000, 0, 10, 5, 8, -3, NEVER, NEVER, False),
        (0, 1_000_000_000, 0, 10, 5, 8, -3, NEVER, NEVER, False),
    ]


def test_a_request_is_made_from_its_row():
    chat = one_class(arrivals=POISSON, cancel={"kind": "after_tokens", "tokens": 3}, priority=2, max_tokens=7)
    traffic = draw(chat, num=3000)
    for row in (0, 1, 2500, 2999, 1023, 1024, 0):
        request = traffic.request(row)
        assert (request.index, request.id, request.arrival_ns) == (row, row, traffic.arrival_ns[row])
        assert (request.prompt_tokens, request.output_tokens, request.max_tokens) == (10, 5, 7)
        assert (request.class_index, request.priority, request.cancel_after_tokens) == (0, 2, 3)
        assert type(request.arrival_ns) is int
        assert request.tokens is UNIQUE
    for row in (3000, -1):
        with pytest.raises(IndexError):
            traffic.request(row)


def test_requests_can_be_made_in_any_order():
    traffic = draw(one_class(arrivals=POISSON, **RANDOM), num=200_000)
    rows = [int(row) for row in np.random.default_rng(1).integers(200_000, size=500)]
    assert [traffic.request(row).prompt_tokens for row in rows] == traffic.prompt_tokens[rows].tolist()


def test_a_closed_loop_has_think_times_and_no_arrivals():
    loop = {"kind": "closed_loop", "num_clients": 2, "think_time_s": 0.5}
    traffic = draw(one_class(arrivals=loop), num=3)
    assert traffic.pools == (ClientPool(num_clients=2),)
    assert table(traffic, "arrival_ns", "think_ns") == [(NEVER, 500_000_000)] * 3


def test_omitted_max_tokens_are_the_outputs_own():
    traffic = draw(one_class(arrivals=POISSON, **RANDOM), num=50)
    assert traffic.max_tokens.tolist() == traffic.output_tokens.tolist()


@pytest.mark.parametrize(
    ("cancel", "column", "expected"),
    [
        ({"kind": "after_time", "after_s": 2}, "cancel_after_ns", 2 * NS_PER_S),
        ({"kind": "deadline", "after_s": 2}, "cancel_after_ns", 2 * NS_PER_S),
        ({"kind": "after_tokens", "tokens": 9}, "cancel_after_tokens", 9),
    ],
)
def test_clients_leave(cancel, column, expected):
    traffic = draw(one_class(arrivals=POISSON, cancel={**cancel, "probability": 0.25}), num=4000)
    leaves = getattr(traffic, column) != NEVER
    assert abs(int(leaves.sum()) - 1000) < 3 * np.sqrt(750)
    assert set(getattr(traffic, column)[leaves].tolist()) == {expected}
    assert traffic.leaves_at_deadline.all() == (cancel["kind"] == "deadline")
    always = draw(one_class(arrivals=POISSON, cancel=cancel), num=10)
    assert getattr(always, column).tolist() == [expected] * 10


def test_times_of_leaving_are_distributed():
    exponential = {"kind": "after_time", "after_s": {"kind": "exponential", "mean_s": 4}}
    drawn = draw(one_class(arrivals=POISSON, cancel=exponential), num=50_000).cancel_after_ns
    assert drawn.mean() == pytest.approx(4e9, rel=0.02)
    uniform = {"kind": "after_time", "after_s": {"kind": "uniform", "low_s": 1, "high_s": 3}}
    drawn = draw(one_class(arrivals=POISSON, cancel=uniform), num=50_000).cancel_after_ns
    assert (drawn.min() / 1e9, drawn.mean() / 1e9, drawn.max() / 1e9) == pytest.approx((1, 2, 3), abs=0.02)


# --- streams --------------------------------------------------------------------------------------


def test_same_seed_same_traffic_and_another_seed_another():
    chat = one_class(arrivals=POISSON, **RANDOM)
    assert everything(draw(chat, num=100)) == everything(draw(chat, num=100))
    for column in ("arrival_ns", "prompt_tokens", "output_tokens"):
        assert getattr(draw(chat, num=100), column).tolist() != getattr(draw(chat, num=100, seed=2), column).tolist()


def test_prompts_and_outputs_are_independent():
    traffic = draw(one_class(arrivals=POISSON, **RANDOM), num=20_000)
    assert abs(np.corrcoef(traffic.prompt_tokens, traffic.output_tokens)[0, 1]) < 0.03


def test_a_change_to_one_column_moves_nothing_else():
    a, b = (one_class(arrivals=POISSON, **RANDOM) | {"name": name} for name in "ab")
    before = draw(a, b, num=200)
    after = draw(
        a | {"prompt_tokens": 1, "cancel": {"kind": "after_tokens", "tokens": 1, "probability": 0.5}}, b, num=200
    )
    unchanged = [name for name in COLUMNS if name not in ("prompt_tokens", "cancel_after_tokens")]
    assert table(after, *unchanged) == table(before, *unchanged)
    of_b = before.class_index == 1
    assert after.prompt_tokens[of_b].tolist() == before.prompt_tokens[of_b].tolist()
    assert not np.array_equal(after.prompt_tokens, before.prompt_tokens)


def test_a_shorter_run_is_the_beginning_of_a_longer_one():
    cancel = {"kind": "after_time", "probability": 0.5, "after_s": {"kind": "exponential", "mean_s": 1}}
    a, b = (one_class(arrivals=POISSON, cancel=cancel, **RANDOM) | {"name": name} for name in "ab")
    assert everything(draw(a, b, num=50)) == everything(draw(a, b, num=500))[:50]
    thirds = [one_class(share=share, **RANDOM) | {"name": str(share)} for share in (0.25, 0.75)]
    assert (
        everything(draw(*thirds, arrivals=POISSON, num=50)) == everything(draw(*thirds, arrivals=POISSON, num=500))[:50]
    )


# --- several classes ------------------------------------------------------------------------------


def test_classes_are_merged_by_time_and_ties_go_by_their_order():
    slow = one_class(arrivals={"kind": "constant", "rate_per_s": 1}, prompt_tokens=1, output_tokens=1) | {
        "name": "slow"
    }
    fast = one_class(arrivals={"kind": "constant", "rate_per_s": 2}, prompt_tokens=2, output_tokens=2) | {
        "name": "fast"
    }
    merged = [(1, 5 * 10**8, 2), (0, 10**9, 1), (1, 10**9, 2), (1, 15 * 10**8, 2), (0, 2 * 10**9, 1)]
    columns = ("class_index", "arrival_ns", "prompt_tokens")
    assert table(draw(slow, fast, num=5), *columns) == merged
    assert table(draw(slow, fast, duration_s=1.5), *columns) == merged[:4]
    assert table(draw(slow | {"num_requests": 1}, fast, num=5), *columns)[4] == (1, 2 * 10**9, 2)


def test_shares_split_common_arrivals_at_random():
    classes = [one_class(share=share) | {"name": str(share)} for share in (0.25, 0.75)]
    common = draw(*classes, arrivals=POISSON, num=10_000)
    assert abs(int((common.class_index == 0).sum()) - 2500) < 3 * np.sqrt(1875)
    alone = draw(one_class(share=1), arrivals=POISSON, num=10_000)
    assert common.arrival_ns.tolist() == alone.arrival_ns.tolist()
    burst = draw(*classes, arrivals={"kind": "burst", "num_requests": 100})
    assert np.count_nonzero(np.diff(burst.class_index)) > 10, "requests of one burst are mixed"


def test_closed_loops_follow_the_open_rows():
    loop = one_class(arrivals={"kind": "closed_loop", "num_clients": 1}, num_requests=2) | {"name": "loop"}
    traffic = draw(loop, one_class(arrivals={"kind": "constant", "rate_per_s": 1}), num=5)
    assert table(traffic, "class_index", "arrival_ns") == [
        *((1, 10**9), (1, 2 * 10**9), (1, 3 * 10**9)),
        *((0, NEVER), (0, NEVER)),
    ]
    with pytest.raises(ScenarioError) as caught:
        draw(loop, one_class(arrivals=POISSON), num=1)
    assert str(caught.value) == (
        "run.num_requests: closed loops ask for 2 requests, the run has 1. "
        "Raise it, or lower num_requests of the classes."
    )


def test_traces_play_whole_or_to_the_limits(tmp_path):
    (tmp_path / "a.csv").write_text(
        "TIMESTAMP,ContextTokens,GeneratedTokens\n2023-01-01 00:00:00,1,2\n2023-01-01 00:00:03,3,4\n"
    )
    rows = [{"timestamp": t, "input_length": 5, "output_length": 6, "hash_ids": [t]} for t in (0, 1000, 2000)]
    (tmp_path / "m.jsonl").write_text("\n".join(map(json.dumps, rows)))
    replay = one_class(trace={"kind": "azure", "path": "a.csv"}) | {"name": "azure"}
    blocks = one_class(trace={"kind": "mooncake", "path": "m.jsonl", "rate_scale": 0.5}) | {"name": "mooncake"}
    expected = [(0, 0, 1, 2), (1, 0, 5, 6), (1, 2 * 10**9, 5, 6), (0, 3 * 10**9, 3, 4), (1, 4 * 10**9, 5, 6)]
    columns = ("class_index", "arrival_ns", "prompt_tokens", "output_tokens")
    traffic = draw(replay, blocks, folder=tmp_path)
    assert table(traffic, *columns) == expected
    assert [run.stream[1] for row in range(5) for run in traffic.request(row).tokens.prefix] == [0, 1000, 2000]
    assert traffic.request(3).tokens is UNIQUE
    assert table(draw(replay, blocks, folder=tmp_path, duration_s=2.5), *columns) == expected[:3]
    assert table(draw(replay, blocks, folder=tmp_path, num=4), *columns) == expected[:4]


def test_files_are_found_from_the_scenarios_folder(tmp_path):
    (tmp_path / "lengths.csv").write_text("tokens,out\n4,8\n")
    path = {"kind": "empirical", "path": "lengths.csv", "column": "tokens"}
    joint = {"path": "lengths.csv", "prompt_column": "tokens", "output_column": "out"}
    assert draw(
        one_class(arrivals=POISSON, prompt_tokens=path, output_tokens=path), num=2, folder=tmp_path
    ).prompt_tokens.tolist() == [4, 4]
    traffic = draw(one_class(arrivals=POISSON, lengths=joint), num=2, folder=tmp_path)
    assert table(traffic, "prompt_tokens", "output_tokens") == [(4, 8), (4, 8)]
    with pytest.raises(TraceError, match="no such file"):
        draw(one_class(arrivals=POISSON, lengths=joint), num=2, folder=tmp_path / "elsewhere")


# --- contradictions -------------------------------------------------------------------------------

CHAT = one_class(arrivals=POISSON)
LOOP = one_class(arrivals={"kind": "closed_loop", "num_clients": 1})


@pytest.mark.parametrize(
    ("classes", "limits", "message"),
    [
        ([], {"num": 1}, "traffic: the list is empty; at least one request class is needed."),
        ([CHAT, CHAT], {"num": 1}, "traffic[1].name: two classes are called 'c'. Rename one of them."),
        (
            [one_class()],
            {"num": 1},
            "traffic[0]: the class has no arrivals, no trace and no share; arrivals, trace, share: give one.",
        ),
        (
            [one_class(arrivals=POISSON, trace={"kind": "azure", "path": "x"})],
            {"num": 1},
            "traffic[0].trace: the class has arrivals and trace; arrivals, trace, share: give one.",
        ),
        (
            [one_class(share=1)],
            {"num": 1},
            "traffic[0].share: there are no common arrivals to share. "
            "Add `arrivals` at the top of the scenario, or give the class its own.",
        ),
        (
            [one_class(share=1, num_requests=3)],
            {"num": 1, "arrivals": POISSON},
            "traffic[0].num_requests: a class that shares arrivals has no number of its own. Use run.num_requests.",
        ),
        (
            [CHAT],
            {"num": 1, "arrivals": POISSON},
            "arrivals: no class takes a share of them. Give the classes a share each.",
        ),
        (
            [CHAT, one_class(share=0.5) | {"name": "a"}, one_class(share=0.4) | {"name": "b"}],
            {"num": 1, "arrivals": POISSON},
            "traffic[1].share: the shares add up to 0.9; their sum must be 1.",
        ),
        (
            [one_class(share=1)],
            {"num": 1, "arrivals": LOOP["arrivals"]},
            "arrivals: clients of a closed loop cannot be shared. "
            "Give each class its own closed_loop with its number of clients.",
        ),
        (
            [one_class(arrivals=POISSON, prompt_tokens=1)],
            {"num": 1},
            "traffic[0].output_tokens: it is missing; give prompt_tokens and output_tokens, or lengths.",
        ),
        (
            [one_class(arrivals=POISSON, prompt_tokens=1, lengths={"table": "azure-code"})],
            {"num": 1},
            "traffic[0].lengths: the class also has prompt_tokens; lengths takes the place of the other two.",
        ),
        (
            [one_class(trace={"kind": "azure", "path": "x"}, output_tokens=1)],
            {"num": 1},
            "traffic[0].output_tokens: the trace gives the lengths already. Drop output_tokens or the trace.",
        ),
        ([CHAT], {}, "traffic[0].arrivals: poisson arrivals never end. Set run.num_requests or run.duration_s."),
        (
            [one_class(share=1)],
            {"arrivals": POISSON},
            "arrivals: poisson arrivals never end. Set run.num_requests or run.duration_s.",
        ),
        (
            [LOOP],
            {"duration_s": 1},
            "run.num_requests: a closed loop needs a number of requests. "
            "Set it high; a run's duration_s may end the loop before.",
        ),
        (
            [CHAT, LOOP | {"name": "loop"}],
            {"num": 1},
            "traffic[1].num_requests: a closed loop beside other classes needs a number of requests of its own. "
            "Set it; a run's duration_s may end the loop before.",
        ),
        (
            [CHAT],
            {"duration_s": 0.0001},
            "run.duration_s: no request arrives within it. Raise it, or the rate of arrivals.",
        ),
        (
            [CHAT],
            {"num": 10**9},
            "traffic[0].arrivals: this makes 1e+09 requests; a run holds at most 1e+08. "
            "Lower the rate, the duration or the number of requests.",
        ),
        (
            [one_class(trace={"kind": "azure", "path": "${NOT_SET_HERE}"})],
            {},
            "traffic[0].trace.path: the environment variable 'NOT_SET_HERE' in '${NOT_SET_HERE}' is not set. "
            "Set it, or write the path out.",
        ),
    ],
)
def test_contradictions_name_their_place(classes, limits, message):
    with pytest.raises(ScenarioError) as caught:
        draw(*classes, **limits)
    assert str(caught.value) == message


def test_processes_that_end_need_no_limit():
    stages = {"kind": "stages", "process": "constant", "stages": [{"duration_s": 2, "rate_per_s": 2}]}
    assert len(draw(one_class(arrivals=stages))) == 4
    assert len(draw(one_class(arrivals={"kind": "burst", "num_requests": 3}))) == 3
    assert len(draw(one_class(arrivals=POISSON, num_requests=6))) == 6


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"cancel": {"kind": "after_time", "after_s": -1}}, "Input should be greater than or equal to 0"),
        (
            {"cancel": {"kind": "after_time", "after_s": {"kind": "uniform", "low_s": 3, "high_s": 2}}},
            "low_s 3 is above high_s 2; low_s must not exceed high_s",
        ),
        ({"cancel": {"kind": "deadline", "after_s": 0}}, "Input should be greater than 0"),
        ({"cancel": {"kind": "deadline", "after_s": 1, "probability": 1.5}}, "Input should be less than or equal to 1"),
        ({"name": "a/b"}, "String should match pattern '^[^/\\x00-\\x1f]+$'"),
        ({"burst": 3}, "Extra inputs are not permitted"),
    ],
)
def test_bad_fields_are_refused(fields, message):
    with pytest.raises(ValidationError) as caught:
        TrafficClass.model_validate({**CHAT, **fields})
    assert caught.value.errors()[0]["msg"] == message


def test_a_class_survives_a_round_trip_through_json():
    closed = {"kind": "closed_loop", "num_clients": 2, "think_time_s": {"kind": "exponential", "mean_s": 1}}
    cancel = {"kind": "after_tokens", "tokens": {"kind": "empirical", "quantiles": {0: 1, 0.5: 3, 1: 9}}}
    stages = {"kind": "stages", "stages": [{"duration_s": 1, "start_rate_per_s": 1, "end_rate_per_s": 2}]}
    for fields in (
        {"arrivals": closed},
        {"arrivals": stages},
        {"arrivals": POISSON, "cancel": cancel, "slo": {"p99_ttft_ms": 5}},
    ):
        before = TrafficClass.model_validate(one_class(**fields))
        assert TrafficClass.model_validate(json.loads(before.model_dump_json())) == before


def test_the_json_schema_offers_numbers_and_kinds():
    properties = TrafficClass.model_json_schema()["properties"]
    integer, family = properties["prompt_tokens"]["anyOf"][:2]
    assert integer == {"type": "integer", "minimum": 1}
    named = [choice["allOf"] for choice in family["oneOf"] if "allOf" in choice]
    assert ["#/$defs/LognormalOptions", "lognormal"] in [
        [options["$ref"], own["properties"]["kind"]["const"]] for options, own in named
    ]
