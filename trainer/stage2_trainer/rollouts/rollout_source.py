"""Between training and generation: a request, its answers while they are made, and the source that makes them.

`ServerRollouts` is the source over servers: weights are pushed when they moved, and the answers come from exactly those
weights. With a pipeline (`pipeline.enabled`) the learner requests the next step while the current one trains. The next
sync waits for all requests under way, for it would abort them; so no rollout is older than one sync.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, overload

from stage2_api.pod.report import SyncStatus
from stage2_trainer.data.images import ImageError
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.process.background import in_background
from stage2_trainer.rollouts.errors import VersionError
from stage2_trainer.sync.fleet.push import WeightSync
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.sync.fleet.retries import ATTEMPTS
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import (
    UNSYNCED,
    OnRollout,
    Outcome,
    Refused,
    Rollout,
    RolloutRequest,
    SeedPlan,
    ServedBackend,
)

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)
Chats = Sequence[Sequence[Mapping[str, Any]]]
NONE = "none"  # the sync mode where nothing generates
T = TypeVar("T")
Request = TypeVar("Request")
Answer = TypeVar("Answer")


@dataclass(frozen=True)
class GenerationRequest:
    """A request for one rollout for each of `chats`, by `model` as it is at `global_step`.

    micro_step: the first one that the chats belong to; each request of a step has its own. sizes: the number of chats
    of each micro-step from there on; empty = all belong to the first. images: the image names of each chat; empty = the
    images have no names. expected: how long the answer to each chat is expected to be, in any unit; empty = unknown.
    bias: what is added to the logits of tokens, by their ids. stopwatch: measures the work. on_rollout: receives each
    outcome as soon as it is there, in any thread and perhaps again after a failure; sources that get all outcomes at
    once do not call it.
    """

    model: nn.Module
    chats: Chats
    global_step: int
    micro_step: int
    stopwatch: Stopwatch
    on_rollout: OnRollout | None = None
    sizes: tuple[int, ...] = ()
    images: Sequence[tuple[str, ...]] = ()
    expected: Sequence[int] = ()
    bias: Mapping[int, float] = field(default_factory=dict)

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
"""Sends a request; takes the error that lost the answers of the try before, and the number of that try."""


class Answers:
    """The answers to a request while they are made.

    `ask` sends the request, first with None and 0. When servers are lost, the waiting thread calls it again with the
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
    def all_arrived(self) -> bool:
        """Whether every answer is there."""
        return self._batch.done() and self._batch.exception() is None

    def wait_for(self, some: Sequence[Future[Any]], *, patience_s: float | None = None) -> bool:
        """Wait until one of `some`, which depend on answers, is done or all answers are there; False after a time-out.

        Raises:
            ServerError: servers were lost, and did not come back.
        """
        while not (any(one.done() for one in some) or self.all_arrived):
            if self._batch.done():
                self.retry()
            elif not wait({*some, self._batch}, timeout=patience_s, return_when=FIRST_COMPLETED).done:
                return False
        return True

    def settle(self) -> None:
        """Wait until no server works on the request any more, whether it succeeded or failed."""
        wait({self._batch})

    def result(self) -> RolloutBatch:
        """Return all answers. Raises ServerError as `wait_for`."""
        while not self.all_arrived:
            self.settle()
            if not self.all_arrived:
                self.retry()
        return self._batch.result()

    def done_within(self, seconds: float) -> bool:
        """Whether the request ends within so many seconds, whether it succeeds or fails."""
        return bool(wait({self._batch}, timeout=seconds).done)

    def outcome(self) -> RolloutBatch:
        """Return all answers of a request that has ended. Raises ServerError where servers were lost."""
        return self._batch.result()

    def retry(self) -> None:
        """Send a request again that has failed. Raises its error where nothing is left to try."""
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

    sync_state: SyncStatus
    """The last sync."""
    engines: Sequence[str] = ()
    """What computes the answers of each server, in words."""
    shared = False
    """Whether all learner processes pass the same requests, and each gets all answers; else each passes its own."""

    def sync(self, model: nn.Module, *, global_step: int, stopwatch: Stopwatch) -> SyncReport | None:
        """Push the weights of a step if they moved; a source in this process does that while it answers.

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
        report = self.sync(request.model, global_step=request.global_step, stopwatch=request.stopwatch)
        answers = self.ask(request)
        with request.stopwatch.measure("rollout_generate"):
            batch = answers.result()
        return replace(batch, sync=batch.sync or report)


def require_version(outcomes: Iterable[Outcome], version: int) -> None:
    """Check that all answers come from the weights of this version.

    Raises:
        VersionError: one does not.
    """
    for one in outcomes:
        if isinstance(one, Rollout) and one.version != version:
            held = "weights that this run has not sent" if one.version == UNSYNCED else f"weights of step {one.version}"
            raise VersionError(
                f"step {version}: an answer of {one.server} comes from {held}, not from those of this step. Nothing is "
                "trained on it. Start the run again: it resumes from its last checkpoint, and sends all weights anew"
            )


class NoRollouts(RolloutSource):
    """A source that answers each request with nothing, at once: stage 1 generates nothing. seed: the run's."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self.sync_state = SyncStatus(requested_mode=NONE, effective_mode=NONE)

    def ask(self, request: GenerationRequest) -> Answers:
        """Return an empty answer for each chat; no image is read."""
        nothing = Rollout([], [], "", server="", version=request.global_step, finish_reason="stop")
        return Answers.complete(RolloutBatch([nothing] * len(request.chats), None, request.seeds(self._seed)))


