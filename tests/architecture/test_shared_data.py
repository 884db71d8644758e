"""A test that needs the shared data may skip only where the data is absent."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).resolve().parents[1] / "conftest.py"
TESTS = {
    "test_fixture.py": "def test_it(shared):\n    assert shared.is_dir()\n",
    "test_own_skip.py": "import pytest\ndef test_it():\n    pytest.skip('SERVESIM_SHARED has no traces')\n",
    "test_mark.py": "import pytest\n@pytest.mark.skipif(True, reason='needs ../shared')\ndef test_it(): pass\n",
    "test_module.py": "import pytest\npytest.skip('no ../shared/golden', allow_module_level=True)\n",
    "test_unrelated.py": "import pytest\ndef test_it():\n    pytest.skip('needs a browser')\n",
}


def closing_line(tmp_path: Path, *options: str, has_shared: bool, **environment: str) -> tuple[int, str]:
    """Exit status and closing line of pytest on `TESTS` in a repository with or without shared data beside it."""
    tests = tmp_path / "repo" / "tests"
    tests.mkdir(parents=True)
    shutil.copy(CONFTEST, tests)
    for name, text in TESTS.items():
        (tests / name).write_text(text)
    if has_shared:
        (tmp_path / "shared").mkdir()
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("SERVESIM_", "PYTEST_"))}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--color=no", *options, "tests"],
        cwd=tests.parent,
        env=inherited | environment,
        capture_output=True,
        text=True,
    )
    return run.returncode, run.stdout.splitlines()[-1].strip("= ").partition(" in ")[0]


def test_skips_where_the_data_is_absent(tmp_path: Path):
    closing = closing_line(tmp_path, has_shared=False, SERVESIM_REQUIRE_SHARED="1")
    assert closing == (0, "5 skipped")


def test_own_skips_are_tolerated_unless_told_otherwise(tmp_path: Path):
    assert closing_line(tmp_path, has_shared=True) == (0, "1 passed, 4 skipped")


@pytest.mark.parametrize("workers", [(), ("-n", "1")], ids=["alone", "xdist"])
def test_no_skip_where_the_data_exists(tmp_path: Path, workers: tuple[str, ...]):
    options = ("--continue-on-collection-errors", *workers)
    closing = closing_line(tmp_path, *options, has_shared=True, SERVESIM_REQUIRE_SHARED="1")
    assert closing == (1, "1 failed, 1 passed, 1 skipped, 2 errors")


def test_the_variable_names_the_folder(tmp_path: Path):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    closing = closing_line(tmp_path, has_shared=False, SERVESIM_SHARED=str(elsewhere))
    assert closing == (0, "1 passed, 4 skipped")
