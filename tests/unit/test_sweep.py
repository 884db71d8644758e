"""Sweeps: which points there are, what is stored of them, and what happens when one is interrupted or wrong."""

import csv
import fcntl
import json
import os
from pathlib import Path

import pytest

import sim
from sim.errors import ScenarioError, UserError
from sim.planning.sweep import Plan, point_name, simulate_point, sweep
from sim.planning.workers import Workers
from sim.report.planning import sweep_report

ONE = Workers(num_jobs=1)
BASE = {
    "name": "tiny",
    "seed": 1,
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "engine": {"policy": "vllm-v1", "max_num_seqs": 8, "max_model_len": 4096},
    "traffic": [
        {
            "name": "chat",
            "arrivals": {"kind": "poisson", "rate_per_s": 5},
            "prompt_tokens": 100,
            "output_tokens": 10,
        }
    ],
    "run": {"num_requests": 20},
}
GRID = {"engine.max_num_seqs": [2, 4], "traffic.chat.arrivals.rate_per_s": [5, 50]}


def scenario(grid=GRID, **changes) -> sim.Scenario:
    return sim.parse_scenario(BASE | {"sweep": grid} | changes, place="x.yaml")


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.rglob("*.[jc]s*"))}


def test_a_grid_is_every_combination_and_a_list_is_points_or_grids():
    assert [tuple(values.values()) for values in Plan(scenario()).points()] == [(2, 5), (2, 50), (4, 5), (4, 50)]
    listed = [{"seed": 3, "engine.max_num_seqs": 2}, {"seed": [4, 5]}]
    plan = Plan(scenario(listed))
    assert list(plan.points()) == [listed[0], {"seed": 4}, {"seed": 5}]
    assert plan.num_points == 3


def test_every_point_is_the_scenario_with_its_values():
    for values, point in Plan(scenario()).scenarios():
        assert point.engine.max_num_seqs == values["engine.max_num_seqs"]
        assert point.traffic[0].arrivals.rate_per_s == values["traffic.chat.arrivals.rate_per_s"]
        assert point.sweep == {}


def test_a_row_has_the_values_and_the_metrics():
    row = sweep(scenario(), workers=ONE).table[0]
    assert list(row.items())[:2] == [("engine.max_num_seqs", 2), ("traffic.chat.arrivals.rate_per_s", 5)]
    expected = sim.run(Plan(scenario()).scenarios()[0][1]).summary()
    assert row["ttft_p99_ms"] == expected["metrics"]["ttft_ms"]["p99"]
    assert (row["limit"], row["error"]) == (expected["limits"]["binds"], "")


def test_what_is_finished_is_not_run_again_and_the_rest_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    whole = sweep(scenario(), tmp_path / "whole", workers=ONE)
    whole.save(tmp_path / "whole")
    stopped, made = tmp_path / "stopped", []

    def stops_after_two(point):
        made.append(point)
        if len(made) == 3:
            raise KeyboardInterrupt
        return simulate_point(point)

    monkeypatch.setattr("sim.planning.sweep.simulate_point", stops_after_two)
    with pytest.raises(KeyboardInterrupt):
        sweep(scenario(), stopped, workers=ONE)
    assert Plan(scenario()).num_finished(stopped) == 2
    resumed = sweep(scenario(), stopped, workers=ONE)
    resumed.save(stopped)
    assert (resumed.num_resumed, len(made)) == (2, 5)
    assert files(stopped) == files(tmp_path / "whole")


def test_a_changed_scenario_starts_afresh(tmp_path: Path):
    first = sweep(scenario(), tmp_path, workers=ONE)
    other = sweep(scenario(seed=2), tmp_path, workers=ONE)
    assert (other.num_resumed, other.num_stale) == (0, 4)
    assert list(other.notes()) == ["4 points of another scenario were removed from the folder"]
    assert first.answers != other.answers
    assert len(list((tmp_path / "points").iterdir())) == 4
    wider = sweep(scenario(GRID | {"engine.max_num_seqs": [2, 4, 8]}, seed=2), tmp_path, workers=ONE)
    assert (wider.num_resumed, wider.num_stale) == (4, 0)
    assert list(wider.notes()) == ["4 of 6 points were finished before"]


