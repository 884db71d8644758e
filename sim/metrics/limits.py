"""What limits a run: time shares that partition it, and the sentence that they add up to.

Each moment of the measurement window goes to exactly one share:

- the device idles: to `admission` if a request waits in the engine (a batching window or a pacing rule holds it
  back), else to `client` if one waits at a client's own limit, else to `arrivals` (nobody is there);
- an iteration runs: to what the head of the waiting queue waited for (`slots`, `kv`, `budget`, `admission`),
  else to `client` while a request waits at a client's own limit, else to the largest term of the iteration's
  cost (`compute`, `bandwidth`, `communication`, `overhead`; a device that waits for the host is `overhead`).

The verdict asks what would have to grow for the run to serve more. While requests are still to come and nobody
waits, nothing binds, however busy the device is: a continuous batch keeps it busy at any load, and a faster
device would shorten latencies but not serve more. That time belongs to the arrivals, as idle time does.
Once the last request has arrived, the arrivals cannot bind any more: unblocked iterations count for the
resource that they spend most on (all of an offline batch is of that kind). If the arrivals bind for at least
half of the time, they are the verdict; else it is the largest of the rest. In a closed loop, where the next
request waits for an answer, time that would be the arrivals' is the client's; in a mix of open and closed loops it
stays the arrivals', for open ones are still to come whatever the clients do.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from sim.cost.base import Resource
from sim.metrics.distribution import Bools, Ints
from sim.metrics.intervals import Coverage
from sim.metrics.latency import waits
from sim.metrics.occupancy import Spans
from sim.metrics.summary import LimitsReport
from sim.metrics.wording import percent
from sim.record import Columns, Tables
from sim.step import BlockedBy

Breakdown = Mapping[Resource, NDArray[np.float64]]
"""Device time of every iteration by resource, nanoseconds."""

_BLOCKED = {
    "slots": BlockedBy.SLOTS,
    "kv": BlockedBy.KV,
    "budget": BlockedBy.BUDGET,
    "admission": BlockedBy.ADMISSION,
}
SHARES = ("arrivals", "client", *_BLOCKED, *(resource.value for resource in Resource))

_UNBLOCKED = "with nobody left to arrive, the device worked unblocked and spent most on {on}"
_PHRASES = {
    "arrivals": "the arrivals (nothing binds): nobody was kept waiting",
    "client": "the client: its own limit on requests at the server held requests back",
    "slots": "slots: the queue waited for a place in the running batch",
    "kv": "KV capacity: the queue waited for cache blocks",
    "budget": "the token budget: the queue waited because the step's tokens were spent",
    "admission": "admission: a batching window, or a batch that admits nobody, kept the queue waiting",
    "compute": "compute: " + _UNBLOCKED.format(on="arithmetic"),
    "bandwidth": "memory bandwidth: " + _UNBLOCKED.format(on="reading memory"),
    "communication": "communication: " + _UNBLOCKED.format(on="exchange between GPUs"),
    "overhead": "overhead: " + _UNBLOCKED.format(on="fixed costs and the host"),
}
_CLOSED_LOOP = "the client: it sends its next request after an answer, and nothing kept one waiting"
_WORTH_A_MENTION = 0.1


@dataclass(frozen=True)
class LimitTimes:
    """How the time of one engine divides, ns."""

    shares_ns: Mapping[str, int]
    """Each of SHARES; they add up to `total_ns`."""
    binding_ns: Mapping[str, int]
    """What would have had to grow for more to be served; the rest of `total_ns` belongs to the arrivals."""
    total_ns: int


def limit_times(
    tables: Tables, spans: Spans, breakdown: Breakdown, run_end_ns: int, everyone: Columns | None = None
) -> LimitTimes:
    """The times of `spans.window`. O((iterations + requests) × log).

    `everyone` is the requests table of the fleet that the engine belongs to: who has not been sent to any engine
    waits for all of them.
    """
    everyone = tables.requests if everyone is None else everyone
    in_engine = waits(tables.requests, run_end_ns, "admitted")
    at_client = waits(everyone, run_end_ns, "queued")
    held_back = Coverage(*at_client)
    anywhere = Coverage(*(np.concatenate(times) for times in zip(in_engine, at_client, strict=True)))
    idle_ns = _idle(spans, Coverage(*in_engine), anywhere)
    blocked_ns, is_free = _blocked(tables.iterations["blocked_by"], spans)
    start_ns, end_ns = spans.start_ns[is_free], spans.end_ns[is_free]
    largest = _largest_term(breakdown, spans)[is_free]
    late_ns = np.clip(everyone["arrival_ns"].max(initial=0), start_ns, end_ns)
    own_ns = _by_term(end_ns - start_ns - held_back.within(start_ns, end_ns), largest)
    own_late_ns = _by_term(end_ns - late_ns - held_back.within(late_ns, end_ns), largest)
    client_ns = {"client": int(held_back.within(start_ns, end_ns).sum())}
    shares_ns = dict.fromkeys(SHARES, 0)
    for part in (idle_ns, blocked_ns, client_ns, own_ns):
        for name, time_ns in part.items():
            shares_ns[name] += time_ns
    binding_ns = {name: shares_ns[name] for name in ("client", *_BLOCKED)} | own_late_ns
    return LimitTimes(shares_ns, binding_ns, spans.window.duration_ns)


def find_limits(times: Sequence[LimitTimes], is_closed_loop: bool) -> LimitsReport:
    """The shares and the verdict of an engine, or of all engines of a fleet together."""
    shares_ns = {name: sum(own.shares_ns[name] for own in times) for name in SHARES}
    binding_ns = {name: sum(own.binding_ns[name] for own in times) for name in times[0].binding_ns}
    return _judge(shares_ns, binding_ns, sum(own.total_ns for own in times), is_closed_loop)


def _idle(spans: Spans, in_engine: Coverage, anywhere: Coverage) -> dict[str, int]:
    """Idle time by who waits meanwhile."""
    start_ns, end_ns = spans.idle()
    admission_ns = int(in_engine.within(start_ns, end_ns).sum())
    waiting_ns = int(anywhere.within(start_ns, end_ns).sum())
    all_ns = int((end_ns - start_ns).sum())
    return {"admission": admission_ns, "client": waiting_ns - admission_ns, "arrivals": all_ns - waiting_ns}


def _blocked(blocked_by: Ints, spans: Spans) -> tuple[dict[str, int], Bools]:
    """Time of the iterations whose queue's head had to wait, by reason; and which the other iterations are."""
    time_ns = {name: int(spans.owned_ns[blocked_by == reason].sum()) for name, reason in _BLOCKED.items()}
    return time_ns, blocked_by == BlockedBy.NOTHING


