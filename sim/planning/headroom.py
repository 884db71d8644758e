"""What a capacity means for the scenario as it is: room for more load, replicas for a rate, cost per token."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from sim.metrics.wording import percent
from sim.planning.capacity import Capacity
from sim.planning.fleet_size import FleetSize, num_gpus
from sim.planning.probe import CUTS, STABILITY, Observation, common_warm_up, observe
from sim.planning.replications import at_load, replication, replication_note
from sim.planning.workers import Workers
from sim.scenario import Scenario
from sim.workload.traffic import Scale

RISES = (1.1, 1.25)
_REPLICATIONS = 2
_LENGTHS = {"prompt_tokens": "prompts", "output_tokens": "answers"}


@dataclass(frozen=True)
class Change:
    """What the SLO makes of the scenario's own load after one thing has grown."""

    what: str
    """`rate`, `prompt_tokens` or `output_tokens`."""
    factor: float
    holds: bool | None
    """None: the interval of the capacity leaves it open."""
    worst: str | None
    """The target that is worst off, where the change was simulated."""
    value: float | None
    limit: float | None


def changes(capacity: Capacity, workers: Workers) -> list[Change]:
    """10 % and 25 % more requests, longer prompts, longer answers; nothing for a load beyond the capacity.

    More requests are judged by the capacity's interval, longer ones by two replications each. Requests that
    become too long for the model are rejected in these.
    """
    boundary, load = capacity.boundary, capacity.load.value
    if load > boundary.value:
        return []
    found = [_rate_change(factor * load, factor, capacity) for factor in RISES]
    cases = [(what, factor) for what in _LENGTHS for factor in RISES]
    tasks = [
        (_longer(capacity, what, factor, i), capacity.search.targets)
        for what, factor in cases
        for i in range(_REPLICATIONS)
    ]
    observed = dict(workers.each(observe, tasks))
    for case, (what, factor) in enumerate(cases):
        own = [observed[case * _REPLICATIONS + i] for i in range(_REPLICATIONS)]
        found.append(_length_change(what, factor, capacity, own))
    return found


def economy(capacity: Capacity) -> dict[str, float | None]:
    """Tokens per GPU-second at the boundary, and what a million of them costs at the user's price."""
    hardware, seen = capacity.scenario.hardware, capacity.observations
    num_requests = sum(one.num_requests for one in seen)
    output = sum(one.output_tokens for one in seen)
    prompt = sum(one.prompt_tokens for one in seen)
    if capacity.load.variable == "rate_per_s":
        per_s = capacity.boundary.value * output / num_requests
    else:
        per_s = output / sum(one.duration_s for one in seen)
    per_gpu_s = per_s / num_gpus(capacity.scenario)
    price = hardware.price_per_gpu_hour
    return {
        "output_tokens_per_s": per_s,
        "output_tokens_per_gpu_s": per_gpu_s,
        "total_tokens_per_gpu_s": per_gpu_s * (prompt + output) / output if output else None,
        "price_per_gpu_hour": price,
        "price_per_million_output_tokens": None if price is None else price / 3600 / per_gpu_s * 1e6,
    }


def answer(capacity: Capacity, found: list[Change], fleet: FleetSize | None = None) -> dict[str, Any]:
    """Everything that `servesim capacity` says, as plain data; `fleet`: what a rate needs, if that was asked."""
    boundary, load, search = capacity.boundary, capacity.load, capacity.search
    room = boundary.value / load.value - 1
    return {
        "name": capacity.scenario.name,
        "boundary": {
            "variable": load.variable,
            "unit": load.unit,
            "value": boundary.value,
            "ci_low": _finite(boundary.low),
            "ci_high": _finite(boundary.high),
            "level": boundary.level,
        },
        "is_precise": capacity.is_precise,
        "binding": capacity.binding,
        "targets": [
            {"target": target.name, "limit": target.limit, "value": capacity.values[target.name]}
            for target in search.targets
        ],
        "measured_at": capacity.below,
        "replications": capacity.num_replications,
        "runs": len(search.runs),
        "requests_per_run": search.num_requests,
        "method": _method(capacity),
        "notes": list(_notes(capacity)),
        "headroom": {
            "load": load.value,
            "room": room,
            "changes": [vars(change) for change in found],
        },
        "replicas": None if fleet is None else fleet.to_dict(),
        "economy": economy(capacity),
        "verdict": _verdict(capacity, found, fleet),
    }


def _rate_change(load: float, factor: float, capacity: Capacity) -> Change:
    boundary = capacity.boundary
    holds = True if load <= boundary.low else False if load > boundary.high else None
    return Change("rate", factor, holds, None, None, None)


