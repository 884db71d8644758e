"""A real vLLM 0.11 server with Llama-3.1-8B on one H100 under rising load, priced from AIConfigurator's H100 tables.

Fitted on the run: nothing. The tables hold no work of the host, which vLLM 0.11 does between steps: its own
scheduler was timed by itself, and preparing inputs, sampling and launching are Vidur's CPU timings.
"""

import pytest

import sim
from calibration.host import vllm_host_us, with_host
from calibration.importers.aiconfigurator import import_tables

HOST = "data/profiles/vidur/history_a100_cpu_overheads_B.csv"


@pytest.fixture(scope="module")
def stages(shared):
    pandas = pytest.importorskip("pandas")
    return pandas.read_csv(shared / "data/groundtruth/inference_perf_h100/vllm_max128.csv").to_dict("records")


@pytest.fixture(scope="module")
def tables(shared):
    return import_tables(shared / "data/profiles/aiconfigurator", "llama-3.1-8b")


def measured_tpot_ms(stage):
    """The published TPOT counts two chunks a token; this is what the latencies say."""
    return (stage["e2e_mean"] - stage["ttft_mean"]) / (stage["output_len_mean"] - 1) * 1e3


def simulate(stage, path):
    """One stage: constant arrivals of equal requests from clients that hold 440 connections in all."""
    scenario = {
        "model": "llama-3.1-8b",
        "hardware": {"gpu": "h100-sxm"},
        "engine": {
            "policy": "vllm-v1",
            "vllm_version": "0.11",
            "max_num_seqs": 128,
            "max_num_batched_tokens": 8192,
            "max_model_len": 512,
            "enable_prefix_caching": False,
            "enable_chunked_prefill": False,
        },
        "cost": {"kind": "table", "artifact": str(path)},
        "traffic": [
            {
                "name": "all",
                "arrivals": {"kind": "constant", "rate_per_s": stage["requested_rate"]},
                "prompt_tokens": {"kind": "constant", "value": 204},
                "output_tokens": {"kind": "constant", "value": 64},
                "max_connections": 440,
            }
        ],
        "run": {"num_requests": int(stage["n"])},
    }
    return sim.run(scenario).summary()


def errors(stages, artifact, folder):
    artifact.write(folder / "h100.json")
    found = {}
    for stage in stages:
        summary = simulate(stage, folder / "h100.json")
        assert summary["cost"]["coverage"]["time"]["extrapolated"] == 0
        tpot = summary["metrics"]["tpot_ms"]["mean"] / measured_tpot_ms(stage) - 1
        rate = summary["throughput"]["requests_per_s"] / stage["req_s"] - 1
        found[stage["stage"]] = (tpot, rate)
    return found


def test_every_stage_is_within_five_percent(shared, stages, tables, tmp_path):
    fixed, per_request = vllm_host_us(shared / HOST)
    assert (fixed, per_request) == (pytest.approx(799, abs=1), pytest.approx(25.3, abs=0.1))
    found = errors(stages, with_host(tables, fixed, per_request), tmp_path)
    assert {stage: tpot for stage, (tpot, _) in found.items() if abs(tpot) > 0.05} == {}
    assert {stage: rate for stage, (_, rate) in found.items() if abs(rate) > 0.03} == {}


def test_without_the_host_a_lone_request_is_an_eighth_too_fast(stages, tables, tmp_path):
    tpot, _ = errors(stages[:1], tables, tmp_path)[0]
    assert -0.15 < tpot < -0.11


def test_two_gpus_halve_the_products_and_add_all_reduces(shared, tables):
    two = import_tables(shared / "data/profiles/aiconfigurator", "llama-3.1-8b", tensor_parallel=2)
    ring = next(term for term in two.terms if term.is_communication)
    assert (ring.calls, ring.axes[0].points[0]) == (64, 128 / 4096)

    def us(artifact, name):
        return next(term for term in artifact.terms if term.name == name).us[-1]

    assert us(two, "gate_up_proj") == pytest.approx(us(tables, "gate_up_proj") / 2, rel=0.05)
