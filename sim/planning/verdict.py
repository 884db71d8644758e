"""One sentence about several runs: who wins, by how much, and why. A pure function of their summaries."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from sim.metrics.wording import percent

Summary = Mapping[str, Any]

TIE = 0.02
"""Two runs whose figures differ by less than this part count as equal."""

ALMOST_NONE = 0.01
"""A part of a run's requests below which a ratio to it says nothing."""

AT_A_PRICE = 1.5
"""How many times as long the winner's slowest requests must take as another run's to be told of."""

_WORTH_NAMING = 0.05
"""A lost share that differs by less is no reason."""


class Yardstick(NamedTuple):
    """Something to win in."""

    phrase: str
    """`{0}` stands for how many times the winner is better, `{1}` for whom it beats."""
    value: Callable[[Summary], float | None]
    is_more_better: bool
    nothing: str
    """What a run has that has none of it."""
    whole: Callable[[Summary], float | None] | None = None
    """What the value is a part of, if it is one."""
    hardly: str = ""
    """What to say of runs, `{0}`, that reach almost none of it."""


YARDSTICKS = (
    Yardstick(
        "its requests within the SLO per second are {0} those of {1}",
        lambda summary: summary["throughput"]["goodput_requests_per_s"],
        is_more_better=True,
        nothing="no request within the SLO",
        whole=lambda summary: summary["throughput"]["requests_per_s"],
        hardly="almost none of the requests of {0} meet the SLO",
    ),
    Yardstick(
        "its output tokens per second are {0} those of {1}",
        lambda summary: summary["throughput"]["output_tokens_per_s"],
        is_more_better=True,
        nothing="no output",
    ),
    Yardstick(
        "its mean end-to-end latency is {0} shorter than that of {1}",
        lambda summary: summary["metrics"]["e2e_ms"]["mean"],
        is_more_better=False,
        nothing="no answer",
    ),
)
"""In order of importance: the first one on which the runs differ decides."""


_QUEUED_FOR = {
    "slots": "a place in the batch",
    "kv": "KV blocks",
    "budget": "token budget",
    "admission": "a batch to fill up or to end",
}
"""Share of the limits -> what the queue waited for."""


class _Loss(NamedTuple):
    """A way to lose: its share of something, and how to say it."""

    phrase: str
    share: Callable[[Summary], float]


def verdict(summaries: Mapping[str, Summary]) -> str:
    """The sentence for two or more runs, by name.

    It gives a reason for the first run's loss, or for the largest loss if the first is among the best, and
    one for the runner-up's; and it says so if the winner's slowest requests pay for it.
    """
    for yardstick in YARDSTICKS:
        values = {name: _value(yardstick, summary) for name, summary in summaries.items()}
        if max(values.values()) <= min(values.values()) * (1 + TIE):
            continue
        ranked = sorted(values, key=lambda name: values[name], reverse=yardstick.is_more_better)
        factors = {name: _factor(values[name], values[ranked[0]]) for name in ranked}
        level = [name for name in ranked if factors[name] < 1 + TIE]
        beaten = [name for name in ranked if name not in level]
        lead = f"{level[0]} wins" + (f" (level with {', '.join(level[1:])})" if level[1:] else "")
        hardly = _reaches_hardly_any(yardstick, summaries[ranked[0]], {name: summaries[name] for name in beaten})
        margins = _margins(yardstick, {name: factors[name] for name in beaten}, hardly)
        first = next(iter(summaries))
        explained = dict.fromkeys((first if first in beaten else beaten[-1], beaten[0]))
        reasons = "; ".join(f"{name} {_reason(summaries[name], summaries[level[0]])}" for name in explained)
        return f"{lead}: {margins}, because {reasons}.{_price(summaries, level[0])}"
    return f"Nobody wins: goodput, output and latency differ by less than {percent(TIE)}."


def _price(summaries: Mapping[str, Summary], winner: str) -> str:
    """Who serves the slowest requests much better than the winner, if anybody does; else nothing."""
    slowest_ms = {name: summary["metrics"]["e2e_ms"]["p99"] for name, summary in summaries.items()}
    known = {name: value for name, value in slowest_ms.items() if value}
    if winner not in known:
        return ""
    gentlest = min(known, key=lambda name: known[name])
    factor = known[winner] / known[gentlest]
    if factor < AT_A_PRICE:
        return ""
    return f" Its slowest requests pay for it: their p99 end-to-end latency is {_times(factor)} that of {gentlest}."


def _value(yardstick: Yardstick, summary: Summary) -> float:
    """What a run reaches; the worst there is where nothing was observed."""
    value = yardstick.value(summary)
    return value if value is not None else 0.0 if yardstick.is_more_better else float("inf")


def _reaches_hardly_any(yardstick: Yardstick, best: Summary, others: Mapping[str, Summary]) -> list[str]:
    """Which of the others reach a part so small that the best run, which reaches more, is beyond comparison."""
    if yardstick.whole is None:
        return []

    def is_hardly_any(summary: Summary) -> bool:
        whole = yardstick.whole(summary) if yardstick.whole else None
        return 0 < _value(yardstick, summary) < ALMOST_NONE * (whole or 0.0)

    return [] if is_hardly_any(best) else [name for name, summary in others.items() if is_hardly_any(summary)]


