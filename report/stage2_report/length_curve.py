"""A picture of precision and recall over the bias against closing the list."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

LINES = (("", "IoU alone", "#0969da"), ("_class", "with class", "#bc4c00"))


def write_curve(nats: Sequence[float], documents: Sequence[Mapping[str, Any]], best: int | None, path: Path) -> None:
    """Draw a point of recall and precision for each bias into a PNG, without class and with; the best one is marked."""
    from matplotlib.figure import Figure  # it takes a second that other commands need not

    figure = Figure(figsize=(6.4, 4.8), layout="constrained")
    axes = figure.add_subplot(xlabel="recall at IoU 0.5", ylabel="precision at IoU 0.5")
    for kind, label, color in LINES:
        points = [(one[f"recall{kind}@0.5"], one[f"precision{kind}@0.5"]) for one in documents]
        axes.plot(*zip(*points, strict=True), marker="o", color=color, label=label)
        for value, point in zip(nats, points, strict=True):
            axes.annotate(f"{value:g}", point, textcoords="offset points", xytext=(5, 5), color=color)
        if best is not None:
            axes.plot(*points[best], marker="o", markersize=14, fillstyle="none", color=color)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=120)
