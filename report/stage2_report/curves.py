"""Curves over the optimizer steps: the rewards of a GRPO run; of any other its loss and its held-out scores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stage2_report.curve_points import HELD_OUT, CurvePoints
from stage2_report.reward_keys import REWARD, SPREAD

_INCHES = (8.0, 4.5)


def write_curves(points: CurvePoints, path: Path) -> None:
    """Draw a run into one PNG.

    Of a GRPO run the weighted reward with its spread, and each reward's mean; of any other the loss of each step, and
    what each evaluation of held-out records found.
    """
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    if points.is_grpo:
        _draw_rewards(points, axes)
    else:
        _draw_learning(points, axes)
        figure.legend(loc="outside upper center", ncols=1 + len(HELD_OUT), fontsize="small")
    _save(figure, axes, path)


def _draw_rewards(points: CurvePoints, axes: Any) -> None:
    reward, spread = points.values[REWARD], points.values[SPREAD]
    low, high = ([one + sign * own for one, own in zip(reward, spread, strict=True)] for sign in (-1, 1))
    axes.fill_between(points.steps, low, high, color="black", alpha=0.08, linewidth=0)
    axes.plot(points.steps, reward, color="black", linewidth=2.5, label="weighted, and its spread")
    for name, key in points.rewards.items():
        axes.plot(points.steps, points.values[key], linewidth=1, label=name)
    axes.set_ylabel("mean reward of a round")
    axes.legend(fontsize="small")


def _draw_learning(points: CurvePoints, losses: Any) -> None:
    losses.plot(points.steps, points.values["loss"], color="0.6", label="loss")
    losses.set_ylabel("loss")
    if points.evaluated:
        scores = losses.twinx()
        scores.set_ylim(0, 1)
        scores.set_ylabel("held-out records")
        for key, (steps, values) in points.held_out.items():
            scores.plot(steps, values, marker="o", label=HELD_OUT[key])


def _save(figure: Figure, axes: Any, path: Path) -> None:
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
