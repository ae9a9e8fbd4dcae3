"""Turn a record and its rollout into a segment: parse, match, build the target, shorten, encode.

Source: semantics, section 4.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from stage2_api.rollout_matching import Overlong
from stage2_trainer.data.encode import Encoder, Prompt, PromptCache
from stage2_trainer.data.images import BLANK_SIDE, ImageError, blank_image
from stage2_trainer.data.messages import Prompts
from stage2_trainer.data.records import Record
from stage2_trainer.learner.padding_free_batch import Segment, with_positions
from stage2_trainer.learner.step_record import SampleStats
from stage2_trainer.matching import (
    CoordVocab,
    MatchedTarget,
    MatchOptions,
    build_target,
    cut_before,
    ground_truth_target,
    object_ends,
    segment_meta,
    unsupervised_meta,
)
from stage2_trainer.model.policy import rope_model
from stage2_trainer.packing.rows import PackingError, over_cap
from stage2_trainer.rollouts.bad_samples import BadSample, BadSamples
from stage2_trainer.rollouts.rollout_source import RolloutBatch
from stage2_trainer.telemetry.timeline import Stopwatch
from stage2_trainer.wire.requests import Rollout

CLOSE_IOU = 0.5  # the overlap that COCO's AP50 asks for
NOTHING = "{}"  # the target text of a zero-loss placeholder, for a sample that is skipped or set aside
Chat = list[dict[str, Any]]


@dataclass(frozen=True)
class Matched:
    """One record, the rollout that answers it, and the target that matching builds from both.

    kept: the number of answer tokens in use, where the answer was too long for a packed row; None = all. skipped: the
    run does not train on it. from_truth: nothing was generated, the target is the ground truth itself. origin: the
    rollout's seeds, servers, sync and options, for the log.
    """

    record: Record
    rollout: Rollout
    target: MatchedTarget
    kept: int | None = None
    skipped: bool = False
    from_truth: bool = False
    origin: Mapping[str, Any] = field(default_factory=dict)


class Matcher:
    """Matches rollouts to the ground truth of their records; an answer is cut before any of its `vision_ids`."""

    def __init__(self, vocab: CoordVocab, options: MatchOptions, vision_ids: Collection[int]) -> None:
        self.vocab = vocab
        self.options = options
        self._vision_ids = frozenset(vision_ids)

    def match(self, record: Record, rollout: Rollout, *, kept: int | None = None) -> Matched:
        """Parse the rollout, or its first `kept` tokens, match its objects, and build the training target."""
        ids = cut_before(rollout.token_ids, self._vision_ids)[:kept]
        target = build_target(ids, record.ground_truth, self.vocab, self.options)
        return Matched(record, rollout, target, kept)

    def object_ends(self, rollout: Rollout) -> tuple[int, ...]:
        """Return the number of tokens up to the end of each object of a rollout, in order."""
        return object_ends(cut_before(rollout.token_ids, self._vision_ids), self.vocab)


def with_origin(
    samples: Mapping[int, Matched | BadSample], batch: RolloutBatch, options: MatchOptions
) -> list[Matched]:
    """Return the matched samples with their origin: seeds, servers, sync and matching options.

    samples: by the places of their requests in the batch.
    """
    shared = {**batch.origin, "options": asdict(options)}
    found = []
    for index, one in samples.items():
        if isinstance(one, Matched):
            micro_step, place = batch.plan.position(index)
            seeds = {"index": place, "micro_step": micro_step, "seed_base": batch.plan.seed(index) - place}
            found.append(replace(one, origin={**seeds, **shared}))
    return found


class OverlongError(PackingError):
    """One sample's segment is longer than a row."""


@dataclass(frozen=True)
class OverlongRule:
    """A rule for answers whose segments would exceed `length` tokens (`post_rollout_overlong`).

    what: `cut`, `skip`, `error` (packing ends the run), or None (the sample is set aside as bad).
    """

    length: int
    what: Overlong | None

    def fit(self, matched: Matched, matcher: Matcher, encoded_len: Callable[[Matched], int]) -> Matched:
        """Return a rollout that fits a row: unchanged, cut after one of its objects, or marked as skipped.

        With `error` it stays unchanged, and packing refuses it.

        Raises:
            OverlongError: it does not fit, and `what` is None.
        """
        if self.what == "error" or encoded_len(matched) <= self.length:
            return matched
        if self.what is None:
            raise OverlongError(over_cap(encoded_len(matched), self.length))
        cut = self._cut(matched, matcher, encoded_len) if self.what == "cut" else None
        return cut or replace(matched, skipped=True)

    def _cut(self, matched: Matched, matcher: Matcher, encoded_len: Callable[[Matched], int]) -> Matched | None:
        """Remove objects from the end until the segment fits; None: the ground truth alone is too long.

        Cutting one half of a matched pair appends its ground-truth object as a miss, so it may take several rounds.
        """
        ends = (0, *matcher.object_ends(matched.rollout))
        kept, left = len(matched.rollout.token_ids), len(ends)
        while left:
            excess = encoded_len(matched) - self.length
            left = next((k for k in range(left - 1, -1, -1) if ends[k] <= kept - excess), 0)
            kept = ends[left]
            matched = matcher.match(matched.record, matched.rollout, kept=kept)
            if encoded_len(matched) <= self.length:
                return matched
        return None


SAMPLE_FAULTS = (ImageError, OverlongError)  # of one sample; the others are fine
Supervised = tuple[Matched | BadSample, Segment]


