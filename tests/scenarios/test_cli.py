"""The command line as a user meets it: what it prints where, and how it ends."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from functools import partial
from importlib import metadata
from pathlib import Path

import jsonschema
import pytest

ROOT = Path(__file__).resolve().parents[2]
SERVESIM = [sys.executable, "-m", "sim"]
YAML = """
model: llama-3.1-8b
hardware: {gpu: h100-sxm}
engine: {policy: vllm-v1, max_num_seqs: 8, max_model_len: 1024, num_gpu_blocks: 200}
traffic:
  - name: chat
    arrivals: {kind: poisson, rate_per_s: 20}
    prompt_tokens: {kind: uniform, low: 10, high: 500}
    output_tokens: {kind: uniform, low: 1, high: 50}
run: {num_requests: 40}
slo: {p99_ttft_ms: 200}
compare:
  static: {engine: {policy: static, max_batch_size: 8}}
"""


def servesim(*arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*SERVESIM, *map(str, arguments)],
        cwd=ROOT,
        env=os.environ | {"COLUMNS": "80"} | environment,
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=120,
    )


@pytest.fixture
def scenario(tmp_path: Path) -> Path:
    path = tmp_path / "chat.yaml"
    path.write_text(YAML)
    return path


def test_run_prints_a_summary_that_ends_with_the_limit(scenario: Path):
    done = servesim("run", scenario)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "chat"
    assert all(len(line) <= 80 for line in lines if str(scenario) not in line)
    for label in ("TTFT, ms", "ITL, ms", "E2E, ms", "throughput", "requests", "KV cache", "what limits you: "):
        assert any(line.startswith(label) for line in lines)
    assert "\x1b" not in done.stdout


def test_a_stopped_run_says_where_and_how_many_were_left(scenario: Path):
    done = servesim("run", scenario, "--set", "run.duration_s=1", "--set", "run.drain=false")
    note = " ".join(done.stdout.partition("note: ")[2].partition("note: ")[0].split())
    stop = r"the run was stopped at 1.000 s with [1-9]\d* requests unfinished"
    assert re.fullmatch(rf"\d+ requests measured, from \d.\d+ s to 1.000 s; {stop}", note)


def test_run_writes_a_folder_that_names_everything(scenario: Path, tmp_path: Path):
    out = tmp_path / "new" / "out"
    done = servesim("run", scenario, "--out", out)
    assert done.returncode == 0
    names = sorted(path.name for path in out.iterdir())
    assert {"summary.json", "requests.parquet", "iterations.parquet", "segments.parquet", "scenario.yaml"} <= set(names)
    wrote = [line for line in done.stdout.splitlines() if line.startswith("wrote ")]
    assert sorted(wrote[0].removeprefix(f"wrote {out}: ").split(", ")) == names
    again = servesim("run", out / "scenario.yaml", "--json")
    assert json.loads(again.stdout)["metrics"] == json.loads((out / "summary.json").read_text())["metrics"]


def test_plot_says_when_there_is_nothing_to_draw(scenario: Path, tmp_path: Path):
    out, nobody = tmp_path / "out", ["--set", "engine.max_model_len=2", "--set", "run.oversized=reject"]
    assert servesim("run", scenario, "--out", out, *nobody).returncode == 0
    done = servesim("plot", out)
    assert (done.returncode, done.stdout) == (0, f"nothing to draw: in the run in {out} nothing was computed\n")


def test_json_is_all_that_json_prints(scenario: Path, tmp_path: Path):
    done = servesim("run", scenario, "--json", "--seed", 5, "--set", "run.num_requests=10", "--out", tmp_path / "out")
    summary = json.loads(done.stdout)
    assert (done.returncode, done.stderr) == (0, "")
    assert summary["provenance"]["seed"] == 5
    assert summary["outcomes"]["finished"] == 10
    comparison = json.loads(servesim("compare", scenario, "--json").stdout)
    assert list(comparison["variants"]) == ["vllm-v1", "static"]
    assert list(comparison["table"][0]) == ["variant", "values", "ratios", "limit"]


def test_compare_ends_with_who_wins(scenario: Path, tmp_path: Path):
    done = servesim("compare", scenario, "--out", tmp_path / "out")
    assert done.returncode == 0
    lines = done.stdout.splitlines()
    shown = [line for line in lines if not line.startswith("wrote ")]
    assert all(len(line) <= 80 for line in shown)
    assert "vllm-v1 wins: " in done.stdout
    assert (tmp_path / "out" / "comparison.json").is_file()
    assert (tmp_path / "out" / "static" / "summary.json").is_file()


def test_several_files_are_compared(scenario: Path, tmp_path: Path):
    other = tmp_path / "other.yaml"
    other.write_text(YAML.replace("max_num_seqs: 8", "max_num_seqs: 2"))
    done = servesim("compare", scenario, other)
    assert done.returncode == 0
    assert "did not meet the same requests" not in done.stdout
    done = servesim("compare", scenario, scenario)
    assert (done.returncode, done.stderr) == (2, f"error: {scenario}: is given twice.\n")


def test_explain_shows_the_arithmetic_without_a_run(scenario: Path):
    done = servesim("explain", scenario, "--set", "engine.num_gpu_blocks=null")
    assert done.returncode == 0
    for label in ("memory of one h100-sxm", "weights of llama-3.1-8b", "= left for KV", "maximum concurrency"):
        assert label in done.stdout
    terms = json.loads(servesim("explain", scenario, "--json").stdout)
    assert sum(term["bytes"] for term in terms["terms"]) == terms["available_bytes"]
    assert terms["num_gpu_blocks"] == 200


@pytest.mark.parametrize(
    ("command", "name"), [("models", "llama-3.1-8b"), ("gpus", "h100-sxm"), ("policies", "vllm-v1")]
)
def test_catalogues(command: str, name: str):
    done = servesim(command)
    assert done.returncode == 0
    assert all(len(line) <= 80 for line in done.stdout.splitlines())
    assert any(line.startswith(name) for line in done.stdout.splitlines())
    rows = json.loads(servesim(command, "--json").stdout)
    assert name in [next(iter(row.values())) for row in rows]


def test_a_policy_can_be_read_alone():
    done = servesim("policies", "sarathi")
    assert (done.returncode, done.stdout.partition(":")[0]) == (0, "sarathi")
    assert "chunk_size" in done.stdout
    assert [row["policy"] for row in json.loads(servesim("policies", "sarathi", "--json").stdout)] == ["sarathi"]
    wrong = servesim("policies", "sarahti")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "POLICY: unknown policy 'sarahti'" in wrong.stderr
    assert "Did you mean 'sarathi'?" in wrong.stderr


def test_the_schema_is_one_and_fits_all_scenarios():
    import yaml

    schema = json.loads(servesim("schema").stdout)
    jsonschema.Draft202012Validator.check_schema(schema)
    for path in sorted((ROOT / "scenarios").glob("*.yaml")):
        jsonschema.validate(yaml.safe_load(path.read_text()), schema)


def test_version_and_help():
    assert servesim("--version").stdout == f"servesim {metadata.version('servesim')}\n"
    done = servesim("--help")
    assert done.returncode == 0
    for command in ("run", "compare", "explain", "schema", "models", "gpus", "policies"):
        assert f"\n  {command} " in done.stdout


def test_help_loads_nothing_that_it_does_not_need():
    code = "import sys, sim.cli; print(*sorted({'numpy', 'pydantic', 'simpy', 'yaml', 'pandas'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["rnu"], "Error: No such command 'rnu'. Did you mean 'run'?"),
        (["run"], "Error: Missing argument 'SCENARIO'."),
        (["run", "{}", "--seed", "x"], "Error: Invalid value for '--seed'"),
        (["run", "{}", "--seed", "-1"], "Error: Invalid value for '--seed'"),
        (["capacity", "{}", "--rate", "inf"], "Error: Invalid value for '--rate'"),
        (["capacity", "{}", "--rate", "nan"], "Error: Invalid value for '--rate'"),
        (["run", "{}", "--sett", "a=1"], "Error: No such option: --sett"),
        (["run", "no.yaml"], "error: no.yaml: no such file."),
        (["capacity", "{}", "--low", "5", "--high", "2"], "--low, --high: 5 to 2 is no range"),
        (["sweep", "{}", "--set", "sweep={{engine.max_nun_seqs: [1]}}"], "unknown key. Did you mean 'max_num_seqs'?"),
        (["why", "{}", "--set", "fleet={{router: {{kind: round_robbin}}}}"], "Did you mean 'round_robin'?"),
        (["run", "{}", "--set", "engine.policy=vlm-v1"], "unknown policy 'vlm-v1'; known: vllm-v1, "),
        (
            ["run", "{}", "--out", "pyproject.toml"],
            "error: --out pyproject.toml: cannot be made a folder: File exists.",
        ),
        (["run", "{}", "--out", ""], "error: --out '': names no folder. For the current one write --out . (a dot)."),
        (["compare", "{}", "--out", ""], "error: --out '': names no folder."),
        (["compare", "{}", "--set", "compare=null"], "has nothing to compare."),
        (["compare", "{}", "--max-replications", "8"], "--max-replications: says nothing without --capacity."),
        (["run", "{}", "--jobs", "2"], "--jobs: says nothing without --precision."),
    ],
)
def test_a_users_mistake_exits_2_without_a_traceback(scenario: Path, arguments: list[str], message: str):
    done = servesim(*(argument.format(scenario) for argument in arguments))
    assert (done.returncode, done.stdout) == (2, "")
    assert message in done.stderr
    assert "Traceback" not in done.stderr


def test_a_bug_exits_3_and_says_whose_it_is(scenario: Path, tmp_path: Path):
    (tmp_path / "theirs.py").write_text(
        "from sim.cost.constant import Constant\n"
        "from sim.cost.base import CostOptions\n"
        "class Broken(Constant):\n"
        "    Options = CostOptions\n"
        "    @classmethod\n"
        "    def build(cls, options, target):\n"
        "        raise ZeroDivisionError('no luck')\n"
    )
    arguments = ("run", scenario, "--set", "cost={kind: 'theirs:Broken'}")
    refused = servesim(*arguments, PYTHONPATH=str(tmp_path))
    assert refused.returncode == 2
    assert "Pass --allow-imports if you trust this scenario." in refused.stderr
    failed = servesim(*arguments, "--allow-imports", PYTHONPATH=str(tmp_path))
    assert (failed.returncode, failed.stdout) == (3, "")
    assert failed.stderr.splitlines() == [
        "error: this is a bug in servesim: ZeroDivisionError('no luck')",
        "Please report it with the scenario. SERVESIM_DEBUG=1 shows where it happened.",
    ]
    assert "Traceback" in servesim(*arguments, "--allow-imports", PYTHONPATH=str(tmp_path), SERVESIM_DEBUG="1").stderr


def test_an_interrupted_run_leaves_nothing(scenario: Path, tmp_path: Path):
    out = tmp_path / "out"
    arguments = ["run", str(scenario), "--set", "run.num_requests=1000000", "--out", str(out)]
    # Started in the background of a script, these tests have SIGINT ignored, and so would what they start.
    heed = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    with subprocess.Popen(
        [*SERVESIM, *arguments], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, preexec_fn=heed
    ) as run:
        for _ in range(600):  # the folder is made just before the run starts
            if out.is_dir():
                break
            time.sleep(0.05)
        time.sleep(0.3)
        run.send_signal(signal.SIGINT)
        stdout, stderr = run.communicate(timeout=60)
    assert (run.returncode, stdout, stderr) == (130, b"", b"interrupted\n")
    assert list(out.iterdir()) == []


def test_a_closed_pipe_is_no_error():
    command = f"set -o pipefail; {sys.executable} -m sim schema | true"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_a_closed_stdout_is_no_error(scenario: Path):
    command = f"{sys.executable} -m sim run {scenario} >&-"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full here")
def test_a_full_disk_is_no_bug_of_ours():
    command = f"{sys.executable} -m sim models --json >/dev/full"
    done = subprocess.run(["bash", "-c", command], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (2, "error: No space left on device.\n")


def test_a_folder_in_the_way_of_a_file_is_no_bug_of_ours(scenario: Path, tmp_path: Path):
    (tmp_path / "out" / "summary.json").mkdir(parents=True)
    done = servesim("run", scenario, "--out", tmp_path / "out")
    assert done.returncode == 2
    assert done.stderr == f"error: {tmp_path / 'out' / 'summary.json'}: Is a directory.\n"
    assert not list((tmp_path / "out").glob(".*"))


def test_a_terminal_without_our_characters_shows_the_rest(scenario: Path):
    done = servesim("explain", scenario, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")
    assert "llama-3.1-8b on 1 ? h100-sxm" in done.stdout


@pytest.mark.parametrize("columns", ["0", "40"])
def test_a_narrow_terminal_loses_no_figure(scenario: Path, columns: str):
    assert servesim("run", scenario, COLUMNS=columns, TERM="dumb").stdout == servesim("run", scenario).stdout
    assert "long_prefill_token_threshold_adaptive" in servesim("policies").stdout.replace(" ", "").replace("\n", "")


def test_a_sweep_says_what_it_found_and_goes_on_where_it_stopped(scenario: Path, tmp_path: Path):
    sweep = ["sweep", scenario, "--set", "sweep={engine.max_num_seqs: [2, 8]}", "--out", tmp_path / "out", "--jobs", 1]
    assert servesim(*sweep, "--dry-run").stdout == f"2 points, 0 of them finished in {tmp_path / 'out'}\n"
    done = servesim(*sweep)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert lines[0] == "chat"
    assert [line.split()[0] for line in lines if line.split()[:1] in (["2"], ["8"])] == ["2", "8"]
    assert {path.name for path in (tmp_path / "out").iterdir()} >= {"points", "sweep.json", "sweep.csv"}
    assert servesim(*sweep, "--dry-run").stdout.startswith("2 points, 2 of them finished")
    again = servesim(*sweep)
    assert (again.stdout, again.stderr) == (done.stdout, "2 of 2 points were finished before\n")
    answers = json.loads(servesim(*sweep, "--json").stdout)
    assert answers == json.loads((tmp_path / "out" / "sweep.json").read_text())
    assert [point["values"] for point in answers["points"]] == [{"engine.max_num_seqs": n} for n in (2, 8)]


def test_a_million_points_are_asked_about(scenario: Path):
    seeds = f"sweep.seed={list(range(1001))}"
    done = servesim("sweep", scenario, "--set", seeds)
    assert (done.returncode, done.stdout) == (2, "")
    assert "these are 1,001 points" in done.stderr
    assert "--yes" in done.stderr
    assert servesim("sweep", scenario, "--set", seeds, "--dry-run").stdout == "1,001 points\n"


QUICK = ["--requests", 300, "--max-replications", 6, "--jobs", 1]


def test_a_capacity_ends_with_the_answer(scenario: Path, tmp_path: Path):
    quick = ["capacity", scenario, *QUICK]
    done = servesim(*quick, "--rate", 100, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.startswith("chat\n")
    assert all(len(line) <= 80 for line in done.stdout.splitlines() if str(tmp_path) not in line)
    said = json.loads((tmp_path / "out" / "capacity.json").read_text())
    assert " ".join(said["verdict"].split()) in " ".join(done.stdout.split())
    assert said["boundary"]["ci_low"] <= said["boundary"]["value"] <= said["boundary"]["ci_high"]
    assert json.loads(servesim(*quick, "--rate", 100, "--json").stdout) == said


def test_capacities_are_compared(scenario: Path):
    """A batch of eight that starts when the last one ended answers later than one that is always refilled."""
    done = servesim("compare", scenario, "--capacity", "--set", "slo.p99_ttft_ms=2000", *QUICK)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"static bears 0\.\d+ times the load of vllm-v1", " ".join(done.stdout.split()))


def test_a_run_is_repeated_until_its_tails_are_known(scenario: Path, tmp_path: Path):
    done = servesim("run", scenario, "--precision", 0.5, "--jobs", 1, "--out", tmp_path / "out")
    assert (done.returncode, done.stderr) == (0, "")
    assert re.search(r"^ttft_p99_ms .* to .*%$", done.stdout, re.MULTILINE)
    said = json.loads((tmp_path / "out" / "replications.json").read_text())
    assert (said["replications"] >= 6, said["is_precise"]) == (True, True)
