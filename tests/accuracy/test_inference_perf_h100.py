"""A real vLLM 0.11 server with Llama-3.1-8B on one H100 under rising load, priced from AIConfigurator's H100 tables.

The tables hold no work of the host, which vLLM 0.11 does between steps: two figures. They were read off the
lone requests of stage 0 (fixed) and the saturated stage 6 (per request); stages 1 to 5 are predicted. A second
test takes both from Vidur's CPU timings instead, where nothing of the server is used and the error is larger.
"""

import pytest

import sim
from calibration.host import fit_vidur_overheads, with_host
from calibration.importers.aiconfigurator import import_tables

HOST_US, HOST_US_PER_REQUEST = 960.0, 24.0


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


def test_stages_between_the_two_that_gave_the_host_figures(stages, tables, tmp_path):
    found = errors(stages, with_host(tables, HOST_US, HOST_US_PER_REQUEST), tmp_path)
    assert {stage: tpot for stage, (tpot, _) in found.items() if abs(tpot) > 0.055} == {}
    assert {stage: rate for stage, (_, rate) in found.items() if abs(rate) > 0.05} == {}


def test_host_figures_of_another_engine(shared, stages, tables, tmp_path):
    path = shared / "data/profiles/vidur/history_a100_cpu_overheads_B.csv"
    fixed, per_request = fit_vidur_overheads(path)
    assert (fixed, per_request) == (pytest.approx(813, abs=30), pytest.approx(42.3, abs=1))
    found = errors([stages[0], stages[6]], with_host(tables, fixed, per_request), tmp_path)
    assert abs(found[0][0]) < 0.03
    assert abs(found[6][0]) < 0.13


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
