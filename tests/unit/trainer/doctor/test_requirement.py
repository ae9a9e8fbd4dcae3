"""What the doctor says of a configuration error is what other programs say of it."""

from __future__ import annotations

import pytest

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.doctor.examination import missing_from


@pytest.mark.parametrize("value", [None, 3, "x" * 10_000])
def test_a_problem_is_told_as_elsewhere_and_as_short(value: object) -> None:
    problem = Problem("a.b", value, "must be true", "write it")
    (told,) = missing_from("data", ConfigError([problem]))
    assert (told.what, told.verdict) == ("data", "missing")
    assert f"{told.status}; {told.way_out}" == str(problem)
    assert len(told.status) < 200
