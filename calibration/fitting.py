"""The commands that fit: `servesim calibrate fit`, `check` and `fit-server`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.errors import ArtifactError, did_you_mean

if TYPE_CHECKING:
    from sim.cost.artifact import Artifact

SERVER_FILES = ("vllm-bench", "iterations")

Raw = Annotated[Path, typer.Argument(metavar="RAW", help="timed points (Parquet)")]


def fit(
    path: Raw,
    out: Annotated[Path, typer.Option("--out", help="the artifact to write (JSON)")],
    model: Annotated[str | None, typer.Option("--model", help="refuse a profile of another model")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="refuse a profile of another type")] = None,
    tensor_parallel: Annotated[int | None, typer.Option("--tp", min=1, help="refuse one of another degree")] = None,
) -> None:
    """Fit a cost artifact to the timed points of a profile."""
    from calibration import raw
    from calibration.check import check_asked
    from calibration.fit import fit as fit_raw

    timed = raw.read(path)
    check_asked(timed.metadata, model, dtype, tensor_parallel)
    artifact = fit_raw(timed)
    try:
        artifact.write(out)
    except OSError as error:
        raise ArtifactError("--out", f"cannot write {str(out)!r} ({error.strerror})") from error
    typer.echo(f"wrote {out}: {len(artifact.terms)} terms from {len(timed.points)} timed points")
    for line in held_out_lines(artifact):
        typer.echo(line)
    for part in artifact.missing:
        typer.echo(f"missing: {part}")


def check(
    path: Raw, artifact_path: Annotated[Path, typer.Argument(metavar="ARTIFACT", help="what was fitted to them (JSON)")]
) -> None:
    """Fit again and compare with an artifact.

    The exit code is 1 where they differ.
    """
    from calibration import raw
    from calibration.check import differences
    from calibration.fit import fit as fit_raw
    from sim.cost.artifact import read_artifact

    artifact = read_artifact(artifact_path, place="ARTIFACT")
    found = differences(fit_raw(raw.read(path)), artifact)
    if found:
        typer.echo("\n".join(found))
        raise typer.Exit(1)
    typer.echo(f"{artifact_path} is what {path} says: sha256 {artifact.sha256}")


def fit_server(
    kind: Annotated[str, typer.Argument(help=f"what the file is: {' or '.join(SERVER_FILES)}")],
    path: Annotated[Path, typer.Argument(help="a result of vllm bench serve --save-detailed, or a log of iterations")],
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="vllm-bench: the server's token budget, which it prints at its start")
    ] = None,
) -> None:
    """Fit `cost: {kind: linear}` to a running server, and print it."""
    from calibration import server

    if kind not in SERVER_FILES:
        known = f"known: {', '.join(SERVER_FILES)}"
        raise ArtifactError("KIND", f"unknown file {kind!r}", valid=known, remedy=did_you_mean(kind, SERVER_FILES))
    if kind == "iterations":
        found = server.fit_steps(server.log_steps(path), str(path))
    elif max_num_batched_tokens is None:
        raise ArtifactError("--max-num-batched-tokens", "is missing", valid="expected the server's token budget")
    else:
        found = server.fit_bench(path, max_num_batched_tokens)
    if found.num_stalled:
        typer.echo(f"# {found.num_stalled} iterations stalled and are left out")
    error = 100 * float(abs(found.errors).mean())
    typer.echo(f"# {path.name}: {len(found.errors)} iterations, mean absolute error of the fit {error:.1f} %")
    typer.echo("cost:\n  kind: linear")
    for name, value in found.options.items():
        typer.echo(f"  {name}: {value:g}")
    typer.echo(f"  relative_error: {found.held_out_error:.4g}")


def held_out_lines(artifact: Artifact) -> list[str]:
    """What points left out say: for whole iterations each region, for every other term the worst of them."""
    from sim.cost.artifact import ITERATION

    regions = [own for own in artifact.residuals if own.term == ITERATION]
    for name in dict.fromkeys(own.term for own in artifact.residuals if own.term != ITERATION):
        mine = (own for own in artifact.residuals if own.term == name)
        regions.append(max(mine, key=lambda own: own.mean_absolute_error))
    return [
        f"{own.term}, {own.region}: {own.num_points} points left out missed by {100 * own.mean_absolute_error:.1f} % "
        f"(on the whole {100 * own.mean_error:+.1f} %)"
        for own in regions
    ]
