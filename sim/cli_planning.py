"""The commands that need many runs: capacities, sweeps and tuning, and what `run` and `compare` need of them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sim.cli_options import (
    AllowImports,
    AsJson,
    Dask,
    Jobs,
    MaxReplications,
    Out,
    Overrides,
    Precision,
    Requests,
    ScenarioPath,
    Seed,
)
from sim.cli_output import check_folder, give, load, name_files, print_json, show

if TYPE_CHECKING:
    from sim.scenario import Scenario


def capacity(
    scenario: ScenarioPath,
    rate: Annotated[
        float | None,
        typer.Option(
            "--rate", min=1e-9, max=1e9, help="requests/s to find a number of replicas for", show_default=False
        ),
    ] = None,
    low: Annotated[float | None, typer.Option("--low", help="search from this load", show_default=False)] = None,
    high: Annotated[float | None, typer.Option("--high", help="search up to this load", show_default=False)] = None,
    precision: Precision = 0.02,
    max_replications: MaxReplications = 40,
    requests: Requests = None,
    out: Out = None,
    overrides: Overrides = None,
    seed: Seed = None,
    jobs: Jobs = None,
    dask: Dask = None,
    as_json: AsJson = False,
    allow_imports: AllowImports = False,
) -> None:
    """Find the largest load that meets the SLO, with its interval."""
    from sim.planning.capacity import find_capacity
    from sim.planning.fleet_size import check_has_rate, fleet_size
    from sim.planning.headroom import answer, changes
    from sim.planning.workers import Workers
    from sim.report.planning import capacity_report
    from sim.report.progress import runs_line

    loaded, workers = load(scenario, overrides, seed, allow_imports), Workers(jobs, dask)
    check_folder(out)
    if rate is not None:
        check_has_rate(loaded)
    with runs_line() as progress:
        found = find_capacity(
            loaded,
            low=low,
            high=high,
            precision=precision,
            max_replications=max_replications,
            num_requests=requests,
            workers=workers,
            progress=progress,
        )
        progress("trying rises", len(found.search.runs))
        rises = changes(found, workers)
        fleet = None if rate is None else fleet_size(found, rate, workers=workers, progress=progress)
        said = answer(found, rises, fleet)
    give(said, capacity_report(said), out, "capacity.json", as_json)


def sweep(
    scenario: ScenarioPath,
    out: Out = None,
    overrides: Overrides = None,
    seed: Seed = None,
    jobs: Jobs = None,
    dask: Dask = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="count the points, and run none")] = False,
    yes: Annotated[bool, typer.Option("--yes", help="yes, so many points are meant")] = False,
    as_json: AsJson = False,
    allow_imports: AllowImports = False,
) -> None:
    """Simulate every point of the `sweep` section.

    With --out, points that an earlier call finished are not simulated again.
    """
    from sim.planning.sweep import Plan
    from sim.planning.sweep import sweep as run_sweep
    from sim.planning.workers import Workers
    from sim.report.planning import sweep_report
    from sim.report.progress import progress_line

    loaded = load(scenario, overrides, seed, allow_imports)
    if dry_run:
        plan = Plan(loaded)
        finished = "" if out is None else f", {plan.num_finished(out):,} of them finished in {out}"
        typer.echo(f"{plan.num_points:,} points{finished}")
        return
    check_folder(out)
    with progress_line() as progress:
        swept = run_sweep(
            loaded,
            out,
            workers=Workers(jobs, dask),
            many=yes,
            progress=lambda num, total: progress(f"{num} of {total} points", num, total),
        )
    for note in swept.notes():
        typer.echo(note, err=True)
    written = [] if out is None else swept.save(out)
    if as_json:
        print_json(swept.to_dict())
        return
    show(sweep_report(swept.table, title=loaded.name))
    name_files(written)


def tune(
    scenario: ScenarioPath,
    precision: Precision = 0.02,
    max_replications: MaxReplications = 20,
    requests: Requests = None,
    out: Out = None,
    overrides: Overrides = None,
    seed: Seed = None,
    jobs: Jobs = None,
    dask: Dask = None,
    as_json: AsJson = False,
    allow_imports: AllowImports = False,
) -> None:
    """Recommend a token budget and a number of slots for the SLO.

    These are max_num_batched_tokens and max_num_seqs; both settings, yours and the recommended one, are tried under
    a burst of long prompts and under clients that leave.
    """
    from sim.planning.tune import tune as tune_scenario
    from sim.planning.workers import Workers
    from sim.report.planning import tune_report
    from sim.report.progress import runs_line

    loaded = load(scenario, overrides, seed, allow_imports)
    check_folder(out)
    with runs_line() as progress:
        said = tune_scenario(
            loaded,
            workers=Workers(jobs, dask),
            progress=progress,
            precision=precision,
            max_replications=max_replications,
            num_requests=requests,
        )
    give(said, tune_report(said), out, "tune.json", as_json)


def compare_capacities(
    scenarios: list[Scenario], search: dict[str, Any], out: Path | None, jobs: int | None, as_json: bool
) -> None:
    """The largest load that every variant bears, and their ratios; `search` is what bounds the search."""
    from sim.planning.ratio import compare_capacities as compare
    from sim.planning.workers import Workers
    from sim.report.planning import capacity_comparison_report
    from sim.report.progress import runs_line

    with runs_line() as progress:
        said = compare(
            *scenarios,
            **search,
            workers=Workers(jobs),
            progress=progress,
        ).to_dict()
    report = capacity_comparison_report(said, title=scenarios[0].name)
    give(said, report, out, "capacities.json", as_json)


def replicate(scenario: Scenario, precision: float, out: Path | None, jobs: int | None, as_json: bool) -> None:
    """A scenario again and again, until its tails are known to `precision`."""
    from sim.planning.replicate import replicate as replicate_scenario
    from sim.planning.workers import Workers
    from sim.report.planning import replicated_report
    from sim.report.progress import runs_line

    with runs_line() as progress:
        said = replicate_scenario(
            scenario,
            precision=precision,
            workers=Workers(jobs),
            progress=progress,
        ).to_dict()
    give(said, replicated_report(said), out, "replications.json", as_json)
