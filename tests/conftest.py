"""The shared data folder: real traces, measured profiles and engine logs that are no part of the repository.

It is found by the variable SERVESIM_SHARED (default: `../shared` beside the repository). Tests that need it
skip where it is absent. Under SERVESIM_REQUIRE_SHARED=1 a skip for the lack of it is a failure wherever the
folder exists, so that no check is lost in silence.
"""

import os
import re
from collections.abc import Generator
from pathlib import Path

import pytest
from hypothesis import settings

ROOT = Path(__file__).resolve().parents[1]
SHARED = Path(os.environ.get("SERVESIM_SHARED") or ROOT.parent / "shared").resolve()
FOR_LACK_OF_SHARED = re.compile(r"SERVESIM_SHARED|\.\./shared")
MAY_NOT_SKIP = os.environ.get("SERVESIM_REQUIRE_SHARED") == "1" and SHARED.is_dir()

settings.register_profile("same_each_time", derandomize=True, deadline=None)
settings.load_profile("same_each_time")  # --hypothesis-profile=default draws other examples in every run


@pytest.fixture(scope="session")
def shared() -> Path:
    """The shared data folder, read-only; the test skips where there is none."""
    if not SHARED.is_dir():
        pytest.skip(f"there is no {SHARED}: set SERVESIM_SHARED to the folder of shared data")
    return SHARED


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    _fail_if_skipped_for_lack_of_shared(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    report = yield
    _fail_if_skipped_for_lack_of_shared(report)
    return report


def _fail_if_skipped_for_lack_of_shared(report: pytest.TestReport | pytest.CollectReport) -> None:
    if not (MAY_NOT_SKIP and report.skipped and isinstance(report.longrepr, tuple)):
        return
    path, line, reason = report.longrepr
    if FOR_LACK_OF_SHARED.search(reason):
        report.outcome = "failed"
        report.longrepr = f"{path}:{line}: {SHARED} exists, but: {reason}"
