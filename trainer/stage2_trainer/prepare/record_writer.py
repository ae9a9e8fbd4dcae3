"""Writes annotated images as records: lines of a data file with coordinate tokens, which need no units."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stage2_api.coordinates import coord_token, to_bin
from stage2_trainer.data.files import check_new_file, leads_inside, name_below, new_file, new_folder, relative_path
from stage2_trainer.data.images import SIDEWAYS, UPRIGHT, ImageError, header_of, read_header
from stage2_trainer.data.reading_order import Bounds, in_reading_order
from stage2_trainer.matching.ground_truth import holds_token
from stage2_trainer.prepare.annotations import (
    NOT_SHARES,
    OTHER_MASK,
    REACH,
    SHARES,
    AnnotatedImage,
    AnnotatedObject,
    Box,
    LeftOut,
    Tally,
    all_shares,
    is_text,
)
from stage2_trainer.prepare.outlines import area, drawn, simplified, without_repeats

Geometry = Literal["bbox", "poly"]
Order = Literal["reading", "file"]
Exif = Literal["auto", "shown", "raw"]
Split = Literal["box", "largest", "drop"]
TOLERANCE_BINS = 1.0
CLIPPED_PIXELS = 1.0  # rounding moves edges of boxes this far outside

MOST_SHARES = 2  # a box may reach out of its image; numbers beyond are pixels
MOST_NAMES = 1000  # descriptions that are compared with a name of --classes
NAMED_NAMES = 5
MISSING = "its file is missing"
UNREADABLE = "its file cannot be read"
OUTSIDE = "its file is not in the folder of the data set, nor in one of ROOT_IMAGE_DIR"
NO_TEXT = "its file name is not UTF-8, and cannot be written into a record"
TURNED = (
    "EXIF rotates it, and nothing says whether its annotations are of the stored pixels (--exif raw) or not (shown)"
)
FOLLOWED = "annotations of an image's stored pixels were rotated with it, as its EXIF says"
OTHER_SIZE = "its file has another size than its annotations"
CROWDED = "it has more objects than --max-objects"
OTHER_CLASS = "its name is not one of --classes"
REVERSED = (
    "its right or lower edge lies before its left or upper one: a negative size, or four numbers that mean something "
    "else than was read (then the other boxes are wrong too)"
)
NO_AREA = "it has no area"
BEYOND = "it lies outside of the image"
TOKEN_IN_DESC = "its name contains the text of a token, <|...|>, and would be read as that token"
SPLIT = {
    "box": "an object of several parts was replaced by the corners of its box (--split-objects)",
    "largest": "an object of several parts has the outline of the largest (--split-objects)",
    "drop": "it has several parts, which one outline cannot show (--split-objects)",
}
HOLES = "a hole of an object, which its outline fills"
CLIPPED = "a box extended more than a pixel beyond its image, and was clipped"
OUTLINE_CLIPPED = "an outline extended more than a pixel beyond its image: its points were moved to the edge"
NO_OUTLINE = "an outline without area in the image was replaced by the corners of its box"
SAME_ID = "another image has the same id: scores by id cannot distinguish them"
PERCENT_OBJECTS, PERCENT_SIDE = 10, 200  # so many objects in images so large do not all lie in 0 to 100 by chance
PERCENT = (
    "all coordinates lie in 0 to 100, and no image is that small: they may be percent, and all boxes wrong (divide "
    "them by 100, and give --units shares)"
)
UNSEEN_CLASS = "no object has this name of --classes"


class NothingKept(Exception):
    """No object is left to write: a model cannot learn from such a file."""


@dataclass(frozen=True)
class RecordChoice:
    """How records are written.

    classes: descriptions to keep; None keeps all. limit: most records. max_objects: images with more are left out,
    never trimmed, because a model would learn to list only some of the objects. exif: what the annotations of a rotated
    image refer to; `auto` compares their size with the image's.
    """

    geometry: Geometry = "bbox"
    order: Order = "reading"
    classes: frozenset[str] | None = None
    limit: int | None = None
    max_objects: int | None = None
    exif: Exif = "auto"
    split_objects: Split = "box"


def write_records(images: Iterable[AnnotatedImage], output: Path, choice: RecordChoice, tally: Tally) -> None:
    """Write a data file, whose paths of images are relative to its folder, and none of it after an error.

    Images without files are written into a folder beside it. Raises NothingKept, and writes nothing, without an object.
    """
    check_new(output)
    with new_file("--output", output) as aside, ExitStack() as stack, aside.open("w", encoding="utf-8") as file:
        writer = _Writer(output, choice, tally, stack)
        for image in images:
            if choice.limit is not None and tally.records >= choice.limit:
                break
            record = writer.record(image)
            if record is not None:
                file.write(json.dumps(record, ensure_ascii=False) + "\n")
                tally.records += 1
                tally.objects += len(record["objects"])
        writer.count_unseen()
        writer.count_percent()
        if not tally.objects:
            raise NothingKept


class _Writer:
    """Creates records for one data file."""

    def __init__(self, output: Path, choice: RecordChoice, tally: Tally, stack: ExitStack) -> None:
        self._output = output
        self._stack = stack
        self._choice = choice
        self._tally = tally
        self._names: set[str] = set()  # of objects so far; at most MOST_NAMES that --classes lacks
        self._ids: set[str] = set()
        self._furthest, self._shortest = 0.0, math.inf  # coordinate, and side of an image, in pixels

    def count_percent(self) -> None:
        """Note coordinates that may be percent of the images."""
        few = self._tally.objects < PERCENT_OBJECTS or self._shortest < PERCENT_SIDE
        if not few and 1 + REACH < self._furthest <= 100 + REACH:
            self._tally.change(PERCENT, f"the largest is {self._furthest:g}")

    def count_unseen(self) -> None:
        """Count the names of --classes that no object has, each with the names that it may mean."""
        for name in sorted((self._choice.classes or frozenset()) - self._names):
            there = sorted(self._names)
            near = get_close_matches(name.casefold(), map(str.casefold, there), n=NAMED_NAMES)
            similar = [other for other in there if other.casefold() in near] or there[:NAMED_NAMES]
            self._tally.change(UNSEEN_CLASS, f"{name}; there is {', '.join(similar) or 'none at all'}")

    def record(self, image: AnnotatedImage) -> dict[str, Any] | None:
        """Return the record of an image; None where it is left out."""
        try:
            width, height, orientation = _size(image, self._choice.exif)
            if orientation != UPRIGHT:
                image = _followed(image, orientation, (width, height))
                self._tally.change(FOLLOWED, image.sample_id)
            place = relative_path(image.path, self._output.parent) if image.content is None else ""
            if not is_text(place) or not is_text(image.sample_id):
                raise LeftOut(NO_TEXT)
            objects = self._objects(image, width, height)
        except LeftOut as left_out:
            if str(left_out) == MISSING:
                self._tally.leave_out_missing(left_out, image.path, image.root)
            else:
                self._tally.leave_out_image(left_out, _name(image))
            return None
        if not image.objects:
            self._tally.without_objects += 1
        if image.sample_id in self._ids:
            self._tally.change(SAME_ID, image.sample_id)
        self._ids.add(image.sample_id)
        if image.content is None and not leads_inside(image.path, (self._output.parent,)):
            self._tally.outside.add(os.path.realpath(image.root))
        if image.content is not None:
            (self._new_images / image.path.name).write_bytes(image.content)
            place = f"{images_folder(self._output).name}/{image.path.name}"
        key = "bbox_2d" if self._choice.geometry == "bbox" else "poly"
        return {
            "sample_id": image.sample_id,
            "images": [place],
            "width": width,
            "height": height,
            "objects": [{"desc": desc, key: [coord_token(number) for number in bins]} for bins, desc in objects],
            **({"metadata": dict(image.metadata)} if image.metadata else {}),
        }

    @cached_property
    def _new_images(self) -> Path:
        """The temporary folder for images without files."""
        return self._stack.enter_context(new_folder("--output", images_folder(self._output)))

    def _objects(self, image: AnnotatedImage, width: int, height: int) -> list[tuple[tuple[int, ...], str]]:
        """Return bins and description of the kept objects, in order. Raises LeftOut for the whole image."""
        most = self._choice.max_objects
        objects = []
        for one in image.objects:
            try:
                self._check_class(one.desc)
                objects.append((self._bins(one, image, width, height), one.desc))
            except LeftOut as left_out:
                self._tally.leave_out_object(left_out, f"{image.sample_id} {one.desc}")
                continue
            for rule in one.noted:
                self._tally.change(rule, f"{image.sample_id} {one.desc}")
        if most is not None and len(objects) > most:
            raise LeftOut(CROWDED)
        if self._choice.order == "reading":
            return in_reading_order(objects, lambda one: Bounds.from_bins(one[0]), tie=lambda one: one)
        return objects

    def _check_class(self, desc: str) -> None:
        """Raise LeftOut for a description that --classes lacks."""
        classes = self._choice.classes
        if classes is None:
            return
        if desc in classes or len(self._names) < MOST_NAMES:
            self._names.add(desc)
        if desc not in classes:
            raise LeftOut(OTHER_CLASS)

    def _bins(self, one: AnnotatedObject, image: AnnotatedImage, width: int, height: int) -> tuple[int, ...]:
        """Return an object's bins, x and y in turn. Raises LeftOut."""
        if holds_token(one.desc):
            raise LeftOut(TOKEN_IN_DESC)
        if one.outlines.mask_size not in (None, (width, height)):
            raise LeftOut(OTHER_MASK)
        scale = (width, height) if image.shares else (1, 1)
        x1, y1, x2, y2 = (number * scale[i % 2] for i, number in enumerate(one.box))
        left, right = (min(max(x, 0.0), width) for x in (x1, x2))
        top, bottom = (min(max(y, 0.0), height) for y in (y1, y2))
        if right <= left or bottom <= top:
            raise LeftOut(_no_area(image.shares, one.box), _shown(one.box))
        _check_units(one.box, image.shares, (width, height))
        if not image.shares:
            self._furthest = max(self._furthest, x2, y2)
            self._shortest = min(self._shortest, width, height)
        if max(left - x1, x2 - right, top - y1, y2 - bottom) > CLIPPED_PIXELS:
            self._tally.change(CLIPPED, f"{image.sample_id} {one.desc}")
        box = (to_bin(left, width), to_bin(top, height), to_bin(right, width), to_bin(bottom, height))
        if self._choice.geometry == "bbox":
            return box
        one = replace(one, outlines=drawn(one.outlines))
        for part in one.outlines.parts:
            _check_units([*chain.from_iterable(part)], image.shares, (width, height))
        return self._outline_bins(one, box, scale, (width, height), image.sample_id)

    def _outline_bins(
        self,
        one: AnnotatedObject,
        box: tuple[int, ...],
        scale: tuple[int, int],
        pixels: tuple[int, int],
        sample_id: str,
    ) -> tuple[int, ...]:
        """Return an object's outline, or the corners of its box if that has fewer than three points. Raises LeftOut."""
        parts = sorted(one.outlines.parts, key=area, reverse=True)
        if len(parts) > 1 and (how := self._choice.split_objects) == "drop":
            raise LeftOut(SPLIT[how])
        if len(parts) > 1:
            self._tally.change(SPLIT[how], f"{sample_id} {one.desc}")
            if how == "box":
                return _corners(box)
        for _ in range(one.outlines.holes):
            self._tally.change(HOLES, f"{sample_id} {one.desc}")
        for part in parts[:1]:
            scaled = np.asarray(part, dtype=np.float64) * scale / np.asarray(pixels) * 1000
            out = np.maximum(-scaled, scaled - 1000).max(axis=0) * pixels / 1000
            if out.max() > CLIPPED_PIXELS:
                self._tally.change(OUTLINE_CLIPPED, f"{sample_id} {one.desc}")
            few = simplified(scaled, TOLERANCE_BINS) if len(scaled) > 3 else scaled
            points = without_repeats([(to_bin(x, 1000), to_bin(y, 1000)) for x, y in few])
            if len(set(points)) >= 3:
                return tuple(number for point in points for number in point)
        if parts or one.outlines.mask_size is not None:
            self._tally.change(NO_OUTLINE, f"{sample_id} {one.desc}")
        return _corners(box)


