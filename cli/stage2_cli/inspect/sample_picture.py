"""The inspected sample as a picture: the image with its ground truth, and with what was answered."""

from __future__ import annotations

from pathlib import Path

from stage2_api.errors import ConfigError, Problem
from stage2_cli.inspect.inputs import check_images
from stage2_trainer.data.drawing import Outline, draw_outlines, grid
from stage2_trainer.data.images import load_image
from stage2_trainer.data.records import Record
from stage2_trainer.matching import MatchedTarget

_WIDTH = 480
_FOUND, _MISSED, _MATCHED, _UNMATCHED = "#1a7f37", "#bc4c00", "#0969da", "#cf222e"


def write_picture(record: Record, target: MatchedTarget, path: Path) -> None:
    """Draw the record's first image twice into a PNG.

    Left, ground truth: green where it was found, orange where it was missed. Right, the answer's valid objects: blue
    where they matched, red where they did not. ConfigError when the image cannot be read.
    """
    check_images(record)
    missed = set(target.false_negatives)
    truth = [
        Outline(one.kind, one.bins, f"{i} {one.desc}", _MISSED if i in missed else _FOUND)
        for i, one in enumerate(target.ground_truth.objects)
    ]
    image = load_image(record.images[0])
    pictures = [draw_outlines(image, outlines, width=_WIDTH) for outlines in (truth, _answer(target))]
    sheet = grid([pictures], ("ground truth", "answer"))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path, format="PNG")
    except OSError as error:
        rule = f"must be a file that can be written ({error.strerror})"
        raise ConfigError([Problem("--picture", str(path), rule, "correct the path")]) from error


def _answer(target: MatchedTarget) -> list[Outline]:
    matched = {pair.pred for pair in target.matching.pairs}
    return [
        Outline(one.kind, one.bins, f"{one.key} {one.desc}", _MATCHED if i in matched else _UNMATCHED)
        for i, one in enumerate(target.parsed.valid_objects)
        if one.kind
    ]
