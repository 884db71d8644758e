"""Costs come back from what a server's clients and its log saw of a run with known costs."""

import json

import numpy as np
import pytest
import yaml
from typer.testing import CliRunner

import sim
from calibration.cli import app
from calibration.server import bench_steps, fit_steps, log_steps
from calibration.whole_steps import Step
from sim.errors import ArtifactError
from sim.metrics.load import step_arrays

COST = {
    "kind": "linear",
    "base_ms": 6.0,
    "per_decode_us": 25.0,
    "per_prefill_token_us": 30.0,
    "per_context_token_ns": 60.0,
    "per_prefill_pair_ns": 4.0,
}
BUDGET = 1024
SCENARIO = {
    "seed": 3,
    "model": "llama-3.1-8b",
    "hardware": {"gpu": "h100-sxm"},
    "engine": {
        "policy": "vllm-v1",
        "max_num_seqs": 64,
        "max_num_batched_tokens": BUDGET,
        "enable_prefix_caching": False,
        "num_gpu_blocks": 60_000,
    },
    "cost": COST,
    "traffic": [
        {
            "name": "bench",
            "arrivals": {"kind": "poisson", "rate_per_s": 4.0},
            "prompt_tokens": {"kind": "uniform", "low": 20, "high": 3000},
            "output_tokens": {"kind": "uniform", "low": 5, "high": 200},
        }
    ],
    "run": {"num_requests": 300},
}


@pytest.fixture(scope="module")
def results():
    return sim.run(SCENARIO)


def bench_result(results, jitter_s=0.0):
    """The run as `vllm bench serve --save-detailed` would have written it."""
    rng = np.random.default_rng(1)
    requests = results.tables.requests
    times = [results.tokens.times_ns(row) / 1e9 for row in range(len(requests["request"]))]
    times = [own + jitter_s * rng.exponential(size=len(own)) for own in times]
    start = requests["arrival_ns"] / 1e9
    return {
        "model_id": "m",
        "input_lens": requests["prompt_tokens"].tolist(),
        "output_lens": [len(own) for own in times],
        "start_times": start.tolist(),
        "ttfts": [float(own[0] - begun) for own, begun in zip(times, start, strict=True)],
        "itls": [np.diff(own).tolist() for own in times],
    }


def written(folder, content, name="bench.json"):
    path = folder / name
    path.write_text(json.dumps(content))
    return path


def fitted(*arguments):
    ran = CliRunner().invoke(app, ["fit-server", *map(str, arguments)])
    assert ran.exception is None
    return yaml.safe_load(ran.stdout)["cost"], ran.stdout


@pytest.mark.parametrize(("jitter_s", "tolerance", "error"), [(0.0, 0.001, 1e-6), (2e-4, 0.01, 0.03)])
def test_a_cost_comes_back_from_what_clients_saw(tmp_path, results, jitter_s, tolerance, error):
    path = written(tmp_path, bench_result(results, jitter_s))
    cost, printed = fitted("vllm-bench", path, "--max-num-batched-tokens", BUDGET)
    for name in ("base_ms", "per_decode_us", "per_prefill_token_us", "per_context_token_ns"):
        assert cost[name] == pytest.approx(COST[name], rel=tolerance), printed
    assert 0 <= cost["relative_error"] < error
    again = sim.run(SCENARIO | {"cost": cost}).summary()["metrics"]
    for metric in ("ttft_ms", "itl_ms", "e2e_ms"):
        for statistic in ("mean", "p50", "p99"):
            assert again[metric][statistic] == pytest.approx(results.summary()["metrics"][metric][statistic], rel=0.03)


def iteration_rows(results):
    arrays = step_arrays(results.tables)
    times = results.tables.iterations["end_ns"] - results.tables.iterations["start_ns"]
    rows = []
    for i, ns in enumerate(times.tolist()):
        own = arrays.prefill_iteration == i
        tokens, contexts = arrays.prefill_num_tokens[own], arrays.prefill_context[own]
        rows.append(
            {
                "num_prefills": int(own.sum()),
                "num_prefill_tokens": int(tokens.sum()),
                "prefill_context_tokens": float(contexts.mean()) if own.any() else 0.0,
                "num_decodes": int(arrays.num_decode[i]),
                "decode_context_tokens": int(arrays.decode_context_sum[i]),
                "time_ms": ns / 1e6,
            }
        )
    return rows


