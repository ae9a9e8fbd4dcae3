"""Cases that run in turns by date, for what costs minutes each; `STAGE2_EXHAUSTIVE=1` runs all of them."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from datetime import UTC, date, datetime
from typing import TypeVar

Case = TypeVar("Case")


def is_exhaustive(environment: Mapping[str, str] = os.environ) -> bool:
    """Whether all cases are to run."""
    return environment.get("STAGE2_EXHAUSTIVE") == "1"


def in_turn(cases: Iterable[Case], day: date | None = None, environment: Mapping[str, str] = os.environ) -> list[Case]:
    """Return the case of a day (today's, in UTC), or all cases of an exhaustive run.

    In as many days as there are cases, each has its day.
    """
    every = list(cases)
    if is_exhaustive(environment):
        return every
    today = day or datetime.now(UTC).date()
    return [every[today.toordinal() % len(every)]]
