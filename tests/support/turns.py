"""Tests that run in turns by date, for what costs much: `@pytest.mark.in_turns(days, first=0, apart=False)`.

Each day has its share of the marked tests of a file, and in so many days every one runs. A mark of a whole file
(`pytestmark`) keeps its tests together: the file has one day, and `first` moves it. With `apart=True` each of its tests
has a day of its own. Days are at most seven, so everything runs in any week. `STAGE2_EXHAUSTIVE=1` runs everything. A
file or a test that the command line names runs whatever the day, and so does, with `--last-failed`, what has failed.
docs/testing.md lists the turns.

All processes of a run have the date (in UTC) on which it began, `STAGE2_TODAY`, so they collect the same tests at
midnight.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping
from datetime import UTC, date, datetime

import pytest

TODAY = "STAGE2_TODAY"
LONGEST_DAYS = 7
os.environ.setdefault(TODAY, f"{datetime.now(UTC).date()}")


def is_exhaustive(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether all cases are to run."""
    return environment.get("STAGE2_EXHAUSTIVE") == "1"


def seed_of_the_day() -> int:
    """Return the seed of random cases of which each day draws others; printed with what fails."""
    return date.fromisoformat(os.environ[TODAY]).toordinal()


@pytest.hookimpl(tryfirst=True)  # before -k makes a file's list shorter; --last-failed has done so already
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselect the tests whose day another one is."""
    named = any(argument.partition("::")[0].endswith(".py") for argument in config.args)
    if is_exhaustive() or named or config.getoption("lf"):
        return
    turns: Counter[object] = Counter()
    chosen = [(item, _is_today(item, turns)) for item in items]
    config.hook.pytest_deselected(items=[item for item, is_today in chosen if not is_today])
    items[:] = [item for item, is_today in chosen if is_today]


def _is_today(item: pytest.Item, turns: Counter[object]) -> bool:
    mark = item.get_closest_marker("in_turns")
    if mark is None:
        return True
    days, first = mark.args[0], mark.kwargs.get("first", 0)
    if not 1 <= days <= LONGEST_DAYS:
        raise pytest.UsageError(f"{item.nodeid}: in_turns({days}) must have from 1 to {LONGEST_DAYS} days")
    turn = turns[item.path, days]
    module = item.getparent(pytest.Module)
    if mark.kwargs.get("apart") or module is None or mark not in module.own_markers:
        turns[item.path, days] += 1
    return (seed_of_the_day() + first + turn) % int(days) == 0