@pytest.mark.parametrize("ending", ["csv", "jsonl"])
def test_a_cost_comes_back_from_a_log_of_iterations(tmp_path, results, ending):
    rows, path = iteration_rows(results), tmp_path / f"log.{ending}"
    if ending == "csv":
        path.write_text("\n".join([",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]))
    else:
        path.write_text("\n".join(map(json.dumps, rows)))
    cost, _ = fitted("iterations", path)
    for name in ("base_ms", "per_decode_us", "per_prefill_token_us", "per_context_token_ns"):
        assert cost[name] == pytest.approx(COST[name], rel=0.03)


def test_arrivals_of_tokens_become_iterations(tmp_path):
    """A prompt of 10 in chunks of 6 beside a decode; then nothing, then a request that meets an idle server."""
    content = {
        "input_lens": [4, 10, 3],
        "output_lens": [4, 2, 1],
        "start_times": [0.0, 1.5, 100.0],
        "ttfts": [1.0, 2.5, 2.0],
        "itls": [[1.0, 1.0, 1.0], [3.0], []],
    }
    assert bench_steps(written(tmp_path, content), 7) == [
        Step(1, 5.0, 0, 0.0, 1000.0),
        Step(1, 6.0, 6, 21.0, 1000.0),
        Step(1, 7.0, 4, 34.0, 1000.0),
        Step(1, 11.0, 0, 0.0, 3000.0),
    ]


def test_chunks_that_nobody_saw_are_averaged(tmp_path):
    """A prompt of 12 alone under a budget of 4: three iterations before its first token."""
    content = {
        "input_lens": [4, 12],
        "output_lens": [1, 1],
        "start_times": [0.0, 0.5],
        "ttfts": [1.0, 3.5],
        "itls": [[], []],
    }
    assert bench_steps(written(tmp_path, content), 4) == [Step(0, 0.0, 4, 26.0, 1000.0)]


def test_iterations_that_stalled_are_left_out():
    steps = [Step(n, 100.0 * n, 0, 0.0, 5.0 + n + 0.01 * (n % 3)) for n in range(1, 40)]
    stalled = [*steps, Step(5, 500.0, 0, 0.0, 60.0)]
    found = fit_steps(stalled, "here")
    assert (found.num_stalled, found.options) == (1, fit_steps(steps, "here").options)


DETAILED = {"input_lens": [1], "output_lens": [3], "start_times": [0.0], "ttfts": [1.0], "itls": [[1.0, 1.0]]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (
            {"input_lens": [1]},
            "has no list start_times, output_lens, ttfts, itls; .* with --save-result --save-detailed",
        ),
        ([], "has no list start_times"),
        (DETAILED | {"itls": [[1.0]] * 2}, "of different lengths: start_times 1, .*itls 2"),
        (DETAILED | {"output_lens": [30]}, "30 tokens were answered and 3 arrived one by one"),
        (DETAILED | {"output_lens": [0], "itls": [[]]}, "0 tokens were answered and 0 arrived"),
    ],
)
def test_results_without_the_arrivals_of_tokens_are_refused(tmp_path, content, message):
    with pytest.raises(ArtifactError, match=message):
        bench_steps(written(tmp_path, content), 100)


def test_too_few_iterations_and_no_budget_are_refused(tmp_path):
    path = written(tmp_path, DETAILED)
    for arguments, message in (
        ([], "--max-num-batched-tokens: is missing"),
        (["--max-num-batched-tokens", "9"], "2 timed"),
    ):
        ran = CliRunner().invoke(app, ["fit-server", "vllm-bench", str(path), *arguments])
        assert message in str(ran.exception)


def test_logs_are_read_strictly(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_text('{"num_decodes": 1}')
    with pytest.raises(ArtifactError, match=r"no column num_prefills, .*time_ms"):
        log_steps(path)
    row = dict.fromkeys(("num_prefills", "num_prefill_tokens", "prefill_context_tokens", "num_decodes"), 1)
    path.write_text(json.dumps(row | {"decode_context_tokens": 1, "time_ms": 0}))
    with pytest.raises(ArtifactError, match=r"log\.jsonl:1: time_ms is 0; expected a number above zero"):
        log_steps(path)
    path.write_text("{")
    with pytest.raises(ArtifactError, match="cannot be read as JSON lines"):
        log_steps(path)
