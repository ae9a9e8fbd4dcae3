"""The interface between those who train and those who generate: a request, a batch of rollouts, and their source."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from stage2_api.pod.report import ReportedSync
from stage2_trainer.data.images import ImageError
from stage2_trainer.data.messages import image_fault
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import FurtherAnswers, OnRollout, Outcome, Refused, RolloutRequest, SeedPlan

if TYPE_CHECKING:
    from torch import nn


def readable(requests: Sequence[RolloutRequest], index: int) -> RolloutRequest | Refused:
    """Return a request all of whose images can be read, or what is wrong with one of them."""
    try:
        asked = requests[index]
    except ImageError as error:
        return Refused(error)
    fault = image_fault(asked.messages)
    return asked if fault is None else Refused(fault)


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


def contiguous_chunks(n: int, servers: int) -> list[tuple[int, int]]:
    """Split requests 0..n-1 into at most one half-open range [start, end) for each server.

    Every server but the last gets ceil(n / servers) requests; a server that would get none has an empty range
    (start == end) and is not called. The list has one range for each server, in server order.

    >>> contiguous_chunks(7, 3)
    [(0, 3), (3, 6), (6, 7)]
    """
    size = -(-n // servers)
    return [(min(i * size, n), min((i + 1) * size, n)) for i in range(servers)]


Chats = Sequence[Sequence[Mapping[str, Any]]]


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one rollout for each of `chats`, by `model` as it is at `global_step`.

    micro_step: the first one that it is for; no other request of that step has it. sizes: how many of the chats each
    micro-step from there on has; empty where all are of the first. images: the names of each chat's images; empty where
    there are none to know them by. further: answers to each chat beside the one that counts; None = none. stopwatch:
    gets the seconds that it takes. on_rollout: is told of each outcome at once by sources that get them one by one, in
    whatever thread and perhaps again after a failure; the others need not.
    """

    model: nn.Module
    chats: Chats
    global_step: int
    micro_step: int
    stopwatch: Stopwatch
    on_rollout: OnRollout | None = None
    sizes: tuple[int, ...] = ()
    images: Sequence[tuple[str, ...]] = ()
    further: FurtherAnswers | None = None

    def seeds(self, training_seed: int, before: Sequence[int] = ()) -> SeedPlan:
        """Return the seeds of its rollouts; `before` as SeedPlan has it."""
        return SeedPlan(training_seed, self.global_step, self.micro_step, self.sizes, tuple(before))


@dataclass(frozen=True)
class RolloutBatch:
    """Rollouts, or what refused a request, in order; and the sync before them (None when the weights had not moved).

    plan: the seeds that they were asked for with. origin: how they came to be, for the record: servers, sync, chunk
    plan, seconds.
    """

    rollouts: list[Outcome]
    sync: SyncReport | None
    plan: SeedPlan
    origin: Mapping[str, Any] = field(default_factory=dict)


class PendingRollouts:
    """Rollouts that are being made.

    again: what is done when servers were lost meanwhile, in the thread that waits, for it may push weights; it raises
    when nothing is left to try.
    """

    def __init__(self, future: Future[RolloutBatch], again: Callable[[ServerError], PendingRollouts]) -> None:
        self._future = future
        self._again = again

    @classmethod
    def made(cls, batch: RolloutBatch) -> PendingRollouts:
        """Return rollouts that are all there."""
        future: Future[RolloutBatch] = Future()
        future.set_result(batch)
        return cls(future, _cannot_be_lost)

    @property
    def all_in(self) -> bool:
        """Whether every rollout is there."""
        return self._future.done() and self._future.exception() is None

    def wait_for(self, some: Sequence[Future[Any]], *, patience_s: float | None = None) -> bool:
        """Wait until one of these, which come of rollouts, is done or all rollouts are there; False: neither, in that
        time.

        Raises:
            ServerError: servers were lost, and did not come back.
        """
        while not (any(one.done() for one in some) or self.all_in):
            if self._future.done():
                self._recover()
            elif not wait({*some, self._future}, timeout=patience_s, return_when=FIRST_COMPLETED).done:
                return False
        return True

    def settle(self) -> None:
        """Wait until nothing is asked of the servers any more, however that ended."""
        wait({self._future})

    def result(self) -> RolloutBatch:
        """Return all rollouts. Raises ServerError as `wait_for`."""
        while True:
            self.settle()
            if self.all_in:
                return self._future.result()
            self._recover()

    def _recover(self) -> None:
        error = self._future.exception()
        if not isinstance(error, ServerError):
            self._future.result()  # raises it
            raise AssertionError("it failed")
        anew = self._again(error)
        self._future, self._again = anew._future, anew._again


def _cannot_be_lost(error: ServerError) -> PendingRollouts:
    raise error


class RolloutSource(Protocol):
    """A source of rollouts by the weights as they are now.

    A chat whose image cannot be read, or that a server does not take, costs the others nothing: it is refused.
    """

    @property
    def sync_state(self) -> ReportedSync:
        """The last sync."""
        ...

    def begin(self, request: GenerationRequest) -> PendingRollouts:
        """Let one rollout for each chat be made, all by the weights of the request's step.

        With several learner processes all of them must call it equally often, with or without chats of their own.
        """
        ...

    def generate(self, request: GenerationRequest) -> RolloutBatch:
        """Begin it, and return all rollouts."""
        ...
