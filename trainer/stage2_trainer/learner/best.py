"""The best checkpoint of a run, chosen by the figures of its evaluations."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path

from transformers import TrainerState, TrainingArguments

from stage2_api.errors import refused
from stage2_api.runconfig import BEST_METRIC
from stage2_trainer.model.best_checkpoint import forget_other_figure, metric_key
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import EventLog

logger = logging.getLogger(__name__)


class Best:
    """Compares evaluations by one figure, and remembers the best in the state of the run."""

    def __init__(self, args: TrainingArguments, log: EventLog, reporter: Reporter) -> None:
        self._args, self._log, self._reporter = args, log, reporter
        self._key = metric_key(args)
        self._sign = 1.0 if args.greater_is_better else -1.0
        saves_each = args.save_strategy != "best"
        # An F1 of 0 is not better than none: else the first checkpoint would be the best until one answer is right.
        # Where only the best is saved, the first is: else nothing would be on disk until then.
        self._least = 0.0 if saves_each and self._key == BEST_METRIC else None

    def begin(self, state: TrainerState) -> None:
        """Forget the best of a resumed run where it is no score of this figure, or its checkpoint is gone."""
        forget_other_figure(self._args, state)
        path = state.best_model_checkpoint
        if path is not None and not Path(path).is_dir():
            logger.warning("the best checkpoint so far, %s, no longer exists", path)
            state.best_model_checkpoint = None

    def is_new(self, metrics: Mapping[str, float | None], state: TrainerState) -> bool:
        """Note the score of the last step; return whether it is the best so far, and so is to be saved.

        Raises:
            ConfigError: no evaluation has such a figure.
        """
        score = self._score(metrics)
        if self._args.save_strategy == "no":
            return False
        better = score is not None and self._is_better(score, state.best_metric)
        if better:
            state.best_metric, state.best_global_step = score, state.global_step
            best = {"step": state.global_step, "metric": self._args.metric_for_best_model, "score": score}
            self._log.write("best_checkpoint", best)
        if state.best_global_step is not None:
            self._reporter.update(best_step=state.best_global_step, best_score=state.best_metric)
        return better

    def _score(self, metrics: Mapping[str, float | None]) -> float | None:
        """Return the figure of an evaluation; None where it is null, or where no checkpoint is the best.

        Raises:
            ConfigError: no evaluation has such a figure.
        """
        if self._key is None:
            return None
        if self._key not in metrics:
            rule = f"must name a figure of an evaluation; there are {', '.join(sorted(metrics))}"
            name = self._args.metric_for_best_model
            raise refused("training.metric_for_best_model", name, rule, "name one of these")
        return metrics[self._key]

    def _is_better(self, score: float, best: float | None) -> bool:
        least = self._least if best is None else best
        return least is None or self._sign * score > self._sign * least
