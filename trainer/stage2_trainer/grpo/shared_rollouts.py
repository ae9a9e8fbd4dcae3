"""Rollouts for several learner processes over one connection: the first process syncs and asks, all get their answers.

Every process calls `generate` equally often, and leaves it in the same way: with its answers, or with the error that
the first one met. A process that dies closes its connections, and the others' next exchange fails at once: they meet in
a gloo group of their own, which has no patience to run out while a server generates.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import distributed, nn

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.data.records import Record
from stage2_trainer.process.interrupt import Interrupt, Interrupted
from stage2_trainer.process.ranks import gathered, host_group, rank
from stage2_trainer.rollouts.rollout_source import GenerationRequest, LazySequence, RolloutSource
from stage2_trainer.sync.fleet.report import DigestError, ProofError, SyncReport
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Outcome, Refused, Rollout

PROMPT_PATH = "prompt_token_ids"

Ask = tuple[int, str]  # a record by its position, and the text of the user's turn
Chat = Callable[[Record, str], list[dict[str, Any]]]


@dataclass(frozen=True)
class SharedBatch:
    """What came of this process's requests, in order, and what the first process did for all.

    tokens: of the answers to all processes.
    """

    outcomes: list[Outcome]
    sync: SyncReport | None
    seconds: dict[str, float]
    tokens: int


@dataclass(frozen=True)
class _Failure:
    """An error of the first process, as it travels."""

    kind: str
    message: str

    def error(self) -> Exception | Interrupted:
        if self.kind == Interrupted.__name__:
            return Interrupted(self.message)
        if self.kind == ServerError.__name__:
            return ServerError("of learner process 0", "rollout", self.message)
        if self.kind == ProofError.__name__:
            return ProofError(self.message)
        if self.kind == DigestError.__name__:
            return DigestError(self.message)
        problem = Problem("learner process 0", None, self.message, "see what that process says")
        return ConfigError([problem])


class ProcessExchange:
    """The group in which learner processes exchange rollouts. One process needs none."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._group = host_group()

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Return what `make` returns in the first process, in all of them; the error that it raises there, in all.

        Errors that a person or another try can mend travel, and so does a request to stop; any other ends the first
        process, and with it the rest.
        """
        made: list[Any] = [None]
        first_error: Exception | Interrupted | None = None
        if rank() == 0:
            try:
                with self._interrupt.stoppable(others_wait=True):
                    made = [make()]
            except (ServerError, ProofError, ConfigError, Interrupted) as error:
                first_error, made = error, [_Failure(type(error).__name__, str(error))]
        if self._group is not None:
            distributed.broadcast_object_list(made, src=0, group=self._group)
        if first_error is not None:
            raise first_error
        if isinstance(made[0], _Failure):
            raise made[0].error()
        return made[0]

    def all(self, value: Any) -> list[Any]:
        """Return what every process passed, in rank order; None is left out."""
        return gathered(value, self._group)


class SharedRollouts:
    """Rollouts of one source for all learner processes. `source` is that of the first process, None elsewhere.

    records: those that are asked about, held-out ones included. chat: the messages of one.
    """

    def __init__(
        self, source: RolloutSource | None, records: Sequence[Record], chat: Chat, exchange: ProcessExchange
    ) -> None:
        self._source = source
        self._records = records
        self._chat = chat
        self._exchange = exchange

    def generate(self, model: nn.Module, asks: Sequence[Ask], *, global_step: int, micro_step: int) -> SharedBatch:
        """Return what came of each ask of this process; rollouts are made by the weights of `global_step`.

        Raises, in all processes:
            ServerError, ProofError: what the first process met.
        """
        everyone = self._exchange.all(list(asks))

        def make() -> SharedBatch:
            assert self._source is not None, "the first process has one"
            whole = [(self._records[index], text) for part in everyone for index, text in part]
            chats = LazySequence(len(whole), lambda position: self._chat(*whole[position]))
            images, stopwatch = [record.images for record, _ in whole], Stopwatch()
            request = GenerationRequest(model, chats, global_step, micro_step, stopwatch, images=images)
            batch = self._source.generate(request)
            tokens = sum(len(one.token_ids) for one in batch.rollouts if isinstance(one, Rollout))
            return SharedBatch([_sent(one) for one in batch.rollouts], batch.sync, stopwatch.seconds, tokens)

        whole: SharedBatch = self._exchange.from_first(make)
        start = sum(len(part) for part in everyone[: rank()])
        return replace(whole, outcomes=[_received(one) for one in whole.outcomes[start : start + len(asks)]])

    def check_prompts(self, outcomes: Sequence[Outcome], prompt_ids: Sequence[Sequence[int]]) -> None:
        """Raise ConfigError, in all processes, when a server read a prompt of any of them as other ids."""
        problems = [
            Problem(
                f"server {one.server} {PROMPT_PATH}",
                f"{len(one.prompt_token_ids)} ids",
                f"the learner reads the same prompt as {len(ids)} other ids",
                "give server and learner the same model directory (tokenizer, chat template, pixel limits)",
            )
            for one, ids in zip(outcomes, prompt_ids, strict=True)
            if isinstance(one, Rollout) and list(one.prompt_token_ids) != list(ids)
        ]
        found: list[list[Problem]] = self._exchange.all(problems[:1])
        if any(found):
            raise ConfigError([problem for part in found for problem in part])


def _sent(outcome: Outcome) -> Any:
    """Return an outcome as it travels: the errors of requests have constructors of their own."""
    if isinstance(outcome, Refused):
        return _Failure(type(outcome.error).__name__, str(outcome.error))
    return outcome


def _received(sent: Any) -> Outcome:
    if not isinstance(sent, _Failure):
        outcome: Outcome = sent
        return outcome
    error = sent.error()
    assert isinstance(error, Exception), "no request is refused by being asked to stop"
    return Refused(error)
