"""A requirement of a run, and whether it is met."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from stage2_api.errors import ConfigError

Verdict = Literal["good", "doubtful", "missing"]


@dataclass(frozen=True)
class Requirement:
    """One thing that a run needs.

    what: its name. said: what was found, and what is needed. way_out: what to do where it is not good.
    """

    what: str
    verdict: Verdict
    said: str
    way_out: str = ""


def good(what: str, said: str) -> Requirement:
    """Return that it is there."""
    return Requirement(what, "good", said)


def of_errors(what: str, error: ConfigError) -> list[Requirement]:
    """Return a requirement for each problem of a configuration error."""
    return [
        Requirement(what, "missing", f"{problem.path}: {problem.found}; {problem.rule}", problem.way_out)
        for problem in error.problems
    ]
