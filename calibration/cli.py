"""`servesim calibrate`: measurements in, cost artifacts out, and predictions beside what was measured."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from calibration import device_cli, fitting, importing
from sim.errors import ArtifactError

app = typer.Typer(
    help="Make cost artifacts from measured kernels, and check predictions against measured runs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

app.add_typer(device_cli.app)

TensorParallel = Annotated[int | None, typer.Option("--tp", min=1, help="GPUs that share the model")]
Model = Annotated[str | None, typer.Option("--model", help="bundled name or config.json, if it is not recognized")]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON and nothing else")]


app.command("import")(importing.command)
app.command()(fitting.fit)
app.command()(fitting.check)
app.command("fit-server")(fitting.fit_server)


@app.command()
def show(
    path: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="a cost artifact (JSON)")], as_json: AsJson = False
) -> None:
    """Print what an artifact is, its terms, and their errors."""
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
    for line in fitting.held_out_lines(artifact):
        typer.echo(line)
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
    typer.echo(f"{'':16}{'measured':>12}{'simulated':>12}{'error':>11}{'published':>11}")
    for row in content["rows"]:
        name = f"{row['metric']} {row['statistic']}".strip() + (" s" if row["metric"] == "makespan" else " ms")
        typer.echo(
            f"{name:16}{row['measured']:12.2f}{row['simulated']:12.2f}{_percent(row['error'], 11)}"
            f"{_percent(row['published_error'], 11)}"
        )
    typer.echo(
        f"{'mean absolute':40}{_percent(content['mean_absolute_error'], 11, sign='')}"
        f"{_percent(content['published_mean_absolute_error'], 11, sign='')}"
    )
    if report.cost:
        from sim.metrics.coverage import coverage_line

        typer.echo(f"times are from {coverage_line(report.cost)}")
    for term in report.artifact.terms:
        if term.is_communication:
            typer.echo(f"{term.name}: {term.note}")


@app.command()
def points(
    profile: Annotated[Path, typer.Option("--profile", help="folder of AIConfigurator's tables")],
    table: Annotated[Path, typer.Option("--points", help="CSV of measured points: clients, lengths, TTFT, TPOT")],
    backend: Annotated[str | None, typer.Option(help="only those of one engine")] = None,
    precision: Annotated[str | None, typer.Option(help="only those that state this type of weights")] = None,
    host_from: Annotated[Path | None, typer.Option(help="Vidur's CPU overheads, for the work of the host")] = None,
    num_worst: Annotated[int, typer.Option("--worst", min=0, help="points with the largest errors to list")] = 10,
    as_json: AsJson = False,
) -> None:
    """Predict published closed-loop points, and compare by group."""
    from dataclasses import asdict

    from calibration.host import vllm_host_us
    from calibration.serving_points import grouped, predict, read_points

    wanted = [point for point in read_points(table, backend) if precision in (None, point.precision)]
    if not wanted:
        raise ArtifactError(str(table), f"has no points of {backend or 'any engine'}, {precision or 'any precision'}")
    host_us = None if host_from is None else partial(vllm_host_us, host_from)
    predictions = list(predict(profile, wanted, host_us))
    groups = grouped(predictions)
    worst = sorted(predictions, key=lambda one: -abs(one.tpot_error))[:num_worst]
    if as_json:
        content = {"groups": [asdict(group) for group in groups], "points": [one.to_dict() for one in predictions]}
        typer.echo(json.dumps(content, indent=2, allow_nan=False))
        return
    typer.echo(f"{'median absolute error':46}{'points':>7}{'TPOT':>9}{'TTFT':>9}{'tokens/s':>9}   rank TPOT, tokens/s")
    for group in groups:
        ranks = ", ".join("-" if rank is None else f"{rank:.3f}" for rank in (group.tpot_rank, group.throughput_rank))
        errors = "".join(
            _percent(error, 9, sign="") for error in (group.tpot_error, group.ttft_error, group.throughput_error)
        )
        typer.echo(f"{group.name:46}{group.num_points:7}{errors}   {ranks}")
    for one in worst:
        typer.echo(
            f"{one.point.id}: TPOT {one.point.tpot_ms:.1f} ms measured, {one.tpot_ms:.1f} simulated "
            f"({100 * one.tpot_error:+.0f} %), TTFT {one.point.ttft_ms:.0f} and {one.ttft_ms:.0f}"
        )


@app.command()
def clients(
    runs: Annotated[list[Path], typer.Argument(help="runs of S-LoRA's server under VTC's queues (CSV)")],
    profile: Annotated[Path, typer.Option("--profile", help="the server's own cost_profile.json")],
) -> None:
    """Replay measured runs, and compare client by client."""
    from calibration.clients import check_clients

    checked = [(run, check_clients(profile, run)) for run in runs]
    typer.echo(f"{'measured and simulated, s':38}{'first token':>20}{'whole request':>29}{'total':>26}")
    for run, found in checked:
        for client in found:
            pairs = (client.first_token_s, client.request_s, client.total_s)
            cells = "".join(
                f"{measured:10.1f}{simulated:9.1f}{_percent(error, 9)}"
                for (measured, simulated), error in zip(pairs, client.errors, strict=True)
            )
            typer.echo(f"{run.stem:26}{client.name:9}{cells}")


@app.command()
def batches(
    folder: Annotated[Path, typer.Argument(help="folder of Sarathi-Serve's measured batches (CSV)")],
) -> None:
    """Price measured iterations from other ones, and compare."""
    from calibration.batches import check_batches

    for batch in check_batches(folder):
        typer.echo(f"{batch.name:44}{batch.measured_ms:10.1f}{batch.priced_ms:10.1f} ms{_percent(batch.error, 9)}")


def _percent(value: Any, width: int, sign: str = "+") -> str:
    return f"{'-':>{width}}" if value is None else f"{100 * value:{sign}{width - 2}.2f} %"
