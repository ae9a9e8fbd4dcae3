"""From a record and its answer to the segment that is trained on (semantics, section 4)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import Any

from stage2_trainer.data.encode import Encoder, Prompt, PromptCache
from stage2_trainer.data.images import BLANK_SIDE, ImageError, blank_image
from stage2_trainer.data.messages import Prompts
from stage2_trainer.data.records import Record
from stage2_trainer.learner.matcher import Matched, Matcher, OverlongError, OverlongRule
from stage2_trainer.learner.padding_free_batch import Segment, place
from stage2_trainer.learner.rollout_metrics import bad_sample_stats, sample_stats
from stage2_trainer.matching import segment_meta, supervised_target, unsupervised_meta
from stage2_trainer.process.policy import rope_model
from stage2_trainer.rollouts.bad_samples import BadSample, BadSamples
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import Rollout

NOTHING = "{}"  # the answer of a zero-loss placeholder: a sample that is skipped or set aside
SAMPLE_FAULTS = (ImageError, OverlongError)  # of one sample; the others are fine

Chat = list[dict[str, Any]]
Supervised = tuple[Matched | BadSample, Segment]


@dataclass(frozen=True)
class SampleTools:
    """The tools of training and evaluation, the same for all samples. bad: notes the samples that they fail on."""

    encoder: Encoder
    cache: PromptCache
    prompts: Prompts
    matcher: Matcher
    bad: BadSamples


class Supervisor:
    """Turns answers into segments; `rope` has the model's `get_rope_index`.

    coord_loss: whether coordinates have their own loss, or the cross entropy of any other token.
    """

    def __init__(
        self, tools: SampleTools, model: Any, *, overlong: OverlongRule | None = None, coord_loss: bool = True
    ) -> None:
        self.tools = tools
        self._rope = rope_model(model)
        self._overlong = overlong
        self._coord_loss = coord_loss

    def chat(self, record: Record) -> Chat:
        """Return the messages of a record."""
        return self.tools.prompts.chat(record)

    def prompt(self, record: Record, chat: Chat, stopwatch: Stopwatch) -> Prompt:
        """Return the encoded prompt of a record, without pixels."""
        with stopwatch.measure("rollout_teacher_encode"):
            return self.tools.cache.prompt(record.images, lambda: chat)

    def supervise(self, record: Record, prompt: Prompt, rollout: Rollout, stopwatch: Stopwatch) -> Supervised:
        """Return a rollout, matched, with its segment. Raises one of SAMPLE_FAULTS, or what ends the run."""
        with stopwatch.measure("rollout_parse_match"):
            matched = self._match(record, prompt, rollout)
            if self._overlong is not None:
                matched = self._overlong.fit(matched, self.tools.matcher, self._encoded_len)
        with stopwatch.measure("rollout_teacher_encode"):
            return matched, self._segment(prompt, matched)

    def set_aside(self, record: Record, error: Exception) -> Supervised:
        """Return the bad sample, and the placeholder that takes its place."""
        return BadSample.from_error(record.sample_id, record.images, error), self._placeholder(record.sample_id)

    def set_aside_late(self, segment: Segment, error: Exception) -> Segment:
        """Note a segment whose pixels are lost, and return the placeholder that takes its place."""
        self.tools.bad.note_late(BadSample.from_error(segment.sample_id, segment.images, error))
        return self._placeholder(segment.sample_id)

    def _match(self, record: Record, prompt: Prompt, rollout: Rollout) -> Matched:
        self.tools.encoder.check_prompt(prompt, rollout.prompt_token_ids, rollout.server)
        return self.tools.matcher.match(record, rollout)

    def _encoded_len(self, matched: Matched) -> int:
        ends = len(self.tools.encoder.end_of_turn_ids)
        return len(matched.rollout.prompt_token_ids) + matched.target.train_len + ends

    def _segment(self, prompt: Prompt, matched: Matched) -> Segment:
        rollout, target = matched.rollout, matched.target
        answer = self.tools.matcher.vocab.encode(NOTHING) if matched.skipped else target.y_train_ids
        encoding = self.tools.encoder.teacher_forced(prompt, answer)
        length = len(encoding.input_ids)
        if matched.skipped:
            meta = unsupervised_meta(rollout.prompt_token_ids, len(answer), encoded_len=length)
        else:
            plain = not self._coord_loss
            meta = segment_meta(target, rollout.prompt_token_ids, encoded_len=length, plain_coords=plain)
        stats = sample_stats(matched, encoded_len=length)
        return Segment(place(encoding, self._rope), meta, stats, matched.record.images, matched.record.sample_id)

    def _placeholder(self, sample_id: str) -> Segment:
        """Return a zero-loss segment.

        It has an image, so that every part of the model takes part in its pass, as several processes require.
        """
        images = (blank_image(),)
        record = Record(0, sample_id, images, BLANK_SIDE, BLANK_SIDE)
        prompt = self.tools.cache.prompt(images, lambda: self.chat(record))
        answer = self.tools.matcher.vocab.encode(NOTHING)
        encoding = self.tools.encoder.teacher_forced(prompt, answer)
        length = len(encoding.input_ids)
        meta = unsupervised_meta(prompt.input_ids.tolist(), len(answer), encoded_len=length)
        return Segment(place(encoding, self._rope), meta, bad_sample_stats(), images, sample_id)


class TruthSupervisor(Supervisor):
    """Stage 1: the target is the record's whole ground truth, after the prompt as the learner encodes it.

    shuffled_by: the seed of an order of objects for each record and step; None = the record's own order.
    """

    def __init__(self, *arguments: Any, shuffled_by: int | None = None, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._shuffled_by = shuffled_by

    def _match(self, record: Record, prompt: Prompt, rollout: Rollout) -> Matched:
        own = replace(rollout, prompt_token_ids=prompt.input_ids.tolist())
        truth = record.ground_truth
        if self._shuffled_by is not None:
            objects = list(truth.objects)
            random.Random(f"{self._shuffled_by} {rollout.version} {record.sample_id}").shuffle(objects)
            truth = replace(truth, objects=tuple(objects))
        return Matched(record, own, supervised_target(truth, self.tools.matcher.vocab), from_truth=True)
