"""What a run's curves are drawn from: numbers of its records, eight bytes each."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

from stage2_report.report_tables import is_grpo
from stage2_report.reward_keys import REWARD, SPREAD, reward_means

HELD_OUT = {
    "eval_rollout_f1": "F1",
    "eval_rollout_recall_iou50": "recall at IoU 0.5",
    "eval_rollout_f1_class_iou50": "F1 at IoU 0.5, with class",
}


class CurvePoints:
    """Points of curves, in the order of the records.

    rewards: keys of a GRPO run's means, by name. evaluated: whether there is any evaluation.
    """

    def __init__(self) -> None:
        self.steps = array("q")
        self.values: dict[str, array[float]] = {}
        self.held_out = {key: (array("q"), array("d")) for key in HELD_OUT}
        self.rewards: dict[str, str] = {}
        self.evaluated = False

    @property
    def is_grpo(self) -> bool:
        """Whether the run is one of GRPO."""
        return bool(self.values) and REWARD in self.values

    def note_step(self, step: Mapping[str, Any]) -> None:
        """Take a step; the first says what is drawn."""
        if not self.values:
            self.rewards = reward_means(step) if is_grpo(step) else {}
            keys = (REWARD, SPREAD, *self.rewards.values()) if is_grpo(step) else ("loss",)
            self.values = {key: array("d") for key in keys}
        self.steps.append(step["step"])
        for key, values in self.values.items():
            values.append(step[key])

    def note_evaluation(self, evaluation: Mapping[str, Any]) -> None:
        """Take an evaluation; an older log lacks some of its figures."""
        self.evaluated = True
        for key, (steps, values) in self.held_out.items():
            if key in evaluation:
                steps.append(evaluation["step"])
                values.append(evaluation[key])
