"""Conditions as Kubernetes keeps them: one for each type, with the time at which its status last changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Literal

Truth = Literal["True", "False", "Unknown"]


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
    """Return the time that `timestamp` wrote."""
    return datetime.fromisoformat(text)


def merged(
    previous: Sequence[Mapping[str, Any]], current: Sequence[Condition], *, generation: int, now: datetime
) -> list[dict[str, Any]]:
    """Return the status' list: `current`, each with its old transition time if its status is the old one."""
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
        "lastTransitionTime": old["lastTransitionTime"] if old and kept else timestamp(now),
    }
