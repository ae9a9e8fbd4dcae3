"""The E-step: records to fresh rollouts to supervised, teacher-forced segments (semantics, section 4)."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from torch import nn

from stage2_trainer.data.encode import Encoder, Prompt
from stage2_trainer.data.messages import chat_messages
from stage2_trainer.data.records import Record
from stage2_trainer.learner.padding_free_batch import Placed, place
from stage2_trainer.learner.rollout_metrics import SampleStats
from stage2_trainer.matching import (
    CoordVocab,
    MatchedTarget,
    MatchOptions,
    SegmentMeta,
    build_target,
    cut_before,
    segment_meta,
)
from stage2_trainer.process.qwen3_vl import rope_model
from stage2_trainer.rollouts.generation_request import GenerationRequest
from stage2_trainer.rollouts.pipeline import PipelinedRollouts
from stage2_trainer.rollouts.rollout_source import RolloutSource
from stage2_trainer.rollouts.synced_rollouts import RolloutBatch
from stage2_trainer.telemetry.stopwatch import Stopwatch
from stage2_trainer.weights.sync_report import SyncReport
from stage2_trainer.wire.rollout import Rollout

logger = logging.getLogger(__name__)

CLIPPED_CHARS = 600
CLOSE_IOU = 0.5  # the overlap that COCO's AP50 asks for


@dataclass(frozen=True)
class Matched:
    """One record, the rollout that answered it, and what matching made of both.

    origin: how the rollout came to be, for the record.
    """

    record: Record
    rollout: Rollout
    target: MatchedTarget
    origin: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Segment:
    """One sample as it is trained on: tokens with their positions, where they are supervised, and its figures."""

    placed: Placed
    meta: SegmentMeta
    stats: SampleStats

    def __len__(self) -> int:
        return len(self.placed)

    def aged(self, staleness: int) -> Segment:
        """Return it with the optimizer steps that lie between its rollout and the training on it."""
        return replace(self, stats=replace(self.stats, staleness=staleness))


@dataclass(frozen=True)
class Prompts:
    """What a person's configuration says to the model: the text of the user's turn, and the system turn if any."""

    user: str
    system: str | None = None

    def chat(self, record: Record) -> list[dict[str, Any]]:
        """Return the messages of a record, without any answer."""
        return chat_messages(record, self.user, system=self.system)


class Matcher:
    """Matches rollouts to the ground truth of their records; an answer is cut before any of its `vision_ids`."""

    def __init__(self, vocab: CoordVocab, options: MatchOptions, vision_ids: Collection[int]) -> None:
        self.vocab = vocab
        self.options = options
        self._vision_ids = frozenset(vision_ids)

    def match(self, record: Record, rollout: Rollout) -> Matched:
        """Parse the rollout, match its objects, and build what is to be learnt from it."""
        ids = cut_before(rollout.token_ids, self._vision_ids)
        return Matched(record, rollout, build_target(ids, record.ground_truth, self.vocab, self.options))


def with_origin(matched: Sequence[Matched], generated: RolloutBatch, options: MatchOptions) -> list[Matched]:
    """Return them with what the record says of how each came to be, and of how it was matched."""
    told = {**generated.origin, "options": asdict(options)}
    return [replace(one, origin={"index": index, **told}) for index, one in enumerate(matched)]


class EStep:
    """Makes segments of records, with rollouts of the weights as they are now.

    A thread encodes prompts while servers generate, and matches and encodes each rollout as soon as it is there.
    """

    def __init__(
        self,
        *,
        encoder: Encoder,
        prompts: Prompts,
        rollouts: RolloutSource,
        matcher: Matcher,
        on_matched: Callable[[int, Sequence[Matched]], None],
    ) -> None:
        self._encoder = encoder
        self._prompts = prompts
        self._rollouts = rollouts
        self._matcher = matcher
        self._on_matched = on_matched

    def __call__(
        self, records: Sequence[Record], model: nn.Module, *, global_step: int, micro_step: int, stopwatch: Stopwatch
    ) -> tuple[list[Segment], SyncReport | None]:
        """Return one segment for each record, and the weight sync that came before its rollout (None: not needed)."""
        chats = [self._prompts.chat(record) for record in records]
        rope, done = rope_model(model), dict[int, tuple[Rollout, Future[tuple[Matched, Segment]]]]()
        with ThreadPoolExecutor(1, "encode") as thread:
            prompts = [thread.submit(self._prompt, chat, stopwatch) for chat in chats]

            def begin(index: int, rollout: Rollout) -> None:
                future = thread.submit(self._made, records[index], prompts[index], rollout, rope, stopwatch)
                done[index] = rollout, future

            request = GenerationRequest(model, chats, global_step, micro_step, stopwatch, on_rollout=begin)
            generated = self._rollouts.generate(request)
            for index, rollout in enumerate(generated.rollouts):  # those that came all at once
                if index not in done or done[index][0] is not rollout:
                    begin(index, rollout)
        made = [done[index][1].result() for index in range(len(records))]
        self._on_matched(global_step, with_origin([one for one, _ in made], generated, self._matcher.options))
        return [segment.aged(global_step - one.rollout.version) for one, segment in made], generated.sync

    def look_ahead(
        self,
        window: Sequence[Sequence[Record]],
        following: Sequence[Sequence[Record]],
        model: nn.Module,
        *,
        global_step: int,
        stopwatch: Stopwatch,
    ) -> None:
        """Begin a window of micro-steps, and let the one after it be asked for; nothing without a pipeline."""
        if isinstance(self._rollouts, PipelinedRollouts):
            chats = [
                [[self._prompts.chat(record) for record in batch] for batch in part] for part in (window, following)
            ]
            self._rollouts.look_ahead(model, *chats, global_step=global_step, stopwatch=stopwatch)

    def _prompt(self, chat: list[dict[str, Any]], stopwatch: Stopwatch) -> Prompt:
        with stopwatch.measure("rollout_teacher_encode"):
            return self._encoder.prompt(chat)

    def _made(
        self, record: Record, prompt: Future[Prompt], rollout: Rollout, rope: Any, stopwatch: Stopwatch
    ) -> tuple[Matched, Segment]:
        """Match and encode one rollout; the prompt's encoding came before it in the same thread."""
        with stopwatch.measure("rollout_parse_match"):
            matched = self._matcher.match(record, rollout)
        with stopwatch.measure("rollout_teacher_encode"):
            return matched, self._segment(prompt.result(), matched, rope)

    def _segment(self, prompt: Prompt, matched: Matched, rope: Any) -> Segment:
        rollout, target = matched.rollout, matched.target
        self._encoder.check_prompt(prompt, rollout.prompt_token_ids, rollout.server)
        encoding = self._encoder.teacher_forced(prompt, target.y_train_ids)
        meta = segment_meta(target, rollout.prompt_token_ids, encoded_len=len(encoding.input_ids))
        return Segment(place(encoding, rope), meta, sample_stats(matched, encoded_len=meta.encoded_len))