@dataclass(frozen=True)
class SampleTools:
    """The tools of training and evaluation, the same for all samples. bad: notes the samples they fail on."""

    encoder: Encoder
    cache: PromptCache
    prompts: Prompts
    matcher: Matcher
    bad: BadSamples


class Supervisor:
    """Turns answers into segments. model: provides `get_rope_index`.

    coord_loss: whether coordinates have their own loss, or the cross entropy of any other token.
    """

    from_truth = False
    """Whether it teaches the ground truth, and nothing is generated."""

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
        """Return a matched rollout with its segment. Raises one of SAMPLE_FAULTS, or an error that ends the run."""
        with stopwatch.measure("rollout_parse_match"):
            matched = self._match(record, prompt, rollout)
            if self._overlong is not None:
                matched = self._overlong.fit(matched, self.tools.matcher, self._encoded_len)
        with stopwatch.measure("rollout_teacher_encode"):
            return matched, self._segment(prompt, matched)

    def set_aside(self, record: Record, error: Exception) -> Supervised:
        """Return the bad sample and its placeholder."""
        return BadSample.from_error(record.sample_id, record.images, error), self.placeholder(record.sample_id)

    def placeholder(self, sample_id: str) -> Segment:
        """Return a zero-loss segment; its image makes every part of the model run, as several processes require."""
        images = (blank_image(),)
        record = Record(0, sample_id, images, BLANK_SIDE, BLANK_SIDE)
        return self._zero_loss(self.tools.cache.prompt(images, lambda: self.chat(record)), images, sample_id)

    def _match(self, record: Record, prompt: Prompt, rollout: Rollout) -> Matched:
        self.tools.encoder.check_prompt(prompt, rollout.prompt_token_ids, rollout.server)
        return self.tools.matcher.match(record, rollout)

    def _encoded_len(self, matched: Matched) -> int:
        ends = len(self.tools.encoder.end_of_turn_ids)
        return len(matched.rollout.prompt_token_ids) + matched.target.train_len + ends

    def _segment(self, prompt: Prompt, matched: Matched) -> Segment:
        record, prompt_ids = matched.record, matched.rollout.prompt_token_ids
        if matched.skipped:
            skipped = self._zero_loss(prompt, record.images, record.sample_id)
            return replace(skipped, stats=sample_stats(matched))
        encoding = self.tools.encoder.teacher_forced(prompt, matched.target.y_train_ids)
        length, plain = len(encoding.input_ids), not self._coord_loss
        meta = segment_meta(matched.target, prompt_ids, encoded_len=length, plain_coords=plain)
        stats = sample_stats(matched, encoded_len=length)
        return Segment(with_positions(encoding, self._rope), meta, stats, record.images, record.sample_id)

    def _zero_loss(self, prompt: Prompt, images: tuple[str, ...], sample_id: str) -> Segment:
        answer = self.tools.matcher.vocab.encode(NOTHING)
        encoding = self.tools.encoder.teacher_forced(prompt, answer)
        length = len(encoding.input_ids)
        meta = unsupervised_meta(prompt.input_ids.tolist(), len(answer), encoded_len=length)
        stats = SampleStats(bad=True, from_truth=self.from_truth, sample_id=sample_id)
        return Segment(with_positions(encoding, self._rope), meta, stats, images, sample_id)


class TruthSupervisor(Supervisor):
    """Stage 1: the target is the record's whole ground truth, after the prompt as the learner encodes it.

    shuffled_by: the seed of an order of objects for each record and step; None = the record's own order.
    """

    from_truth = True

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
        return Matched(record, own, ground_truth_target(truth, self.tools.matcher.vocab), from_truth=True)


def sample_stats(matched: Matched, *, encoded_len: int = 0) -> SampleStats:
    """Return the figures of one sample; `encoded_len` is 0 where nothing is trained on it."""
    target, rollout = matched.target, matched.rollout
    counters = target.counters
    stats = SampleStats(
        prompt_len=len(rollout.prompt_token_ids),
        generated=len(rollout.token_ids),
        drafted=rollout.drafted,
        accepted=rollout.accepted,
        verified=rollout.verified,
        server=rollout.server,
        truncated=target.parsed.truncated,
        valid_objects=int(counters["valid_pred_objects"]),
        dropped_invalid=int(counters["parse_dropped_invalid"]),
        gt_objects=int(counters["gt_objects"]),
        matched=int(counters["matched_pairs"]),
        gating_rejections=int(counters["gating_rejections"]),
        maskiou_sum=counters["matched_maskiou_sum"],
        matched_iou50=sum(pair.iou >= CLOSE_IOU for pair in target.matching.pairs),
        beam=rollout.decode_mode == "beam",
        cut=matched.kept is not None and not matched.skipped,
        skipped=matched.skipped,
        repeated=rollout.finish_reason == "repetition",
        at_limit=rollout.finish_reason == "length",
        from_truth=matched.from_truth,
        sample_id=matched.record.sample_id,
    )
    if matched.skipped:
        return stats
    return replace(
        stats,
        supervised=int(counters["matched_for_supervision"]),
        following=int(counters["following"]),
        fn_appended=int(counters["fn_appended"]),
        prefix_coord_targets=int(counters["prefix_coord_targets"]),
        tail_ignored=int(counters["tail_ignored"]),
        prefix_len=int(counters["prefix_len"]),
        append_len=int(counters["append_len"]),
        train_len=int(counters["train_len"]),
        encoded_len=encoded_len,
        duplicates_removed=int(counters["duplicates_removed"]),
        unmatched_dropped=int(counters["unmatched_dropped"]),
        unmatched_penalised=int(counters["unmatched_penalised"]),
    )
