"""Profiling and serving for real on the CPU: what is done, counted and kept; nothing about how long it takes."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch")

import sim  # noqa: E402
from calibration import raw  # noqa: E402
from calibration.communication import time_all_reduce  # noqa: E402
from calibration.device_artifact import main as make_artifact  # noqa: E402
from calibration.engine import HostTimer, RealDevice  # noqa: E402
from calibration.points import NO_LIMIT, Limits, candidates  # noqa: E402
from calibration.profile import Job, Progress, build_for, open_device, profile  # noqa: E402
from calibration.verify import verify  # noqa: E402
from sim.cli import main  # noqa: E402
from sim.errors import ArtifactError, InvariantError, ScenarioError  # noqa: E402
from sim.model import load_model, read_config  # noqa: E402

pytestmark = pytest.mark.slow

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 64,
    "max_position_embeddings": 128,
}
SCENARIO = """
model: model.json
hardware: {gpu: h100-sxm}
engine: {policy: vllm-v1, max_num_seqs: 4, max_num_batched_tokens: 16, max_model_len: 64, num_gpu_blocks: 9}
traffic:
  - name: chat
    arrivals: {kind: closed_loop, num_clients: 4}
    prompt_tokens: {kind: uniform, low: 4, high: 40}
    output_tokens: {kind: uniform, low: 2, high: 12}
run: {num_requests: 30}
"""


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Two threads would wait for each other on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    path = tmp_path / "model.json"
    path.write_text(json.dumps(CONFIG))
    return path


@pytest.fixture
def scenario(tmp_path: Path, model: Path) -> Path:
    path = tmp_path / "scenario.yaml"
    path.write_text(SCENARIO)
    return path


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """No point is timed more often than it must be, and no time is too long for a busy machine."""
    monkeypatch.setattr("calibration.timing.MAX_REPEATS", 5)
    monkeypatch.setattr("calibration.screening.LONGEST_LAUNCH_NS", 1e12)


@pytest.fixture
def coarse_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A profile ends with its grid, however long that takes."""
    monkeypatch.setattr("calibration.profile.candidates", lambda *_: [])


def job(model: Path, **changes: object) -> Job:
    limits = Limits(max_num_batched_tokens=8, max_num_seqs=2, max_model_len=32, cache_tokens=NO_LIMIT)
    made = Job(load_model(str(model)), read_config(str(model))[1], torch.device("cpu"), limits, budget_s=1e6)
    return replace(made, **changes)


def in_order(_: object, wanted: object) -> np.ndarray:
    return np.zeros(len(wanted))


class Clock:
    """Stands for `time`: every look at the clock takes so long."""

    def __init__(self, step_s: float) -> None:
        self._now_s, self._step_s = 0.0, step_s

    def monotonic(self) -> float:
        self._now_s += self._step_s
        return self._now_s


@pytest.mark.usefixtures("quick")
def test_everything_is_timed_once_and_said_to_be_known_the_next_time(model: Path, tmp_path: Path):
    out, seen = tmp_path / "raw.parquet", []
    first = profile(job(model), out, in_order, seen.append)
    executor = build_for(job(model))
    limits = replace(job(model).limits, cache_tokens=(executor.cache.num_pages - 1) * executor.page_size)
    keys = [point.key for point in candidates(limits, False, ("eager",))]
    points, metadata = raw.read(out)
    found = points[list(raw.KEY)].to_dict("records")
    assert [key for key in keys if key not in found] == []
    assert len(found) == len({tuple(row.values()) for row in found}) == first.num_timed == len(seen)
    assert (points["median_ns"] > 0).all()
    assert (points["ci_low_ns"] <= points["ci_high_ns"]).all()
    assert metadata.model == "model"
    assert metadata.config == CONFIG
    assert (metadata.num_layers, metadata.dtype, metadata.device) == (2, "bfloat16", "cpu")
    assert metadata.backends["decode_attention"] == "torch gather + scaled_dot_product_attention"
    before = out.read_bytes()
    again = profile(job(model), out, in_order)
    assert (again.num_timed, again.num_known) == (0, first.num_timed)
    assert out.read_bytes() == before


@pytest.mark.usefixtures("quick", "coarse_only")
def test_what_an_interruption_leaves_is_gone_on_with(model: Path, tmp_path: Path):
    out = tmp_path / "raw.parquet"

    def interrupt(now: Progress) -> None:
        if now.done == 7:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        profile(job(model), out, in_order, interrupt)
    assert len(raw.read(out).points) == 7
    assert profile(job(model), out, in_order).num_known == 7


