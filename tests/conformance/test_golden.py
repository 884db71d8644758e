"""Step logs of real schedulers: the whole point of naming an engine."""

from pathlib import Path

import pytest

from sim.conformance.golden import find_goldens
from sim.conformance.replay import REPLAYS, Mismatch
from sim.conformance.suite import Result, examine
from tests.conformance import tiny
from tests.conftest import ROOT, SHARED

OWN = ROOT / "tests" / "golden"


def goldens_below(*folders: Path):
    """Every golden of an engine that has a policy, as pytest parameters."""
    paths = [folder / engine for folder in folders for engine in REPLAYS if any((folder / engine).glob("*.log.*"))]
    return [pytest.param(path, id=f"{path.parent.name}/{path.stem}") for path in find_goldens(paths)]


def assert_passes(path: Path):
    outcome = examine(path)
    assert (outcome.result, outcome.mismatch, outcome.error) == (Result.PASSED, None, None)
    assert outcome.num_steps > 0


@pytest.mark.parametrize("path", goldens_below(SHARED / "golden", OWN))
def test_log_is_reproduced(path):
    assert_passes(path)


def test_shared_logs_are_all_there(shared):
    assert {path.name for path in (shared / "golden").iterdir() if path.name in REPLAYS} == set(REPLAYS)
    assert len(goldens_below(shared / "golden")) >= 55


def test_log_that_was_made_by_hand(tmp_path):
    assert_passes(tiny.write(tmp_path, *tiny.golden()))


@pytest.mark.parametrize("index", range(len(tiny.STEPS) + 1))
def test_any_difference_in_any_line_is_found(tmp_path, index):
    for field in tiny.golden()[1][index].keys() - {"format"}:
        scenario, lines = tiny.golden()
        lines[index][field] = "something else"
        mismatch = examine(tiny.write(tmp_path, scenario, lines)).mismatch
        honest = tiny.golden()[1]
        before = None if index == 1 else honest[index - 1]  # the header is compared last
        assert mismatch == Mismatch(lines[index], honest[index], before)
        assert mismatch.fields == [field]


def test_missing_and_surplus_fields_differ(tmp_path):
    scenario, lines = tiny.golden()
    del lines[4]["preempted_for"]
    lines[4]["thoughts"] = None
    assert examine(tiny.write(tmp_path, scenario, lines)).mismatch.fields == ["thoughts", "preempted_for"]


def test_log_that_ends_early(tmp_path):
    scenario, lines = tiny.golden()
    mismatch = examine(tiny.write(tmp_path, scenario, lines[:-1])).mismatch
    assert mismatch == Mismatch(None, tiny.STEPS[-1], tiny.STEPS[-2])


def test_log_that_goes_on(tmp_path):
    scenario, lines = tiny.golden()
    lines.append(lines[-1] | {"step": 7})
    mismatch = examine(tiny.write(tmp_path, scenario, lines)).mismatch
    assert mismatch == Mismatch(lines[-1], None, tiny.STEPS[-1])


def test_replay_that_never_ends_is_not_waited_for(tmp_path):
    scenario, lines = tiny.golden()
    scenario["requests"][0]["prompt_tokens"] = 15  # four blocks, and there are three
    stuck = {**tiny.STEPS[0], "scheduled": [], "new": [], "num_cached_tokens": {}, "running": [], "waiting": ["a"]}
    stuck |= {"free_blocks": 3}
    scenario["requests"] = scenario["requests"][:1]
    mismatch = examine(tiny.write(tmp_path, scenario, [lines[0], stuck])).mismatch
    assert mismatch == Mismatch(None, stuck | {"step": 1}, stuck)


def test_log_that_was_cut(tmp_path):
    scenario, lines = tiny.golden()
    header = lines[0] | {"lines": 4, "finished": 0, "cancelled": 0, "unfinished": 3, "scheduled_tokens": 11}
    assert_passes(tiny.write(tmp_path, scenario | {"max_steps": 4}, [header, *lines[1:5]]))


def test_folders_logs_and_inputs_name_the_same_golden_once(tmp_path):
    path = tiny.write(tmp_path, *tiny.golden())
    (tmp_path / "deeper").mkdir()
    deeper = tiny.write(tmp_path / "deeper", *tiny.golden())
    (tmp_path / "unrelated.json").write_text("{}")
    assert find_goldens([tmp_path, path, tmp_path / "tiny.log.jsonl.gz", tmp_path / "deeper"]) == [deeper, path]
