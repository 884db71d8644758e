"""`servesim calibrate import`: whose measurements there are, what each importer takes, and the command itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from sim.cost.artifact import Artifact
from sim.errors import ArtifactError, did_you_mean

LINK = {"link_gb_per_s": "--link-gb-per-s", "link_latency_us": "--link-latency-us"}
HOST = {"host_us": "--host-us", "host_us_per_request": "--host-us-per-request", "host_from": "--host-from"}
MODEL = {"model": "--model"}
GPU = {"gpu": "--gpu"}
DEGREE = {"tensor_parallel": "--tp"}
ENGINE = {"engine": "--engine"}


@dataclass(frozen=True)
class Settings:
    """What the options say; None: not given."""

    tensor_parallel: int | None = None
    model: str | None = None
    gpu: str | None = None
    engine: str | None = None
    link_gb_per_s: float | None = None
    link_latency_us: float | None = None
    host_us: float | None = None
    host_us_per_request: float | None = None
    host_from: Path | None = None

    @property
    def degree(self) -> int:
        """GPUs that share the model; 1 unless said otherwise."""
        return self.tensor_parallel or 1

    def model_needed(self) -> str:
        """The model. Raises ArtifactError when it was not given."""
        if self.model is None:
            raise ArtifactError("--model", "is missing", valid="expected a bundled name or a config.json")
        return self.model

    def given(self, **names: str) -> dict[str, str]:
        """Keyword arguments for those text options that were given: `given(hardware="gpu")`."""
        values = {keyword: getattr(self, name) for keyword, name in names.items()}
        return {keyword: value for keyword, value in values.items() if value is not None}


@dataclass(frozen=True)
class Importer:
    """Files of one project: how many paths it takes, which options mean something to it, and how it reads them."""

    least_paths: int
    most_paths: int
    options: dict[str, str]
    read: Callable[[list[Path], Settings], Artifact]


def _llmservingsim(paths: list[Path], settings: Settings) -> Artifact:
    from calibration.importers.llmservingsim import import_profile
    from calibration.ring import Link

    rate, latency_us = settings.link_gb_per_s, settings.link_latency_us
    if rate is None and latency_us is not None:
        raise ArtifactError("--link-latency-us", "is given without the rate of the link", valid="--link-gb-per-s too")
    link = None if rate is None else Link(rate * 1e3, latency_us or 0.0)
    return import_profile(paths[0], settings.degree, settings.model, link)


def _aiconfigurator(paths: list[Path], settings: Settings) -> Artifact:
    from calibration.importers.aiconfigurator import import_tables

    folder = paths[0] if paths else None
    return import_tables(folder, settings.model_needed(), tensor_parallel=settings.degree, **settings.given(gpu="gpu"))


def _vidur(paths: list[Path], settings: Settings) -> Artifact:
    from calibration.importers.vidur import import_profile

    return import_profile(paths[0], paths[1], settings.model_needed(), settings.degree, *paths[2:])


def _splitwise(paths: list[Path], settings: Settings) -> Artifact:
    from calibration.importers.splitwise import import_table

    return import_table(
        paths[0], tensor_parallel=settings.tensor_parallel or 8, **settings.given(model="model", hardware="gpu")
    )


def _vtc(paths: list[Path], settings: Settings) -> Artifact:
    from calibration.importers.vtc import import_profile

    return import_profile(paths[0], **settings.given(model="model"))


def _distserve(paths: list[Path], settings: Settings) -> Artifact:
    from calibration.importers.distserve import import_coefficients

    return import_coefficients(
        paths[0], tensor_parallel=settings.degree, **settings.given(model="model", engine="engine")
    )


IMPORTERS = {
    "llmservingsim": Importer(1, 1, DEGREE | MODEL | LINK | HOST, _llmservingsim),
    "aiconfigurator": Importer(0, 1, DEGREE | MODEL | GPU | HOST, _aiconfigurator),
    "vidur": Importer(2, 3, DEGREE | MODEL | HOST, _vidur),
    "splitwise": Importer(1, 1, DEGREE | MODEL | GPU, _splitwise),
    "vtc": Importer(1, 1, MODEL, _vtc),
    "distserve": Importer(1, 1, DEGREE | MODEL | ENGINE, _distserve),
}
"""By the name of the project. What timed whole iterations takes no time of the host, which is in them."""


def import_measurements(kind: str, paths: list[Path], settings: Settings) -> Artifact:
    """The artifact of published measurements. Raises ArtifactError for what is none, or not what the options say."""
    from calibration.host import vllm_host_us, with_host

    importer = _importer(kind, paths, settings)
    artifact = importer.read(paths, settings)
    host_us, per_request_us = settings.host_us, settings.host_us_per_request or 0.0
    if settings.host_from is not None:
        host_us, per_request_us = vllm_host_us(settings.host_from, settings.degree)
    return artifact if host_us is None else with_host(artifact, host_us, per_request_us)


def _importer(kind: str, paths: list[Path], settings: Settings) -> Importer:
    """The importer of that name, for as many paths and such options as it takes."""
    if kind not in IMPORTERS:
        raise ArtifactError(
            "KIND",
            f"unknown importer {kind!r}",
            valid=f"known: {', '.join(IMPORTERS)}",
            remedy=did_you_mean(kind, IMPORTERS),
        )
    own = IMPORTERS[kind]
    if not own.least_paths <= len(paths) <= own.most_paths:
        raise ArtifactError("PATHS", f"{len(paths)} given", valid=f"{kind} takes {own.least_paths} to {own.most_paths}")
    for name, option in (DEGREE | MODEL | GPU | ENGINE | LINK | HOST).items():
        if getattr(settings, name) is not None and name not in own.options:
            raise ArtifactError(option, f"means nothing to {kind}", valid=f"it takes {', '.join(own.options.values())}")
    if settings.host_from is not None and settings.host_us is not None:
        raise ArtifactError("--host-from", "is given beside --host-us", valid="expected one of them")
    return own


def command(
    kind: Annotated[str, typer.Argument(help=f"whose measurements: {', '.join(IMPORTERS)}")],
    out: Annotated[Path, typer.Option("--out", help="the artifact to write (JSON)")],
    paths: Annotated[
        list[Path] | None,
        typer.Argument(
            help="the file or folder; vidur: the files of mlp, attention and all-reduce; "
            "aiconfigurator: none for the installed aiconfigurator-core",
        ),
    ] = None,
    tensor_parallel: Annotated[
        int | None, typer.Option("--tp", min=1, help="GPUs that share the model (1; splitwise: 8)")
    ] = None,
    model: Annotated[
        str | None, typer.Option("--model", help="bundled name or config.json, if it is not recognized")
    ] = None,
    gpu: Annotated[
        str | None,
        typer.Option("--gpu", help="its name in the files (aiconfigurator: h100_sxm; splitwise: a100-80gb)"),
    ] = None,
    engine: Annotated[str | None, typer.Option("--engine", help="distserve: distserve or vllm (distserve)")] = None,
    link_gb_per_s: Annotated[
        float | None, typer.Option(min=0.001, help="llmservingsim: rate of the link between GPUs, which was not timed")
    ] = None,
    link_latency_us: Annotated[float | None, typer.Option(min=0, help="latency of that link (0)")] = None,
    host_us: Annotated[float | None, typer.Option(min=0, help="time of the host before every iteration")] = None,
    host_us_per_request: Annotated[float | None, typer.Option(min=0, help="the same for each request in it")] = None,
    host_from: Annotated[
        Path | None, typer.Option(help="take both from vLLM's scheduler and Vidur's CPU overheads")
    ] = None,
) -> None:
    """Turn published measurements into a cost artifact."""
    settings = Settings(
        tensor_parallel, model, gpu, engine, link_gb_per_s, link_latency_us, host_us, host_us_per_request, host_from
    )
    artifact = import_measurements(kind, paths or [], settings)
    try:
        artifact.write(out)
    except OSError as error:
        raise ArtifactError("--out", f"cannot write {str(out)!r} ({error.strerror})") from error
    typer.echo(f"wrote {out}: {len(artifact.terms)} terms of {artifact.model} on {artifact.hardware}")
    for part in artifact.missing:
        typer.echo(f"missing: {part}")
