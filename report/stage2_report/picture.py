"""`stage2 report RUN --picture OUT.png`: held-out images with ground truth, first rollouts and last rollouts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from stage2_api.errors import ConfigError, Problem
from stage2_report.run_history import Record
from stage2_trainer.data.drawing import Outline, draw_outlines, grid

_MAX_ROWS = 6
_TRUTH, _MATCHED, _UNMATCHED = "#1a7f37", "#0969da", "#cf222e"


class EndSamples:
    """The samples of a run's first and last evaluation; all others are dropped."""

    def __init__(self) -> None:
        self._evaluations: dict[int, dict[str, Record]] = {}

    def add(self, sample: Record) -> None:
        """Add an `evaluation_sample` record."""
        step = sample["step"]
        self._evaluations.setdefault(step, {})[sample["sample_id"]] = sample  # of a repeated evaluation, the last
        ends = (min(self._evaluations), max(self._evaluations))
        self._evaluations = {one: samples for one, samples in self._evaluations.items() if one in ends}

    def write(self, path: Path, *, images: Path | None) -> None:
        """Draw both evaluations into one PNG: ground truth green, matched predictions blue, unmatched ones red.

        images: the folder in which images are found by name. Raises ConfigError where the log holds no samples.
        """
        if not self._evaluations:
            way_out = (
                "set custom.val_jsonl and training.eval_strategy, then run again; the page (--html) has the reward"
                " curves of a GRPO run"
            )
            raise ConfigError([Problem("--picture", str(path), "needs held-out rollouts in the log", way_out)])
        first, last = min(self._evaluations), max(self._evaluations)
        before, after = self._evaluations[first], self._evaluations[last]
        rows = [_row(before[name], after[name], images) for name in before if name in after]
        titles = (
            "ground truth",
            f"rollouts at step {first} (blue: matched)",
            f"rollouts at step {last} (red: not matched)",
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        grid(rows[:_MAX_ROWS], titles).save(path)


def _row(first: Record, last: Record, images: Path | None) -> list[Image.Image]:
    path = Path(first["image"])
    with Image.open(images / path.name if images is not None else path) as image:
        truth = [_outline(item, _TRUTH) for item in first["ground_truth"]]
        return [draw_outlines(image, truth), *(draw_outlines(image, _predicted(sample)) for sample in (first, last))]


def _predicted(sample: Record) -> list[Outline]:
    return [_outline(item, _MATCHED if item["matched"] else _UNMATCHED) for item in sample["predictions"]]


def _outline(item: Mapping[str, Any], color: str) -> Outline:
    return Outline(kind=item["kind"], bins=item["bins"], label=item["desc"], color=color)