def _margins(yardstick: Yardstick, factors: Mapping[str, float], hardly: Sequence[str]) -> str:
    """By how much the winner is better than each other one; some may have nothing to compare with."""
    nothing = [name for name, factor in factors.items() if factor == float("inf")]
    finite = [(_times(factor), name) for name, factor in factors.items() if name not in (*nothing, *hardly)]
    parts = [yardstick.phrase.format(*finite[0]), *(" ".join(margin) for margin in finite[1:])] if finite else []
    rest = [yardstick.hardly.format(_listed(hardly))] if hardly else []
    rest += [f"{_listed(nothing)} had {yardstick.nothing}"] if nothing else []
    return ", while ".join(filter(None, (", ".join(parts), " and ".join(rest))))


def _listed(names: Sequence[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))


def _times(factor: float) -> str:
    return f"{factor:.3g} times" if factor < 100 else f"{factor:,.0f} times"


def _factor(value: float, best: float) -> float:
    """How many times better `best` is, >= 1."""
    high, low = max(value, best), min(value, best)
    return high / low if low > 0 else float("inf")


def _reason(loser: Summary, winner: Summary) -> str:
    """What the loser lost most by, beyond the winner; else that few ran, stalls, queueing, or what limits it."""
    excess = {loss: loss.share(loser) - loss.share(winner) for loss in _LOSSES}
    loss = max(_LOSSES, key=lambda loss: excess[loss])
    if excess[loss] >= _WORTH_NAMING:
        return loss.phrase.format(percent(loss.share(loser)))
    causes = []
    running, best = _num_running(loser), _num_running(winner)
    stall_ms, shortest_ms = _longest_stall_ms(loser), _longest_stall_ms(winner)
    if running < 0.9 * best:
        few = f"{running:.3g} request{'' if f'{running:.3g}' == '1' else 's'}"
        causes.append(f"had {few} running on average against {best:.3g}")
    if _queue_share(loser) - _queue_share(winner) >= _WORTH_NAMING:
        causes.append(f"kept requests queued for {percent(_queue_share(loser))} of their latency{_what_for(loser)}")
    if running >= 0.9 * best and stall_ms > 2 * shortest_ms:
        causes.append(f"let running answers stall for up to {stall_ms:,.0f} ms, against {shortest_ms:,.0f} ms")
    return ", and ".join(causes) or f"is limited by {loser['limits']['verdict']}"


def _what_for(loser: Summary) -> str:
    """What its queue waited for most of the time that it waited, in words; empty if that was no single thing."""
    shares = {name: float(loser["limits"]["shares"][name]) for name in _QUEUED_FOR}
    longest = max(shares, key=lambda name: shares[name])
    return f", mostly for {_QUEUED_FOR[longest]}" if 2 * shares[longest] > sum(shares.values()) else ""


def _num_running(summary: Summary) -> float:
    return float(summary["iterations"]["mean_num_running"] or 0.0)


def _longest_stall_ms(summary: Summary) -> float:
    return float(summary["metrics"]["itl_ms"]["max"] or 0.0)


def _queue_share(summary: Summary) -> float:
    queue_ms, e2e_ms = (summary["metrics"][key]["mean"] or 0.0 for key in ("queue_ms", "e2e_ms"))
    return float(queue_ms / e2e_ms) if e2e_ms else 0.0


def _finished_slots(summary: Summary) -> float:
    return float(summary["waste"]["finished_slot_share"])


def _padding(summary: Summary) -> float:
    return float(summary["waste"]["padding_share"])


def _recomputed(summary: Summary) -> float:
    iterations = summary["iterations"]
    computed = (iterations["mean_scheduled_tokens"] or 0.0) * iterations["count"]
    return float(summary["kv"]["recomputed_tokens"] / computed) if computed else 0.0


def _not_cached(summary: Summary) -> float:
    """Of the prompts' tokens, those that were computed; what was computed again after preemptions does not count."""
    kv = summary["kv"]
    computed = kv["prefill_tokens"] - kv["recomputed_tokens"]
    prompts = computed + kv["cached_prompt_tokens"]
    return float(computed / prompts) if prompts else 0.0


def _reserved_kv(summary: Summary) -> float:
    """Reserved but unused KV, where KV keeps the queue waiting."""
    waits_for_kv = summary["limits"]["shares"]["kv"] > 0.1
    return float(summary["kv"]["reserved_unused_share"]) if waits_for_kv else 0.0


def _waiting_idle(summary: Summary) -> float:
    """Time in which the device idled although requests waited, at most."""
    idle = 1.0 - (summary["iterations"]["busy_share"] or 0.0)
    return float(min(idle, summary["limits"]["shares"]["admission"]))


_LOSSES = (
    _Loss("kept places of its batch for finished requests {0} of the time that they were held", _finished_slots),
    _Loss("computed {0} of its tokens as padding, for nobody", _padding),
    _Loss("computed {0} of its tokens again after preemptions", _recomputed),
    _Loss("computed {0} of its prompt tokens, which it found in no cache", _not_cached),
    _Loss("left {0} of the KV that requests had reserved unused while others waited for it", _reserved_kv),
    _Loss("let the device idle {0} of the time, waiting for company for a request", _waiting_idle),
)
