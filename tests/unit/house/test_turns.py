"""Turns by date: every case has its day, and an exhaustive run has them all."""

from datetime import date, timedelta

import pytest

from tests.support.turns import TODAY, in_turn, seed_of_the_day

CASES = ("a", "b", "c", "d")
FIRST = date(2026, 11, 28)


def test_each_case_has_its_day_in_as_many_days_as_there_are_cases() -> None:
    days = [in_turn(CASES, FIRST + timedelta(days=number), {}) for number in range(len(CASES))]
    assert sorted(case for day in days for case in day) == list(CASES)
    assert all(len(day) == 1 for day in days)


def test_run_keeps_the_date_on_which_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TODAY, "2026-11-29")
    assert in_turn(CASES, environment={}) == in_turn(CASES, date(2026, 11, 29), {})
    assert seed_of_the_day() == date(2026, 11, 29).toordinal()


def test_exhaustive_run_has_all_cases() -> None:
    assert in_turn(CASES, FIRST, {"STAGE2_EXHAUSTIVE": "1"}) == list(CASES)
