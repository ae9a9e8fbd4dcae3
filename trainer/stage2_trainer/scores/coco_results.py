"""COCO's results: a JSON list, or lines, of detections with `image_id`, `category_id`, `score`, and `bbox` or
`segmentation`.

Format: https://cocodataset.org/#format-results. A detection has no name, so the annotation file gives the names of
categories; its `file_name` finds images whose ids are no names of records.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

from pycocotools import mask as rle

from stage2_api.errors import counted, refused
from stage2_trainer.data.files import read_named
from stage2_trainer.data.run_lengths import run_lengths
from stage2_trainer.scores.plain_answers import LARGEST
from stage2_trainer.scores.scored_image import MeasuredObject, ReadAnswer

WHOLE_NUMBER = re.compile(r"([0-9]{1,18})(?:\.0*)?")  # of 64 bits, as ids are in other tools
LONGEST_EDGE = 2_000_000  # pixels around a polygon
WAY_OUT = "correct the file, or write the answers as JSON lines (docs/evaluation.md)"

BEYOND = 1.1  # times the size of an image: a box that ends there is not of this image
FROM_CORNERS = "map(.bbox |= [.[0], .[1], .[2] - .[0], .[3] - .[1]])"

Find = Callable[[str], Sequence[int]]  # from a name to the positions of records


@dataclass(frozen=True)
class Finders:
    """How records are found. by_name: by `sample_id`, FILE:LINE, or the image's path or name. by_stem: by an id that
    the name of the image is, without its ending.
    """

    by_name: Find
    by_stem: Find


@dataclass(frozen=True)
class Annotations:
    """What an annotation file says about results: names of categories and file names of images, by id."""

    path: Path
    categories: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def from_file(cls, path: Path) -> Annotations:
        """Read COCO's annotation file. Raises ConfigError if it is none."""
        try:
            document = json.loads(read_named(path))
        except OSError as error:
            raise refused(
                "--annotations", str(path), f"must be readable ({error.strerror})", "check the path"
            ) from error
        except (ValueError, RecursionError) as error:
            raise refused("--annotations", str(path), f"must be JSON ({error})", "give instances_*.json") from error
        listed = document if isinstance(document, dict) else {}
        names = {
            key: _named(listed.get(key), value) for key, value in (("categories", "name"), ("images", "file_name"))
        }
        if not names["categories"]:
            rule = "must list categories with id and name"
            raise refused("--annotations", str(path), rule, "give the instances_*.json of the answered images")
        return cls(path, names["categories"], names["images"])


def _named(entries: Any, key: str) -> dict[str, str]:
    """Return the values of a key by the id of their entries."""
    listed = [one for one in entries if isinstance(one, dict)] if isinstance(entries, list) else []
    pairs = [(id_text(one.get("id")), one.get(key)) for one in listed]
    return {number: value for number, value in pairs if number is not None and isinstance(value, str)}