def _no_area(shares: bool, box: Box) -> str:
    """Return why a box has no area in its image."""
    x1, y1, x2, y2 = box
    if x2 < x1 or y2 < y1:
        return REVERSED
    if x1 == x2 or y1 == y2:
        return NO_AREA
    return NOT_SHARES if shares and max(map(abs, box)) > MOST_SHARES else BEYOND


def _check_units(numbers: Sequence[float], shares: bool, pixels: tuple[int, int]) -> None:
    """Raise LeftOut if coordinates in pixels can only be shares, or the other way round."""
    if shares and not all(abs(number) <= MOST_SHARES for number in numbers):
        raise LeftOut(NOT_SHARES, _shown(numbers))
    if not shares and pixels != (1, 1) and all_shares(numbers, REACH):
        raise LeftOut(SHARES, _shown(numbers))


def _shown(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:g}" for number in numbers[:4])


def _name(image: AnnotatedImage) -> str:
    return image.sample_id if image.content is not None else name_below(image.path, image.root)


def _corners(box: tuple[int, ...]) -> tuple[int, ...]:
    x1, y1, x2, y2 = box
    return (x1, y1, x2, y1, x2, y2, x1, y2)


def _size(image: AnnotatedImage, exif: Exif) -> tuple[int, int, int]:
    """Return width and height as shown, and the orientation that annotations have to follow. Raises LeftOut."""
    if image.content is None and not os.path.exists(image.path):
        raise LeftOut(MISSING)
    if image.content is None and not leads_inside(image.path, (image.root,)):
        raise LeftOut(OUTSIDE)
    try:
        header = read_header(str(image.path)) if image.content is None else header_of(image.content, str(image.path))
    except ImageError as error:
        raise LeftOut(f"{UNREADABLE}: {error.fault}; {error.way_out}") from error
    is_raw = exif == "raw" or (exif == "auto" and image.size == header.stored)
    if header.rotated and exif == "auto" and (image.size is None or header.stored == header.size):
        raise LeftOut(TURNED)
    if image.size is not None and image.size != (header.stored if is_raw else header.size):
        shown = "{} x {}".format(*(header.stored if is_raw else header.size))
        raise LeftOut(OTHER_SIZE, f"{shown}, not {image.size[0]:g} x {image.size[1]:g}")
    return (*header.size, header.orientation if is_raw else UPRIGHT)