def test_a_changed_trace_is_a_changed_scenario(tmp_path: Path):
    trace = tmp_path / "trace.csv"
    columns = {"arrival_column": "t", "prompt_column": "p", "output_column": "o"}
    traffic = [{"name": "all", "trace": {"kind": "csv", "path": str(trace), **columns}}]
    point = scenario(traffic=traffic, run={})
    trace.write_text("t,p,o\n0,10,1\n")
    before = point_name(point)
    assert point_name(point) == before
    trace.write_text("t,p,o\n0,11,1\n")
    assert point_name(point) != before


def test_more_workers_store_the_same_bytes(tmp_path: Path):
    for name, num_jobs in (("one", 1), ("two", 2)):
        sweep(scenario(), tmp_path / name, workers=Workers(num_jobs)).save(tmp_path / name)
    assert files(tmp_path / "one") == files(tmp_path / "two")
    rows = list(csv.DictReader((tmp_path / "two" / "sweep.csv").read_text().splitlines()))
    assert [row["engine.max_num_seqs"] for row in rows] == ["2", "2", "4", "4"]


def test_a_point_that_cannot_run_has_its_error_and_the_others_run(tmp_path: Path):
    swept = sweep(scenario({"model": ["llama-3.1-8b", "llama-3.1-70b"]}), tmp_path, workers=ONE)
    assert [bool(row["error"]) for row in swept.table] == [False, True]
    assert "llama-3.1-70b" in swept.table[1]["error"] or "memory" in swept.table[1]["error"]
    swept.save(tmp_path)
    assert json.loads((tmp_path / "sweep.json").read_text())["points"][1]["error"] == swept.table[1]["error"]


def error(grid, **options) -> str:
    with pytest.raises(ScenarioError) as caught:
        sweep(scenario(grid), workers=ONE, **options)
    return str(caught.value)


def test_bad_grids_are_refused_before_anything_runs():
    assert error({"engine.max_num_sqs": [1]}) == (
        "x.yaml: sweep (engine.max_num_sqs=1): engine.max_num_sqs: unknown key. Did you mean 'max_num_seqs'?"
    )
    assert error({"seed": list(range(1000)), "engine.max_num_seqs": [1, 2]}) == (
        "x.yaml: sweep: these are 2,000 points; more than 1,000 are run only if that is meant. "
        "Say so with --yes, or shorten the lists."
    )
    assert "has nothing to sweep" in error({})
    with pytest.raises(ScenarioError, match="sweep: seed has no values; a list of at least one"):
        scenario({"seed": []})


def test_counting_a_million_points_makes_none():
    assert Plan(scenario({"seed": list(range(1000)), "engine.max_num_seqs": list(range(1, 1001))})).num_points == 10**6


def test_two_sweeps_do_not_share_a_folder(tmp_path: Path):
    with (tmp_path / ".sweep.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="another sweep is writing to this folder"):
            sweep(scenario(), tmp_path, workers=ONE)
    assert len(sweep(scenario(), tmp_path, workers=ONE).answers) == 4


def test_a_full_disk_keeps_what_is_finished(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    replaced, replace = [], os.replace

    def full_after_two(source, target):
        if len(replaced) == 2:
            raise OSError(28, "No space left on device", str(target))
        replaced.append(target)
        replace(source, target)

    monkeypatch.setattr(os, "replace", full_after_two)
    with pytest.raises(OSError, match="No space left"):
        sweep(scenario(), tmp_path, workers=ONE)
    monkeypatch.undo()
    assert sweep(scenario(), tmp_path, workers=ONE).num_resumed == 2
    assert not list(tmp_path.rglob("*.tmp"))


def die(point):
    os._exit(9)


def test_a_dying_worker_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("sim.planning.sweep.simulate_point", die)
    with pytest.raises(UserError, match="a worker died"):
        sweep(scenario(), tmp_path, workers=Workers(2))


def test_a_long_key_breaks_between_words():
    rows = [{"engine.max_num_batched_tokens": 2, "engine.max_num_seqs": 3, "output_tokens_per_s": 1.0}]
    rows[0] |= dict.fromkeys(["goodput_requests_per_s", "ttft_p99_ms", "itl_p99_ms", "e2e_p99_ms"])
    _, table = sweep_report([rows[0] | {"limit": "kv", "error": ""}], "x")
    heads = [column.header for column in table.columns]
    assert heads == ["engine.\nmax_num_\nbatched_\ntokens", "engine.\nmax_num_seqs", "tokens\nper s", "limited\nby"]
