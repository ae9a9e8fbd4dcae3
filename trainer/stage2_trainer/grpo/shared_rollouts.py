"""Rollouts for several learner processes over one connection: the first process syncs and asks, all get their answers.

Every process calls `generate` equally often, and it ends alike in all: with answers, or with the first process's error.
A process that dies closes its connections, so the next exchange fails at once in the others: they use a gloo group of
their own, which has no time-out that a slow server could exceed.
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
from stage2_trainer.sync.fleet.report import ProofError, SyncReport
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.errors import ServerError
from stage2_trainer.wire.requests import Outcome, Rollout, draft_figures

PROMPT_PATH = "prompt_token_ids"

Ask = tuple[int, str]  # a record by its position, and the text of the user's turn
Chat = Callable[[Record, str], list[dict[str, Any]]]


@dataclass(frozen=True)
class SharedBatch:
    """The outcomes of this process's requests, in order; sync, seconds, tokens, drafts of all processes together."""

    outcomes: list[Outcome]
    sync: SyncReport | None
    seconds: dict[str, float]
    tokens: int
    drafts: dict[str, float]


class ProcessExchange:
    """The group in which learner processes exchange rollouts. One process needs none."""

    def __init__(self, interrupt: Interrupt) -> None:
        self._interrupt = interrupt
        self._group = host_group()

    def from_first(self, make: Callable[[], Any]) -> Any:
        """Run `make` in the first process; return its result, or raise its error, in all processes.

        Errors that a person or another try can fix are sent, and so is a request to stop; any other error ends the
        first process, and with it the rest.
        """
        result: list[Any] = [None]
        if rank() == 0:
            try:
                with self._interrupt.stoppable(others_wait=True):
                    result = [make()]
            except (ServerError, ProofError, ConfigError, Interrupted) as error:
                result = [error]
        if self._group is not None:
            distributed.broadcast_object_list(result, src=0, group=self._group)
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def all(self, value: Any) -> list[Any]:
        """Return the values of all processes, in rank order; None is left out."""
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
        """Return the outcome of each request of this process, by the weights of `global_step`.

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
            answered = [one for one in batch.rollouts if isinstance(one, Rollout)]
            tokens = sum(len(one.token_ids) for one in answered)
            drafts = draft_figures(
                generated=tokens,
                drafted=sum(one.drafted for one in answered),
                accepted=sum(one.accepted for one in answered),
            )
            return SharedBatch(batch.rollouts, batch.sync, stopwatch.seconds, tokens, drafts)

        whole: SharedBatch = self._exchange.from_first(make)
        start = sum(len(part) for part in everyone[: rank()])
        return replace(whole, outcomes=whole.outcomes[start : start + len(asks)])

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
