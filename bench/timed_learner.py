"""The learner's own step, whose parts take the time of an 8B on an H100 and compute nothing.

E-step, pipeline, rows, and the order of passes are the learner's; a record has no image, an answer no objects, and a
forward or backward pass is a sleep. All time is divided by `SCALE`, as that of the servers is.
"""

from __future__ import annotations

import os
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, cast

import numpy as np
import torch
from bench.slow_servers import SCALE
from torch import nn

from stage2_api.coordinates import BINS
from stage2_trainer.data.encode import Encoding, Prompt
from stage2_trainer.data.records import Record
from stage2_trainer.learner.estep import EStep, Teaching
from stage2_trainer.learner.loss import LossParts, LossTargets
from stage2_trainer.learner.padding_free_batch import Placed, Segment
from stage2_trainer.learner.passes import EarlyGradients, RowPasses, RowTensors
from stage2_trainer.learner.rows import RowGroup, RowPlanner, SharedRowPlanner, StepRowPlanner
from stage2_trainer.learner.step import CurrentStep, train_step
from stage2_trainer.learner.step_record import SampleStats
from stage2_trainer.learner.supervise import Matched, Matcher, SampleTools, Supervisor
from stage2_trainer.matching import CoordVocab, GTObject, MatchOptions, unsupervised_meta
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.process.ranks import world_size
from stage2_trainer.rollouts.bad_samples import BadSamples
from stage2_trainer.rollouts.first_process import ProcessExchange
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.rollouts.rollout_source import RolloutSource, ServerRollouts
from stage2_trainer.sync.fleet.push import WeightSync
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import SilentLog
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.credentials import trust
from stage2_trainer.wire.requests import Rollout

ROW_TOKENS = 12_000
FORWARD_TOKENS_PER_S, BACKWARD_TOKENS_PER_S = 21_000.0, 10_500.0  # LoRA, gradient checkpointing, one learner GPU
OPTIMIZER_S = 0.3
SYNC_S = 0.6  # an adapter of 45 MB, merged by the servers
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "List the objects."}]
NOTHING = torch.zeros(())
VOCAB = CoordVocab(np.arange(1, 1 + BINS), decode=str, encode=lambda text: [], size=1 + BINS)
NO_ONE = SampleStats()
Objects = tuple[GTObject, ...]


def pause(seconds: float) -> None:
    """Let the model's seconds pass."""
    time.sleep(seconds / SCALE)


@dataclass(frozen=True)
class Gpus:
    """The learner's GPUs, which share each row; seconds of passes over so many tokens."""

    count: int

    def forward_s(self, tokens: int) -> float:
        """Return those of a forward pass."""
        return tokens / FORWARD_TOKENS_PER_S / self.count

    def backward_s(self, tokens: int) -> float:
        """Return those of a backward pass."""
        return tokens / BACKWARD_TOKENS_PER_S / self.count

    def train_s(self, tokens: int) -> float:
        """Return those of one pass each."""
        return self.forward_s(tokens) + self.backward_s(tokens)

    def early_s(self, tokens: int) -> float:
        """Return those of a row that is trained on before the step's counts are known."""
        return self.train_s(tokens) + self.backward_s(tokens)


