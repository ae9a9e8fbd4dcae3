"""Several calls of a server's own routes in one request: made there in order, up to the first that does not go well.

An update is some ten calls of vLLM's routes, and each request costs the learner, once for every server. A call may
demand members of its JSON answer, such as `{"success": true}`: where they are not there the calls after it are not
made, and the learner, who sees how far it went, decides.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

ROUTE = "/stage2/calls"
OK = 200


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

    def to_wire(self) -> dict[str, Any]:
        """Return what the server is asked."""
        asked = {"method": self.method, "path": self.path, "demand": dict(self.demand)}
        return {**asked, "body": self.body} if self.body else asked


def to_text(calls: Sequence[Call]) -> str:
    """Return the request's body."""
    return json.dumps({"calls": [call.to_wire() for call in calls]})


def is_met(demand: Mapping[str, Any], answer: Any) -> bool:
    """Whether an answer has what was demanded of it: equal values, of the same type."""
    found = answer if isinstance(answer, dict) else {}
    return all(type(found.get(key)) is type(value) and found[key] == value for key, value in demand.items())