def id_text(value: Any) -> str | None:
    """Return an id as text: some tools write 17 in one file, "17" in another, and 17.0 in a third."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    found = WHOLE_NUMBER.fullmatch(str(value))
    return str(int(found[1])) if found else str(value)


@dataclass(frozen=True)
class Results:
    """The list in a results file, at `path`."""

    path: Path
    entries: Sequence[Any]

    def answers(
        self, find: Finders, sizes: Sequence[tuple[int, int]], annotations: Annotations | None
    ) -> dict[int, ReadAnswer]:
        """Return the answers by the position of their record. sizes: of the records' images.

        Raises ConfigError for an entry that is no detection, or is one of an unknown image or category.
        """
        objects: dict[int, list[MeasuredObject]] = defaultdict(list)
        scores: dict[int, list[float | None]] = defaultdict(list)
        places: dict[Any, int] = {}
        for number, entry in enumerate(self.entries):
            detection = _Detection(f"{self.path} [{number}]", entry if isinstance(entry, dict) else {})
            detection.check_form()
            key = id_text(detection.entry.get("image_id"))
            if key not in places:
                places[key] = detection.position(find, annotations)
            place = places[key]
            objects[place].append(detection.object(sizes[place], detection.category(annotations)))
            scores[place].append(detection.score())
        unscored = [number for number, entry in enumerate(self.entries) if entry.get("score") is None]
        if unscored and len(unscored) < len(self.entries):
            rule = "must be a number in all entries, or in none"
            raise refused(f"{self.path} [{unscored[0]}].score", None, rule, "give every detection its score")
        return {
            place: ReadAnswer(
                tuple(found),
                None if unscored else tuple(one for one in scores[place] if one is not None),
                parsed=True,
                truncated=False,
                looped=False,
            )
            for place, found in objects.items()
        }


def doubt(answers: Mapping[int, ReadAnswer], sizes: Sequence[tuple[int, int]]) -> tuple[str, str] | None:
    """Return what boxes seem to be instead of x, y, width and height in pixels, and the way out; None if nothing.

    sizes: of the records' images, by position. Each test asks for many boxes: a detector may err in some.
    """
    boxes = [
        (*one.box, *sizes[place])
        for place, answer in answers.items()
        for one in answer.objects
        if isinstance(one, MeasuredObject) and one.mask is None
    ]
    shares = sum(max(map(abs, box[:4])) <= 1 for box in boxes)
    if 2 * shares > len(boxes):
        rule = f"{shares:,} of {counted(len(boxes), 'detection')} lie between 0 and 1: they are shares of their images"
        return rule, "multiply x and width by the image's width, y and height by its height"
    beyond = [box for box in boxes if _reaches_out(box[0] + box[2], box[1] + box[3], *box[4:])]
    if 4 * len(beyond) <= len(boxes):
        return None
    rule = f"{len(beyond):,} of {counted(len(boxes), 'detection')} leave their images"
    corners = sum(x < right and y < low and not _reaches_out(right, low, *size) for x, y, right, low, *size in boxes)
    if corners >= 0.9 * len(boxes):
        return f"{rule}, and would not as corners x1, y1, x2, y2", f"write x, y, width, height: jq -c '{FROM_CORNERS}'"
    return f"{rule}: they may be pixels of another size", "scale them to the width and height of the records"


def _reaches_out(right: float, low: float, width: float, height: float) -> bool:
    return right > BEYOND * width or low > BEYOND * height


@dataclass(frozen=True)
class _Detection:
    """An entry of a results file. where: its file and position."""

    where: str
    entry: Mapping[str, Any]

    def check_form(self) -> None:
        """Raise ConfigError, which names the form of the entry, if it is no detection."""
        if not {"image_id", "category_id"} <= self.entry.keys():
            keys = ", ".join([*self.entry][:6]) or "no keys"
            rule = f"must be a detection with image_id, category_id and bbox or segmentation; it has {keys}"
            raise refused(self.where, None, rule, "answers as text are JSON lines: jq -c '.[]' writes a list so")

    def position(self, find: Finders, annotations: Annotations | None) -> int:
        """Return the position of the record of its image, by id, by file name in the annotation file, or by stem."""
        value = self.entry.get("image_id")
        key = id_text(value)
        if key is None:
            raise refused(f"{self.where}.image_id", value, "must be a number or a text", WAY_OUT)
        by_id = find.by_name(str(value)) or find.by_name(key)
        file = annotations.files.get(key) if annotations else None
        by_file = (find.by_name(file) or find.by_name(os.path.basename(file))) if file else []
        if by_id and by_file and not {*by_id} & {*by_file}:
            rule = f"is the id of one record, and its file {file!r} in {annotations and annotations.path} is another's"
            raise refused(f"{self.where}.image_id", value, rule, "give the annotation file of these results")
        places = [place for place in by_id if place in by_file] or by_file or by_id or find.by_stem(key)
        if len(places) != 1:
            rule = "names several records" if places else "names none of the records"
            way_out = "give the records of these images; --annotations FILE finds them by file name"
            raise refused(f"{self.where}.image_id", value, rule, way_out)
        return places[0]

    def category(self, annotations: Annotations | None) -> str:
        """Return the name of its category."""
        value = self.entry.get("category_id")
        key = id_text(value)
        if annotations is None:
            rule = "needs the name of each category, which results lack"
            raise refused("--annotations", None, rule, "give COCO's instances_*.json, which lists the categories")
        if key is None or key not in annotations.categories:
            rule = f"must be the id of a category in {annotations.path}"
            raise refused(f"{self.where}.category_id", value, rule, "give the annotation file of these results")
        return annotations.categories[key].strip()

    def score(self) -> float | None:
        """Return its score; None if it has none."""
        value = self.entry.get("score")
        if value is not None and (not _is_number(value) or not math.isfinite(value)):
            raise refused(f"{self.where}.score", value, "must be a number", WAY_OUT)
        return None if value is None else float(value)

    def object(self, size: tuple[int, int], desc: str) -> MeasuredObject:
        """Return its object, in pixels of an image of this size."""
        outline, box = self.entry.get("segmentation"), self.entry.get("bbox")
        mask = self._mask(outline, size) if outline else None
        if box is None and mask is not None:
            box = rle.toBbox({"size": [size[1], size[0]], "counts": mask}).tolist()
        if not isinstance(box, list) or len(box) != 4 or not all(map(_is_number, box)) or min(box[2:]) < 0:
            rule = "must be x, y, width and height in pixels"
            raise refused(f"{self.where}.bbox", box, rule, WAY_OUT)
        return MeasuredObject.from_box(desc, box, size, mask)

    def _mask(self, outline: Any, size: tuple[int, int]) -> bytes:
        """Return the compressed run lengths of a segmentation: run lengths, or polygons."""
        width, height = size
        try:
            if isinstance(outline, dict):
                return _run_lengths(outline, width, height)
            if not all(len(one) >= 6 and len(one) % 2 == 0 and all(map(_is_number, one)) for one in outline):
                raise ValueError("a polygon is a list of at least three points, x and y in turn")
            moved = [[min(max(v, 0.0), size[place % 2]) for place, v in enumerate(one)] for one in outline]
            for one in moved:
                check_length(one)
            counts: bytes = rle.merge(rle.frPyObjects(moved, height, width))["counts"]
        except (ValueError, TypeError, KeyError) as error:
            shown = json.dumps(outline, default=str)[:80]
            raise refused(
                f"{self.where}.segmentation", shown, f"must be run lengths or polygons ({error})", WAY_OUT
            ) from error
        return counts


def check_length(polygon: Sequence[float]) -> None:
    """Raise ValueError for a polygon of which pycocotools would draw too many pixels: it draws each edge."""
    xs, ys = polygon[::2], polygon[1::2]
    steps = (
        max(abs(x - before_x), abs(y - before_y))
        for (before_x, before_y), (x, y) in pairwise([*zip(xs, ys, strict=True), (xs[0], ys[0])])
    )
    if sum(steps) > LONGEST_EDGE:
        raise ValueError(f"the edge of a polygon is longer than {LONGEST_EDGE:,} pixels")


def _run_lengths(outline: Mapping[str, Any], width: int, height: int) -> bytes:
    """Return COCO's run lengths, compressed. Raises ValueError where they do not cover the image."""
    if list(outline["size"]) != [height, width]:
        raise ValueError(f"run lengths of size {outline['size']} in an image of {[height, width]}, height and width")
    runs = run_lengths(outline["counts"], width * height)
    compressed: bytes = rle.frPyObjects({"size": [height, width], "counts": runs}, height, width)["counts"]
    return compressed


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= LARGEST