def sample_stats(matched: Matched, *, encoded_len: int = 0) -> SampleStats:
    """Return the figures of one sample; `encoded_len` is 0 where nothing is trained on it."""
    counters = matched.target.counters
    return SampleStats(
        prompt_len=len(matched.rollout.prompt_token_ids),
        generated=len(matched.rollout.token_ids),
        truncated=matched.target.parsed.truncated,
        valid_objects=int(counters["valid_pred_objects"]),
        dropped_invalid=int(counters["parse_dropped_invalid"]),
        dropped_ambiguous=int(counters["parse_dropped_ambiguous"]),
        gt_objects=int(counters["gt_objects"]),
        matched=int(counters["matched_pairs"]),
        supervised=int(counters["matched_for_supervision"]),
        gating_rejections=int(counters["gating_rejections"]),
        maskiou_sum=counters["matched_maskiou_sum"],
        matched_iou50=sum(pair.iou >= CLOSE_IOU for pair in matched.target.matching.pairs),
        fn_appended=int(counters["fn_count"]),
        prefix_coord_targets=int(counters["prefix_coord_targets"]),
        tail_ignored=int(counters["tail_ignored"]),
        prefix_len=int(counters["prefix_len"]),
        append_len=int(counters["append_len"]),
        train_len=int(counters["train_len"]),
        encoded_len=encoded_len,
        beam=matched.rollout.decode_mode == "beam",
    )


class ParseFailureLog:
    """Logs the first rollouts that do not parse cleanly (`debug_dump_parse_failures`), cut to 600 characters."""

    def __init__(self, most: int) -> None:
        self._left = most

    def __call__(self, matched: Sequence[Matched]) -> None:
        """Log what fails to parse among these."""
        for one in matched:
            parsed = one.target.parsed
            if self._left > 0 and (parsed.dropped or parsed.truncated or parsed.notes):
                self._left -= 1
                logger.info(
                    "rollout of %s does not parse (%s): %r; kept: %r",
                    one.record.sample_id,
                    ", ".join([*parsed.dropped, *parsed.notes]) or "truncated",
                    parsed.text[:CLIPPED_CHARS],
                    parsed.prefix_text[:CLIPPED_CHARS],
                )
