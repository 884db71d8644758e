"""Several replicas that take single requests from one queue are the M/D/c and M/M/c queues.

Exact theory: the recursion of J. Kiefer and J. Wolfowitz (1955) to the nanosecond; Erlang's C formula for M/M/c
(L. Kleinrock, Queueing Systems I, 1975, section 3.5); for M/D/c the chain of the numbers in the system a service time
apart, N(t + D) = max(N(t) - c, 0) + arrivals in D (C. D. Crommelin, 1932). Confidence intervals and services are those
of one server's tests.
"""

import functools
import math

import numpy as np
import pytest
from scipy import stats

from tests.statistical.test_single_server import (
    MEAN_SERVICE_NS,
    batch_means,
    busy_shares,
    interval,
    missed,
    run_queue,
    services,
)

NUM_SERVERS = [2, 4]
every_number = pytest.mark.parametrize("num_servers", NUM_SERVERS)
every_queue = pytest.mark.parametrize("queue", ["M/D/1", "M/M/1"])
every_load = pytest.mark.parametrize("load", [0.5, 0.8])


def run_servers(queue, num_servers, load, **given):
    rate_per_s = load * num_servers / (MEAN_SERVICE_NS / 1e9)
    return run_queue("static", services(queue, **given), rate_per_s, num_servers)


@every_number
@every_queue
def test_whoever_is_next_goes_where_a_server_is_free_first(queue, num_servers):
    """Waits by Kiefer and Wolfowitz: of the times at which servers are free, each request takes the earliest."""
    requests = run_servers(queue, num_servers, 0.8, num=1000).requests
    free_ns, starts_ns = [0] * num_servers, []
    for arrival_ns, service_ns in zip(
        requests["arrival_ns"].tolist(), services(queue, num=1000).times_ns.tolist(), strict=True
    ):
        first = free_ns.index(min(free_ns))
        starts_ns.append(max(arrival_ns, free_ns[first]))
        free_ns[first] = starts_ns[-1] + service_ns
    assert requests["admitted_ns"].tolist() == starts_ns
    assert 100 < np.count_nonzero(requests["admitted_ns"] > requests["arrival_ns"]) < 900


def erlang_c(num_servers, load):
    """The probability that a request waits in M/M/c."""
    offered = num_servers * load
    terms = [offered**k / math.factorial(k) for k in range(num_servers)]
    last = offered**num_servers / math.factorial(num_servers) / (1 - load)
    return last / (sum(terms) + last)


@functools.cache
def crommelin(num_servers, load):
    """The probability that a request waits in M/D/c, and the mean wait in service times."""
    size = 60 * num_servers
    arrivals = stats.poisson.pmf(np.arange(size), num_servers * load)
    later = np.maximum(np.arange(size) - num_servers, 0)
    chain = np.zeros((size, size))
    for start, after in enumerate(later):
        chain[start, after:] = arrivals[: size - after]
    chain[:, -1] += 1 - chain.sum(axis=1)
    equations = np.vstack([chain.T - np.eye(size), np.ones(size)])
    share, *_ = np.linalg.lstsq(equations, np.append(np.zeros(size), 1.0), rcond=None)
    return share[num_servers:].sum(), (share @ later) / (num_servers * load)


def predicted(queue, num_servers, load):
    """Figure -> what theory says."""
    if queue == "M/M/1":
        waits = erlang_c(num_servers, load)
        mean = waits / (num_servers * (1 - load))
    else:
        waits, mean = crommelin(num_servers, load)
    return {"mean wait": mean * MEAN_SERVICE_NS / 1e6, "share that waits": waits, "utilisation": load}


@functools.cache
def measured(queue, num_servers, load):
    """Figure -> its confidence interval."""
    tables = run_servers(queue, num_servers, load)
    requests = tables.requests
    waits_ns = requests["admitted_ns"] - requests["arrival_ns"]
    replica = tables.iterations["replica"]
    own = [{name: values[replica == i] for name, values in tables.iterations.items()} for i in range(num_servers)]
    return {
        "mean wait": interval(batch_means(waits_ns / 1e6)),
        "share that waits": interval(batch_means(waits_ns > 0)),
        "utilisation": interval(np.mean([busy_shares(iterations) for iterations in own], axis=0)),
    }


@every_load
@every_queue
@every_number
def test_theory_lies_within_the_confidence_intervals(queue, num_servers, load):
    assert missed(measured(queue, num_servers, load), predicted(queue, num_servers, load)) == []


@every_queue
@every_number
@pytest.mark.parametrize("error", [0.95, 1.05])
def test_the_intervals_would_notice_a_rate_that_is_five_percent_off(queue, num_servers, error):
    noticed = missed(measured(queue, num_servers, 0.8), predicted(queue, num_servers, 0.8 * error))
    assert set(noticed) == {"mean wait", "share that waits", "utilisation"}


@pytest.mark.parametrize("load", [0.3, 0.8])
def test_with_one_server_the_formulas_are_those_of_one(load):
    """Pollaczek and Khinchine: a mean wait of rho / (2 (1 - rho)) service times in M/D/1, twice that in M/M/1."""
    mean_ms = load / (1 - load) * MEAN_SERVICE_NS / 1e6
    for queue, expected_ms in (("M/D/1", mean_ms / 2), ("M/M/1", mean_ms)):
        figures = predicted(queue, 1, load)
        assert figures == pytest.approx(
            {"mean wait": expected_ms, "share that waits": load, "utilisation": load}, rel=1e-6
        )
