"""A need of a run, and whether it is met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stage2_api.errors import ConfigError

Verdict = Literal["good", "doubtful", "missing"]


@dataclass(frozen=True)
class Need:
    """One thing that a run needs.

    what: its name. said: what was found, and what is needed. way_out: what to do where it is not good.
    """

    what: str
    verdict: Verdict
    said: str
    way_out: str = ""


def good(what: str, said: str) -> Need:
    """Return that it is there."""
    return Need(what, "good", said)


def of_errors(what: str, error: ConfigError) -> list[Need]:
    """Return a need for each problem of a configuration error."""
    return [
        Need(what, "missing", f"{problem.path}: {problem.value!r}; {problem.rule}", problem.way_out)
        for problem in error.problems
    ]
