"""One request at a time is the M/G/1 queue: waits and utilisation against Pollaczek and Khinchine.

A prompt token costs a microsecond and a decode step a millisecond, so a request's lengths are its service
time. Its mean wait in the queue is lambda E[S^2] / (2 (1 - rho)), whatever the distribution of S (L. Kleinrock,
Queueing Systems I, 1975, chapter 5); M/D/1 and M/M/1 are special cases. Each figure must lie in its own 99.9 %
confidence interval, from batch means of one long run. Seeds are fixed, so that a test that passes goes on
passing; they were not picked, and the last test shows that the intervals notice a rate that is 5 % off.
"""

import functools
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest
from scipy import stats

import sim
from sim.build import draw, simulate

NUM_REQUESTS = 30_000
NUM_BATCHES = 30
WARM_UP = 0.1
"""Share of the run that is cut because it begins with an empty queue."""
TOKEN_NS, DECODE_NS = 1_000, 1_000_000
MEAN_SERVICE_NS = 4_000_000
ONE_AT_A_TIME = {
    "vllm-v1": {"max_num_seqs": 1, "max_num_batched_tokens": 131_072, "async_scheduling": False},
    "static": {"max_batch_size": 1, "release": "streaming"},
    "orca": {"max_batch_size": 1},
}


class Service(NamedTuple):
    """Lengths of requests, one array entry each, and the exact variance of the time that serving one takes."""

    prompt_tokens: np.ndarray
    output_tokens: np.ndarray
    variance_ns2: float

    @property
    def times_ns(self):
        return self.prompt_tokens * TOKEN_NS + (self.output_tokens - 1) * DECODE_NS


def services(queue, num=NUM_REQUESTS):
    rng, ones = np.random.default_rng(1), np.ones(num, dtype=np.int64)
    if queue == "M/D/1":
        return Service(4000 * ones, ones, 0)
    if queue == "M/M/1":  # geometric: the exponential in whole tokens
        share = TOKEN_NS / MEAN_SERVICE_NS
        return Service(rng.geometric(share, num), ones, TOKEN_NS**2 * (1 - share) / share**2)
    # Prompts of 400 to 5,600 tokens and 1 to 3 outputs, equally likely: service of several iterations.
    variance_ns2 = TOKEN_NS**2 * ((5201**2 - 1) / 12) + DECODE_NS**2 * ((3**2 - 1) / 12)
    return Service(rng.integers(400, 5601, num), rng.integers(1, 4, num), variance_ns2)


def run_queue(policy, service, rate_per_s, num_servers=1):
    num = len(service.prompt_tokens)
    scenario = sim.parse_scenario(
        {
            "seed": 2,
            "model": "llama-3.1-8b",
            "hardware": {"gpu": "h100-sxm"},
            "engine": {"policy": policy, "num_gpu_blocks": 10_000, "kv_cache_dtype": "fp8", **ONE_AT_A_TIME[policy]},
            "cost": {
                "kind": "linear",
                "base_ms": 0,
                "per_prefill_token_us": TOKEN_NS / 1e3,
                "per_decode_us": DECODE_NS / 1e3,
            },
            "traffic": [
                {
                    "name": "all",
                    "arrivals": {"kind": "poisson", "rate_per_s": rate_per_s},
                    "prompt_tokens": 1,
                    "output_tokens": 1,
                }
            ],
            "run": {"num_requests": num},
            **({"fleet": {"replicas": num_servers, "router": {"kind": "shared_queue"}}} if num_servers > 1 else {}),
        }
    )
    lengths = {
        "prompt_tokens": service.prompt_tokens,
        "output_tokens": service.output_tokens,
        "max_tokens": service.output_tokens,
    }
    return simulate(scenario, replace(draw(scenario), **lengths)).tables