class ServerRollouts(RolloutSource):
    """Rollouts from servers; a run continues without lost ones, and takes them in again when they are back.

    follow: takes in servers that have come, before a push; returns whether any has. wait: called with the error after
    servers were lost; returns when some answer, and raises ServerError after a time-out.
    """

    def __init__(
        self,
        backend: ServedBackend,
        synchronizer: WeightSync,
        *,
        seed: int,
        wait: Callable[[ServerError], object],
        reporter: Reporter,
        follow: Callable[[], bool] = lambda: False,
    ) -> None:
        self._backend = backend
        self._synchronizer = synchronizer
        self._seed = seed
        self._wait = wait
        self._follow = follow
        self._reporter = reporter
        self._version = -1
        self._asked: list[Answers] = []
        self.sync_state: SyncReport = synchronizer.report

    def sync(self, model: nn.Module, *, global_step: int, stopwatch: Stopwatch) -> SyncReport | None:
        """Wait for requests under way, then push the weights of a step; None if the servers hold them.

        Raises:
            ServerError: servers fail again and again; the run can resume later, from a checkpoint.
        """
        with stopwatch.measure("rollout_generate"):
            self._settle()
        self._asked.clear()
        return self._push(model, global_step, stopwatch)

    def ask(self, request: GenerationRequest) -> Answers:
        """Request one rollout for each chat, after the requests before it. Raises ServerError as `sync`.

        A request that was sent one step ahead and lost is sent again, to be answered by the weights of its own step.
        """
        version = self._version

        def ask(error: ServerError | None, tries: int) -> Future[RolloutBatch]:
            nonlocal version
            if error is None:
                return in_background(self._answer, request, version, None, tuple(self._asked))
            self._settle()  # servers may change only while none is asked
            if version == request.global_step:
                self._wait_for_lost(error, tries, request.global_step)
            else:
                logger.warning(
                    "rollouts requested ahead were lost; requesting them again with the current weights: %s", error
                )
            report = self._push(request.model, request.global_step, request.stopwatch)
            version = request.global_step
            return in_background(self._answer, request, version, report, ())

        answers = Answers(ask)
        self._asked.append(answers)
        return answers

    def _settle(self) -> None:
        for answers in self._asked:
            answers.settle()

    def _push(self, model: nn.Module, global_step: int, stopwatch: Stopwatch) -> SyncReport | None:
        attempt = 1
        while True:
            try:
                return self._push_once(model, global_step, stopwatch)
            except ServerError as error:
                attempt = self._wait_for_lost(error, attempt, global_step) + 1

    def _push_once(self, model: nn.Module, global_step: int, stopwatch: Stopwatch) -> SyncReport | None:
        self._reporter.update(phase="syncing")
        with ACTIVITY.doing(f"sending the weights of step {global_step} to servers"), stopwatch.measure("sync"):
            if self._follow():
                self._synchronizer.invalidate()
            report = self._synchronizer.ensure_synced(model, global_step)
        self.sync_state = self._synchronizer.report
        self._version = global_step
        self._reporter.update(phase="rollout", sync=self.sync_state, message="")
        return report

    def _wait_for_lost(self, error: ServerError, attempt: int, global_step: int) -> int:
        """Continue without lost servers, or wait for one if none is left; raise the error after the last attempt.

        Returns how many attempts have failed by now; a wait in vain for servers is one.
        """
        while attempt < ATTEMPTS:
            logger.warning("servers were lost, attempt %d of %d at step %d: %s", attempt, ATTEMPTS, global_step, error)
            self._synchronizer.invalidate()
            self._reporter.update(phase="waiting-for-servers", message=str(error))
            try:
                self._wait(error)
                return attempt
            except ServerError as still:
                error, attempt = still, attempt + 1
        raise error

    def _answer(
        self, request: GenerationRequest, version: int, sync: SyncReport | None, after: Sequence[Answers]
    ) -> RolloutBatch:
        """Return the servers' answers; runs in a thread of its own, when the requests before it are done."""
        for earlier in after:
            earlier.settle()
        plan, adapter, chats = request.seeds(self._seed), self.sync_state.adapter, request.chats
        # built one by one: images are in memory only while they travel
        requests = LazySequence(
            len(chats), lambda index: RolloutRequest(list(chats[index]), adapter=adapter, bias=request.bias)
        )
        start, state = time.monotonic(), self.sync_state
        receive = request.on_rollout

        def checked(index: int, outcome: Outcome) -> None:
            require_version([outcome], version)
            if receive is not None:
                receive(index, outcome)

        rollouts = self._backend.generate(
            requests, seed_plan=plan, version=version, on_rollout=checked, expected=request.expected
        )
        seconds = time.monotonic() - start
        origin = {"servers": list(self._backend.base_urls), "sync": state.record(), "generate_s": seconds}
        return RolloutBatch(rollouts, sync, plan, origin)


