"""`servesim calibrate`: measurements in, cost artifacts out, and predictions beside what was measured."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated, Any

import typer

from calibration import importing

app = typer.Typer(
    help="Make cost artifacts from measured kernels, and check predictions against measured runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

TensorParallel = Annotated[int | None, typer.Option("--tp", min=1, help="GPUs that share the model")]
Model = Annotated[str | None, typer.Option("--model", help="bundled name or config.json, if it is not recognized")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON and nothing else")]


app.command("import")(importing.command)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="a cost artifact (JSON)")], as_json: AsJson = False
) -> None:
    """Print what an artifact is, its terms, and how well they interpolate."""
    from sim.cost.artifact import read_artifact

    artifact = read_artifact(path, place="ARTIFACT")
    if as_json:
        typer.echo(json.dumps(artifact.model_dump(mode="json") | {"sha256": artifact.sha256}))
        return
    versions = ", ".join(f"{name} {version}" for name, version in artifact.versions.items())
    typer.echo(f"{artifact.model} ({artifact.dtype}) on {artifact.tensor_parallel} x {artifact.hardware}")
    typer.echo(f"measured: {artifact.measured_on}; {versions or 'versions not stated'}")
    typer.echo(f"from {artifact.source} ({artifact.licence})")
    typer.echo(f"sha256 {artifact.sha256}")
    if artifact.step_us:
        typer.echo(f"every iteration: {artifact.step_us:g} us")
    for term in artifact.terms:
        axes = " x ".join(
            f"{axis.name} {axis.points[0]:g} to {axis.points[-1]:g} ({len(axis.points)})" for axis in term.axes
        )
        error = artifact.holdout_error.get(term.name)
        shown = "" if error is None else f", points left out missed by {100 * error:.1f} %"
        typer.echo(f"{term.name}: {term.kind}, {term.calls} calls, {axes}{shown}")
        if term.note:
            typer.echo(f"  {term.note}")
    if artifact.host_us or artifact.host_us_per_request:
        typer.echo(f"host: {artifact.host_us:g} us an iteration and {artifact.host_us_per_request:g} us a request")
    for part in artifact.missing:
        typer.echo(f"missing: {part}")


@app.command()
def accuracy(
    profile: Annotated[Path, typer.Option("--profile", help="folder of the profile")],
    run: Annotated[Path, typer.Option("--run", help="folder of the measured run: meta.json and requests.csv")],
    trace: Annotated[Path, typer.Option("--trace", help="its prompts: JSONL with the identities of their blocks")],
    tensor_parallel: TensorParallel = None,
    model: Model = None,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY.KEY=VALUE")] = None,
    as_json: AsJson = False,
) -> None:
    """Replay a measured run on a profile and compare every metric."""
    from calibration.accuracy import check_accuracy

    report = check_accuracy(profile, run, trace, tensor_parallel, model, overrides or ())
    content = report.to_dict()
    if as_json:
        typer.echo(json.dumps(content, indent=2, allow_nan=False))
        return
    typer.echo(f"{'':16}{'measured':>12}{'simulated':>12}{'error':>9}{'published':>11}")
    for row in content["rows"]:
        name = f"{row['metric']} {row['statistic']}".strip() + (" s" if row["metric"] == "makespan" else " ms")
        typer.echo(
            f"{name:16}{row['measured']:12.2f}{row['simulated']:12.2f}{_percent(row['error'], 9)}"
            f"{_percent(row['published_error'], 11)}"
        )
    typer.echo(
        f"{'mean absolute':40}{_percent(content['mean_absolute_error'], 9, sign='')}"
        f"{_percent(content['published_mean_absolute_error'], 11, sign='')}"
    )
    if report.cost:
        from sim.metrics.coverage import coverage_line

        typer.echo(f"times are from {coverage_line(report.cost)}")


def _percent(value: Any, width: int, sign: str = "+") -> str:
    return f"{'-':>{width}}" if value is None else f"{100 * value:{sign}{width - 2}.2f} %"