def _followed(image: AnnotatedImage, orientation: int, shown: tuple[int, int]) -> AnnotatedImage:
    """Return an image with its annotations rotated as a viewer rotates its pixels. shown: its size when displayed."""
    sideways = orientation in SIDEWAYS
    w, h = (1, 1) if image.shares else shown[::-1] if sideways else shown

    def point(x: float, y: float) -> tuple[float, float]:
        return {
            2: (w - x, y), 3: (w - x, h - y), 4: (x, h - y), 5: (y, x), 6: (h - y, x), 7: (h - y, w - x), 8: (y, w - x),
        }[orientation]  # fmt: skip

    def turned(one: AnnotatedObject) -> AnnotatedObject:
        corners = point(*one.box[:2]), point(*one.box[2:])
        (x1, x2), (y1, y2) = (sorted(values) for values in zip(*corners, strict=True))
        size = one.outlines.mask_size
        if size not in (None, shown[::-1] if sideways else shown):
            return one  # it is left out, and not drawn
        one = replace(one, outlines=drawn(one.outlines))
        parts = [[point(x, y) for x, y in part] for part in one.outlines.parts]
        outlines = replace(one.outlines, parts=parts, mask_size=size and (size[::-1] if sideways else size))
        return replace(one, box=(x1, y1, x2, y2), outlines=outlines)

    return replace(image, objects=[turned(one) for one in image.objects])


def images_folder(output: Path) -> Path:
    """Return the folder for images without files, beside a data file."""
    return output.with_name(f"{output.stem}-images")


def check_new(output: Path) -> None:
    """Raise ConfigError where a data file, or its folder of images, exists already or cannot be created."""
    check_new_file("--output", output)
    check_new_file("--output", images_folder(output))
