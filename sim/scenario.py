"""A scenario: what is served, on what, how it is scheduled, and who asks for it.

One YAML file, checked completely before anything runs. What one field alone can get wrong is found here;
what takes a model, a GPU or the drawn traffic to see is found by `sim.replica` and `sim.build`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, PrivateAttr, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from sim.cost.base import COST_MODELS, CostOptions
from sim.errors import ScenarioError, UserError
from sim.gpu import load_gpu
from sim.metrics.slo import parse_slo
from sim.options import Count, CountOrZero, NonNegative, OneOf, Options, Positive, PositiveSeconds, Seconds
from sim.policies.base import POLICIES, EngineOptions
from sim.routing.fleet import FleetOptions
from sim.scenario_errors import check_known, scenario_error
from sim.scenario_file import idle_nulls, lay_over, overlay_from_overrides, put, read_yaml
from sim.workload.base import ARRIVALS, ArrivalOptions
from sim.workload.traffic import Scale, TrafficClass


def refusal(found: str, *, valid: str = "", remedy: str = "", **place: str) -> PydanticCustomError:
    """What a validator raises; `key` is where, relative to what it validates."""
    return PydanticCustomError("refused", "{found}", {"found": found, "valid": valid, "remedy": remedy, **place})


def _check_slo(slo: dict[str, float], **place: str) -> dict[str, float]:
    try:
        parse_slo(slo)
    except ScenarioError as error:
        raise refusal(error.found, valid=error.valid, remedy=error.remedy, **place) from None
    return slo


Slo = Annotated[dict[str, Positive], AfterValidator(lambda slo: _check_slo(slo))]
"""Limits such as `p99_ttft_ms: 500`, milliseconds."""


class Hardware(Options):
    """What one replica runs on."""

    gpu: str = Field(description="name of a GPU; `servesim gpus` lists them")
    tensor_parallel: Count = Field(default=1, description="GPUs that share the model")
    price_per_gpu_hour: NonNegative | None = Field(
        default=None, description="what one of these GPUs costs you for an hour, in any currency"
    )


class RunOptions(Options):
    """How long the run is, and what of it is measured."""

    num_requests: Count | None = Field(default=None, description="requests over all classes, the earliest ones")
    duration_s: PositiveSeconds | None = Field(default=None, description="arrivals end here, seconds")
    warmup_s: Seconds = Field(default=0.0, description="requests that arrive earlier are not measured, seconds")
    drain: bool = Field(
        default=True, description="run until the last request is over; false: cut at duration_s, the rest is unfinished"
    )
    cut_drain: bool = Field(
        default=False, description="measure rates up to the last arrival only, not while the run drains"
    )
    oversized: Literal["error", "reject"] = Field(
        default="error", description="a request that can never fit stops the run, or is rejected by the engine"
    )

    @model_validator(mode="after")
    def _check_times(self) -> RunOptions:
        if not self.drain and self.duration_s is None:
            raise refusal("drain: false needs duration_s")
        if self.duration_s is not None and self.warmup_s >= self.duration_s:
            raise refusal(f"warmup_s {self.warmup_s:g} leaves nothing of duration_s {self.duration_s:g} to measure")
        return self


_NOT_IN_A_VARIANT = {
    "name": "its key under `compare` is its name",
    "compare": "variants have no variants",
    "sweep": "a sweep varies one scenario",
}


def _roofline() -> CostOptions:
    return COST_MODELS.load("roofline").Options(kind="roofline")


def is_model_path(name: str) -> bool:
    """Whether a scenario's `model` is a path rather than a bundled name."""
    return "/" in name or "$" in name or name.endswith(".json")


