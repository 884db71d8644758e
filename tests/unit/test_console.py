"""What reports look like where a terminal is narrow."""

from io import StringIO

from rich.console import Console

from sim.report.catalog import policy_rows
from sim.report.console import grid_report


def test_the_second_line_of_a_value_is_indented_like_the_first():
    console = Console(width=80, file=StringIO())
    for renderable in grid_report(policy_rows()):
        console.print(renderable)
    lines = console.file.getvalue().splitlines()
    first = next(i for i, line in enumerate(lines) if line.startswith("  the step's chunk, the whole prompt "))
    assert lines[first + 1].rstrip() == "  reserved"
