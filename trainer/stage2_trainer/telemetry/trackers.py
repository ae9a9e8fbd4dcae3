"""The trackers of `training.report_to`, by the callback that transformers has for each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import TrainerControl, TrainerState, TrainingArguments
from transformers.integrations.integration_utils import get_reporting_integration_callbacks


class Trackers:
    """The trackers of a run.

    parts: what callbacks are given of it, by their names: `model`, `processing_class`, `optimizer`, `lr_scheduler`.
    """

    def __init__(self, args: TrainingArguments, **parts: Any) -> None:
        self._args, self._parts = args, parts
        self._control = TrainerControl()
        self._callbacks = [create() for create in get_reporting_integration_callbacks(args.report_to)]

    def begin(self, state: TrainerState) -> None:
        """Open a run in each tracker."""
        self._call("on_init_end", state)
        self._call("on_train_begin", state)

    def log(self, state: TrainerState, figures: Mapping[str, float]) -> None:
        """Send figures of the last step."""
        self._call("on_log", state, logs=dict(figures))

    def save(self, state: TrainerState) -> None:
        """Report that the last step has a checkpoint."""
        self._call("on_save", state)

    def end(self, state: TrainerState) -> None:
        """Close the run."""
        self._call("on_train_end", state)

    def _call(self, event: str, state: TrainerState, **options: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self._args, state, self._control, **self._parts, **options)
