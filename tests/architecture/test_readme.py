"""The README leads to every page and names every scheduler."""

import re
from pathlib import Path

from sim.policies.base import POLICIES

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_it_links_every_page():
    pages = {f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md")}
    index = next(line for line in README.splitlines() if line.startswith("| `docs/`"))
    assert set(re.findall(r"\]\((docs/[^)]+)\)", index)) == pages


def test_it_names_every_policy():
    (schedulers,) = re.findall(r"- \*\*Schedulers\.\*\*.*?\n- ", README, re.DOTALL)
    assert set(POLICIES) - set(re.findall(r"`([\w-]+)`", schedulers)) == set()
