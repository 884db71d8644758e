"""An operator's loop in one call: which token budget and how many sequences, where the knee is, and what stress does.

The scenario's own capacity sets the load; every setting then meets the same replications there, the best one
is compared with the scenario's own by their capacities, and both face a burst of long prompts and clients that
leave.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim.errors import ScenarioError
from sim.metrics.wording import percent
from sim.planning.capacity import Capacity, Progress, find_capacity
from sim.planning.probe import Observation, common_warm_up, observe
from sim.planning.ratio import ratio_of, with_equal_replications
from sim.planning.replications import at_load, replication
from sim.planning.workers import Workers
from sim.replica import replica
from sim.scenario import Scenario

BUDGETS = (512, 1024, 2048, 4096, 8192)
SEQUENCES = (64, 128, 256, 512)
_KEYS = ("max_num_batched_tokens", "max_num_seqs")
_REPLICATIONS = 3
_KNEE_LOADS = (0.2, 0.4, 0.6, 0.8, 0.9, 1.0, 1.1, 1.2)
"""Of the scenario's capacity."""
_LONG_PROMPTS = 8
_LEAVING = {"kind": "after_tokens", "probability": 0.3, "tokens": {"kind": "uniform", "low": 1, "high": 50}}

_WHY = {
    ("max_num_batched_tokens", False): "smaller steps keep the gaps between tokens short",
    ("max_num_batched_tokens", True): "prompts take fewer steps, so that first tokens come sooner",
    ("max_num_seqs", False): "smaller batches keep the gaps between tokens short",
    ("max_num_seqs", True): "fewer requests wait for a place in the batch",
}


@dataclass(frozen=True)
class Setting:
    """A token budget and a number of sequences, and what becomes of the SLO with them."""

    max_num_batched_tokens: int
    max_num_seqs: int
    score: float
    """Of the target that is worst off, below 0 within the SLO; see `Target.score`."""
    worst: str
    values: dict[str, float | None]
    """Target -> its statistic."""
    is_efficient: bool = False
    """Whether no other setting is better in one target and as good in all others."""


def tune(
    scenario: Scenario,
    *,
    workers: Workers | None = None,
    progress: Progress = lambda what, num_runs: None,
    **search: Any,
) -> dict[str, Any]:
    """Recommend `max_num_batched_tokens` and `max_num_seqs` for an SLO, as plain data; `search` as for `find_capacity`.

    Raises ScenarioError for an engine without these options, and what `find_capacity` raises.
    """
    workers = workers or Workers()
    own = own_setting(scenario)
    base = find_capacity(scenario, workers=workers, progress=progress, **search)
    settings = _tried(base, own, workers, progress)
    mine = next(setting for setting in settings if _pair(setting) == own)
    best = recommended(settings, own)
    ratio, tuned = None, scenario
    if best is not mine:
        tuned = _with(scenario, *_pair(best))
        pair = with_equal_replications(
            {"own": base, "best": find_capacity(tuned, workers=workers, progress=progress, **search)}
        )
        ratio = ratio_of(pair["best"], pair["own"])
        if ratio.low <= 1:
            best, tuned = mine, scenario
    load = base.crossing.interval.value
    return {
        "name": scenario.name,
        "own": dict(zip(_KEYS, own, strict=True)),
        "recommended": dict(zip(_KEYS, _pair(best), strict=True)),
        "reason": _reason(own, best, mine, ratio),
        "load": load,
        "unit": base.load.unit,
        "ratio": None if ratio is None else {"value": ratio.value, "ci_low": ratio.low, "ci_high": ratio.high},
        "settings": [vars(setting) for setting in settings],
        "knee": _knee(base, workers, progress),
        "stress": {
            name: _stressed(base, name, [scenario, tuned], workers) for name in ("long prompts", "clients leave")
        },
    }


def own_setting(scenario: Scenario) -> tuple[int, int]:
    """The scenario's token budget and number of sequences. Raises ScenarioError for an engine without them."""
    found = [getattr(scenario.engine, key, None) for key in _KEYS]
    if not all(isinstance(value, int) for value in found):
        raise ScenarioError(
            f"{scenario.place}: engine.policy",
            f"{scenario.engine.policy!r} has no {' or '.join(_KEYS)} to tune",
            remedy="Use servesim sweep over its own options.",
        )
    return int(found[0] or 0), int(found[1] or 0)


def recommended(settings: Sequence[Setting], own: tuple[int, int]) -> Setting:
    """The setting with the best score; of equal ones that which leaves most as it is, then the smallest."""

    def num_changes(setting: Setting) -> int:
        return sum(new != old for new, old in zip(_pair(setting), own, strict=True))

    return min(settings, key=lambda setting: (setting.score, num_changes(setting), _pair(setting)))


def efficient(values: Sequence[Sequence[float]]) -> list[bool]:
    """Which points no other one dominates: better (smaller) in one coordinate and not worse in any."""
    points = np.asarray(values, dtype=np.float64)
    return [not bool(((points <= point).all(axis=1) & (points < point).any(axis=1)).any()) for point in points]


def knee(loads: Sequence[float], latencies: Sequence[float]) -> int:
    """The position where a rising curve bends most: farthest below the straight line between its ends.

    V. Satopää et al., "Finding a 'kneedle' in a haystack", ICDCSW 2011, for a convex curve.
    """
    x, y = (np.asarray(column, dtype=np.float64) for column in (loads, latencies))
    below = (x - x[0]) / (x[-1] - x[0]) - (y - y[0]) / max(y[-1] - y[0], 1e-300)
    return int(np.argmax(below))


