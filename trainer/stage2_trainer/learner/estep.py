"""The E-step: records to fresh rollouts to supervised, teacher-forced segments (semantics, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn

from stage2_trainer.data.encode import Prompt
from stage2_trainer.data.images import BLANK_SIDE, blank_image
from stage2_trainer.data.records import Record
from stage2_trainer.learner.matcher import Matched, with_origin
from stage2_trainer.learner.overlong import OverlongRule
from stage2_trainer.learner.padding_free_batch import Segment, place
from stage2_trainer.learner.rollout_metrics import bad_sample_stats, sample_stats
from stage2_trainer.learner.sample_tools import SampleTools
from stage2_trainer.learner.step_segments import SegmentWork, StepSegments
from stage2_trainer.matching import segment_meta, unsupervised_meta
from stage2_trainer.process.policy import rope_model
from stage2_trainer.rollouts.bad_samples import BadSample
from stage2_trainer.rollouts.pipeline import PipelinedRollouts
from stage2_trainer.rollouts.rollout_source import RolloutSource
from stage2_trainer.sync.fleet.report import SyncReport
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import FurtherAnswers, Rollout

NOTHING = "{}"  # the answer of a sample that is skipped or set aside: it has a place in a row, and teaches nothing


class EStep:
    """The E-step: segments of an optimizer step's records, whose rollouts are asked for all at once.

    coord_loss: whether coordinates have their own loss, or the cross entropy of any other token.
    further: answers that are asked for beside the one that each record is trained on.
    """

    def __init__(
        self,
        *,
        tools: SampleTools,
        rollouts: RolloutSource | PipelinedRollouts,
        on_matched: Callable[[int, Sequence[Matched]], None],
        overlong: OverlongRule | None = None,
        coord_loss: bool = True,
        further: FurtherAnswers | None = None,
    ) -> None:
        self._overlong = overlong
        self._further = further
        self._coord_loss = coord_loss
        self._encoder = tools.encoder
        self._cache = tools.cache
        self._prompts = tools.prompts
        self._matcher = tools.matcher
        self._bad = tools.bad
        self._rollouts = rollouts
        self._on_matched = on_matched
        self._thread = ThreadPoolExecutor(1, "encode")
        self._ahead: StepSegments | None = None

    def begin(
        self,
        batches: Sequence[Sequence[Record]],
        model: nn.Module,
        *,
        global_step: int,
        stopwatch: Stopwatch,
        following: Sequence[Sequence[Record]] = (),
    ) -> StepSegments:
        """Ask for the rollouts of a step, by the weights as they are; with a pipeline for those of the next one.

        Raises:
            ServerError: servers were lost, and did not come back.
        """
        if isinstance(self._rollouts, PipelinedRollouts):
            return self._begin_ahead(self._rollouts, batches, model, global_step, stopwatch, following)
        step = self._segments(batches, model, global_step)
        step.pending = self._rollouts.begin(step.request(model, stopwatch))
        return step

    def finish(self, step: StepSegments) -> SyncReport | None:
        """Tell of a step whose rollouts are all there; return the sync that came before them (None: not needed).

        Raises:
            TooManyBadSamples, BadStepError, Exception: as `BadSamples.note`.
        """
        matched, batch = step.matched()
        found = [one for one in matched if isinstance(one, BadSample)]
        self._bad.note(found, step=step.global_step, of=len(matched))
        self._on_matched(step.global_step, with_origin(matched, batch, self._matcher.options))
        return step.sync or batch.sync

    def _begin_ahead(
        self,
        rollouts: PipelinedRollouts,
        batches: Sequence[Sequence[Record]],
        model: nn.Module,
        global_step: int,
        stopwatch: Stopwatch,
        following: Sequence[Sequence[Record]],
    ) -> StepSegments:
        ahead, self._ahead = self._ahead, None
        current = ahead if ahead is not None and ahead.global_step == global_step else None
        step = current or self._segments(batches, model, global_step)
        request = step.request(model, stopwatch)
        step.sync = rollouts.synced(request)
        if current is None:
            step.pending = rollouts.ask(request, version=global_step)
        if following:
            self._ahead = self._segments(following, model, global_step + 1)
            self._ahead.pending = rollouts.ask(self._ahead.request(model, Stopwatch()), version=global_step)
        return step

    def _segments(self, batches: Sequence[Sequence[Record]], model: nn.Module, global_step: int) -> StepSegments:
        rope = rope_model(model)

        def make(record: Record, prompt: Prompt, rollout: Rollout, stopwatch: Stopwatch) -> tuple[Matched, Segment]:
            with stopwatch.measure("rollout_parse_match"):
                matched = self._match(record, prompt, rollout)
                if self._overlong is not None:
                    matched = self._overlong.fitted(matched, self._matcher, self._encoded_len)
            with stopwatch.measure("rollout_teacher_encode"):
                return matched, self._segment(prompt, matched, rope)

        def set_aside(record: Record, error: Exception) -> tuple[BadSample, Segment]:
            return BadSample.of(record.sample_id, record.images, error), self._stand_in(record.sample_id, rope)

        work = SegmentWork(self._prompts.chat, self._prompt, make, set_aside)
        return StepSegments(batches, work, self._thread, global_step=global_step, further=self._further)

    def _match(self, record: Record, prompt: Prompt, rollout: Rollout) -> Matched:
        self._encoder.check_prompt(prompt, rollout.prompt_token_ids, rollout.server)
        return self._matcher.match(record, rollout)

    def set_aside_late(self, segment: Segment, error: Exception, model: nn.Module) -> Segment:
        """Return what takes the place of a segment that can no longer be trained on, which is noted."""
        self._bad.note_late(BadSample.of(segment.sample_id, segment.images, error))
        return self._stand_in(segment.sample_id, rope_model(model))

    def _stand_in(self, sample_id: str, rope: Any) -> Segment:
        """Return a segment of which nothing is learnt.

        It has an image, so that every part of the model takes part in its pass, as several processes must have it.
        """
        images = (blank_image(),)
        record = Record(0, sample_id, images, BLANK_SIDE, BLANK_SIDE)
        prompt = self._cache.prompt(images, lambda: self._prompts.chat(record))
        answer = self._matcher.vocab.encode(NOTHING)
        encoding = self._encoder.teacher_forced(prompt, answer)
        length = len(encoding.input_ids)
        meta = unsupervised_meta(prompt.input_ids.tolist(), len(answer), encoded_len=length)
        return Segment(place(encoding, rope), meta, bad_sample_stats(), images, sample_id)

    def _prompt(self, record: Record, chat: list[dict[str, Any]], stopwatch: Stopwatch) -> Prompt:
        with stopwatch.measure("rollout_teacher_encode"):
            return self._cache.prompt(record.images, lambda: chat)

    def _encoded_len(self, matched: Matched) -> int:
        ends = len(self._encoder.end_of_turn_ids)
        return len(matched.rollout.prompt_token_ids) + matched.target.train_len + ends

    def _segment(self, prompt: Prompt, matched: Matched, rope: Any) -> Segment:
        rollout, target = matched.rollout, matched.target
        answer = self._matcher.vocab.encode(NOTHING) if matched.skipped else target.y_train_ids
        encoding = self._encoder.teacher_forced(prompt, answer)
        length = len(encoding.input_ids)
        if matched.skipped:
            meta = unsupervised_meta(rollout.prompt_token_ids, len(answer), encoded_len=length)
        else:
            plain = not self._coord_loss
            meta = segment_meta(target, rollout.prompt_token_ids, encoded_len=length, plain_coords=plain)
        stats = sample_stats(matched, encoded_len=length)
        return Segment(place(encoding, rope), meta, stats, matched.record.images, matched.record.sample_id)
