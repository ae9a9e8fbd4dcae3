"""One attempt of an attacker, and what came of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Outcome = Literal["held", "open", "GOT"]


@dataclass(frozen=True)
class Attempt:
    """What was tried and what came of it: `held`; `open`, as the threat model says it is; `GOT`, which is a hole."""

    who: str
    what: str
    outcome: Outcome
    said: str = ""


def table(attempts: Sequence[Attempt]) -> str:
    """Return the attempts as text: a line each, those that got something first."""
    order = {"GOT": 0, "open": 1, "held": 2}
    lines = [
        f"{one.outcome:5} {one.who:18} {one.what}" + (f": {one.said}" if one.said else "")
        for one in sorted(attempts, key=lambda one: (order[one.outcome], one.who))
    ]
    counts = {outcome: sum(one.outcome == outcome for one in attempts) for outcome in order}
    return "\n".join([*lines, f"{len(attempts)} attempts: " + ", ".join(f"{n} {name}" for name, n in counts.items())])
