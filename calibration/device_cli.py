"""The commands of `servesim calibrate` that compute for real: they need torch, and say so."""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sim.errors import ArtifactError

if TYPE_CHECKING:
    import torch

    from calibration.profile import Progress

app = typer.Typer()

Device = Annotated[str, typer.Option("--device", help="cuda or cpu")]
Attention = Annotated[
    str,
    typer.Option("--attention", help="its kernel: auto, vllm, flashinfer, varlen or sdpa (the last two are torch's)"),
]
Threads = Annotated[int, typer.Option("--threads", min=1, help="threads of a CPU that compute")]


@app.command()
def profile(
    model: Annotated[str, typer.Option("--model", help="bundled name or config.json")],
    device: Device,
    out: Annotated[Path, typer.Option("--out", help="the raw file (Parquet), made or continued")],
    tensor_parallel: Annotated[int, typer.Option("--tp", min=1, help="GPUs that share the model")] = 1,
    budget_minutes: Annotated[float, typer.Option("--budget-minutes", min=0.01, help="when to stop")] = 8.0,
    max_num_seqs: Annotated[int, typer.Option("--max-num-seqs", help="largest batch of decodes")] = 256,
    max_num_batched_tokens: Annotated[int, typer.Option("--max-num-batched-tokens", help="most tokens at once")] = 8192,
    max_model_len: Annotated[int | None, typer.Option("--max-model-len", help="longest context; default 8192")] = None,
    attention: Attention = "auto",
    threads: Threads = 1,
    seed: Annotated[int, typer.Option("--seed", min=0, help="of the random weights")] = 0,
) -> None:
    """Time a model's kernels on this machine.

    Points come first where least is known; those that the file holds are not timed again.
    """
    place = _open(device, threads)
    from calibration.fit import worst_regions
    from calibration.points import NO_LIMIT, Limits
    from calibration.profile import Job
    from calibration.profile import profile as time_kernels
    from sim.model import load_model, read_config

    shape = load_model(model, place="--model")
    longest = max_model_len or min(8192, shape.max_position_embeddings)
    job = Job(
        model=shape,
        config=read_config(model)[1],
        device=place,
        limits=Limits(max_num_batched_tokens, max_num_seqs, longest, cache_tokens=NO_LIMIT),
        tensor_parallel=tensor_parallel,
        budget_s=60 * budget_minutes,
        seed=seed,
        attention=attention,
    )
    with _progress() as report:
        found = time_kernels(job, out, worst_regions, report)
    typer.echo(f"wrote {out}: {found.num_timed} points in {found.seconds:.0f} s, {found.num_known} were there before")
    if found.num_layers < found.total_layers:
        typer.echo(
            f"memory sufficed for {found.num_layers} of the {found.total_layers} layers; whole iterations have those"
        )


@app.command()
def verify(
    scenario: Annotated[Path, typer.Argument(metavar="SCENARIO", help="a scenario file (YAML)")],
    device: Device,
    artifact: Annotated[
        Path | None, typer.Option("--artifact", help="predict from this; default: profile first")
    ] = None,
    repeats: Annotated[int, typer.Option("--repeats", min=1, help="how often to serve it")] = 3,
    budget_minutes: Annotated[float, typer.Option("--budget-minutes", min=0.01, help="of the profile")] = 2.0,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="folder for profile, artifact and report")] = Path(
        "out/verify"
    ),
    attention: Attention = "auto",
    threads: Threads = 1,
    overrides: Annotated[list[str] | None, typer.Option("--set", metavar="KEY.KEY=VALUE")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print JSON and nothing else")] = False,
) -> None:
    """Predict a scenario, then serve it for real here, and compare."""
    place = _open(device, threads)
    from calibration.verify import verify as predict_and_serve

    with _progress() as report:
        found = predict_and_serve(
            scenario,
            place,
            out,
            artifact=artifact,
            repeats=repeats,
            budget_s=60 * budget_minutes,
            attention=attention,
            overrides=overrides or (),
            report=report,
        )
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2, allow_nan=False))
        return
    from sim.metrics.coverage import coverage_line

    typer.echo("\n".join(found.lines()))
    typer.echo(f"times are from {coverage_line(found.cost)}")


def _open(device: str, threads: int) -> torch.device:
    if importlib.util.find_spec("torch") is None:
        raise ArtifactError(
            "torch", "is not installed", remedy="Install the extra: pip install 'servesim[calibration]' (or torch)."
        )
    import torch

    from calibration.profile import open_device

    torch.set_num_threads(threads)
    return open_device(device)


@contextmanager
def _progress() -> Iterator[Callable[[Progress], None]]:
    """A line on the terminal's stderr that says what is being timed, and how long it will take yet."""
    from rich.console import Console
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bar

    columns = (BarColumn(), TextColumn("{task.fields[left]}"), TextColumn("{task.description}"))
    console = Console(stderr=True)
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task("", total=None, left="")

        def report(now: Progress) -> None:
            bar.update(
                task, completed=now.done, total=now.planned, left=f"{now.left_s:.0f} s left", description=str(now)
            )

        yield report
