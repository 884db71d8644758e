"""Figures that papers print: the right system is ahead, and the document is what comes out."""

import re
from itertools import combinations

import pytest

import sim
from benchmarks.papers import FOLDER, ROOT, Row, entries, rows

ENTRIES = entries()
FAST = ("orca_equal_lengths", "sarathi_table4_sharegpt", "vtc_overload", "vtc_proportional", "anyscale_opt13b")
"""What runs in seconds; each experiment as a whole runs with the slow tests."""


def check_order(made: list[Row]) -> None:
    """Whatever two printed figures are of the same kind, their order is ours too; a ratio has its sign."""
    for row in made:
        assert row.has_sign, row
    made = [row for row in made if row.figure.counts == "yes"]
    kind = {row.figure.name: (row.figure.key, row.figure.over, row.figure.under) for row in made}
    for one, other in combinations(made, 2):
        printed = one.figure.printed, other.figure.printed
        if (
            kind[one.figure.name] != kind[other.figure.name]
            or one.figure.over
            or abs(printed[0] / printed[1] - 1) < 0.1
        ):
            continue
        assert (one.value < other.value) == (printed[0] < printed[1]), (one, other)


@pytest.mark.parametrize("name", [path.stem for path in sorted(FOLDER.glob("*.yaml")) if path.stem != "printed"])
def test_scenario_says_what_it_reproduces(name: str):
    header = re.match(r"(#.*\n)+", (FOLDER / f"{name}.yaml").read_text())
    assert header is not None
    for word in ("Paper:", "Figure:", "Set-up:", "Costs:", "Run time:"):
        assert word in header[0]
    scenario = sim.load_scenario(FOLDER / f"{name}.yaml")
    assert scenario.name == name
    variants = {"base", *scenario.variants()}
    assert {v for figure in ENTRIES[name].figures for v in (*figure.of, *figure.over)} <= variants


@pytest.mark.parametrize("name", FAST)
def test_the_same_systems_are_ahead(name: str):
    check_order(rows(ENTRIES[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ENTRIES)
def test_the_document_is_what_comes_out(name: str):
    made = rows(ENTRIES[name])
    check_order(made)
    text = (ROOT / "docs" / "papers.md").read_text()
    for row in made:
        assert row.line in text


def test_document_has_every_experiment():
    text = (ROOT / "docs" / "papers.md").read_text()
    for entry in ENTRIES.values():
        assert f"## {entry.title}\n" in text
        assert " ".join(entry.differs.split()) in text
        assert all(f"| {figure.name} |" in text for figure in entry.figures)


def test_only_ratios_of_a_stated_set_up_are_asked():
    entry = ENTRIES["fastgen_llama2_70b"]
    made = [Row(figure, 1.0, entry.lacks if figure.lacks is None else figure.lacks) for figure in entry.figures]
    assert [row.is_asked for row in made] == [False, False, False, True]
    assert [" | stated | " in row.line for row in made] == [False, False, False, True]
