"""Arguments and options that several commands have."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from sim.errors import UserError


def _folder(name: str) -> Path:
    if not name:
        raise UserError("--out ''", "names no folder", remedy="For the current one write --out . (a dot).")
    return Path(name)


def refuse_without(context: typer.Context, needed: str, *names: str) -> None:
    """Raise UserError for a parameter among `names` that was given and says nothing without the option `needed`."""
    for name in names:
        source = context.get_parameter_source(name)
        if source is not None and source.name == "COMMANDLINE":
            raise UserError(f"--{name.replace('_', '-')}", f"says nothing without {needed}")


ScenarioPath = Annotated[Path, typer.Argument(metavar="SCENARIO", help="a scenario file (YAML)", show_default=False)]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out", parser=_folder, metavar="DIR", help="folder for tables, summary and plots", show_default=False
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY.KEY=VALUE", help="change the scenario; may be repeated", show_default=False),
]
Seed = Annotated[int | None, typer.Option("--seed", min=0, help="replace the scenario's seed", show_default=False)]
AsJson = Annotated[bool, typer.Option("--json", help="print JSON and nothing else")]
AllowImports = Annotated[
    bool, typer.Option("--allow-imports", help="let the scenario name classes outside servesim; this runs their code")
]

Jobs = Annotated[int | None, typer.Option("--jobs", min=1, help="processes; default: one per core", show_default=False)]
Dask = Annotated[
    str | None,
    typer.Option("--dask", metavar="ADDRESS", help="run on the workers of this dask scheduler", show_default=False),
]
Precision = Annotated[
    float, typer.Option("--precision", min=1e-4, max=1, help="half-width of the 95 % interval, as a part of the load")
]
MaxReplications = Annotated[int, typer.Option("--max-replications", min=6, help="stop there, however precise")]
Requests = Annotated[
    int | None,
    typer.Option("--requests", min=200, help="requests per run; default: as the SLO needs", show_default=False),
]