class Scenario(Options):
    """Everything that a simulation depends on. Make one with `load_scenario` or `parse_scenario`."""

    name: str = Field(default="scenario", description="what tables and plots call it; default: the file's name")
    seed: CountOrZero = Field(default=0, description="seed of every random stream")
    model: str = Field(description="name of a model that `servesim models` lists, or the path of a HF config.json")
    hardware: Hardware
    engine: Annotated[EngineOptions, OneOf(POLICIES, key="policy")]
    cost: Annotated[CostOptions, OneOf(COST_MODELS)] = Field(default_factory=_roofline)
    traffic: list[TrafficClass] = Field(min_length=1, description="the request classes")
    arrivals: Annotated[ArrivalOptions, OneOf(ARRIVALS)] | None = Field(
        default=None, description="one arrival process for all classes, which split it by their share"
    )
    fleet: FleetOptions | None = Field(
        default=None, description="several replicas of the engine behind a router; null: one engine without a router"
    )
    scale: Scale | None = Field(default=None, description="what if there were more, or longer, requests")
    run: RunOptions = Field(default_factory=RunOptions)
    slo: Slo = Field(default_factory=dict, description="service level objectives: <statistic>_<metric>_ms, ms")
    compare: dict[str, dict[str, Any]] = Field(
        default_factory=dict, description="variants: what each changes in this scenario, on the same arrivals"
    )

    sweep: dict[str, list[Any]] | list[dict[str, Any]] = Field(
        default_factory=dict,
        description="values to try: a grid of lists by dotted key, or a list of points (or of grids)",
    )

    _place: str = PrivateAttr(default="scenario")
    _folder: Path = PrivateAttr(default=Path())
    _data: dict[str, Any] = PrivateAttr(default_factory=dict)
    _allow_imports: bool = PrivateAttr(default=False)

    @model_validator(mode="after")
    def _check_sweep(self) -> Scenario:
        for part in self.sweep if isinstance(self.sweep, list) else [self.sweep]:
            for key, values in part.items():
                if values == []:
                    raise refusal(f"{key} has no values", valid="a list of at least one", key="sweep")
        return self

    @model_validator(mode="after")
    def _check_class_slos(self) -> Scenario:
        for i, traffic_class in enumerate(self.traffic):
            _check_slo(traffic_class.slo or {}, key=f"traffic[{i}].slo")
        return self

    @property
    def allows_imports(self) -> bool:
        """Whether it may name classes outside servesim."""
        return self._allow_imports

    @property
    def place(self) -> str:
        """Where it comes from, for messages."""
        return self._place

    @property
    def folder(self) -> Path:
        """What relative paths in it are relative to."""
        return self._folder

    def replica_groups(self) -> list[tuple[Scenario, int]]:
        """Each kind of engine of the fleet as a scenario of its own, and how many there are. Raises ScenarioError."""
        if self.fleet is None:
            return [(self, 1)]
        base = {key: value for key, value in self._data.items() if key not in ("compare", "sweep", "fleet")}
        groups = [(self, self.fleet.replicas)]
        for i, group in enumerate(self.fleet.others):
            place = f"{self.place}: fleet.others[{i}]"
            data = lay_over(base, group.overlay(), place)
            alone = parse_scenario(data, place=place, folder=self.folder, allow_imports=self._allow_imports)
            groups.append((alone, group.replicas))
        return groups

    def variants(self) -> dict[str, Scenario]:
        """The scenarios under `compare`, each of them complete, by name. Raises ScenarioError."""
        base = self._base()
        variants: dict[str, Scenario] = {}
        for name, overlay in self.compare.items():
            place = f"{self.place}: compare.{name}"
            for key in _NOT_IN_A_VARIANT.keys() & overlay.keys():
                raise ScenarioError(f"{place}.{key}", "no key of a variant", valid=_NOT_IN_A_VARIANT[key])
            data = lay_over(base, overlay, place)
            variants[name] = parse_scenario(
                data | {"name": name}, place=place, folder=self.folder, allow_imports=self._allow_imports
            )
            check_known(idle_nulls(base, overlay), data, Scenario, place)
        return variants

    def changed(self, values: Mapping[str, Any], what: str) -> Scenario:
        """The scenario, without variants and sweep, with other `values` by dotted key; `what` it is, for messages.

        Raises ScenarioError.
        """
        place = f"{self.place}: {what}"
        overlay: dict[str, Any] = {}
        for path, value in values.items():
            put(overlay, path, value, place)
        base = self._base()
        data = lay_over(base, overlay, place)
        scenario = parse_scenario(data, place=place, folder=self.folder, allow_imports=self._allow_imports)
        check_known(idle_nulls(base, overlay), data, Scenario, place)
        return scenario

    def with_class(self, traffic_class: Mapping[str, Any], what: str) -> Scenario:
        """The scenario, without variants and sweep, with one more class of requests. Raises ScenarioError."""
        base = self._base()
        data = base | {"traffic": [*base["traffic"], dict(traffic_class)]}
        place = f"{self.place}: {what}"
        return parse_scenario(data, place=place, folder=self.folder, allow_imports=self._allow_imports)

    def _base(self) -> dict[str, Any]:
        """What variants and points change."""
        return {key: value for key, value in self._data.items() if key not in ("compare", "sweep")}


def load_scenario(
    path: Path | str,
    overrides: Sequence[str] = (),
    *,
    seed: int | None = None,
    allow_imports: bool = False,
) -> Scenario:
    """Read, override and check a scenario file.

    `overrides` are `key.key=value` with YAML values, as for `--set`; `seed` replaces the file's.
    `allow_imports` lets the scenario name classes outside servesim, which runs their code. Relative paths
    in it are relative to its folder. Raises ScenarioError; all findings are in one message, a line each.
    """
    path = Path(path)
    base, overlay = read_yaml(path), overlay_from_overrides(overrides)
    data = lay_over(base, overlay, str(path))
    if seed is not None:
        data["seed"] = seed
    scenario = parse_scenario(
        {"name": path.stem} | data, place=str(path), folder=path.parent, allow_imports=allow_imports
    )
    check_known(idle_nulls(base, overlay), data, Scenario, str(path))
    return scenario


def parse_scenario(
    data: Mapping[str, Any], *, place: str = "scenario", folder: Path | str = ".", allow_imports: bool = False
) -> Scenario:
    """Check a scenario given as nested dicts and lists, as YAML would. Raises ScenarioError at `place`."""
    data = dict(data)
    try:
        scenario = Scenario.model_validate(data, context={"allow_imports": allow_imports})
    except ValidationError as error:
        raise scenario_error(error, data, Scenario, place) from None
    except ScenarioError as error:
        raise ScenarioError(
            f"{place}: {error.place}".rstrip(": "), error.found, valid=error.valid, remedy=error.remedy
        ) from None
    with suppress(UserError):  # an unknown GPU is reported by whoever needs one
        engine = scenario.engine.on_gpu(load_gpu(scenario.hardware.gpu))
        scenario = scenario.model_copy(update={"engine": engine})
    scenario._place, scenario._folder = place, Path(folder)
    scenario._data, scenario._allow_imports = data, allow_imports
    if scenario.fleet is not None:
        scenario.replica_groups()
    if scenario.compare:
        scenario.variants()
    return scenario
