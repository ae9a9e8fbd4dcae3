"""Evaluation: rollouts of held-out records, parsed and matched; no teacher forcing, no loss (semantics, section 13)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import TypeVar

import numpy as np
from torch import nn

from stage2_trainer.data.images import ImageError
from stage2_trainer.data.records import Record
from stage2_trainer.learner.step_record import Figures, evaluation_metrics
from stage2_trainer.learner.supervise import Matched, SampleTools, sample_stats, with_origin
from stage2_trainer.process.ranks import gathered, rank, world_size
from stage2_trainer.rollouts.bad_samples import BadSample
from stage2_trainer.rollouts.rollout_source import GenerationRequest, LazySequence, RolloutSource
from stage2_trainer.scores.answer_scores import AnswerScores, without_nan
from stage2_trainer.scores.image_counts import COUNTS
from stage2_trainer.scores.scored_image import ReadAnswer, from_parsed, scored_images
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import Outcome, Refused

T = TypeVar("T")
METRICS = {
    "AP": "ap",
    "AP50": "ap50",
    "AP75": "ap75",
    "AR": "ar",
    "f1_class@0.5": "f1_class_iou50",
    "precision_class@0.5": "precision_class_iou50",
    "recall_class@0.5": "recall_class_iou50",
    "desc_exact": "desc_exact",
    "duplicates": "duplicates",
    "objects_per_truth": "objects_per_truth",
    "counting_error": "counting_error",
    "parse_rate": "parse_rate",
    "loop_rate": "loop_rate",
}
"""Metrics of an evaluation, by the names of `stage2 evaluate`; trackers take no `@`."""


@dataclass(frozen=True)
class Evaluation:
    """An evaluation of the weights as they are now, by rollouts of training's own source; each process does a share.

    bias: what is added to the logits of tokens, by their ids.
    """

    tools: SampleTools
    rollouts: RolloutSource
    batch_size: int
    on_matched: Callable[[int, Sequence[Matched]], None]
    bias: Mapping[int, float] = field(default_factory=dict)

    def __call__(self, records: Sequence[Record], model: nn.Module, *, global_step: int) -> Figures:
        """Return `runtime`, `samples_per_second`, `steps_per_second`, `bad_samples` and `rollout_*`, without a prefix.

        Raises:
            BadStepError, Exception: as `BadSamples.note_held_out`.
        """
        start = perf_counter()
        asked = batches_of_rank(records, self.batch_size, shared=self.rollouts.shared)
        matched, found = self._generate_and_match(asked, model, global_step=global_step)
        bad = self.tools.bad.note_held_out(found, step=global_step, of=len(records))
        self.on_matched(global_step, matched)
        answers = {one.record.index: from_parsed(one.target.parsed, one.rollout.finish_reason) for one in matched}
        batches = sum(map(bool, asked))
        everywhere = gathered((perf_counter() - start, batches, [sample_stats(one) for one in matched], answers))
        seconds = max(taken for taken, *_ in everywhere)
        batches = batches if self.rollouts.shared else sum(own for _, own, *_ in everywhere)
        stats = [one for _, _, share, _ in everywhere for one in share]
        return {
            "runtime": seconds,
            "samples_per_second": len(records) / seconds,
            "steps_per_second": batches / seconds,
            "bad_samples": float(bad),
            **evaluation_metrics(stats, top_k=self.tools.matcher.options.candidate_top_k),
            **answer_metrics(records, {index: one for *_, share in everywhere for index, one in share.items()}),
        }

    def _generate_and_match(
        self, batches: Sequence[Sequence[Record]], model: nn.Module, *, global_step: int
    ) -> tuple[list[Matched], list[BadSample]]:
        """Return the matched samples of this process, all requested at once, and the bad ones.

        Where the source is shared, these are a share of the requests, which are those of all processes.
        """
        records = [record for batch in batches for record in batch]
        sizes = tuple(len(batch) for batch in batches)
        chats = LazySequence(len(records), lambda index: self.tools.prompts.chat(records[index]))
        images = [record.images for record in records]
        expected = [record.answer_length for record in records]
        request = GenerationRequest(
            model, chats, global_step, 0, Stopwatch(), sizes=sizes, images=images, expected=expected, bias=self.bias
        )
        generated = self.rollouts.generate(request)
        pairs = list(enumerate(zip(records, generated.rollouts, strict=True)))
        mine = share_of_rank(pairs) if self.rollouts.shared else pairs
        found = {index: self._match(*pair) for index, pair in mine}
        bad = [one for one in found.values() if isinstance(one, BadSample)]
        return with_origin(found, generated, self.tools.matcher.options), bad

    def _match(self, record: Record, outcome: Outcome) -> Matched | BadSample:
        if isinstance(outcome, Refused):
            return BadSample.from_error(record.sample_id, record.images, outcome.error)
        try:
            prompt = self.tools.cache.prompt(record.images, lambda: self.tools.prompts.chat(record))
        except ImageError as error:
            return BadSample.from_error(record.sample_id, record.images, error)
        self.tools.encoder.check_prompt(prompt, outcome.prompt_token_ids, outcome.server)
        return self.tools.matcher.match(record, outcome)


def share_of_rank(items: Sequence[T]) -> Sequence[T]:
    """Return this process's share of items that all processes have."""
    return items[rank() :: world_size()]


def batches_of_rank(records: Sequence[Record], batch_size: int, *, shared: bool) -> list[Sequence[Record]]:
    """Return this process's share of the records, or all where processes share requests.

    Every process has as many batches, the last perhaps empty.
    """
    mine, most = (records, len(records)) if shared else (share_of_rank(records), -(-len(records) // world_size()))
    return [mine[start : start + batch_size] for start in range(0, most, batch_size)]


def answer_metrics(records: Sequence[Record], answers: Mapping[int, ReadAnswer]) -> Figures:
    """Return the `rollout_*` scores of answers, without the evaluation's prefix; None for a score that is not defined.

    answers: by the index of their record; a record without one is left out. Records are scored in the order of indices:
    it counts where scores are equal.
    """
    answered = sorted((one for one in records if one.index in answers), key=lambda one: one.index)
    if not answered:
        return {f"rollout_{name}": 0.0 if source in COUNTS else None for source, name in METRICS.items()}
    images = scored_images(answered, [answers[one.index] for one in answered])
    figures = without_nan(AnswerScores.from_images(images).figures(np.ones(len(images))))
    return {f"rollout_{name}": figures[source] for source, name in METRICS.items()}
