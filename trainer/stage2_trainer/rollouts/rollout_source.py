"""The interface between training and generation: a request, its answers while they are made, and a source of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar

from stage2_api.pod.report import ReportedSync
from stage2_trainer.data.images import ImageError
from stage2_trainer.data.messages import image_fault
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import FurtherAnswers, OnRollout, Outcome, Refused, Rollout, RolloutRequest, SeedPlan

if TYPE_CHECKING:
    from torch import nn

Chats = Sequence[Sequence[Mapping[str, Any]]]
NONE = "none"  # the sync mode where nothing generates


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one rollout for each of `chats`, by `model` as it is at `global_step`.

    micro_step: the first one that the chats belong to; each request of a step has its own. sizes: the number of chats
    of each micro-step from there on; empty = all belong to the first. images: the image names of each chat; empty = the
    images have no names. further: answers to each chat beside the one that counts; None = none. stopwatch: measures the
    work. on_rollout: receives each outcome as soon as it is there, in any thread and perhaps again after a failure;
    sources that get all outcomes at once do not call it.
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
        """Return the seeds of its rollouts; `before` as in SeedPlan."""
        return SeedPlan(training_seed, self.global_step, self.micro_step, self.sizes, tuple(before))


@dataclass(frozen=True)
class RolloutBatch:
    """The outcome of each request, in order, with the sync before them (None: the weights had not moved).

    plan: the seeds of the requests. origin: how the rollouts were made, for the record: servers, sync, chunk plan,
    seconds.
    """

    rollouts: list[Outcome]
    sync: SyncReport | None
    plan: SeedPlan
    origin: Mapping[str, Any] = field(default_factory=dict)


Ask = Callable[[ServerError | None, int], Future[RolloutBatch]]
"""Sends a request to whoever answers it; takes the error that lost the answers of the try before, and its number."""


class Answers:
    """The answers to a request while they are made.

    `ask` sends the request, first with None and 0. When servers are lost, the thread that waits calls it again with the
    error and the number of tries so far: it may push weights, and raises when nothing is left to try.
    """

    def __init__(self, ask: Ask) -> None:
        self._ask = ask
        self._tries = 0
        self._batch = ask(None, 0)

    @classmethod
    def complete(cls, batch: RolloutBatch) -> Answers:
        """Return answers that are all there."""
        future: Future[RolloutBatch] = Future()
        future.set_result(batch)
        return cls(lambda error, tries: future)

    @property
    def all_in(self) -> bool:
        """Whether every answer is there."""
        return self._batch.done() and self._batch.exception() is None

    def wait_for(self, some: Sequence[Future[Any]], *, patience_s: float | None = None) -> bool:
        """Wait until one of `some`, which depend on answers, is done or all answers are there; False after a time-out.

        Raises:
            ServerError: servers were lost, and did not come back.
        """
        while not (any(one.done() for one in some) or self.all_in):
            if self._batch.done():
                self._retry()
            elif not wait({*some, self._batch}, timeout=patience_s, return_when=FIRST_COMPLETED).done:
                return False
        return True

    def settle(self) -> None:
        """Wait until no server works on the request any more, whether it succeeded or failed."""
        wait({self._batch})

    def result(self) -> RolloutBatch:
        """Return all answers. Raises ServerError as `wait_for`."""
        while not self.all_in:
            self.settle()
            if not self.all_in:
                self._retry()
        return self._batch.result()

    def _retry(self) -> None:
        error = self._batch.exception()
        if not isinstance(error, ServerError):
            self._batch.result()  # raises it
        assert isinstance(error, ServerError), "it failed"
        self._tries += 1
        self._batch = self._ask(error, self._tries)


class RolloutSource(ABC):
    """A source of rollouts: `sync` once a step, then `ask`.

    A chat with an unreadable image, or one that a server does not accept, is refused; the others are answered.
    """

    sync_state: ReportedSync
    """The last sync."""

    def sync(self, request: GenerationRequest) -> SyncReport | None:
        """Push the weights of the request's step if they moved; a source in this process does that while it answers.

        Raises:
            ServerError: servers were lost, and did not come back.
        """
        return None

    @abstractmethod
    def ask(self, request: GenerationRequest) -> Answers:
        """Request one rollout for each chat, by the weights of the last sync.

        With several learner processes all of them must call it equally often, with or without chats of their own.
        """

    def generate(self, request: GenerationRequest) -> RolloutBatch:
        """Sync, ask, and return all rollouts. Raises ServerError as `sync`."""
        report = self.sync(request)
        answers = self.ask(request)
        with request.stopwatch.measure("rollout_generate"):
            batch = answers.result()
        return replace(batch, sync=batch.sync or report)


class NoRollouts(RolloutSource):
    """A source that answers each request with nothing, at once: stage 1 generates nothing. seed: the run's."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.sync_state = ReportedSync(requested_mode=NONE, effective_mode=NONE)

    def ask(self, request: GenerationRequest) -> Answers:
        """Return an empty answer for each chat; no image is read."""
        nothing = Rollout([], [], "", server="", version=request.global_step, finish_reason="stop")
        return Answers.complete(RolloutBatch([nothing] * len(request.chats), None, request.seeds(self._seed)))


def contiguous_chunks(n: int, servers: int) -> list[tuple[int, int]]:
    """Split requests 0..n-1 into at most one half-open range [start, end) for each server (semantics, section 11).

    Every server but the last gets ceil(n / servers) requests; a server that would get none has an empty range
    (start == end) and is not called. The list has one range for each server, in server order.

    >>> contiguous_chunks(7, 3)
    [(0, 3), (3, 6), (6, 7)]
    """
    size = -(-n // servers)
    return [(min(i * size, n), min((i + 1) * size, n)) for i in range(servers)]


def readable(requests: Sequence[RolloutRequest], index: int) -> RolloutRequest | Refused:
    """Return a request if all its images can be read, else the fault: one bad image would fail a call of many."""
    try:
        request = requests[index]
    except ImageError as error:
        return Refused(error)
    fault = image_fault(request.messages)
    return request if fault is None else Refused(fault)


Request = TypeVar("Request")
Answer = TypeVar("Answer")


def ask_in_parts(
    ask: Callable[[Sequence[Request]], Sequence[Answer]],
    requests: Sequence[Request],
    *,
    refuses: Callable[[Exception], bool],
) -> list[Answer | Refused]:
    """Return the outcome of each request of one call, in order; a refused call is repeated in halves.

    refuses: whether an error means that one of the requests is at fault; any other error is raised. The halves depend
    on the requests alone, so processes that ask the same make the same calls.
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
    return [one for part in parts for one in ask_in_parts(ask, part, refuses=refuses)]
