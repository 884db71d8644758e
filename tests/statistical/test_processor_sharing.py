"""Continuous batching whose step costs as much as it holds requests is processor sharing.

Every request in the batch then gets a token in each step, and each of n of them advances at an n-th of the
speed that it would have alone. In M/G/1 processor sharing the mean response is E[S] / (1 - rho) whatever the
distribution of S, and x / (1 - rho) for a request of size x (L. Kleinrock, Queueing Systems II, 1976,
chapter 4), where one request at a time would make it depend on the variance. Tokens are quanta, not
infinitesimal: a request waits for the end of the step that runs when it comes, so that intervals (99.9 %,
batch means, fixed seed) are widened by such a step.
"""

import functools
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

import sim
from sim.build import draw, simulate

NUM_REQUESTS = 6_000
NUM_BATCHES = 30
WARM_UP = 0.1
LOAD = 0.5
TOKEN_NS = 50_000
MEAN_SERVICE_NS = 100 * TOKEN_NS
SIZES = {
    "all equal": ([100], [1.0]),
    "few large ones": ([20, 500], [5 / 6, 1 / 6]),  # the variance is 3.2 times the squared mean
}


@functools.cache
def responses(sizes):
    """Output tokens and response time, ns, of every request after the warm-up."""
    tokens, shares = SIZES[sizes]
    drawn = np.random.default_rng(1).choice(np.array(tokens), NUM_REQUESTS, p=shares)
    scenario = sim.parse_scenario(
        {
            "seed": 2,
            "model": "llama-3.1-8b",
            "hardware": {"gpu": "h100-sxm"},
            "engine": {
                "policy": "vllm-v1",
                "async_scheduling": False,
                "max_num_seqs": 1000,
                "max_num_batched_tokens": 8192,
                "max_model_len": 1024,
            },
            "cost": {
                "kind": "linear",
                "base_ms": 0,
                "per_prefill_token_us": TOKEN_NS / 1e3,
                "per_decode_us": TOKEN_NS / 1e3,
            },
            "traffic": [
                {
                    "name": "all",
                    "arrivals": {"kind": "poisson", "rate_per_s": LOAD / (MEAN_SERVICE_NS / 1e9)},
                    "prompt_tokens": 1,
                    "output_tokens": 1,
                }
            ],
            "run": {"num_requests": NUM_REQUESTS},
        }
    )
    requests = simulate(scenario, replace(draw(scenario), output_tokens=drawn, max_tokens=drawn)).tables.requests
    kept = slice(int(WARM_UP * NUM_REQUESTS), None)
    return requests["output_tokens"][kept], (requests["finished_ns"] - requests["arrival_ns"])[kept]


def assert_slowdown(tokens, responses_ns, expected):
    """`expected` lies in the 99.9 % interval of mean response / mean service, widened by the step an arrival meets."""
    batches = np.array_split(np.arange(len(tokens)), NUM_BATCHES)
    ratios = [responses_ns[batch].mean() / (tokens[batch].mean() * TOKEN_NS) for batch in batches]
    half_width = stats.t.ppf(0.9995, NUM_BATCHES - 1) * np.std(ratios, ddof=1) / np.sqrt(NUM_BATCHES)
    # The length of that step is biased by itself: E[N^2] / E[N] tokens, with N geometric in M/G/1 processor sharing.
    met = (1 + LOAD) / (1 - LOAD) / np.mean(tokens)
    assert np.mean(ratios) - half_width - met < expected < np.mean(ratios) + half_width


@pytest.mark.parametrize("sizes", SIZES)
def test_mean_response_does_not_depend_on_the_distribution(sizes):
    assert_slowdown(*responses(sizes), 1 / (1 - LOAD))


def test_response_is_proportional_to_size():
    tokens, responses_ns = responses("few large ones")
    for size in SIZES["few large ones"][0]:
        alike = tokens == size
        assert_slowdown(tokens[alike], responses_ns[alike], 1 / (1 - LOAD))


@pytest.mark.parametrize(("sizes", "cv2"), [("all equal", 0.0), ("few large ones", 3.2)])
def test_one_request_at_a_time_would_be_noticed(sizes, cv2):
    """First come, first served it would be E[S] + lambda E[S^2] / (2 (1 - rho)), in units of E[S]."""
    with pytest.raises(AssertionError):
        assert_slowdown(*responses(sizes), 1 + LOAD * (1 + cv2) / (2 * (1 - LOAD)))
