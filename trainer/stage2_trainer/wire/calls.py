"""Several calls of a server's own routes in one request: `POST /stage2/calls`.

An update is some ten calls of vLLM's routes, and each request costs the learner, once for every server. The server
makes the calls in order, up to the first that fails. A call may demand members of its JSON answer, such as
`{"success": true}`; if they are missing, the server stops there, and the learner decides. Each answer is one line of
the request's answer, sent as soon as it is there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

CALLS_ROUTE = "/stage2/calls"
MAX_CALLS = 16
MEMBERS = {"path": str, "method": str, "body": str, "demand": dict}
METHODS = ("GET", "POST")


@dataclass(frozen=True)
class Call:
    """One call.

    phase: what it is part of, for errors. path: with its query. body: JSON text. demand: members that its answer must
    have.
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
        """Return the JSON object that the server gets."""
        return {"method": self.method, "path": self.path, "demand": dict(self.demand), "body": self.body}

    @classmethod
    def from_wire(cls, call: Any) -> Call:
        """Read `to_wire` back; the phase stays empty. Raises ValueError."""
        if not isinstance(call, dict) or set(call) != set(MEMBERS):
            raise ValueError(f"a call must have {', '.join(MEMBERS)}, and nothing else")
        for member, kind in MEMBERS.items():
            if not isinstance(call[member], kind):
                raise ValueError(f"{member} of a call must be a {kind.__name__}")
        if call["method"] not in METHODS:
            raise ValueError(f"method of a call must be one of {', '.join(METHODS)}")
        if not (call["path"] + call["body"]).isascii():
            raise ValueError("path and body of a call must be ASCII: JSON can write the rest")
        return cls("", call["path"], call["body"], call["method"], call["demand"])


@dataclass(frozen=True)
class CallAnswer:
    """The answer to one call: HTTP status and body."""

    status: int
    content: str

    def to_line(self) -> bytes:
        """Return the line that goes to the learner."""
        return json.dumps(asdict(self)).encode() + b"\n"

    @classmethod
    def from_wire(cls, line: Mapping[str, Any]) -> CallAnswer:
        """Read the JSON object of a line. Raises ValueError for anything that `to_line` does not write."""
        status, content = line.get("status"), line.get("content")
        if type(status) is not int or not isinstance(content, str):
            raise ValueError("neither status nor content")
        return cls(status, content)

    def value(self) -> Any:
        """Return the JSON value of the body; None if it is not JSON."""
        try:
            return json.loads(self.content)
        except (ValueError, RecursionError):
            return None


def calls_to_json(calls: Sequence[Call]) -> str:
    """Return the request's body."""
    return json.dumps({"calls": [call.to_wire() for call in calls]})


def calls_from_json(text: bytes) -> list[Call]:
    """Read a request's body. Raises ValueError for anything that `calls_to_json` does not write."""
    try:
        calls = json.loads(text)["calls"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"not a JSON object of calls: {type(error).__name__}") from error
    if not isinstance(calls, list) or not 0 < len(calls) <= MAX_CALLS:
        raise ValueError(f"calls must be a list of 1 to {MAX_CALLS}")
    return [Call.from_wire(call) for call in calls]


def is_met(demand: Mapping[str, Any], answer: Any) -> bool:
    """Whether an answer has the demanded members: equal values, of the same type."""
    found = answer if isinstance(answer, dict) else {}
    return all(type(found.get(key)) is type(value) and found[key] == value for key, value in demand.items())
