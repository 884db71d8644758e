"""The command line: `sim/cli*.py` are the only place that prints, and this file the only one that exits.

Commands parse, call the library and show what it returns. Exit codes: 0 done (also when the reader of a pipe has
seen enough), 1 a log differs from its replay, 2 the user's error or what the system refuses, 3 a bug of ours, 130
interrupted. Everything heavy is imported by the command that needs it, so that `--help` is quick.
"""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import traceback
from collections.abc import Sequence
from importlib import import_module, metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

import typer

from sim import cli_planning
from sim.cli_options import (
    AllowImports,
    AsJson,
    Jobs,
    MaxReplications,
    Out,
    Overrides,
    Precision,
    Requests,
    ScenarioPath,
    Seed,
    refuse_without,
)
from sim.cli_output import check_folder, load, name_files, print_json, show, show_table
from sim.errors import UserError

if TYPE_CHECKING:
    from sim.results import Results

USER_ERROR, OUR_BUG, INTERRUPTED = 2, 3, 130
DEBUG_VARIABLE = "SERVESIM_DEBUG"

app = typer.Typer(
    help="Simulate LLM serving schedulers: one YAML scenario in, latency percentiles and a plain answer out.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    try:
        app(arguments, prog_name="servesim")
        return 0
    except SystemExit as end:
        return _after(end)
    except UserError as error:
        _complain(f"error: {error}")
        return USER_ERROR
    except KeyboardInterrupt:
        _complain("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        _silence_stdout()
        return 0
    except OSError as error:
        return _refused_by_system(error)
    except Exception as error:
        return _bug(error)


def end() -> NoReturn:
    """Run the command line of this process and leave with its exit code."""
    if sys.stdout is None:  # closed by whoever started us
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115  # it lives as long as the process
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal without, say, × shows the rest
    sys.exit(main())


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="print the version and exit", is_eager=True)] = False,
) -> None:
    if version:
        typer.echo(f"servesim {metadata.version('servesim')}")
        raise typer.Exit


@app.command()
def run(
    context: typer.Context,
    scenario: ScenarioPath,
    out: Out = None,
    overrides: Overrides = None,
    seed: Seed = None,
    precision: Annotated[
        float | None,
        typer.Option(
            "--precision",
            min=1e-3,
            max=1,
            help="replicate until the p99 of TTFT and ITL are known to this part of themselves, and print intervals",
            show_default=False,
        ),
    ] = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
    allow_imports: AllowImports = False,
    cost_uncertainty: Annotated[
        bool, typer.Option("--cost-uncertainty", help="run again with costs off as their fit was, and give the band")
    ] = False,
) -> None:
    """Simulate a scenario and say what limits it."""
    from sim.build import run as simulate
    from sim.planning.uncertainty import run_with_cost_uncertainty
    from sim.provenance import save

    loaded = load(scenario, overrides, seed, allow_imports)
    check_folder(out)
    if precision is not None and cost_uncertainty:
        raise UserError("--precision, --cost-uncertainty", "are two studies", remedy="Ask for one of them.")
    if precision is not None:
        cli_planning.replicate(loaded, precision, out, jobs, as_json)
        return
    refuse_without(context, "--precision", "jobs")
    results = run_with_cost_uncertainty(loaded) if cost_uncertainty else simulate(loaded)
    written = [] if out is None else save(results, loaded, out) + _draw(results, out)
    if as_json:
        print_json(results.summary())
        return
    from sim.report.console import summary_report

    show(summary_report(results.summary(), title=loaded.name))
    if loaded.compare:
        show([f"To see it beside its variants ({', '.join(loaded.compare)}): servesim compare {scenario}"])
    name_files(written)


@app.command()
def compare(
    context: typer.Context,
    scenarios: Annotated[list[Path], typer.Argument(metavar="SCENARIO...", help="one file with variants, or several")],
    out: Out = None,
    overrides: Overrides = None,
    seed: Seed = None,
    capacities: Annotated[
        bool, typer.Option("--capacity", help="compare the largest loads that meet the SLO, with a paired interval")
    ] = False,
    precision: Precision = 0.02,
    max_replications: MaxReplications = 40,
    requests: Requests = None,
    jobs: Jobs = None,
    as_json: AsJson = False,
    allow_imports: AllowImports = False,
) -> None:
    """Simulate variants on the same arrivals: who wins, and why."""
    from sim.planning.compare import compare as compare_scenarios

    loaded = [load(path, overrides, seed, allow_imports) for path in scenarios]
    check_folder(out)
    if capacities:
        search = {"precision": precision, "max_replications": max_replications, "num_requests": requests}
        cli_planning.compare_capacities(loaded, search, out, jobs, as_json)
        return
    refuse_without(context, "--capacity", "precision", "max_replications", "requests", "jobs")
    comparison = compare_scenarios(*loaded)
    written: list[Path] = []
    if out is not None:
        from sim.report.plots import save_comparison

        written = comparison.save(out) + save_comparison(comparison.results, out)
    if as_json:
        print_json(comparison.to_dict())
        return
    from sim.report.console import comparison_report

    show(comparison_report(comparison.to_dict(), title=loaded[0].name))
    name_files(written)


@app.command()
def plot(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="a folder that `servesim run --out` wrote")],
) -> None:
    """Draw the plots of a run again, from its tables."""
    from sim.results import Results

    drawn = _draw(Results.load(folder), folder)
    name_files(drawn)
    if not drawn:
        typer.echo(f"nothing to draw: in the run in {folder} nothing was computed")


