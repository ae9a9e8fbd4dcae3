"""Evaluation: rollouts of held-out records, parsed and matched; no teacher forcing, no loss (semantics: evaluation)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from time import perf_counter

from torch import nn

from stage2_trainer.data.records import Record
from stage2_trainer.learner.estep import Matched, Matcher, Prompts, sample_stats
from stage2_trainer.learner.metrics import Stopwatch, evaluation_metrics
from stage2_trainer.learner.rollouts import FreshRollouts


class Evaluation:
    """Evaluates the weights as they are now, through the same servers that training uses."""

    def __init__(
        self,
        *,
        prompts: Prompts,
        rollouts: FreshRollouts,
        matcher: Matcher,
        batch_size: int,
        on_matched: Callable[[int, Sequence[Matched]], None],
    ) -> None:
        self._prompts = prompts
        self._rollouts = rollouts
        self._matcher = matcher
        self._batch_size = batch_size
        self._on_matched = on_matched

    def __call__(self, records: Sequence[Record], model: nn.Module, *, global_step: int) -> dict[str, float]:
        """Return `runtime`, `samples_per_second`, `steps_per_second` and `rollout_*`, without a prefix."""
        start = perf_counter()
        batches = [records[i : i + self._batch_size] for i in range(0, len(records), self._batch_size)]
        matched = [
            one
            for index, batch in enumerate(batches)
            for one in self._matched(batch, model, global_step=global_step, index=index)
        ]
        self._on_matched(global_step, matched)
        seconds = perf_counter() - start
        stats = [sample_stats(one) for one in matched]
        return {
            "runtime": seconds,
            "samples_per_second": len(records) / seconds,
            "steps_per_second": len(batches) / seconds,
            **evaluation_metrics(stats, top_k=self._matcher.options.candidate_top_k),
        }

    def _matched(self, records: Sequence[Record], model: nn.Module, *, global_step: int, index: int) -> list[Matched]:
        chats = [self._prompts.chat(record) for record in records]
        fresh = self._rollouts.generate(model, chats, global_step=global_step, micro_step=index, stopwatch=Stopwatch())
        return [self._matcher.match(*pair) for pair in zip(records, fresh.rollouts, strict=True)]
