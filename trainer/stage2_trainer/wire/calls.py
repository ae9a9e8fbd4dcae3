"""Several calls of a server's own routes in one request: made there in order, up to the first that does not go well.

An update is some ten calls of vLLM's routes, and each request costs the learner, once for every server. A call may
demand members of its JSON answer, such as `{"success": true}`: where they are not there the calls after it are not
made, and the learner, who sees how far it went, decides. Each call's answer is a line of the request's, sent as soon
as it is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

ROUTE = "/stage2/calls"
OK = 200
MOST = 16  # calls of one request
MEMBERS = {"path": str, "method": str, "body": str, "demand": dict}
METHODS = ("GET", "POST")


@dataclass(frozen=True)
class Call:
    """One call.

    phase: what it is part of, for errors. path: with its query. body: JSON text. demand: what its answer must have.
    """

    phase: str
    path: str
    body: str = ""
    method: str = "POST"
    demand: Mapping[str, Any] = field(default_factory=dict)

    @property
    def route(self) -> str:
        """The path without its query."""
        return self.path.partition("?")[0]

    def to_wire(self) -> dict[str, Any]:
        """Return what the server is asked."""
        return {"method": self.method, "path": self.path, "demand": dict(self.demand), "body": self.body}


@dataclass(frozen=True)
class CallAnswer:
    """What one call was answered: the status, and the text."""

    status: int
    content: str

    def to_line(self) -> bytes:
        """Return the line of the request's answer."""
        return json.dumps(asdict(self)).encode() + b"\n"

    def value(self) -> Any:
        """Return the JSON value that was answered; None where it is none."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            return None


def to_text(calls: Sequence[Call]) -> str:
    """Return the request's body."""
    return json.dumps({"calls": [call.to_wire() for call in calls]})


def from_text(text: bytes) -> list[Call]:
    """Read a request's body. Raises ValueError for anything else than `to_text` writes."""
    try:
        asked = json.loads(text)["calls"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a JSON object of calls: {type(error).__name__}") from error
    if not isinstance(asked, list) or not 0 < len(asked) <= MOST:
        raise ValueError(f"calls must be a list of 1 to {MOST}")
    return [_call(one) for one in asked]


def answer_of(found: Mapping[str, Any]) -> CallAnswer:
    """Read a line of an answer. Raises ValueError for anything else than `to_line` writes."""
    status, content = found.get("status"), found.get("content")
    if type(status) is not int or not isinstance(content, str):
        raise ValueError("neither status nor content")
    return CallAnswer(status, content)


def is_met(demand: Mapping[str, Any], answer: Any) -> bool:
    """Whether an answer has what was demanded of it: equal values, of the same type."""
    found = answer if isinstance(answer, dict) else {}
    return all(type(found.get(key)) is type(value) and found[key] == value for key, value in demand.items())


def _call(asked: Any) -> Call:
    if not isinstance(asked, dict) or set(asked) != set(MEMBERS):
        raise ValueError(f"a call must have {', '.join(MEMBERS)}, and nothing else")
    for member, kind in MEMBERS.items():
        if not isinstance(asked[member], kind):
            raise ValueError(f"{member} of a call must be a {kind.__name__}")
    if asked["method"] not in METHODS:
        raise ValueError(f"method of a call must be one of {', '.join(METHODS)}")
    if not (asked["path"] + asked["body"]).isascii():
        raise ValueError("path and body of a call must be ASCII: JSON can write the rest")
    return Call("", asked["path"], asked["body"], asked["method"], asked["demand"])
