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


def test_its_errors_are_those_of_the_accuracy_page():
    page = (ROOT / "docs" / "accuracy.md").read_text(encoding="utf-8")
    rows = {cells[0]: cells[1:] for line in page.splitlines() if len(cells := line.strip("| ").split(" | ")) == 5}
    ours, published, others, others_published = map(float, rows["mean absolute, without makespan"])
    median = float(rows["TTFT p50"][2].replace("−", "-"))
    assert (
        f"mean absolute error of {ours:.1f} % (RTX 4090, KV-bound; published simulator: {published:.1f} %) and "
        f"{others:.1f} % (RTX PRO 6000, slot-bound; published: {others_published:.1f} %; the median TTFT is "
        f"{-median:.1f} % too short there)"
    ) in README