@app.command()
def explain(
    scenario: ScenarioPath,
    overrides: Overrides = None,
    as_json: AsJson = False,
    allow_imports: AllowImports = False,
) -> None:
    """Show the memory and KV arithmetic, without a run."""
    from sim.planning.explain import explain as explain_scenario
    from sim.report.console import explanation_report

    loaded = load(scenario, overrides, None, allow_imports)
    explanation = explain_scenario(loaded)
    if as_json:
        print_json(explanation)
    else:
        show(explanation_report(explanation, title=loaded.name))


@app.command()
def why(
    scenario: ScenarioPath,
    overrides: Overrides = None,
    seed: Seed = None,
    with_next_change: Annotated[
        bool, typer.Option("--next-change", help="also rerun with 10 % more of each resource: what to buy or to raise")
    ] = False,
    as_json: AsJson = False,
    allow_imports: AllowImports = False,
) -> None:
    """Say what latencies are made of, and what would change them."""
    from sim.planning.why import why as explain_run
    from sim.report.why import why_report

    loaded = load(scenario, overrides, seed, allow_imports)
    explanation = explain_run(loaded, with_next_change=with_next_change)
    if as_json:
        print_json(explanation)
    else:
        show(why_report(explanation, title=loaded.name))


app.command()(cli_planning.capacity)
app.command()(cli_planning.tune)
app.command()(cli_planning.sweep)


@app.command()
def schema() -> None:
    """Print the JSON Schema of scenario files, for editors."""
    from sim.scenario import Scenario

    print_json({"$schema": "https://json-schema.org/draft/2020-12/schema"} | Scenario.model_json_schema())


@app.command()
def models(as_json: AsJson = False) -> None:
    """List the bundled models."""
    from sim.report.catalog import model_rows

    show_table("models", model_rows(), as_json)


@app.command()
def gpus(as_json: AsJson = False) -> None:
    """List the bundled GPUs."""
    from sim.report.catalog import gpu_rows

    show_table("GPUs", gpu_rows(), as_json)


@app.command(short_help="List the schedulers: what each does, whom it copies, options.")
def policies(
    policy: Annotated[
        str | None, typer.Argument(metavar="POLICY", help="this one alone; default: all", show_default=False)
    ] = None,
    as_json: AsJson = False,
) -> None:
    """List the scheduling policies: what each does, whom it copies, and its options."""
    from sim.report.catalog import engine_option_rows, kind_rows, policy_rows
    from sim.report.console import policies_report, policy_report

    rows = policy_rows(policy)
    if as_json:
        print_json(rows)
    elif policy is not None:
        show(policy_report(rows[0]))
    else:
        show(policies_report(rows, engine_option_rows(), kind_rows()))


@app.command()
def conformance(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH", help="goldens: an input, its log, or folders of them", show_default=False),
    ],
) -> None:
    """Replay step logs of real engines, and compare every field."""
    from sim.conformance import report, suite
    from sim.conformance.golden import find_goldens

    goldens, outcomes = find_goldens(paths), []
    width = report.name_width(goldens)
    typer.echo(report.heading(width))
    for path in goldens:
        start_s = time.perf_counter()
        outcome = suite.examine(path)
        outcomes.append(outcome)
        typer.echo(report.row(outcome, time.perf_counter() - start_s, width))
        show(report.details(outcome))
        if outcome.error is not None:
            _complain(f"error: {outcome.error}")
    typer.echo(report.closing(outcomes))
    raise typer.Exit(suite.exit_code(outcomes))


@app.command(
    context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []},
    add_help_option=False,
)
def calibrate(context: typer.Context) -> None:
    """Make cost artifacts from measurements, and check predictions."""
    calibration = import_module("calibration.cli")  # by name: the simulator itself must run without it
    calibration.app(context.args, prog_name="servesim calibrate")


def _draw(results: Results, folder: Path) -> list[Path]:
    from sim.report.plots import save_all

    return save_all(results, folder)


def _complain(message: str) -> None:
    with contextlib.suppress(BrokenPipeError):
        typer.echo(message, err=True)


def _after(end: SystemExit) -> int:
    """The exit code of a command line that ended by itself (usage error, help, Ctrl-C, closed pipe)."""
    code = end.code if isinstance(end.code, int) else 0 if end.code is None else USER_ERROR
    if code == INTERRUPTED:
        _complain("interrupted")
    if isinstance(end.__context__, BrokenPipeError):
        _silence_stdout()
        return 0
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        _silence_stdout()
    except OSError as error:
        return _refused_by_system(error)
    return code


def _silence_stdout() -> None:
    """The reader is gone (`| head`): let nothing more be written, not even by the interpreter's last flush."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _refused_by_system(error: OSError) -> int:
    """A full disk, a folder where a file should go: nothing that a scenario or servesim could mend."""
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    what = f"{error.filename2 or error.filename}: " if error.filename else ""
    _complain(f"error: {what}{error.strerror or error}.")
    if not error.filename:
        _silence_stdout()
    return USER_ERROR


def _bug(error: Exception) -> int:
    if os.environ.get(DEBUG_VARIABLE):
        traceback.print_exc()
    what = str(error) if str(error).startswith("this is a bug") else f"this is a bug in servesim: {error!r}"
    _complain(f"error: {what}\nPlease report it with the scenario. {DEBUG_VARIABLE}=1 shows where it happened.")
    return OUR_BUG