def _largest_term(breakdown: Breakdown, spans: Spans) -> Ints:
    """The position in Resource of each iteration's largest cost, the host's exposed time being overhead."""
    terms = np.stack([breakdown[resource] for resource in Resource])
    terms[list(Resource).index(Resource.OVERHEAD)] += spans.host_ns
    largest: Ints = np.argmax(terms, axis=0)
    return largest


def _by_term(time_ns: Ints, largest: Ints) -> dict[str, int]:
    return {resource.value: int(time_ns[largest == index].sum()) for index, resource in enumerate(Resource)}


def _judge(shares_ns: dict[str, int], binding_ns: dict[str, int], total_ns: int, is_closed_loop: bool) -> LimitsReport:
    """The verdict from what bound for how long; the rest of `total_ns` belongs to the arrivals."""
    if total_ns == 0:
        return LimitsReport(
            shares=dict.fromkeys(SHARES, 0.0), binds="arrivals", verdict="nothing: no time was measured"
        )
    unbound_ns = total_ns - sum(binding_ns.values())
    ranked = sorted(binding_ns, key=lambda name: -binding_ns[name])
    if 2 * unbound_ns >= total_ns:
        binds = "client" if is_closed_loop else "arrivals"
        phrase, time_ns, others = _CLOSED_LOOP if is_closed_loop else _PHRASES[binds], unbound_ns, ranked
    else:
        binds, *others = ranked
        phrase, time_ns = _PHRASES[binds], binding_ns[binds]
    verdict = f"{phrase} {percent(time_ns / total_ns)} of the time"
    also = others[0]
    if binding_ns[also] >= _WORTH_A_MENTION * total_ns:
        verdict += f"; then {also} ({percent(binding_ns[also] / total_ns)})"
    shares = {name: time_ns / total_ns for name, time_ns in shares_ns.items()}
    return LimitsReport(shares=shares, binds=binds, verdict=verdict)
