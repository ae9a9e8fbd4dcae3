"""The one error of everything that goes wrong between the learner and a rollout server."""

from __future__ import annotations

from functools import partial
from typing import Any

from stage2_api.log_lines import one_line

NAMED_CHARS = 64  # of what a call says; a group's name is 32


class ServerError(RuntimeError):
    """A rollout server did not do what was requested, or not in time.

    The message names the server, the phase and, where there is one, the request or the tensor. It is worth another
    try (a server may have been restarted), so a learner that gives up on it exits with `EXIT_RETRYABLE`.

    phase: what the call is part of, as the message names it; the `PHASES` of a push's report are another list.
    status: the HTTP status of a refusal; None if the server did not answer, or is unavailable (503, as when its engine
    has died): the learner waits for it. others: more servers that failed.
    """

    def __init__(
        self, server: str, phase: str, detail: str, *, status: int | None = None, others: frozenset[str] = frozenset()
    ) -> None:
        detail = one_line(detail)  # it may come from the server
        super().__init__(f"server {server}, phase {phase}: {detail}")
        self.server = server
        self.phase = phase
        self.detail = detail
        self.status = status
        self.servers = others | {server}

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), status=self.status, others=self.servers), (self.server, self.phase, self.detail)


def join_errors(errors: list[ServerError]) -> ServerError:
    """Fold the failures of several servers into one error.

    The first one's server and phase lead; the status is that of a refusal only if every server refused.
    """
    if len(errors) == 1:
        return errors[0]
    first, *others = errors
    statuses = [error.status for error in errors]
    return ServerError(
        first.server,
        first.phase,
        "; also ".join([first.detail, *map(str, others)]),
        status=None if None in statuses else first.status,
        others=frozenset().union(*(error.servers for error in errors)),
    )


class LinkError(RuntimeError):
    """A link between the learner and a server's worker could not be opened, broke, or was too slow."""


class OtherGroupError(RuntimeError):
    """A call of a learner that this worker has left came late: what it announces is sent to nobody any more."""

    def __init__(self, announced: str, joined: str) -> None:
        super().__init__(
            f"the tensors of this call are sent in group {one_line(announced)[:NAMED_CHARS]!r}, and this worker has"
            f" since joined {joined!r}: the call is a late one, of a learner that was replaced or that called again"
        )
        self._groups = announced, joined

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._groups


class RepeatedCallError(RuntimeError):
    """A call came again that this worker has already obeyed: what it announces was sent then."""

    def __init__(self, number: int, last: int) -> None:
        super().__init__(
            f"the tensors of call {number} in this group came with call {last} or before: something between the learner"
            " and this server has repeated the call"
        )
        self._numbers = number, last

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._numbers