def _tried(base: Capacity, own: tuple[int, int], workers: Workers, progress: Progress) -> list[Setting]:
    budgets, sequences = {*BUDGETS, own[0]}, {*SEQUENCES, own[1]}
    pairs = sorted({own, *((budget, seqs) for budget in budgets for seqs in sequences if budget >= seqs)})
    scenarios: dict[tuple[int, int], Scenario] = {}
    for pair in pairs:
        try:
            scenarios[pair] = _with(base.scenario, *pair)
            replica(scenarios[pair])
        except ScenarioError:  # an engine that such a budget does not allow, say without chunked prefill
            scenarios.pop(pair, None)
    load = base.crossing.interval.value
    seen = _observed(base, list(scenarios.values()), load, _REPLICATIONS, workers, progress)
    settings = [_setting(base, pair, seen[i]) for i, pair in enumerate(scenarios)]
    is_efficient = efficient([[value or 0.0 for value in setting.values.values()] for setting in settings])
    return [
        Setting(*_pair(one), one.score, one.worst, one.values, flag)
        for one, flag in zip(settings, is_efficient, strict=True)
    ]


def _observed(
    base: Capacity, scenarios: Sequence[Scenario], load: float, num: int, workers: Workers, progress: Progress
) -> list[list[Observation]]:
    """The first replications of every scenario under a load."""
    search = base.search
    factor = load / base.load.value
    tasks = [
        (replication(at_load(scenario, factor), i, search.num_requests), search.targets)
        for scenario in scenarios
        for i in range(num)
    ]
    found: dict[int, Observation] = {}
    for position, observation in workers.each(observe, tasks):
        found[position] = observation
        progress("trying settings", len(found))
    return [[found[i * num + j] for j in range(num)] for i in range(len(scenarios))]


def _setting(base: Capacity, pair: tuple[int, int], seen: list[Observation]) -> Setting:
    targets, (cut, _) = base.search.targets, common_warm_up([one.seen for one in seen])
    scores = [target.score([one.tallies[cut][i] for one in seen]) for i, target in enumerate(targets)]
    values = {target.name: _mean([one.tallies[cut][i].value for one in seen]) for i, target in enumerate(targets)}
    worst = int(np.argmax(scores))
    return Setting(*pair, scores[worst], targets[worst].name, values)


def _knee(base: Capacity, workers: Workers, progress: Progress) -> dict[str, Any]:
    """The target that binds, under rising load, and where it bends."""
    boundary, binding = base.crossing.interval.value, base.search.targets.index(base.crossing.binding)
    curve = []
    for share in _KNEE_LOADS:
        (seen,) = _observed(base, [base.scenario], share * boundary, 1, workers, progress)
        cut, _ = common_warm_up([seen[0].seen])
        tokens_per_s = seen[0].output_tokens / seen[0].duration_s
        curve.append(
            {
                "load": share * boundary,
                "value": seen[0].tallies[cut][binding].value,
                "output_tokens_per_s": tokens_per_s,
            }
        )
    at = knee([point["load"] or 0.0 for point in curve], [point["value"] or 0.0 for point in curve])
    return {"target": base.binding, "at": curve[at]["load"], "curve": curve}


def _stressed(base: Capacity, name: str, scenarios: Sequence[Scenario], workers: Workers) -> list[dict[str, Any]]:
    """What the targets of own and tuned scenario come to under a stress, at the load of the scenario."""
    load = min(base.load.value, base.crossing.interval.value)
    stressed = [_with_stress(scenario, name) for scenario in scenarios]
    seen = _observed(base, stressed, load, 1, workers, lambda what, num_runs: None)
    return [{target.name: one[0].tallies[0][i].value for i, target in enumerate(base.search.targets)} for one in seen]


def _with_stress(scenario: Scenario, name: str) -> Scenario:
    if name == "clients leave":
        leaving = {f"traffic[{i}].cancel": _LEAVING for i in range(len(scenario.traffic))}
        return scenario.changed(leaving, name)
    parts = replica(scenario)
    longest = min(parts.limits.max_model_len, parts.limits.num_gpu_blocks * parts.limits.block_size // 2)
    burst = {
        "name": "burst of long prompts",
        "arrivals": {"kind": "burst", "num_requests": _LONG_PROMPTS, "at_s": 30.0, "every_s": 60.0},
        "prompt_tokens": max(1, longest - 64),
        "output_tokens": 16,
    }
    return scenario.with_class(burst, name)


def _with(scenario: Scenario, budget: int, sequences: int) -> Scenario:
    values = {f"engine.{key}": value for key, value in zip(_KEYS, (budget, sequences), strict=True)}
    return scenario.changed(values, f"with {budget} tokens and {sequences} sequences")


def _pair(setting: Setting) -> tuple[int, int]:
    return setting.max_num_batched_tokens, setting.max_num_seqs


def _mean(values: Sequence[float | None]) -> float | None:
    seen = [value for value in values if value is not None]
    return sum(seen) / len(seen) if seen else None


def _reason(own: tuple[int, int], best: Setting, mine: Setting, ratio: Any) -> str:
    if best is mine:
        return "no other setting bears surely more: keep yours"
    changed = [(key, new > old) for key, old, new in zip(_KEYS, own, _pair(best), strict=True) if new != old]
    why = "; ".join(f"{key} {'up' if is_up else 'down'}: {_WHY[key, is_up]}" for key, is_up in changed)
    more = f"{percent(ratio.value - 1)} more load (95 % CI {percent(ratio.low - 1)} to {percent(ratio.high - 1)})"
    return f"it bears {more}; {mine.worst} bound before. {why}"
