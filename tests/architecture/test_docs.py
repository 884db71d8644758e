"""Documents name what exists, and the architecture page leaves no module out."""

import re
from pathlib import Path
from typing import Any

import pytest

from sim.cli import app
from sim.doors.base import DOORS
from sim.queues.base import QUEUE_ORDERS
from sim.registry import Registry

ROOT = Path(__file__).resolve().parents[2]
ARCHITECTURE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
documents = pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: path.name)


def test_every_module_has_its_line():
    modules = {
        f"sim/{path.name}{'/' if path.is_dir() else ''}"
        for path in (ROOT / "sim").iterdir()
        if path.suffix == ".py" or (path / "__init__.py").is_file()
    }
    families = {path.rpartition("/")[0] + "/" for path in re.findall(r"`(sim/\w+/[\w*.]+)`", ARCHITECTURE)}
    assert modules - families - set(re.findall(r"`(sim/[\w.]+/?)`", ARCHITECTURE)) == set()


@documents
def test_paths_in_it_exist(path: Path):
    named = re.findall(
        r"`((?:sim|calibration|scenarios|docs|tests|benchmarks|notebooks)/[^`\s]*)`", path.read_text("utf-8")
    )
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


@pytest.mark.parametrize("path", [ROOT / "README.md", ROOT / "CHANGELOG.md"], ids=lambda path: path.name)
def test_every_command_is_named_in_it(path: Path):
    text = path.read_text("utf-8")
    commands = {str(command.callback.__name__) for command in app.registered_commands if command.callback}
    assert {name for name in commands if not re.search(rf"`{name}`|servesim {name}\b", text)} == set()


@pytest.mark.parametrize("registry", [QUEUE_ORDERS, DOORS], ids=lambda registry: registry.what)
def test_every_order_and_door_has_its_row(registry: Registry[Any]):
    rows = re.findall(r"^\| (`[^|]*`) \|", (ROOT / "docs" / "queues.md").read_text("utf-8"), re.MULTILINE)
    assert set(registry) - set(re.findall(r"`(\w+)`", " ".join(rows))) == set()


def test_every_folder_of_tests_has_its_row():
    folders = {f"tests/{path.name}/" for path in (ROOT / "tests").iterdir() if any(path.glob("test_*.py"))}
    rows = re.findall(r"^\| `(tests/[^`]*)`", (ROOT / "CONTRIBUTING.md").read_text("utf-8"), re.MULTILINE)
    assert set(rows) == folders


@documents
def test_links_in_it_lead_somewhere(path: Path):
    links = re.findall(r"\]\(([^)#]+)", path.read_text("utf-8"))
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
