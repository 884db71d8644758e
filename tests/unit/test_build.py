"""From scenario to run: limits that need the model, the GPU or the drawn traffic, and what is written down."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml

import sim
from sim.build import draw, run
from sim.provenance import provenance, save
from sim.replica import replica
from sim.request import Outcome
from sim.scenario import load_scenario, parse_scenario

BASE = {
    "seed": 3,
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "engine": {"policy": "vllm-v1", "max_num_seqs": 8, "max_model_len": 1024, "num_gpu_blocks": 200},
    "traffic": [
        {
            "name": "chat",
            "arrivals": {"kind": "poisson", "rate_per_s": 20},
            "prompt_tokens": {"kind": "uniform", "low": 10, "high": 500},
            "output_tokens": {"kind": "uniform", "low": 1, "high": 50},
        }
    ],
    "run": {"num_requests": 40},
}


def with_engine(**options: object) -> dict:
    return BASE | {"engine": BASE["engine"] | options}


def error_of(data: dict, error: type[Exception] = sim.ScenarioError) -> str:
    with pytest.raises(error) as caught:
        run(parse_scenario(data, place="x.yaml"))
    return str(caught.value)


def test_a_run_is_the_same_twice():
    one, two = run(BASE), run(BASE)
    assert one.summary() == two.summary()
    assert one.summary()["outcomes"]["finished"] == 40
    for table in ("iterations", "requests", "segments", "chunks"):
        assert one.to_frame(table).equals(two.to_frame(table))


def test_time_without_anybody_waiting_is_the_clients_only_where_all_classes_are_closed_loops():
    loop = {"kind": "closed_loop", "num_clients": 1, "think_time_s": 0.1}
    closed = BASE["traffic"][0] | {"name": "loop", "arrivals": loop, "num_requests": 5}
    assert run(BASE | {"traffic": [closed]}).limits.verdict.startswith("the client: it sends its next request after")
    mixed = run(BASE | {"traffic": [*BASE["traffic"], closed]})
    assert mixed.limits.verdict.startswith("the arrivals (nothing binds): nobody was kept waiting")


def test_oversized_requests_stop_the_run_or_are_rejected():
    data = with_engine(max_model_len=400)
    assert error_of(data) == (
        "x.yaml: traffic: 9 of 40 requests can never run; the largest is request 24 of class 'chat' "
        "(500 prompt tokens, max_tokens 39): its prompt of 500 tokens is not below max_model_len 400. "
        "Raise the limit, make the requests shorter, or set run.oversized: reject."
    )
    summary = run(data | {"run": {"num_requests": 40, "oversized": "reject"}}).summary()
    assert (summary["outcomes"]["rejected"], summary["outcomes"]["finished"]) == (9, 31)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (BASE | {"hardware": {"gpu": "h100"}}, "x.yaml: hardware.gpu: unknown GPU 'h100'; known: "),
        (BASE | {"model": "llama-3-8b"}, "x.yaml: model: unknown model 'llama-3-8b'; known: "),
        (
            BASE | {"hardware": {"gpu": "h100-sxm", "tensor_parallel": 3}},
            "x.yaml: hardware.tensor_parallel: 3 does not divide the 32 attention heads of llama-3.1-8b; possible: ",
        ),
        (
            BASE | {"model": "llama-3.1-70b", "engine": {"policy": "vllm-v1"}},
            "x.yaml: hardware.gpu: llama-3.1-70b does not fit h100-sxm: ",
        ),
        (
            BASE | {"hardware": {"gpu": "rtx-3090"}, "engine": {"policy": "vllm-v1"}},
            "x.yaml: engine.max_model_len: 131072 tokens need 16.00 GiB of KV per GPU, there is ",
        ),
        (
            with_engine(max_model_len=200_000),
            "x.yaml: engine.max_model_len: 200000 is more than llama-3.1-8b supports; at most 131072.",
        ),
        (BASE | {"run": {}}, "x.yaml: "),
    ],
    ids=["gpu", "model", "tensor parallel", "weights", "max_model_len", "positions", "endless"],
)
def test_what_takes_more_than_the_file_to_see(data: dict, message: str):
    assert error_of(data).startswith(message)


@pytest.mark.parametrize(
    ("engine", "left"),
    [
        # max_tokens counts anew after a preemption, until a victim is too large for the watermark
        (
            {"policy": "sarathi-vllm", "max_model_len": 40, "block_size": 2, "num_gpu_blocks": 16, "watermark": 0.1},
            "25 requests are left in it that it can never run again; request 6 is first in its queue, ",
        ),
        # what is swapped out in its prefill comes back whole or not at all
        (
            {
                "policy": "vllm-v0",
                "max_model_len": 40,
                "num_gpu_blocks": 3,
                "max_num_batched_tokens": 3,
                "enable_chunked_prefill": True,
                "preemption": "swap",
            },
            "requests are left in it that it can never run again;",
        ),
    ],
)
def test_an_engine_that_stands_still_is_named(engine: dict, left: str):
    """As the real one hangs. A run that is cut has not come to that."""
    traffic = BASE["traffic"][0] | {
        "arrivals": {"kind": "burst", "num_requests": 40},
        "prompt_tokens": {"kind": "uniform", "low": 1, "high": 15},
        "output_tokens": {"kind": "uniform", "low": 1, "high": 80},
        "max_tokens": 20,
    }
    data = BASE | {"engine": engine, "traffic": [traffic], "run": {"num_requests": 40, "oversized": "reject"}}
    assert left in error_of(data)
    cut = run(parse_scenario(data | {"run": {"duration_s": 9.0, "drain": False, "oversized": "reject"}}))
    assert Outcome.UNFINISHED in cut.tables.requests["outcome"]


def test_a_missing_trace(tmp_path: Path):
    trace = {"kind": "azure", "path": "nowhere.csv"}
    data = BASE | {"traffic": [{"name": "replay", "trace": trace}]}
    with pytest.raises(sim.TraceError) as caught:
        run(parse_scenario(data, folder=tmp_path))
    assert str(caught.value).startswith(f"{tmp_path / 'nowhere.csv'}: no such file.")


def azure_rows(num: int) -> str:
    rows = [f"2023-11-16 18:15:{i:02d}.0000000,{100 + i},{5 + i}" for i in range(num)]
    return "\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *rows])


def test_a_fallback_is_played_and_named(tmp_path: Path):
    (tmp_path / "sample.csv").write_text(azure_rows(5))
    trace = {"kind": "azure", "path": "trace.csv", "fallback": "sample.csv"}
    scenario = parse_scenario(BASE | {"traffic": [{"name": "replay", "trace": trace}], "run": {}}, folder=tmp_path)
    results = run(scenario)
    assert results.summary()["outcomes"]["finished"] == 5
    facts = results.facts.provenance
    assert facts["notes"] == ["class 'replay' plays sample.csv in place of trace.csv, which is not there"]
    assert facts["scenario"]["traffic"][0]["trace"]["path"] == "sample.csv"

    (tmp_path / "trace.csv").write_text(azure_rows(9))
    again = run(scenario)
    assert again.summary()["outcomes"]["finished"] == 9
    assert again.facts.provenance["notes"] == ["class 'replay' plays trace.csv"]
    assert again.facts.provenance["scenario_sha256"] != facts["scenario_sha256"]


def test_variants_meet_the_same_requests():
    scenario = parse_scenario(BASE)
    other = parse_scenario(BASE | {"engine": {"policy": "orca", "max_batch_size": 4}, "cost": {"kind": "roofline"}})
    assert draw(scenario).arrival_ns.tolist() == draw(other).arrival_ns.tolist()
    assert draw(scenario).output_tokens.tolist() == draw(other).output_tokens.tolist()


def test_the_hash_covers_what_is_simulated_and_nothing_else():
    def digest(data: dict) -> str:
        scenario = parse_scenario(data)
        return provenance(scenario, [replica(scenario).limits])["scenario_sha256"]

    base = digest(BASE)
    assert digest(BASE | {"name": "other", "compare": {"a": {"seed": 1}}}) == base
    assert digest(with_engine(block_size=16)) == base
    assert digest(with_engine(max_num_seqs=9)) != base
    assert digest(BASE | {"seed": 4}) != base


def test_what_is_written_down_runs_again(tmp_path: Path):
    data = copy.deepcopy(BASE)
    data["engine"]["num_gpu_blocks"] = "auto"
    data["engine"]["kv_cache_memory_bytes"] = 2**30
    scenario = parse_scenario(data)
    results = run(scenario)
    written = save(results, scenario, tmp_path / "out")
    assert sorted(path.name for path in written) == sorted(path.name for path in (tmp_path / "out").iterdir())
    resolved = load_scenario(tmp_path / "out" / "scenario.yaml")
    assert resolved.engine.num_gpu_blocks == 512
    again = run(resolved)
    assert again.summary() == results.summary()


def test_relative_paths_are_written_so_that_they_work_elsewhere(tmp_path: Path):
    (tmp_path / "sample.csv").write_text(azure_rows(3))
    trace = {"kind": "azure", "path": "sample.csv"}
    scenario = parse_scenario(BASE | {"traffic": [{"name": "replay", "trace": trace}], "run": {}}, folder=tmp_path)
    save(run(scenario), scenario, tmp_path / "a" / "b")
    text = (tmp_path / "a" / "b" / "scenario.yaml").read_text()
    assert yaml.safe_load(text)["traffic"][0]["trace"]["path"] == str(tmp_path / "sample.csv")
    assert run(tmp_path / "a" / "b" / "scenario.yaml").summary()["outcomes"]["finished"] == 3


def test_a_run_can_be_cut():
    data = BASE | {"run": {"duration_s": 1.0, "drain": False}, "engine": BASE["engine"] | {"max_num_seqs": 1}}
    summary = run(data).summary()
    assert summary["outcomes"]["unfinished"] > 0
    assert summary["makespan_s"] <= 1.0
    assert sum(summary["outcomes"].values()) == len(draw(parse_scenario(data)))


def test_the_public_api_runs_files_and_data(tmp_path: Path):
    path = tmp_path / "chat.yaml"
    path.write_text(yaml.safe_dump(BASE))
    assert (
        sim.run(path).summary()["metrics"]
        == sim.run(str(path)).summary()["metrics"]
        == sim.run(BASE).summary()["metrics"]
    )


RICH = {
    "name": "rich",
    "seed": 3,
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm", "tensor_parallel": 1},
    "engine": {"policy": "vllm-v1", "max_num_seqs": 8, "max_model_len": 4096, "block_size": 16, "num_gpu_blocks": 900},
    "cost": {"kind": "constant", "step_ms": 5.0},
    "traffic": [
        {
            "name": "chat",
            "arrivals": {"kind": "gamma", "rate_per_s": 20, "cv": 2.0},
            "prompt_tokens": {"kind": "lognormal", "mean": 200, "cv": 1.0, "max": 2000},
            "output_tokens": {"kind": "empirical", "values": [5, 10], "weights": [1, 2]},
            "max_tokens": 100,
            "priority": 1,
            "cancel": {
                "kind": "after_time",
                "probability": 0.5,
                "after_s": {"kind": "uniform", "low_s": 0, "high_s": 1},
            },
            "slo": {"p99_ttft_ms": 100.0},
        },
        {
            "name": "loop",
            "arrivals": {"kind": "closed_loop", "num_clients": 2, "think_time_s": 0.5},
            "lengths": {"table": "azure-code"},
            "num_requests": 5,
            "max_connections": 1,
        },
        {
            "name": "ramp",
            "arrivals": {"kind": "stages", "stages": [{"duration_s": 1.0, "rate_per_s": 5.0}]},
            "prompt_tokens": 10,
            "output_tokens": 3,
        },
    ],
    "run": {"num_requests": 40, "duration_s": 5.0, "warmup_s": 0.5, "oversized": "reject"},
    "slo": {"p99_itl_ms": 50},
    "compare": {"other": {"engine": {"policy": "orca"}}},
}
WRONG = (None, True, -1, 0, 10**30, 0.5, math.nan, math.inf, "", "x", [], [1], [[]], {}, {"kind": "x"}, {"name": 3})


def paths(value: object, path: tuple = ()) -> Iterator[tuple]:
    """Every place in nested data, the innermost last."""
    for key, inner in value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ():
        yield (*path, key)
        yield from paths(inner, (*path, key))


def complaint(data: dict) -> str:
    """What is said about a scenario before it runs; nothing if it may run."""
    try:
        scenario = parse_scenario(data, place="x.yaml")
        replica(scenario)
        draw(scenario)
    except sim.UserError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("path", list(paths(RICH)), ids=lambda path: ".".join(map(str, path)))
def test_whatever_is_wrong_is_a_users_error(path: tuple):
    for value in WRONG:
        data = copy.deepcopy(RICH)
        here = data
        for key in path[:-1]:
            here = here[key]
        here[path[-1]] = value
        assert all(line.startswith("x.yaml: ") for line in complaint(data).splitlines())


def test_the_scenario_of_that_test_is_right():
    assert complaint(RICH) == ""
