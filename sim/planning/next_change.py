"""What a little more of each resource would change: finite differences on the same requests."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from sim.build import draw, simulate
from sim.planning.compare import METRICS
from sim.replica import Replica, price_model, replicas
from sim.scenario import Scenario
from sim.step import StepShape

STEP = 1.1
"""Each resource is made so many times as large."""

_NOTICEABLE = 0.01
"""Changes of a metric by less than this part of it are no reason to buy anything."""

_YARDSTICKS = {
    "goodput_requests_per_s": "requests within the SLO",
    "output_tokens_per_s": "output tokens per second",
    "ttft_p99_ms": "p99 TTFT",
    "e2e_mean_ms": "mean E2E",
    "itl_p99_ms": "p99 ITL",
}
"""What the advice goes by, in this order: the first that anything moves; and what to call it."""

_PROBE = StepShape(64, 64_000, 64_000_000, 1000, ((2000, 0),), 65)
"""A step that uses every part of a GPU: a price that stays the same does not know the part."""


class _Resource(NamedTuple):
    """Something to have more of."""

    label: str
    purchase: str
    """What to buy to have it; empty for a setting."""
    enlarge: Callable[[Replica], tuple[Replica, float]]
    """The replica with more of it, and how many times as much that is."""


@dataclass(frozen=True, eq=False)
class Change:
    """What more of one resource does to each metric of a comparison."""

    resource: str
    label: str
    purchase: str
    factor: float
    """How many times as much there was of it (whole numbers are rounded up)."""
    values: Mapping[str, float | None]
    ratios: Mapping[str, float | None]
    """New value over old; None where either was not observed."""

    def elasticity(self, metric: str) -> float | None:
        """Percent that the metric changes by per percent of the resource."""
        ratio = self.ratios[metric]
        return math.log(ratio) / math.log(self.factor) if ratio else None


@dataclass(frozen=True)
class NextChange:
    """The elasticity table of a scenario."""

    base: Mapping[str, float | None]
    changes: tuple[Change, ...]

    def advice(self) -> str:
        """One sentence: what to buy, or to set, and what it would bring."""
        for metric, label in _YARDSTICKS.items():
            gains = {change: _gain(metric, change.ratios[metric]) for change in self.changes}
            best = max(gains, key=lambda change: gains[change])
            if gains[best] < _NOTICEABLE:
                continue
            hardware = {change: gain for change, gain in gains.items() if change.purchase}
            buy = max(hardware, key=lambda change: hardware[change])
            knob = "" if best.purchase else f"first raise {best.label}: {_effect(best, metric, label)}; "
            if hardware[buy] < _NOTICEABLE:
                return f"{knob}of what can be bought, nothing moves {label} by 1 %"
            others = ", ".join(
                f"{change.purchase} {_signed(change.ratios[metric])}" for change in hardware if change is not buy
            )
            return f"{knob}buy {buy.purchase}: {_effect(buy, metric, label)}" + (
                f" (against {others})" if others else ""
            )
        return "nothing to buy and nothing to raise: 10 % more of any resource moves neither output nor latency by 1 %"

    def to_dict(self) -> dict[str, Any]:
        """All of it as plain data."""
        return {
            "base": dict(self.base),
            "changes": [
                {
                    "resource": change.resource,
                    "label": change.label,
                    "factor": change.factor,
                    "values": dict(change.values),
                    "ratios": dict(change.ratios),
                    "elasticities": {metric: change.elasticity(metric) for metric in change.ratios},
                }
                for change in self.changes
            ],
            "advice": self.advice(),
        }


def next_change(scenario: Scenario) -> NextChange:
    """Run the scenario, and once more with 10 % more of each resource that it has, all on the same requests.

    In a fleet every replica gets more of what the first one has. The KV pool is the same in all runs but the one
    that enlarges it. Of a GPU's compute, bandwidth and links those are tried that the cost model knows; one that
    rests on measurements knows none of them, and gets a device that is faster as a whole. Raises what
    `sim.build` raises.
    """
    traffic, parts = draw(scenario), replicas(scenario)
    kinds = {id(own): own for own in parts}
    base = _measure(simulate(scenario, traffic, parts).summary())
    changes = []
    for name, resource in _resources(parts[0]):
        larger = {key: resource.enlarge(own)[0] for key, own in kinds.items()}
        factor = resource.enlarge(parts[0])[1]
        values = _measure(simulate(scenario, traffic, [larger[id(own)] for own in parts]).summary())
        ratios = {metric: _ratio(values[metric], base[metric]) for metric in base}
        changes.append(Change(name, resource.label, resource.purchase, factor, values, ratios))
    return NextChange(base, tuple(changes))


def _resources(parts: Replica) -> Iterator[tuple[str, _Resource]]:
    yield "kv", _Resource("KV blocks", "memory", _more_kv)
    price = _price(parts)
    known = {name: resource for name, resource in _GPU_PARTS.items() if _price(resource.enlarge(parts)[0]) != price}
    yield from (known or {"device": _Resource("device speed", "a faster GPU", _faster_device)}).items()
    yield "host", _Resource("host speed", "", lambda parts: (replace(parts, host_speed=STEP), STEP))
    for name, keys in {"slots": ("max_num_seqs", "max_batch_size"), "budget": ("max_num_batched_tokens",)}.items():
        for key in keys:
            if isinstance(getattr(parts.scenario.engine, key, None), int):
                yield name, _Resource(key, "", _more_of(key))


def _price(parts: Replica) -> int:
    return price_model(parts).price(_PROBE)


def _more_kv(parts: Replica) -> tuple[Replica, float]:
    num_blocks = _a_tenth_more(parts.limits.num_gpu_blocks)
    limits = replace(parts.limits, num_gpu_blocks=num_blocks)
    return replace(parts, limits=limits), num_blocks / parts.limits.num_gpu_blocks


def _a_tenth_more(num: int) -> int:
    return num - (-num // 10)


def _more_of(key: str) -> Callable[[Replica], tuple[Replica, float]]:
    """A setting of the engine, a whole number, made larger."""

    def enlarge(parts: Replica) -> tuple[Replica, float]:
        scenario = parts.scenario
        now = getattr(scenario.engine, key, None)
        if now is None:
            return parts, 1.0
        more = _a_tenth_more(now)
        engine = scenario.engine.model_copy(update={key: more})
        return replace(parts, scenario=scenario.model_copy(update={"engine": engine})), more / now

    return enlarge


def _gpu_part(*fields: str) -> Callable[[Replica], tuple[Replica, float]]:
    """Figures of the GPU made larger."""

    def enlarge(parts: Replica) -> tuple[Replica, float]:
        gpu = parts.target.gpu
        more = {field: getattr(gpu, field) * STEP for field in fields if getattr(gpu, field) is not None}
        return replace(parts, target=replace(parts.target, gpu=replace(gpu, **more))), STEP

    return enlarge


def _faster_device(parts: Replica) -> tuple[Replica, float]:
    return replace(parts, device_speed=STEP), STEP


_GPU_PARTS = {
    "bandwidth": _Resource("memory bandwidth", "memory bandwidth", _gpu_part("bandwidth_bytes_per_s")),
    "compute": _Resource("compute", "FLOPs", _gpu_part("bf16_flops", "fp8_flops")),
    "link": _Resource("links between GPUs", "faster links", _gpu_part("link_bytes_per_s")),
}


def _measure(summary: Mapping[str, Any]) -> dict[str, float | None]:
    return {metric.name: metric.value(summary) for metric in METRICS}


def _ratio(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _gain(metric: str, ratio: float | None) -> float:
    """By which part the metric gets better; negative if it gets worse."""
    if not ratio:
        return 0.0
    return ratio - 1 if metric.endswith("_per_s") else 1 - ratio


def _effect(change: Change, metric: str, label: str) -> str:
    return f"{100 * (change.factor - 1):.0f} % more changes {label} by {_signed(change.ratios[metric])}"


def _signed(ratio: float | None) -> str:
    return "nothing" if ratio is None else f"{100 * (ratio - 1):+.1f} %"
