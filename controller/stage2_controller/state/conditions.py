"""Conditions as Kubernetes keeps them: one for each type, with the time at which its status last changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Literal

Truth = Literal["True", "False", "Unknown"]

MESSAGE_CHARS = 8_192
"""Characters of one text of a status: the definition allows 32,768, and ten of these fit etcd beside a large spec."""
_END_CHARS = 1_024  # kept of a text that is shortened: its end says what to do


@dataclass(frozen=True)
class Condition:
    """One finding of this pass."""

    type: str
    status: Truth
    reason: str
    message: str


def truth(value: bool) -> Truth:
    """Return a bool as a condition's status."""
    return "True" if value else "False"


def timestamp(now: datetime) -> str:
    """Return `now` as Kubernetes writes times: UTC, RFC 3339, whole seconds."""
    return now.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def instant(text: str) -> datetime:
    """Return the time of a text as `timestamp` and Kubernetes write it."""
    return datetime.fromisoformat(text)


def not_after(text: str, now: datetime) -> str:
    """Return an earlier time of this controller, or `now` where it is in the future because the clock was set back."""
    return min(text, timestamp(now), key=instant)


def seconds_left(since: datetime, limit_s: float, now: datetime) -> float:
    """Return the seconds until `limit_s` have passed since then; none are left at 0 and below.

    Never more than the limit: a time in the future comes from a clock that is or was ahead of this one.
    """
    return min(limit_s, (since + timedelta(seconds=limit_s) - now).total_seconds())


def shorten(text: str) -> str:
    """Return the text, without its middle where it is longer than a status may hold; others write without limit."""
    if len(text) <= MESSAGE_CHARS:
        return text
    gap = f" … ({len(text):,} characters, cut) … "
    return text[: MESSAGE_CHARS - _END_CHARS - len(gap)] + gap + text[-_END_CHARS:]


def bounded(status: Mapping[str, Any]) -> dict[str, Any]:
    """Return the status with every message cut, because the API server refuses a status with one that is too long."""
    entries = [{**item, "message": shorten(item["message"])} for item in status.get("conditions") or ()]
    return {
        **status,
        **({"conditions": entries} if entries else {}),
        **({"message": shorten(status["message"])} if status.get("message") else {}),
    }


def merged(
    previous: Sequence[Mapping[str, Any]], current: Sequence[Condition], *, generation: int, now: datetime
) -> list[dict[str, Any]]:
    """Return the status' list: `current`, each with its old transition time if its status is the old one.

    A time in the future becomes `now`; otherwise what counts from it would last as long as the clock was wrong.
    """
    old = {item["type"]: item for item in previous}
    return [_entry(condition, old.get(condition.type), generation, now) for condition in current]


def find(status: Mapping[str, Any], condition_type: str) -> Mapping[str, Any] | None:
    """Return the condition of one type in a job's status."""
    return next((item for item in status.get("conditions") or [] if item["type"] == condition_type), None)


def _entry(condition: Condition, old: Mapping[str, Any] | None, generation: int, now: datetime) -> dict[str, Any]:
    kept = old is not None and old["status"] == condition.status
    return {
        "type": condition.type,
        "status": condition.status,
        "reason": condition.reason,
        "message": condition.message,
        "observedGeneration": generation,
        "lastTransitionTime": not_after(old["lastTransitionTime"], now) if old and kept else timestamp(now),
    }
