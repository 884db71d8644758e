"""Replications: a scenario with other random numbers, the same ones for every variant of it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sim.build import draw
from sim.clock import NS_PER_S
from sim.request import NEVER
from sim.rng import stream
from sim.scenario import RunOptions, Scenario
from sim.workload.traffic import Scale, TrafficClass, build_arrivals, is_closed

BLOCK_S = 60.0
"""Recorded seconds of a trace that stay together: longer than requests of chats live, and than their bursts last."""


@dataclass(frozen=True)
class Load:
    """What a search varies, and how much of it the scenario has."""

    variable: str
    """`rate_per_s`, `num_clients`, or `scale` for a mix of both."""
    unit: str
    value: float

    @property
    def is_whole(self) -> bool:
        """Whether only whole numbers make sense."""
        return self.variable == "num_clients"


def seed_of(seed: int, index: int) -> int:
    """The seed of replication `index` of a scenario with `seed`; the first one is the scenario itself."""
    return seed if index == 0 else int(stream(seed, f"replication/{index}").integers(10**12))


def replication(scenario: Scenario, index: int, num_requests: int | None = None) -> Scenario:
    """The scenario with the random numbers of replication `index`.

    A trace, which has none, is resampled: blocks of it, drawn at random (see `TraceOptions.resample_s`).
    `num_requests` replaces the run's length, unless the traffic has an end of its own.
    """
    update: dict[str, object] = {
        "seed": seed_of(scenario.seed, index),
        "traffic": [_resampled(entry) for entry in scenario.traffic],
    }
    if num_requests is not None and is_steady(scenario):
        update["run"] = scenario.run.model_copy(
            update={"num_requests": num_requests, "duration_s": None, "warmup_s": 0.0, "drain": True}
        )
    return scenario.model_copy(update=update)


def at_load(scenario: Scenario, factor: float) -> Scenario:
    """The scenario under `factor` times its load."""
    scale = scenario.scale or Scale()
    return scenario.model_copy(update={"scale": scale.model_copy(update={"rate": scale.rate * factor})})


def is_steady(scenario: Scenario) -> bool:
    """Whether the traffic goes on alike for as long as one asks: no stages, no single bursts, no own numbers."""
    processes = [entry.arrivals for entry in scenario.traffic if entry.arrivals is not None]
    processes += [scenario.arrivals] if scenario.arrivals is not None else []
    ends = any(build_arrivals(process).ends_by_itself for process in processes)
    return not ends and all(entry.num_requests is None for entry in scenario.traffic)


def load_of(scenario: Scenario) -> Load:
    """What the scenario's load is measured in: requests per second, or the clients of closed loops."""
    closed = [is_closed(entry) for entry in scenario.traffic]
    factor = scenario.scale.rate if scenario.scale else 1.0
    if all(closed):
        processes = [build_arrivals(entry.arrivals).scaled(factor) for entry in scenario.traffic if entry.arrivals]
        return Load("num_clients", "clients", sum(process.clients or 0 for process in processes))
    if any(closed):
        return Load("scale", "times the scenario's load", 1.0)
    talks = any(entry.conversation for entry in scenario.traffic)
    unit = "requests/s (a conversation counts once)" if talks else "requests/s"
    rates = [_rate_of(entry, scenario) for entry in scenario.traffic if entry.share is None]
    sharing = next((entry for entry in scenario.traffic if entry.share is not None), None)
    if sharing is not None:
        whole = sharing.model_copy(update={"share": None, "arrivals": scenario.arrivals})
        rates.append(_rate_of(whole, scenario))
    return Load("rate_per_s", unit, factor * sum(rates))


def replication_note(scenario: Scenario) -> str:
    """What a replication of this scenario is, in words."""
    if all(entry.trace is None for entry in scenario.traffic):
        return "a replication is the scenario with another seed"
    return (
        f"a replication of a trace is a bootstrap: blocks of {BLOCK_S:g} s of it (at most a tenth), drawn at random "
        "and scaled to the rate"
    )


def _rate_of(entry: TrafficClass, scenario: Scenario) -> float:
    """Arrivals per second of one class, unscaled: as it says, or as drawn (of a trace all that is recorded)."""
    stated = getattr(entry.arrivals, "rate_per_s", None)
    if isinstance(stated, float):
        return stated
    run = scenario.run if entry.trace is None else RunOptions()
    alone = scenario.model_copy(update={"traffic": [entry], "arrivals": None, "scale": None, "run": run})
    arrival_ns = draw(alone).arrival_ns
    arrivals_ns = np.sort(arrival_ns[arrival_ns != NEVER])
    return len(arrivals_ns) * NS_PER_S / max(1, int(arrivals_ns[-1]))


def _resampled(entry: TrafficClass) -> TrafficClass:
    if entry.trace is None or entry.trace.resample_s is not None:
        return entry
    return entry.model_copy(update={"trace": entry.trace.model_copy(update={"resample_s": BLOCK_S})})