@pytest.mark.parametrize("policy", ONE_AT_A_TIME)
@pytest.mark.parametrize("queue", ["M/D/1", "M/M/1", "M/G/1"])
def test_waits_follow_lindleys_recursion_to_the_nanosecond(queue, policy):
    """The next wait is this one plus this service less the gap between the two, or 0 (D. V. Lindley, 1952)."""
    service = services(queue, num=500)
    requests = run_queue(policy, service, rate_per_s=200).requests
    waits_ns = [0]
    for service_ns, gap_ns in zip(service.times_ns[:-1], np.diff(requests["arrival_ns"]), strict=True):
        waits_ns.append(max(0, waits_ns[-1] + int(service_ns) - int(gap_ns)))
    assert (requests["admitted_ns"] - requests["arrival_ns"]).tolist() == waits_ns
    assert np.array_equal(requests["finished_ns"] - requests["admitted_ns"], service.times_ns)
    assert 100 < np.count_nonzero(waits_ns) < 500


def interval(batch_means):
    """99.9 % confidence interval of a mean from the means of batches."""
    half_width = stats.t.ppf(0.9995, NUM_BATCHES - 1) * np.std(batch_means, ddof=1) / np.sqrt(NUM_BATCHES)
    return np.mean(batch_means) - half_width, np.mean(batch_means) + half_width


def batch_means(values):
    kept = values[int(WARM_UP * len(values)) :]
    return [np.mean(batch) for batch in np.array_split(kept, NUM_BATCHES)]


def busy_shares(iterations):
    """Part of the time that the device computes, in equal stretches of the run."""
    starts_ns, ends_ns = iterations["start_ns"], iterations["end_ns"]
    times_ns = np.column_stack([starts_ns, ends_ns]).ravel()
    busy_ns = np.repeat(np.cumsum(ends_ns - starts_ns), 2)
    busy_ns[::2] -= ends_ns - starts_ns
    edges_ns = np.linspace(WARM_UP * ends_ns[-1], ends_ns[-1], NUM_BATCHES + 1)
    return np.diff(np.interp(edges_ns, times_ns, busy_ns)) / np.diff(edges_ns)


@functools.cache
def measured(queue, load):
    """Figure -> its confidence interval."""
    service = services(queue)
    tables = run_queue("static", service, load / (MEAN_SERVICE_NS / 1e9))
    requests = tables.requests
    waits_ns = requests["admitted_ns"] - requests["arrival_ns"]
    responses_ns = requests["finished_ns"] - requests["arrival_ns"]
    figures = {
        "mean wait": interval(batch_means(waits_ns / 1e6)),
        "share that waits": interval(batch_means(waits_ns > 0)),
        "utilisation": interval(busy_shares(tables.iterations)),
    }
    if queue == "M/M/1":
        mean_ns = MEAN_SERVICE_NS / (1 - load)
        figures["share above the mean response"] = interval(batch_means(responses_ns > mean_ns))
    return figures


def predicted(queue, load):
    """Figure -> what theory says. Poisson arrivals see time averages, so as many wait as the server is busy."""
    second_moment_ns2 = services(queue, num=1).variance_ns2 + MEAN_SERVICE_NS**2
    mean_wait_ns = load / MEAN_SERVICE_NS * second_moment_ns2 / (2 * (1 - load))
    figures = {"mean wait": mean_wait_ns / 1e6, "share that waits": load, "utilisation": load}
    if queue == "M/M/1":  # responses are exponential
        figures["share above the mean response"] = np.exp(-1)
    return figures


def missed(intervals, figures):
    return [name for name, (low, high) in intervals.items() if not low <= figures[name] <= high]


every_queue = pytest.mark.parametrize("queue", ["M/D/1", "M/M/1", "M/G/1"])
every_load = pytest.mark.parametrize("load", [0.5, 0.8])


@every_load
@every_queue
def test_theory_lies_within_the_confidence_intervals(queue, load):
    assert missed(measured(queue, load), predicted(queue, load)) == []


@every_load
@every_queue
@pytest.mark.parametrize("error", [0.95, 1.05])
def test_the_intervals_would_notice_a_rate_that_is_five_percent_off(queue, load, error):
    noticed = missed(measured(queue, load), predicted(queue, load * error))
    assert {"share that waits", "utilisation"} <= set(noticed)
    assert "mean wait" in noticed or (queue, load) == ("M/M/1", 0.5)
