"""The E-step: records to fresh rollouts to supervised, teacher-forced segments (semantics, section 4)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from torch import nn

from stage2_trainer.data.encode import Encoder, Prompt
from stage2_trainer.data.messages import Prompts
from stage2_trainer.data.records import Record
from stage2_trainer.learner.matcher import Matched, Matcher, with_origin
from stage2_trainer.learner.padding_free_batch import Segment, place
from stage2_trainer.learner.rollout_metrics import sample_stats
from stage2_trainer.matching import segment_meta
from stage2_trainer.process.qwen3_vl import rope_model
from stage2_trainer.rollouts.pipeline import PipelinedRollouts
from stage2_trainer.rollouts.rollout_source import GenerationRequest, RolloutSource
from stage2_trainer.telemetry.stopwatch import Stopwatch
from stage2_trainer.weights.sync_report import SyncReport
from stage2_trainer.wire.rollout import Rollout


class EStep:
    """The E-step: segments of records, with rollouts of the weights as they are now.

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
