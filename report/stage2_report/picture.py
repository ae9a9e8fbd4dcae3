"""The picture of a run: held-out images with ground truth, the first rollouts, and the last ones, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from PIL import Image

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.data.drawing import Outline, draw_outlines, grid

_MAX_ROWS = 6
_TRUTH, _MATCHED, _UNMATCHED = "#1a7f37", "#0969da", "#cf222e"


class EndSamples:
    """The samples of a run's first and last evaluation, and no others, from its records one by one."""

    def __init__(self) -> None:
        self._evaluations: dict[int, dict[str, Mapping[str, Any]]] = {}

    def note(self, sample: Mapping[str, Any]) -> None:
        """Take a sample."""
        step = sample["step"]
        self._evaluations.setdefault(step, {})[sample["sample_id"]] = sample  # of one made again, the last
        ends = (min(self._evaluations), max(self._evaluations))
        self._evaluations = {one: found for one, found in self._evaluations.items() if one in ends}

    def write(self, path: Path, *, images: Path | None) -> None:
        """Draw both evaluations into one PNG.

        Green: ground truth; blue: a prediction that found its object; red: one that did not.
        Raises ConfigError when the log holds no evaluation samples.
        """
        if not self._evaluations:
            way_out = "set custom.val_jsonl and training.eval_strategy, then run again"
            problem = Problem("records", "no evaluation_sample", "a picture needs held-out rollouts", way_out)
            raise ConfigError([problem])
        first, last = min(self._evaluations), max(self._evaluations)
        before, after = self._evaluations[first], self._evaluations[last]
        shown = [one for one in before if one in after][:_MAX_ROWS]
        rows = [_row(before[one], after[one], images) for one in shown]
        titles = (
            "ground truth",
            f"rollouts at step {first} (blue: matched)",
            f"rollouts at step {last} (red: not matched)",
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        grid(rows, titles).save(path)


def _row(first: Mapping[str, Any], last: Mapping[str, Any], images: Path | None) -> list[Image.Image]:
    image_path = Path(first["image"])
    if images is not None:
        image_path = images / image_path.name
    with Image.open(image_path) as image:
        truth = [_outline(item, _TRUTH) for item in first["ground_truth"]]
        return [draw_outlines(image, truth), *(draw_outlines(image, _predicted(sample)) for sample in (first, last))]


def _predicted(sample: Mapping[str, Any]) -> list[Outline]:
    return [_outline(item, _MATCHED if item["matched"] else _UNMATCHED) for item in sample["predictions"]]


def _outline(item: Mapping[str, Any], color: str) -> Outline:
    return Outline(kind=item["kind"], bins=item["bins"], label=item["desc"], color=color)
