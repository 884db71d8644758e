"""Documents name what exists, and the architecture page leaves no module out."""

import re
from pathlib import Path

import pytest

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
    named = re.findall(r"`((?:sim|calibration|scenarios|docs|benchmarks|notebooks)/[^`\s]*)`", path.read_text("utf-8"))
    assert [name for name in named if not list(ROOT.glob(name.rstrip("/")))] == []


@documents
def test_links_in_it_lead_somewhere(path: Path):
    links = re.findall(r"\]\(([^)#]+)", path.read_text("utf-8"))
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []
