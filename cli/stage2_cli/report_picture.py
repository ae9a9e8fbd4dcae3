"""The picture of a run: held-out images with ground truth, the first rollouts, and the last ones, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from PIL import Image

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.data.drawing import Outline, draw_outlines, grid

_MAX_ROWS = 6
_TRUTH, _MATCHED, _UNMATCHED = "#1a7f37", "#0969da", "#cf222e"


def write_picture(records: Sequence[Mapping[str, Any]], path: Path, *, images: Path | None) -> None:
    """Draw the samples of the first and the last evaluation into one PNG.

    Green: ground truth; blue: a prediction that found its object; red: one that did not.
    Raises ConfigError when the log holds no evaluation samples.
    """
    samples = [record for record in records if record["event"] == "evaluation_sample"]
    if not samples:
        way_out = "set custom.val_jsonl and training.eval_strategy, then run again"
        raise ConfigError([Problem("records", "no evaluation_sample", "a picture needs held-out rollouts", way_out)])
    first, last = (min(_steps(samples)), max(_steps(samples)))
    by_step = {(record["step"], record["sample_id"]): record for record in samples}
    ids = [record["sample_id"] for record in samples if record["step"] == first][:_MAX_ROWS]
    rows = [_row(by_step[first, sample_id], by_step[last, sample_id], images) for sample_id in ids]
    titles = (
        "ground truth",
        f"rollouts at step {first} (blue: matched)",
        f"rollouts at step {last} (red: not matched)",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    grid(rows, titles).save(path)


def _steps(samples: Sequence[Mapping[str, Any]]) -> set[int]:
    return {record["step"] for record in samples}


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
