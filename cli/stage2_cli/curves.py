"""Curves over the optimizer steps: the rewards of a GRPO run; of any other its loss and its held-out scores."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stage2_cli.reward_keys import REWARD, SPREAD, reward_means

_INCHES = (8.0, 4.5)
_HELD_OUT = (
    ("F1", "eval_rollout_f1"),
    ("recall at IoU 0.5", "eval_rollout_recall_iou50"),
    ("F1 at IoU 0.5, with class", "eval_rollout_f1_class_iou50"),
)


def write_reward_curves(steps: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the weighted reward with its spread, and each reward's mean, into one PNG."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    numbers = [step["step"] for step in steps]
    low, high = ([step[REWARD] + sign * step[SPREAD] for step in steps] for sign in (-1, 1))
    axes.fill_between(numbers, low, high, color="black", alpha=0.08, linewidth=0)
    axes.plot(numbers, [step[REWARD] for step in steps], color="black", linewidth=2.5, label="weighted, and its spread")
    for name, key in reward_means(steps[0]).items():
        axes.plot(numbers, [step[key] for step in steps], linewidth=1, label=name)
    axes.set_ylabel("mean reward of a round")
    axes.legend(fontsize="small")
    _save(figure, axes, path)


def write_learning_curves(
    steps: Sequence[Mapping[str, Any]], held_out: Sequence[Mapping[str, Any]], path: Path
) -> None:
    """Draw the loss of each step, and what each evaluation of held-out records found, into one PNG."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    losses = figure.subplots()
    losses.plot([step["step"] for step in steps], [step["loss"] for step in steps], color="0.6", label="loss")
    losses.set_ylabel("loss")
    if held_out:
        scores = losses.twinx()
        scores.set_ylim(0, 1)
        scores.set_ylabel("held-out records")
        for name, key in _HELD_OUT:
            shown = [one for one in held_out if key in one]  # an older log lacks some
            scores.plot([one["step"] for one in shown], [one[key] for one in shown], marker="o", label=name)
    figure.legend(loc="outside upper center", ncols=1 + len(_HELD_OUT), fontsize="small")
    _save(figure, losses, path)


def _save(figure: Figure, axes: Any, path: Path) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
