"""The largest load that a queue bears under an SLO, where theory says what it is.

One request at a time, a microsecond a prompt token: Pollaczek and Khinchine give the mean wait of M/D/1 and M/G/1 as
lambda E[S^2] / (2 (1 - lambda E[S])), and the response of M/M/1 is exponential with mean E[S] / (1 - rho). Both are
solved for lambda.
"""

import numpy as np
import pytest

import sim
from sim.planning.capacity import find_capacity
from sim.planning.probe import STABILITY
from sim.planning.workers import Workers

SERVICE_MS = 4.0
ONE = Workers(num_jobs=1)


def queue(prompt_tokens, slo, rate_per_s=50.0, **changes):
    data = {
        "seed": 3,
        "model": "llama-3.1-8b",
        "hardware": {"gpu": "h100-sxm"},
        "engine": {
            "policy": "static",
            "num_gpu_blocks": 10_000,
            "kv_cache_dtype": "fp8",
            "max_batch_size": 1,
            "release": "streaming",
        },
        "cost": {"kind": "linear", "base_ms": 0, "per_prefill_token_us": 1.0, "per_decode_us": 1.0},
        "traffic": [
            {
                "name": "all",
                "arrivals": {"kind": "poisson", "rate_per_s": rate_per_s},
                "prompt_tokens": prompt_tokens,
                "output_tokens": 1,
            }
        ],
        "run": {"num_requests": 100},
        "slo": slo,
    }
    return sim.parse_scenario(data | changes, allow_imports=True)


def rate_at_mean_wait(wait_ms, second_moment_ms2):
    """Pollaczek and Khinchine, solved for the arrivals per second."""
    return 1000 * 2 * wait_ms / (second_moment_ms2 + 2 * wait_ms * SERVICE_MS)


CASES = {
    "M/D/1, mean wait": (4000, {"mean_queue_ms": 4.0}, rate_at_mean_wait(4.0, SERVICE_MS**2)),
    "M/G/1, mean wait": (
        {"kind": "uniform", "low": 400, "high": 7600},
        {"mean_queue_ms": 4.0},
        rate_at_mean_wait(4.0, SERVICE_MS**2 + (7201**2 - 1) / 12e6),
    ),
    "M/M/1, p90 of the response": (
        {"kind": "tests.statistical.geometric:Geometric", "mean": 4000.0},
        {"p90_e2e_ms": SERVICE_MS * np.log(10) / (1 - 0.7)},
        0.7 * 1000 / SERVICE_MS,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_the_boundary_is_where_theory_says(case: str):
    prompt_tokens, slo, rate = CASES[case]
    found = find_capacity(queue(prompt_tokens, slo), workers=ONE, precision=0.03, num_requests=3000)
    assert found.binding == next(iter(slo))
    assert found.boundary.has(rate), (found.boundary, rate)
    assert found.is_precise
    assert found.boundary.relative_half_width < 0.03


def test_a_loose_slo_ends_at_the_stability_of_the_queue():
    """A deterministic server bears 250 requests per second, however long the queue may be."""
    found = find_capacity(queue(4000, {"p50_e2e_ms": 60_000.0}), workers=ONE, num_requests=3000)
    assert found.binding == STABILITY
    assert found.boundary.value == pytest.approx(250, rel=0.03)


def test_an_unstable_run_is_named_and_a_stable_one_is_not():
    def report(rate):
        return sim.run(queue(4000, {}, rate_per_s=rate, run={"num_requests": 3000})).summary()["steady"]

    overloaded, busy = report(300.0), report(225.0)
    assert overloaded["is_stable"] is False
    assert overloaded["sustainable_requests_per_s"] == pytest.approx(250, rel=0.02)
    assert overloaded["verdict"] == (
        f"unstable: offered {overloaded['offered_requests_per_s']:.3g} req/s exceeds the sustainable "
        f"{overloaded['sustainable_requests_per_s']:.3g}; percentiles depend on run length and are not reported as "
        "steady"
    )
    assert (busy["is_stable"], busy["sustainable_requests_per_s"]) == (True, None)
