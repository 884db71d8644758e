"""What a prediction is told from when a scenario was served several times."""

import pytest

from calibration.verify_report import Row


def test_repeats_give_a_mean_an_error_and_students_interval():
    row = Row("ttft", "mean", 121.0, [100.0, 120.0, 110.0])
    assert (row.mean, row.error, row.aim) == (pytest.approx(110.0), pytest.approx(0.1), 0.05)
    assert row.half_width == pytest.approx(4.3027 * 10 / 3**0.5, rel=1e-4)


def test_one_repeat_has_no_interval():
    assert Row("makespan", "", 1.0, [2.0]).half_width is None
