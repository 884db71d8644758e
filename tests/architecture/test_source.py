"""Rules about the source that no linter knows: who may print, draw or read a clock, and how long things get."""

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from statistics import quantiles

import pytest

ROOT = Path(__file__).resolve().parents[2]
SIM = sorted((ROOT / "sim").rglob("*.py"))
SOURCES = SIM + sorted((ROOT / "calibration").rglob("*.py"))
THE_COMMAND_LINE = ROOT / "sim" / "cli.py"
TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}

Place = str
"""`path:line`, as editors open it."""


def place(path: Path, line: int) -> Place:
    return f"{path.relative_to(ROOT)}:{line}"


def nodes(paths: list[Path]) -> Iterator[tuple[Path, ast.AST]]:
    for path in paths:
        for node in ast.walk(TREES[path]):
            yield path, node


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a name or an attribute of one, else nothing."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (owner := dotted(node.value)):
        return f"{owner}.{node.attr}"
    return ""


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        return [node.module or ""]
    return []


def test_only_the_command_line_prints_or_exits():
    ends = {"print", "exit", "quit", "sys.exit", "os._exit", "SystemExit", "sys.stdout.write", "sys.stderr.write"}
    found = [
        place(path, node.lineno)
        for path, node in nodes([path for path in SIM if path != THE_COMMAND_LINE])
        if isinstance(node, (ast.Name, ast.Attribute)) and dotted(node) in ends
    ]
    assert found == []


def test_randomness_comes_from_named_streams():
    """Same seed, same bytes: every draw is made with a generator that `sim.rng` gave out."""
    undetermined = {"random", "secrets", "uuid"}
    elsewhere = [path for path in SIM if path.name != "rng.py"]
    found = [
        place(path, node.lineno)
        for path, node in nodes(elsewhere)
        if undetermined.intersection(imported_modules(node))
        or (dotted(node).startswith("np.random.") and dotted(node) != "np.random.Generator")
    ]
    assert found == []


def test_no_result_depends_on_the_time_of_day():
    clocks = {"datetime.now", "datetime.utcnow", "datetime.datetime.now", "date.today", "datetime.date.today"}
    found = [
        place(path, node.lineno)
        for path, node in nodes([path for path in SIM if path != THE_COMMAND_LINE])
        if "time" in imported_modules(node) or dotted(node) in clocks
    ]
    assert found == []


def test_broken_laws_are_raised_not_asserted():
    """`python -O` drops an assert, and its message would tell a user nothing. One that names a type is for mypy."""
    found = [
        place(path, node.lineno)
        for path, node in nodes(SOURCES)
        if isinstance(node, ast.Assert) and not is_type_hint(node.test)
    ]
    assert found == []


def is_type_hint(test: ast.expr) -> bool:
    return isinstance(test, ast.Call) and dotted(test.func) == "isinstance"


def test_no_module_has_state_that_functions_change():
    found = [place(path, node.lineno) for path, node in nodes(SOURCES) if isinstance(node, ast.Global)]
    assert found == []


def test_lint_and_type_exceptions_say_why():
    exception = re.compile(r"#\s*(type: ignore|noqa)")
    reasoned = re.compile(r"#\s*(type: ignore\[[\w, -]+\]|noqa: [A-Z]+\d+(, ?[A-Z]+\d+)*)  # \w")
    found = [
        place(path, number)
        for path in SOURCES
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if exception.search(line) and not reasoned.search(line)
    ]
    assert found == []


def test_files_and_functions_stay_small():
    """Hard limits; the soft ones are 300 lines a file and 25 lines a function."""
    lengths = {place(path, 1): len(path.read_text(encoding="utf-8").splitlines()) for path in SOURCES}
    assert {name: length for name, length in lengths.items() if length > 500} == {}

    bodies = dict(function_bodies())
    assert {name: length for name, length in bodies.items() if length > 60} == {}
    assert quantiles(bodies.values(), n=10)[-1] <= 25


def function_bodies() -> Iterator[tuple[Place, int]]:
    """Lines of every function's body, without its docstring."""
    for path, node in nodes(SOURCES):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            body = node.body[1:] if ast.get_docstring(node) and len(node.body) > 1 else node.body
            yield place(path, node.lineno), (body[-1].end_lineno or 0) - body[0].lineno + 1


@pytest.mark.parametrize(
    ("what", "pattern"),
    [
        ("a path of somebody's machine", re.compile(r"(?<![\w./-])/(?:work|home|root|Users|mnt)/\w")),
        ("an unfinished mark", re.compile(r"\b(?:TO" r"DO|FIX" r"ME|XX" r"X)\b")),
    ],
)
def test_no_tracked_text_has(what: str, pattern: re.Pattern[str]):
    found = [
        place(path, number)
        for path in tracked_texts()
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if pattern.search(line)
    ]
    assert found == []


def tracked_texts() -> list[Path]:
    if not (ROOT / ".git").exists():
        pytest.skip("not a git checkout: what belongs to the project is not known")
    names = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    binary = {".png", ".parquet", ".gz", ".ico"}
    paths = (ROOT / name for name in names.split("\0") if name)
    return [path for path in paths if path.is_file() and path.suffix not in binary]