def contiguous_chunks(n: int, servers: int) -> list[tuple[int, int]]:
    """Split requests 0..n-1 into at most one half-open range [start, end) for each server (semantics, section 11).

    Every server but the last gets ceil(n / servers) requests; a server that would get none has an empty range
    (start == end) and is not called. The list has one range for each server, in server order.

    >>> contiguous_chunks(7, 3)
    [(0, 3), (3, 6), (6, 7)]
    """
    size = -(-n // servers)
    return [(min(i * size, n), min((i + 1) * size, n)) for i in range(servers)]


class LazySequence(Sequence[T]):
    """A sequence of `length` items that `build` returns at each access, so that none stays in memory.

    >>> list(LazySequence(3, lambda index: index * index)[1:])
    [1, 4]
    """

    def __init__(self, length: int, build: Callable[[int], T]) -> None:
        self._length = length
        self._build = build

    def __len__(self) -> int:
        return self._length

    @overload
    def __getitem__(self, index: int) -> T: ...

    @overload
    def __getitem__(self, index: slice) -> list[T]: ...

    def __getitem__(self, index: int | slice) -> T | list[T]:
        if isinstance(index, slice):
            return [self._build(i) for i in range(*index.indices(self._length))]
        if not 0 <= index < self._length:
            raise IndexError(index)
        return self._build(index)


def readable(requests: Sequence[RolloutRequest], index: int) -> RolloutRequest | Refused:
    """Return a request if all its images can be read, else the fault: one bad image would fail a call of many."""
    try:
        return requests[index]
    except ImageError as error:
        return Refused(error)


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
