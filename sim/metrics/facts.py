"""What the tables do not say about a run and the metrics need."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata
from platform import python_version
from typing import Any


@dataclass(frozen=True)
class ReplicaFacts:
    """What one replica of a fleet is."""

    name: str
    num_blocks: int
    usable_blocks: int
    block_size: int


@dataclass(frozen=True, kw_only=True)
class RunFacts:
    """The facts of one run. Plain data: it is stored beside the tables."""

    class_names: tuple[str, ...]
    num_blocks: int
    """Blocks of the pool, counting a null block where the policy has one."""
    usable_blocks: int
    block_size: int
    replicas: tuple[ReplicaFacts, ...] = ()
    """Of a fleet, whose tables have a column `replica`; the figures above are then those of all together, and of its
    first replica's blocks. Empty: one engine without a router."""
    slo: Mapping[str, float] = field(default_factory=dict)
    """Of the whole run: `{"p99_ttft_ms": 500, ...}`."""
    class_slos: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    """Class name -> its own SLO; a class without one is held to the run's."""
    warmup_s: float = 0.0
    cut_drain: bool = False
    """Whether the measurement window ends with the last arrival."""
    stopped_ns: int | None = None
    """When the run was stopped with requests unfinished; None: it ran dry."""
    is_streaming: bool = True
    """Whether clients see tokens as they are made, not whole answers at their release."""
    is_closed_loop: bool = False
    """Whether all arrivals are reactions to answers: no class is an open loop."""
    turn_away_reasons: tuple[str, ...] = ("never_fits",)
    """Why the engine may have turned a request away, by the number in the requests table."""
    cost: Mapping[str, Any] = field(default_factory=dict)
    """What a cost model that rests on measurements says of them and of how far the run stayed within them."""
    provenance: Mapping[str, Any] = field(default_factory=dict)
    """What reproduces the run; nothing in it changes from one run to the next."""


def versions() -> dict[str, str]:
    """The versions that a run depends on, for its provenance. A package that is not installed has none."""
    found = {"python": python_version()}
    for package in ("servesim", "numpy", "simpy"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "not installed"
    return found
