"""The picture of a GRPO run: the mean reward and what each reward says, over the optimizer steps."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from stage2_cli.reward_keys import REWARD, SPREAD, reward_means

_INCHES = (8.0, 4.5)


def write_curves(steps: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw the weighted reward with its spread, and each reward's mean, into one PNG."""
    figure = Figure(figsize=_INCHES, layout="constrained")
    axes = figure.subplots()
    numbers = [step["step"] for step in steps]
    low, high = ([step[REWARD] + sign * step[SPREAD] for step in steps] for sign in (-1, 1))
    axes.fill_between(numbers, low, high, color="black", alpha=0.08, linewidth=0)
    axes.plot(numbers, [step[REWARD] for step in steps], color="black", linewidth=2.5, label="weighted, and its spread")
    for name, key in reward_means(steps[0]).items():
        axes.plot(numbers, [step[key] for step in steps], linewidth=1, label=name)
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")
    axes.set_ylabel("mean reward of a round")
    axes.legend(fontsize="small")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
