"""The line of the run's log that says where training begins, and how far it goes."""

from __future__ import annotations

from typing import Any

from transformers import TrainerCallback, TrainerState

from stage2_trainer.telemetry.run_log import EventLog


class StartTold(TrainerCallback):
    """Writes `start` when training begins: after which step it goes on, and how many there are in all."""

    def __init__(self, log: EventLog) -> None:
        self._log = log

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Say it."""
        self._log.write("start", {"step": state.global_step, "max_steps": state.max_steps})