@pytest.mark.usefixtures("quick")
def test_after_the_grid_the_least_known_come_first(model: Path, tmp_path: Path):
    out, refined = tmp_path / "raw.parquet", []

    def note(now: Progress) -> None:
        if now.planned is None:
            refined.append(now.point)

    def long_chunks(timed: object, wanted: object) -> np.ndarray:
        assert len(timed) > 30
        return wanted["chunk_tokens"].to_numpy(dtype=float)

    profile(job(model), out, long_chunks, note)
    chunks = [point.chunk_tokens for point in refined]
    assert chunks == sorted(chunks, reverse=True)
    assert chunks[0] > chunks[-1]


@pytest.mark.usefixtures("quick")
def test_too_little_time_is_said_and_nothing_is_lost(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    out = tmp_path / "raw.parquet"
    monkeypatch.setattr("calibration.profile.time", Clock(1.0))
    with pytest.raises(ArtifactError, match=r"--budget-minutes: ran out after \d+ of the \d+ points .* Run it again"):
        profile(job(model, budget_s=20.0), out, in_order)
    assert 0 < len(raw.read(out).points) < 20


def test_a_raw_file_of_something_else_and_a_missing_gpu_are_named(model: Path, tmp_path: Path):
    out = tmp_path / "raw.parquet"
    other = tmp_path / "other.json"
    other.write_text(json.dumps(CONFIG | {"intermediate_size": 32}))
    with pytest.raises(ArtifactError, match="--budget-minutes"):
        profile(job(model, budget_s=0.0), out, in_order)
    assert not out.exists()
    raw.append(out, [], describe_of(job(model)))
    with pytest.raises(ArtifactError, match='holds points of model "model", and these are of "other"'):
        profile(job(other), out, in_order)
    with pytest.raises(ArtifactError, match="unknown device 'tpu'; known: cuda, cpu"):
        open_device("tpu")
    if not torch.cuda.is_available():
        with pytest.raises(ArtifactError, match=r"--device cuda: torch .* finds no GPU"):
            open_device("cuda")


def describe_of(own: Job) -> raw.Metadata:
    from calibration.profile import describe

    return describe(own, build_for(own))


def test_processes_sum_over_a_network_of_their_own():
    found = time_all_reduce([1, 16], 32, 2, "cpu")
    assert len(found) == 2
    assert all(timing.median_ns > 0 and timing.repeats == 50 for timing in found)


@pytest.mark.usefixtures("quick", "coarse_only")
@pytest.mark.parametrize("ahead", ["true", "false"])
def test_verify_serves_every_planned_iteration_and_reports_all_metrics(scenario: Path, tmp_path: Path, ahead: str):
    """Clients that wait for their answers meet the same batches however long these take, so that counts are equal."""
    out, overrides = tmp_path / "out", [f"engine.async_scheduling={ahead}"]
    planned = sim.run(sim.load_scenario(scenario, overrides)).summary()
    assert planned["kv"]["num_preemptions"] > 0
    report = verify(scenario, torch.device("cpu"), out, repeats=2, budget_s=1e6, overrides=overrides)
    assert report.predicted_iterations == planned["iterations"]["count"]
    assert [executed.iterations for executed in report.executed] == [report.predicted_iterations] * 2
    assert [(row.metric, row.statistic) for row in report.rows] == [
        *((metric, statistic) for metric in ("ttft", "itl", "tpot", "e2e") for statistic in ("mean", "p50", "p99")),
        ("makespan", ""),
    ]
    assert all(value > 0 for row in report.rows for value in (row.predicted, *row.measured))
    assert all(row.half_width is not None and len(row.measured) == 2 for row in report.rows)
    assert len({executed.output_tokens for executed in report.executed}) == 1
    assert report.executed[0].output_tokens == report.executed[0].sampled_tokens
    assert all(executed.drift is not None and executed.drift > -1 for executed in report.executed)
    assert report.artifact.host_us + report.artifact.host_us_per_request > 0
    saved = json.loads((out / "report.json").read_text())
    assert saved == json.loads(json.dumps(report.to_dict()))
    assert {path.name for path in out.iterdir()} == {"raw.parquet", "artifact.json", "report.json"}
    text = "\n".join(report.lines())
    assert "ttft mean, ms" in text
    assert "2 repeats of" in text
    again = verify(
        scenario,
        torch.device("cpu"),
        tmp_path / "again",
        artifact=out / "artifact.json",
        repeats=1,
        overrides=overrides,
    )
    assert again.artifact == report.artifact
    assert again.rows[0].half_width is None
    assert again.executed[0].drift is None


def served(scenario: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, change: Callable[..., None]) -> None:
    monkeypatch.setattr(RealDevice, "_take_in", change)
    verify(scenario, torch.device("cpu"), tmp_path / "out", repeats=1, budget_s=1e6)


@pytest.mark.usefixtures("quick", "coarse_only")
def test_a_device_that_loses_track_of_its_requests_is_a_bug(
    scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    take_in = RealDevice._take_in

    def forgets_one(self, members, tokens):
        take_in(self, members, tokens)
        members[0][0].num_computed -= 1

    with pytest.raises(InvariantError, match="reached an engine that follows"):
        served(scenario, monkeypatch, tmp_path, forgets_one)


@pytest.mark.usefixtures("quick", "coarse_only")
def test_a_token_that_is_not_counted_is_a_bug(scenario: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    take_in = RealDevice._take_in

    def miscounts(self, members, tokens):
        take_in(self, members, tokens)
        if not isinstance(self, HostTimer):
            self.num_sampled -= 1

    with pytest.raises(InvariantError, match="tokens were planned"):
        served(scenario, monkeypatch, tmp_path, miscounts)


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("hardware.tensor_parallel=2", "hardware.tensor_parallel: is 2; the engine of `calibrate verify` has 1"),
        ("engine.pipeline_parallel_size=2", "engine.pipeline_parallel_size: is 2"),
        ("engine={policy: orca, selective_batching: false}", "engine.selective_batching: is False"),
    ],
)
def test_what_one_device_cannot_serve_is_refused(scenario: Path, tmp_path: Path, override: str, message: str):
    with pytest.raises(ScenarioError, match=message):
        verify(scenario, torch.device("cpu"), tmp_path / "out", overrides=[override])


@pytest.mark.usefixtures("quick", "coarse_only")
def test_the_commands_say_what_they_wrote(
    scenario: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    out = tmp_path / "raw.parquet"
    profiled = ["calibrate", "profile", "--model", str(model), "--device", "cpu", "--out", str(out)]
    limits = ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--max-model-len", "64"]
    assert main([*profiled, *limits, "--budget-minutes", "1e4"]) == 0
    assert f"wrote {out}: " in capsys.readouterr().out
    assert main([*profiled, *limits, "--tp", "3"]) == 2
    assert "--tp: 3 does not divide the 2 attention heads" in capsys.readouterr().err
    artifact = tmp_path / "artifact.json"
    assert main(["calibrate", "fit", str(out), "--out", str(artifact)]) == 0
    served = ["calibrate", "verify", str(scenario), "--device", "cpu", "--artifact", str(artifact)]
    assert main([*served, "--repeats", "1", "--out", str(tmp_path / "verify")]) == 0
    shown = capsys.readouterr().out
    assert "makespan, s" in shown
    assert "times are from model on 1" in shown
    assert main([*served, "--json", "--repeats", "1", "--out", str(tmp_path / "verify"), "--set", "seed=2"]) == 0
    assert json.loads(capsys.readouterr().out)["scenario"] == "scenario"


@pytest.mark.usefixtures("quick", "coarse_only")
def test_one_command_makes_an_artifact_and_its_report_and_goes_on_where_it_was(
    scenario: Path, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = ["--device", "cpu", "--model", str(model), "--name", "toy", "--scenario", str(scenario)]
    arguments += ["--out", str(tmp_path / "artifacts"), "--work", str(tmp_path / "work"), "--repeats", "1"]
    arguments += ["--max-num-seqs", "4", "--max-num-batched-tokens", "16", "--max-model-len", "64"]
    assert make_artifact([*arguments, "--minutes", "0.001"]) == 2
    assert "--budget-minutes: ran out after" in capsys.readouterr().err
    assert make_artifact([*arguments, "--minutes", "1e4"]) == 0
    shown = capsys.readouterr().out
    names = sorted(path.name for path in (tmp_path / "artifacts").iterdir())
    assert [name.rpartition("_")[2] for name in names] == ["toy.json", "toy.report.txt"]
    report = (tmp_path / "artifacts" / names[1]).read_text()
    assert "makespan, s" in report
    assert report in shown
    assert make_artifact([*arguments, "--device", "cuda"]) == 2 or torch.cuda.is_available()


def test_the_one_command_needs_nothing_of_the_command_line():
    code = "import sys, calibration.device_artifact, calibration.verify, sim.build, sim.results, calibration.fit"
    code += "; print(*{'typer', 'rich', 'matplotlib', 'joblib'}.intersection(sys.modules))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.split() == []
