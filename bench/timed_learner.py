"""The learner's own step, whose parts take the time of an 8B on an H100 and compute nothing.

E-step, pipeline, rows, and the order of passes are the learner's; a record has no image, an answer no objects, and a
forward or backward pass is a sleep. All time is divided by `SCALE`, as that of the servers is.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import httpx
import numpy as np
import torch
from bench.slow_servers import SCALE
from torch import nn

from stage2_api.coordinates import BINS
from stage2_trainer.data.encode import Encoding, Prompt
from stage2_trainer.data.records import Record
from stage2_trainer.learner.early_gradients import EarlyGradients
from stage2_trainer.learner.estep import EStep
from stage2_trainer.learner.loss import LossParts
from stage2_trainer.learner.loss_targets import LossTargets
from stage2_trainer.learner.matcher import Matched
from stage2_trainer.learner.microsteps import MicroSteps
from stage2_trainer.learner.padding_free_batch import Placed, Segment
from stage2_trainer.learner.rollout_metrics import SampleStats
from stage2_trainer.learner.row_planner import StepRowPlanner
from stage2_trainer.learner.step_segments import SegmentWork, StepSegments
from stage2_trainer.learner.whole_step import Batch, RowTraining, train_step
from stage2_trainer.matching import CoordVocab, unsupervised_meta
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.rollouts.pipeline import PipelinedRollouts
from stage2_trainer.rollouts.synced_rollouts import SyncedRollouts
from stage2_trainer.sync.fleet.push import WeightSync
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import Rollout

ROW_TOKENS = 12_000
FORWARD_TOKENS_PER_S, BACKWARD_TOKENS_PER_S = 21_000.0, 10_500.0  # LoRA, gradient checkpointing, one learner GPU
OPTIMIZER_S = 0.3
SYNC_S = 0.6  # an adapter of 45 MB, merged by the servers
CHAT: list[dict[str, Any]] = [{"role": "user", "content": "List the objects."}]
NOTHING = torch.zeros(())
VOCAB = CoordVocab(np.arange(1, 1 + BINS), decode=str, encode=lambda text: [], size=1 + BINS)
NO_ONE = SampleStats(0, 0, False, 0, 0, 0, 0, 0, 0, 0, 0.0, 0)


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


class TimedSync:
    """A push of weights that takes its time; the servers learn the version alone."""

    def __init__(self, urls: Sequence[str]) -> None:
        self._urls = tuple(urls)
        self._client = httpx.Client(trust_env=False)

    def sync(self, model: nn.Module, *, version: int) -> SyncReport:
        """Give every server the version."""
        pause(SYNC_S)
        for url in self._urls:
            self._client.put(f"{url}/version", content=str(version)).raise_for_status()
        return SyncReport.create(version, SYNC_S, self._urls)


class TimedEStep(EStep):
    """The E-step without encoder and matcher: a segment is as long as its prompt and its answer."""

    def __init__(self, rollouts: SyncedRollouts | PipelinedRollouts) -> None:
        self._rollouts = rollouts
        self._thread = ThreadPoolExecutor(1, "encode")
        self._ahead: StepSegments | None = None

    def finish(self, step: StepSegments) -> SyncReport | None:
        """Wait for the last word of the servers."""
        step.matched()
        return step.sync

    def _segments(self, batches: Sequence[Sequence[Record]], model: nn.Module, global_step: int) -> StepSegments:
        return StepSegments(batches, WORK, self._thread, global_step=global_step)


def _chat(record: Record) -> list[dict[str, Any]]:
    return CHAT


def _prompt(record: Record, chat: list[dict[str, Any]], stopwatch: Stopwatch) -> Prompt:
    return Prompt(torch.empty(0), torch.empty(0), None, None)


def _segment(record: Record, prompt: Prompt, rollout: Rollout, stopwatch: Stopwatch) -> tuple[Matched, Segment]:
    length = tokens_of(rollout)
    ids = torch.zeros(length, dtype=torch.int64)
    encoding = Encoding(ids, ids, None, None, len(rollout.prompt_token_ids), len(rollout.token_ids))
    meta = unsupervised_meta(rollout.prompt_token_ids, len(rollout.token_ids), encoded_len=length)
    return Matched(record, rollout, None), Segment(Placed(encoding, ids), meta, NO_ONE)  # type: ignore[arg-type]


def _set_aside(record: Record, error: Exception) -> NoReturn:
    raise error


WORK = SegmentWork(_chat, _prompt, _segment, _set_aside)


def tokens_of(rollout: Rollout) -> int:
    """Return the length of a sequence that is trained on."""
    return len(rollout.prompt_token_ids) + len(rollout.token_ids)


def rollouts_of(backend: ServerBackend, seed: int) -> SyncedRollouts:
    """Return the learner's source of rollouts over these servers."""
    weights = WeightSync("full", full=TimedSync(backend.base_urls))
    return SyncedRollouts(backend, weights, seed=seed, wait=lambda: None, reporter=Reporter())


class TimedLearner:
    """The optimizer steps of a run on so many records each, by the learner's own loop."""

    def __init__(self, rollouts: SyncedRollouts | PipelinedRollouts, gpus: Gpus, records: int) -> None:
        self._gpus = gpus
        self._records = [Record(i, f"record-{i}", (), 1, 1, ()) for i in range(records)]
        self._ahead = isinstance(rollouts, PipelinedRollouts)
        self._micro_steps = MicroSteps(TimedEStep(rollouts), StepRowPlanner(ROW_TOKENS))

    def step(self, global_step: int) -> None:
        """Train on the rollouts of a step, and ask for those of the next one where they are asked for ahead."""
        batches = [[record] for record in self._records]
        following = batches if self._ahead else []
        self._micro_steps.begin(batches, following, global_step=global_step, uses=1)
        train_step(
            self._micro_steps.rows(nn.Module(), Stopwatch()),
            RowTraining(
                _lay_out,
                self._train,
                self._sums,
                lambda batch, parts: None,
                nullcontext,
                lambda place: nullcontext(),
                lambda: None,
            ),
            VOCAB,
            early=_TimedGradients(),
            all_in=lambda: self._micro_steps.all_in,
        )
        pause(OPTIMIZER_S)

    def _train(self, batch: Batch) -> LossParts:
        pause(self._gpus.train_s(batch["tokens"]))
        return _parts()

    def _sums(self, batch: Batch) -> tuple[LossParts, LossParts]:
        pause(self._gpus.early_s(batch["tokens"]))
        return _parts(), _parts()


class _TimedGradients(EarlyGradients):
    """Gradients of nothing, whose passes have been paid for."""

    def __init__(self) -> None:
        super().__init__([])

    def add(self, ordinary: torch.Tensor, coords: torch.Tensor) -> None:
        """Add nothing."""


def _lay_out(row: Sequence[Segment]) -> dict[str, Any]:
    none = torch.empty(0, dtype=torch.int64)
    return {"targets": LossTargets(none, none, none, none.bool(), 0, 1.0, 1.0), "tokens": sum(map(len, row))}


def _parts() -> LossParts:
    return LossParts(NOTHING, NOTHING, NOTHING, NOTHING, NOTHING, 0, 0, 0)


def steps_of(learner: TimedLearner, steps: Sequence[int]) -> Iterator[float]:
    """Yield the model's seconds of each of these steps."""
    for step in steps:
        start = time.monotonic()
        learner.step(step)
        yield (time.monotonic() - start) * SCALE
