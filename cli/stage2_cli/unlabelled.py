"""`stage2 data --unlabelled-by MODEL`: the objects that a file does not label, as a model's answers show them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage2_api.coordinates import BINS, coord_token
from stage2_api.errors import counted, refused
from stage2_trainer.data.drawing import Outline, captioned_page, draw_outlines
from stage2_trainer.data.files import new_file
from stage2_trainer.data.images import ImageError, load_image
from stage2_trainer.data.reading_order import Bounds, in_reading_order
from stage2_trainer.data.records import Record, RecordRules, lines, load_records
from stage2_trainer.infer.unlabelled import AGREED, SAMPLES, Agreement, Estimate, Named
from stage2_trainer.matching.ground_truth import BINS_ONLY, GTObject, InvalidObject, Measure, read_object
from stage2_trainer.process.activity import ACTIVITY

if TYPE_CHECKING:
    from stage2_trainer.infer.answered_image import AnsweredImage

IMAGES = 200
LABEL, BESIDE = "#1a7f37", "#cf222e"
PAGE_COLUMNS, PAGE_IMAGES, WIDTH = 4, 24, 340


@dataclass(frozen=True)
class Examined:
    """The images of a data file that a model has answered, and what its answers agree on.

    boxless: how many of the answers have no box that can be read.
    """

    records: Sequence[Record]
    images: Sequence[Agreement]
    boxless: int

    @property
    def estimate(self) -> Estimate:
        """How many objects have no label."""
        return Estimate.of_images(self.images)

    def document(self) -> dict[str, Any]:
        """Return the estimate as a JSON object; shares are null where nothing can be said."""
        found = self.estimate
        share, low, high = found.share or (None, None, None)
        counts = {"images": found.images, "labels": found.labels, "labels_found": found.found}
        return {**counts, "boxes_without_label": found.beside, "share": share, "interval": [low, high]}

    def line(self) -> str:
        """Return the estimate as a sentence."""
        found = self.estimate
        seen = f"{counted(found.images, 'image')}, {AGREED} of {SAMPLES} sampled answers agree"
        counts = f"on {found.found:,} of {counted(found.labels, 'label')}, and on {found.beside:,} boxes without one"
        if found.share is None:
            why = f"{seen} on no label; {self.boxless:,} of {counted(found.images * SAMPLES, 'answer')} have no box"
            return (
                f"objects without a label: unknown ({why}: `stage2 infer --prompt` shows whether the prompt is right)"
            )
        share, low, high = found.share
        return f"objects without a label: {share:.0%} [{low:.0%}, {high:.0%}] ({seen} {counts})"

    def draw(self, path: Path) -> None:
        """Draw the images with the most boxes that have no label: labels green, boxes red."""
        pairs = sorted(zip(self.records, self.images, strict=True), key=lambda pair: -len(pair[1].unlabelled))
        cells = [_cell(record, image) for record, image in pairs[:PAGE_IMAGES]]
        path.parent.mkdir(parents=True, exist_ok=True)
        captioned_page(cells, columns=PAGE_COLUMNS, width=WIDTH).save(path, format="PNG")


def examine(path: Path, model: str, rules: RecordRules, *, all_images: bool = False) -> Examined:
    """Let a model answer images of a data file several times each: all, or `IMAGES` that are evenly spread over it.

    Raises ConfigError for a model that cannot be loaded, and for a file without a readable image.
    """
    records = load_records(path, rules=rules)
    images = len(records) if all_images else IMAGES
    chosen = [one for one in records[:: max(1, len(records) // images)][:images] if _is_readable(one)]
    if not chosen:
        raise refused("FILE", str(path), "has no record whose image can be read", "see its problems with `stage2 data`")
    from stage2_trainer.infer.model import Model

    loaded = Model(model)
    with ACTIVITY.doing("answering", len(chosen), "images") as doing:
        found, boxless = [], 0
        for record in chosen:
            answers = [_boxes(one) for one in loaded.samples(record.images[0], SAMPLES)]
            found.append(Agreement.of_answers(_labels(record), answers))
            boxless += sum(not boxes for boxes in answers)
            doing.advance(1)
    return Examined(chosen, found, boxless)


def write_labelled(path: Path, output: Path, rules: RecordRules, examined: Examined) -> None:
    """Write a data file whose records label the boxes without a label, too, and are the same in all else.

    The objects of a record that gains some are in reading order. A box that no data file may hold, such as one without
    area or with the text of a token in its name, is left out.
    """
    added = {record.index: image.unlabelled for record, image in zip(examined.records, examined.images, strict=True)}
    with new_file("--add-labels", output) as aside, aside.open("w", encoding="utf-8") as file:
        for line in lines(path):
            raw = json.loads(line.text)
            if boxes := added.get(line.position):
                labels = line.record(rules.without_images()).objects
                pairs = [*zip(labels, raw["objects"], strict=True), *_labels_of(boxes, raw)]
                in_order = in_reading_order(
                    pairs, lambda pair: Bounds.from_bins(pair[0].bins), lambda pair: (pair[0].bins, pair[0].desc)
                )
                raw["objects"] = [written for _, written in in_order]
            file.write(json.dumps(raw, ensure_ascii=False) + "\n")


def _labels_of(boxes: Sequence[Named], raw: Mapping[str, Any]) -> Iterator[tuple[GTObject, dict[str, Any]]]:
    """Yield boxes as objects of a record: in tokens, or in pixels where its units are pixels."""
    sides = (raw["width"], raw["height"])
    in_pixels = raw.get("units") == "pixels"
    measure = Measure("pixels", sides, of_record=True) if in_pixels else BINS_ONLY
    for one in boxes:
        pixels = [round(number / BINS * side) for number, side in zip(one.box, sides * 2, strict=True)]
        label = {"desc": one.desc, "bbox_2d": pixels if in_pixels else [coord_token(k) for k in _bins(one)]}
        with suppress(InvalidObject):
            yield read_object(label, measure), label


def _bins(one: Named) -> tuple[int, ...]:
    return tuple(min(BINS - 1, round(number)) for number in one.box)


def _is_readable(record: Record) -> bool:
    try:
        load_image(record.images[0])
    except ImageError:
        return False
    return True


def _labels(record: Record) -> list[Named]:
    return [Named(one.desc, Bounds.from_bins(one.bins)) for one in record.objects]


def _boxes(answer: AnsweredImage) -> list[Named]:
    sides = (answer.width, answer.height) * 2
    return [Named(one.desc, _in_bins(one.box, sides)) for one in answer.boxes]


def _in_bins(box: Sequence[float], sides: Sequence[int]) -> tuple[float, float, float, float]:
    left, top, right, bottom = (number / side * BINS for number, side in zip(box, sides, strict=True))
    return left, top, right, bottom


def _cell(record: Record, image: Agreement) -> tuple[Any, str]:
    labels = [Outline(one.kind, one.bins, one.desc, LABEL) for one in record.objects]
    beside = [Outline("bbox", _bins(one), one.desc, BESIDE) for one in image.unlabelled]
    picture = draw_outlines(load_image(record.images[0]), [*labels, *beside], width=WIDTH)
    return picture, f"{record.sample_id}: {counted(len(labels), 'label')}, {len(beside)} without"
