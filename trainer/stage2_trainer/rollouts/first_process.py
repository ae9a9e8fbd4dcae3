"""Rollouts of several learner processes from servers: the first process syncs and asks, all get the same answers.

Every process makes the same requests in the same order, and each ends alike in all: with answers, or with the first
process's error. A process that dies closes its connections, so the next exchange fails at once in the others: they use
gloo groups of their own, which have no time-out that a slow server could exceed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import Future, wait
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from queue import SimpleQueue
from typing import Any, TypeVar

from torch import distributed, nn

from stage2_api.errors import ConfigError
from stage2_trainer.model.gathered_weights import GatheredWeights
from stage2_trainer.packing import PackingError
from stage2_trainer.process.background import in_background
from stage2_trainer.process.interrupt import Interrupt, Interrupted
from stage2_trainer.process.ranks import gathered, host_group, rank, world_size
from stage2_trainer.rollouts.rollout_source import Answers, GenerationRequest, RolloutBatch, RolloutSource
from stage2_trainer.sync.fleet.report import ProofError, SyncReport
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Outcome

PART_S = 0.2  # seconds over which answers are collected before they go to the other processes
SENT = (ServerError, ProofError, ConfigError, PackingError, Interrupted)
"""Errors that a person or another try can fix: all processes raise them. Any other ends its own process, and with it
the rest."""

T = TypeVar("T")
Arrived = SimpleQueue[tuple[int, Outcome]]


@dataclass(frozen=True)
class _Step:
    """A step that the other processes take with the first one."""

    arguments: tuple[Any, ...]


class ProcessExchange:
    """A group in which learner processes exchange objects. One process needs none."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._group = host_group()

    def from_first(self, make: Callable[[], Any], whole: GatheredWeights | None = None) -> Any:
        """Run `make` in the first process; return its result, or raise its error (SENT), in all processes.

        whole: the weights that `make` gathers `together` with the others. Afterwards all processes release them: an
        error that is not sent ends the first one without, for the others may wait for it in a gather.
        """
        found = self.sent(self._made(make))
        while isinstance(found, _Step):
            assert whole is not None, "the first process takes no step alone"
            whole.follow(*found.arguments)
            found = self.sent(None)
        if whole is not None:
            whole.let_go()
        return _raised(found)

    @contextmanager
    def together(self, *step: Any) -> Iterator[None]:
        """In the first process: let the others `follow` a step while the block takes it; SIGTERM waits for its end."""
        with self._interrupt.held():
            self.sent(_Step(step))
            yield

    def one_each(self, make: Callable[[], list[Any]]) -> Any:
        """Run `make` as `from_first` does, but give each process only the result of its own rank."""
        made = self._made(make)
        if self._group is None:
            return _raised(made)[0]
        parts = [made] * world_size() if rank() or isinstance(made, BaseException) else made
        own: list[Any] = [None]
        distributed.scatter_object_list(own, parts if rank() == 0 else None, src=0, group=self._group)
        return _raised(own[0])

    def shares(self, make: Callable[[], T]) -> list[T]:
        """Run `make` in all processes; return what all made, in rank order, in the first; the others get nothing.

        The first error (SENT) of any process is raised in all of them.
        """
        made: Any = None
        failed: BaseException | None = None
        try:
            made = make()
        except SENT as error:
            failed = error
        for one in self.all(failed):
            raise one
        if self._group is None:
            return [made]
        values: list[Any] = [None] * world_size()
        distributed.gather_object(made, values if rank() == 0 else None, dst=0, group=self._group)
        return [] if rank() else values

    def all(self, value: Any) -> list[Any]:
        """Return the values of all processes, in rank order; None is left out."""
        return gathered(value, self._group)

    def sent(self, value: Any) -> Any:
        """Return the first process's value, in all processes."""
        values = [value]
        if self._group is not None:
            distributed.broadcast_object_list(values, src=0, group=self._group)
        return values[0]

    def _made(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns in the first process, or its error; None in the others."""
        if rank():
            return None
        try:
            with self._interrupt.stoppable(others_wait=True):
                return make()
        except SENT as error:
            return error


def _raised(found: Any) -> Any:
    if isinstance(found, BaseException):
        raise found
    return found


class FirstProcessRollouts(RolloutSource):
    """Rollouts of the first process's source, for all processes.

    connect: returns that source; the first process alone calls it. whole: how that source reads weights that ZeRO-3
    spreads over the processes.
    """

    shared = True

    def __init__(
        self, connect: Callable[[], RolloutSource], interrupt: Interrupt, *, whole: GatheredWeights | None = None
    ) -> None:
        self._interrupt = interrupt
        self._exchange = ProcessExchange(interrupt)
        self._streams = ProcessExchange(interrupt)  # another group: its thread and this one do not wait for each other
        self._last: Future[RolloutBatch] | None = None
        self._whole = whole
        if whole is not None:
            whole.together = self._exchange.together
        connected: list[RolloutSource] = []

        def describe() -> tuple[Any, Any]:
            connected.append(connect())
            return connected[0].sync_state, connected[0].engines

        self.sync_state, self.engines = self._exchange.from_first(describe)
        self._source = connected[0] if connected else None

    def sync(self, model: nn.Module, *, global_step: int, stopwatch: Stopwatch) -> SyncReport | None:
        """Push the weights of a step if they moved. All processes call it. Raises as the first process's source."""
        source = self._source
        waits = nullcontext() if source else stopwatch.measure("sync")
        with waits:
            report: SyncReport | None = self._exchange.from_first(
                lambda: source and source.sync(model, global_step=global_step, stopwatch=stopwatch), self._whole
            )
        return report

    def ask(self, request: GenerationRequest) -> Answers:
        """Request one rollout for each chat; all processes pass the same chats, and each gets all answers."""
        arrived: Arrived = SimpleQueue()
        own: Answers | None = None
        if self._source is not None:
            asked = replace(request, on_rollout=lambda index, outcome: arrived.put((index, outcome)))
            own = self._source.ask(asked)

        def retry() -> None:
            assert own is not None, "the first process asks"
            own.retry()

        def ask(error: ServerError | None, tries: int) -> Future[RolloutBatch]:
            if error is not None:
                self._exchange.from_first(retry, self._whole)
            self._last = in_background(self._receive, own, arrived, request, after=self._last)
            return self._last

        return Answers(ask)

    def _receive(
        self, own: Answers | None, arrived: Arrived, request: GenerationRequest, *, after: Future[RolloutBatch] | None
    ) -> RolloutBatch:
        """Return the answers as the first process has them, and report each as it comes; runs in a thread."""
        if after is not None:
            wait({after})
        while True:
            part, end = self._streams.sent(self._part(own, arrived) if own else None)
            for index, outcome in part:
                if request.on_rollout is not None:
                    request.on_rollout(index, outcome)
            if end is not None:
                batch: RolloutBatch = _raised(end)
                return batch

    def _part(self, own: Answers, arrived: Arrived) -> tuple[list[tuple[int, Outcome]], Any]:
        """Return what has arrived since the last part, and all answers or an error where that is the end."""
        done = own.done_within(PART_S)
        part = [arrived.get_nowait() for _ in range(arrived.qsize())]  # nobody else takes from it
        if self._interrupt.requested:
            return part, Interrupted("asked to stop (SIGTERM)")
        try:
            return part, own.outcome() if done else None
        except SENT as error:
            return part, error
