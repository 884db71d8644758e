"""What a run was, written down so that it can be run again: the resolved scenario, its hash, the versions."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml

from sim.metrics.facts import versions
from sim.policies.base import EngineLimits
from sim.results import Results
from sim.scenario import Scenario, is_model_path
from sim.storage import atomic_path
from sim.workload.draw import with_existing_path


def resolved(scenario: Scenario, limits: Sequence[EngineLimits]) -> dict[str, Any]:
    """The scenario with every default and derived limit written out; itself a valid scenario.

    `limits` has an entry for each kind of engine in the fleet, the scenario's own first.
    Of a trace and its fallback it names the one that was played.
    """
    traffic = [
        entry.model_copy(update={"trace": entry.trace and with_existing_path(entry.trace, scenario.folder)})
        for entry in scenario.traffic
    ]
    played = scenario.model_copy(update={"traffic": traffic})
    data: dict[str, Any] = _without_none(played.model_dump(mode="json", exclude={"compare", "sweep"}))
    for group, own in zip([data, *data.get("fleet", {}).get("others", ())], limits, strict=True):
        engine = group.get("engine", {}) | {"max_model_len": own.max_model_len, "num_gpu_blocks": own.num_gpu_blocks}
        engine.pop("kv_cache_memory_bytes", None)
        group["engine"] = engine
    return data


def provenance(scenario: Scenario, limits: Sequence[EngineLimits]) -> dict[str, Any]:
    """Where a result comes from: what was simulated (and its hash), with which versions; nothing that varies by itself.

    The hash covers the resolved scenario without its name: runs with equal hashes and versions have equal tables.
    `limits` as in `resolved`.
    """
    content = resolved(scenario, limits)
    hashed = {key: value for key, value in content.items() if key != "name"}
    canonical = json.dumps(hashed, sort_keys=True, separators=(",", ":"))
    return {
        "scenario_sha256": hashlib.sha256(canonical.encode()).hexdigest(),
        "seed": scenario.seed,
        "cost": scenario.cost.kind,
        "host": scenario.cost.describe_host(),
        "versions": versions(),
        "notes": list(_notes(scenario)),
        "scenario": content,
    }


def save(results: Results, scenario: Scenario, folder: Path) -> list[Path]:
    """Write a run to `folder`: tables, summary, and the resolved scenario, which runs by itself from there."""
    facts = results.facts.provenance
    content = _with_absolute_paths(facts["scenario"], scenario.folder)
    header = [f"# servesim {facts['versions']['servesim']}, scenario sha256 {facts['scenario_sha256']}"]
    header += [f"# {note}" for note in facts["notes"]]
    written = results.save(folder)
    written.append(folder / "scenario.yaml")
    with atomic_path(written[-1]) as path:
        text = yaml.safe_dump(content, sort_keys=False, allow_unicode=True)
        path.write_text("\n".join([*header, text]), encoding="utf-8")
    return written


def _notes(scenario: Scenario) -> Iterator[str]:
    yield from scenario.engine.notes()
    if scenario.cost.host is not None:
        yield f"host time: {scenario.cost.describe_host()}, in place of that of {scenario.cost.kind} itself"
    for entry in scenario.traffic:
        if entry.trace is not None and entry.trace.fallback is not None:
            played = with_existing_path(entry.trace, scenario.folder).path
            stands_in = f" in place of {entry.trace.path}, which is not there" if played != entry.trace.path else ""
            yield f"class {entry.name!r} plays {played}{stands_in}"


def _with_absolute_paths(value: Any, folder: Path, key: str = "") -> Any:
    """A resolved scenario with its relative paths made independent of the folder it is in."""
    if isinstance(value, dict):
        return {name: _with_absolute_paths(inner, folder, name) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_absolute_paths(inner, folder) for inner in value]
    is_path = isinstance(value, str) and (key in ("path", "artifact") or (key == "model" and is_model_path(value)))
    return str((folder / value).absolute()) if is_path and not value.startswith("${") else value


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_none(inner) for key, inner in value.items() if inner is not None}
    return [_without_none(inner) for inner in value] if isinstance(value, list) else value