def _longer(capacity: Capacity, what: str, factor: float, index: int) -> Scenario:
    scenario = capacity.scenario
    scale = scenario.scale or Scale()
    longer = scale.model_copy(update={what: getattr(scale, what) * factor})
    run = scenario.run.model_copy(update={"oversized": "reject"})
    changed = scenario.model_copy(update={"scale": longer, "run": run})
    return replication(at_load(changed, 1.0), index, capacity.search.num_requests)


def _length_change(what: str, factor: float, capacity: Capacity, seen: list[Observation]) -> Change:
    targets, (cut, _) = capacity.search.targets, common_warm_up([one.seen for one in seen])
    scores = [target.score([one.tallies[cut][i] for one in seen]) for i, target in enumerate(targets)]
    worst = max(range(len(targets)), key=lambda i: scores[i])
    values = [value for one in seen if (value := one.tallies[cut][worst].value) is not None]
    value = sum(values) / len(values) if values else None
    return Change(what, factor, scores[worst] <= 0, targets[worst].name, value, targets[worst].limit)


def _method(capacity: Capacity) -> str:
    seen, (cut, _) = capacity.observations, capacity.warm_up
    num = CUTS[cut] * sum(one.num_requests for one in seen) / len(seen)
    tail = sum(one.num_tail for one in seen) / len(seen)
    if not num and not tail:
        return replication_note(capacity.scenario)
    return (
        f"{replication_note(capacity.scenario)}; of each run the first {num:.0f} requests are cut as warm-up (MSER-5 "
        f"on the mean number in the system) and on average the last {tail:.0f}, which met no new ones"
    )


def _notes(capacity: Capacity) -> list[str]:
    notes, seen = [], capacity.observations
    if not capacity.is_precise:
        half = capacity.crossing.interval.relative_half_width
        notes.append(
            f"the interval is ±{percent(half, 1)} after {capacity.num_replications} replications, more than the ±"
            f"{percent(capacity.precision, 1)} asked for"
        )
    if not capacity.warm_up[1]:
        notes.append("the runs do not settle within their first half: make them longer with --requests")
    if any(target.name == STABILITY for target in capacity.search.targets):
        notes.append("stability: seconds by which waits grow in a second of arrivals")
    lost = sum(one.no_answer_share for one in seen) / len(seen)
    if lost > 0.01:
        notes.append(f"{percent(lost, 1)} of the requests got no answer and count in no latency")
    return notes


def _verdict(capacity: Capacity, found: list[Change], fleet: FleetSize | None) -> str:
    boundary, load = capacity.boundary, capacity.load
    limit = "beyond it waits grow without end" if capacity.binding == STABILITY else f"{capacity.binding} binds"
    interval = f"{percent(boundary.level)} CI {boundary.low:.3g} to {boundary.high:.3g}"
    text = f"{boundary.value:.3g} {load.unit} ({interval}): {limit}"
    room = boundary.value / load.value - 1
    if load.variable == "scale":
        text += "."
    elif room < 0:
        text += f"; the scenario's {load.value:.3g} exceed it by {percent(load.value / boundary.value - 1)}."
    else:
        text += f"; the scenario's {load.value:.3g} leave room for {percent(room)} more."
    if found:
        text += " " + _said(found)
    if fleet is not None:
        text += " " + _needed(fleet.to_dict())
    return text


def _needed(fleet: dict[str, Any]) -> str:
    between = "" if fleet["ci_low"] == fleet["ci_high"] else f" (CI {fleet['ci_low']} to {fleet['ci_high']})"
    how = f"behind {fleet['router']}" if fleet["is_simulated"] else "if each bears an equal share as one alone would"
    return (
        f"{fleet['rate_per_s']:g} requests/s need {fleet['replicas']} replicas{between}, {fleet['gpus']} GPUs, {how}."
    )


def _said(found: list[Change]) -> str:
    names = {"rate": "more load", **{key: f"longer {word}" for key, word in _LENGTHS.items()}}
    broken = [f"{percent(change.factor - 1)} {names[change.what]}" for change in found if change.holds is False]
    unsure = [f"{percent(change.factor - 1)} {names[change.what]}" for change in found if change.holds is None]
    if not broken and not unsure:
        return "25 % more load, longer prompts or longer answers would still hold."
    parts = [f"it would not bear {' or '.join(broken)}"] if broken else []
    parts += [f"{' or '.join(unsure)} lies within the interval"] if unsure else []
    return f"Of its rises by 10 % and 25 %: {'; '.join(parts)}."


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None