class TimedPush:
    """A push of weights that takes its time; the servers learn the version alone, by the first of them."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)

    def push(self, model: nn.Module, *, version: int) -> SyncReport:
        """Give every server the version."""
        pause(SYNC_S)
        request = urllib.request.Request(f"{self._urls[0]}/version", data=str(version).encode(), method="PUT")
        urllib.request.urlopen(request, context=trust(self._urls[0], os.environ)).close()
        return SyncReport.create(version, SYNC_S, self._urls)


class TimedSupervisor(Supervisor):
    """A supervisor without encoder and matcher: a segment is as long as its prompt and its answer."""

    def __init__(self) -> None:
        unused: Any = None
        matcher = Matcher(VOCAB, MatchOptions(), ())
        self.tools = SampleTools(unused, unused, unused, matcher, BadSamples(0, SilentLog()))

    def chat(self, record: Record) -> list[dict[str, Any]]:
        """Return the same messages for each record."""
        return CHAT

    def prompt(self, record: Record, chat: list[dict[str, Any]], stopwatch: Stopwatch) -> Prompt:
        """Return an empty prompt."""
        return Prompt(torch.empty(0), torch.empty(0), None, None)

    def supervise(
        self, record: Record, prompt: Prompt, rollout: Rollout, stopwatch: Stopwatch
    ) -> tuple[Matched, Segment]:
        """Return a segment of which nothing is supervised."""
        length = tokens_of(rollout)
        ids = torch.zeros(length, dtype=torch.int64)
        encoding = Encoding(ids, ids, None, None, len(rollout.prompt_token_ids), len(rollout.token_ids))
        meta = unsupervised_meta(rollout.prompt_token_ids, len(rollout.token_ids), encoded_len=length)
        return Matched(record, rollout, None), Segment(Placed(encoding, ids), meta, NO_ONE)  # type: ignore[arg-type]


def tokens_of(rollout: Rollout) -> int:
    """Return the length of a sequence that is trained on."""
    return len(rollout.prompt_token_ids) + len(rollout.token_ids)


def rollouts_of(backend: ServerBackend, seed: int) -> ServerRollouts:
    """Return the learner's source of rollouts over these servers."""
    weights = WeightSync("full", full=TimedPush(backend.base_urls).push)
    return ServerRollouts(backend, weights, seed=seed, wait=lambda error: None, reporter=Reporter())


class TimedLearner:
    """The optimizer steps of a run on so many records each, by the learner's own loop; its passes are sleeps.

    gpus: of this process. pipelined: each step's rollouts are requested while the step before it trains. truth: the
    true objects of each record of a step, by which requests are divided. If the source is shared by several processes,
    so are the rows.
    """

    def __init__(
        self,
        rollouts: RolloutSource,
        gpus: Gpus,
        records: int,
        *,
        pipelined: bool = False,
        truth: Callable[[int], Sequence[Objects]] | None = None,
    ) -> None:
        self._gpus = gpus
        self._truth = truth or (lambda step: [()] * records)
        self._pipelined = pipelined
        self._shared = rollouts.shared
        planner: RowPlanner = StepRowPlanner(ROW_TOKENS)
        if self._shared:
            planner = SharedRowPlanner(planner, ProcessExchange(Interrupt(world_size())))
        estep = EStep(nn.Module(), Teaching(rollouts, TimedSupervisor()), shared=self._shared)
        self._step = CurrentStep(estep, planner)

    def step(self, global_step: int) -> None:
        """Train on the rollouts of a step; if pipelined, request those of the next step first."""
        following = self._batches(global_step + 1) if self._pipelined else []
        self._step.set_batches(self._batches(global_step), following, global_step=global_step, uses=1)
        train_step(self._step, cast(RowPasses, self), Stopwatch(), mean="step", divisor=1)
        pause(OPTIMIZER_S)

    def _batches(self, step: int) -> list[list[Record]]:
        return [[Record(i, f"record-{i}", (), 1, 1, objects)] for i, objects in enumerate(self._truth(step))]

    @cached_property
    def early(self) -> EarlyGradients | None:
        """Gradients of nothing; None where several processes share the rows, which then wait for all answers."""
        return None if self._shared else EarlyGradients([])

    def lay_out(self, group: RowGroup) -> dict[str, Any]:
        """Return the length of a row, and targets of nothing."""
        none = torch.empty(0, dtype=torch.int64)
        targets = LossTargets(none, none, none, none.bool(), 0, 1.0, 1.0)
        return {"targets": targets, "tokens": sum(map(len, group.rows[0]))}

    def train_rows(self, group: RowGroup, batch: RowTensors, *, last: bool) -> LossParts:
        """Take the time of a forward and a backward pass."""
        pause(self._gpus.train_s(batch["tokens"]))
        return _parts()

    def train_rows_early(self, group: RowGroup, batch: RowTensors) -> LossParts:
        """Take the time of a forward pass and two backward passes."""
        pause(self._gpus.early_s(batch["tokens"]))
        return _parts()


def _parts() -> LossParts:
    return LossParts(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, 0, 0, 0)


def steps_of(learner: TimedLearner, steps: Sequence[int]) -> Iterator[float]:
    """Yield the model's seconds of each of these steps."""
    for step in steps:
        start = time.monotonic()
        learner.step(step)
        yield (time.monotonic() - start) * SCALE
