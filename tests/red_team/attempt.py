"""One attempt of an attacker, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

Outcome = Literal["held", "open", "GOT", "not tried"]


@dataclass(frozen=True)
class Attempt:
    """What was tried and what came of it: `held`; `open`, as the threat model says it is; `GOT`, which is a hole.

    `not tried`: it comes to nothing here even where nothing forbids it, and so says nothing.
    """

    who: str
    what: str
    outcome: Outcome
    detail: str = ""


def table(attempts: Sequence[Attempt]) -> str:
    """Return the attempts as text: a line each, those that got something first."""
    order = {"GOT": 0, "open": 1, "not tried": 2, "held": 3}
    lines = [
        f"{one.outcome:9} {one.who:18} {one.what}" + (f": {one.detail}" if one.detail else "")
        for one in sorted(attempts, key=lambda one: (order[one.outcome], one.who))
    ]
    counts = {outcome: sum(one.outcome == outcome for one in attempts) for outcome in order}
    return "\n".join([*lines, f"{len(attempts)} attempts: " + ", ".join(f"{n} {name}" for name, n in counts.items())])


def beside_control(tried: Sequence[Attempt], control: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts; one that fails without any policy too counts as not tried."""
    reached = {one.what for one in control if one.outcome == "GOT"}
    (who,) = {one.who for one in control}
    vain = f"{who}, whom no policy holds, fails too"
    return [
        one if one.outcome != "held" or one.what in reached else replace(one, outcome="not tried", detail=vain)
        for one in tried
    ]


Lives = Mapping[str, tuple[int, bool]]
"""Of each pod, by its uid: how often its containers were started again, and whether it is ready."""


def lives(pods: Sequence[Mapping[str, Any]]) -> Lives:
    """Return the lives of pods, objects as the API server holds them."""
    return {
        pod["metadata"]["uid"]: (
            sum(one["restartCount"] for one in pod["status"].get("containerStatuses", [])),
            any(one["type"] == "Ready" and one["status"] == "True" for one in pod["status"].get("conditions", [])),
        )
        for pod in pods
    }


def survived(who: str, what: str, before: Lives, after: Lives) -> Attempt:
    """Return whether pods live on as they did: the same ones, never started again, ready."""
    if not before or not all(ready for _, ready in before.values()):
        return Attempt(who, what, "not tried", "no pod of it was ready before")
    return Attempt(who, what, "held" if after == before else "GOT", f"restarts and readiness: {sorted(after.values())}")
