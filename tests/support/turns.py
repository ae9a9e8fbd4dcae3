"""Cases that run in turns by date, for what costs minutes each; `STAGE2_EXHAUSTIVE=1` runs all of them.

All processes of a run have the date on which it began (`STAGE2_TODAY`), so they collect the same tests at midnight.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from typing import TypeVar

Case = TypeVar("Case")
TODAY = "STAGE2_TODAY"
os.environ.setdefault(TODAY, f"{datetime.now(UTC).date()}")


def is_exhaustive(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether all cases are to run."""
    return environment.get("STAGE2_EXHAUSTIVE") == "1"


def seed_of_the_day() -> int:
    """Return the seed of random cases of which each day draws others; printed with what fails."""
    return date.fromisoformat(os.environ[TODAY]).toordinal()


def in_turn(cases: Iterable[Case], day: date | None = None, environment: Mapping[str, str] = os.environ) -> list[Case]:
    """Return the case of a day (in UTC, that on which this run began), or all cases of an exhaustive run.

    In as many days as there are cases, each has its day.
    """
    every = list(cases)
    if is_exhaustive(environment):
        return every
    today = day or date.fromisoformat(os.environ[TODAY])
    return [every[today.toordinal() % len(every)]]
