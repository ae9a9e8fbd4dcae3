"""Rollouts of a GRPO run: the requests of all learner processes are made together, and each gets its own answers.

Every process calls `generate` equally often, and it ends alike in all: with answers, or with the first process's error.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.data.records import Record
from stage2_trainer.process.ranks import rank
from stage2_trainer.rollouts.first_process import ProcessExchange
from stage2_trainer.rollouts.rollout_source import GenerationRequest, LazySequence, RolloutSource
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import DraftCounts, Outcome, Rollout

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
    drafts: list[DraftCounts]


class SharedRollouts:
    """Rollouts of one source for the requests of all learner processes.

    source: what all of them ask together. records: those that are asked about, held-out ones included. chat: the
    messages of one.
    """

    def __init__(self, source: RolloutSource, records: Sequence[Record], chat: Chat, exchange: ProcessExchange) -> None:
        self._source = source
        self._records = records
        self._chat = chat
        self._exchange = exchange

    def generate(self, model: nn.Module, asks: Sequence[Ask], *, global_step: int, micro_step: int) -> SharedBatch:
        """Return the outcome of each request of this process, by the weights of `global_step`.

        Raises, in all processes:
            ServerError, ProofError: the error of the first process.
        """
        everyone = self._exchange.all(list(asks))
        whole = [(self._records[index], text) for part in everyone for index, text in part]
        chats = LazySequence(len(whole), lambda position: self._chat(*whole[position]))
        images, stopwatch = [record.images for record, _ in whole], Stopwatch()
        request = GenerationRequest(model, chats, global_step, micro_step, stopwatch, images=images)
        batch = self._source.generate(request)
        answered = [one for one in batch.rollouts if isinstance(one, Rollout)]
        tokens = sum(len(one.token_ids) for one in answered)
        drafts = DraftCounts.joined(map(DraftCounts.from_rollout, answered))
        start = sum(len(part) for part in everyone[: rank()])
        own = batch.rollouts[start : start + len(asks)]
        return SharedBatch(own, batch.sync, stopwatch.seconds, tokens, drafts)

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
