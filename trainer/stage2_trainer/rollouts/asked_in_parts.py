"""Many requests in one call, of which one that is refused fails the call: the call is made again in parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from stage2_trainer.wire.rollout import Refused

Request = TypeVar("Request")
Answer = TypeVar("Answer")


def asked_in_parts(
    ask: Callable[[Sequence[Request]], Sequence[Answer]],
    requests: Sequence[Request],
    *,
    refuses: Callable[[Exception], bool],
) -> list[Answer | Refused]:
    """Return what came of each request, in order.

    refuses: whether an error says that one of them is at fault. Then halves are asked, and theirs, until it is found;
    who asks the same comes to the same halves. Raises any other error.
    """
    try:
        return list(ask(requests))
    except Exception as error:
        if not refuses(error):
            raise
        if len(requests) == 1:
            return [Refused(error)]
    middle = len(requests) // 2
    parts = (requests[:middle], requests[middle:])
    return [one for part in parts for one in asked_in_parts(ask, part, refuses=refuses)]
