"""The writer of records: annotated images become lines of a data file, in coordinate tokens, which need no units."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from stage2_api.coordinates import coord_token, to_bin
from stage2_trainer.data.image_headers import read_header
from stage2_trainer.data.images import ImageError
from stage2_trainer.prepare.annotated_image import AnnotatedImage, AnnotatedObject, Tally
from stage2_trainer.prepare.outline import area, simplified, without_repeats

Geometry = Literal["bbox", "poly"]
Order = Literal["reading", "file"]
TOLERANCE_BINS = 1.0

MISSING = "its file is missing"
UNREADABLE = "its file cannot be read"
TURNED = "it is shown turned (EXIF), and its annotations may mean the image before that"
OTHER_SIZE = "its file has another size than its annotations say"
CROWDED = "it has more objects than --max-objects"
NO_AREA = "it has no area in the image"
FURTHER_PARTS = "a further part of an object of several"


@dataclass(frozen=True)
class RecordChoice:
    """What becomes of annotated images.

    classes: descriptions that are kept; None keeps all. limit: most records. max_objects: images with more are left
    out, never trimmed: an answer that lists some of what is to be seen would be taught.
    """

    geometry: Geometry = "bbox"
    order: Order = "reading"
    classes: frozenset[str] | None = None
    limit: int | None = None
    max_objects: int | None = None


def write_records(images: Iterable[AnnotatedImage], output: Path, choice: RecordChoice, tally: Tally) -> None:
    """Write a data file; it gets its name when it is whole. Paths of images are relative to its folder."""
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = output.with_name(f".{output.name}.unfinished")
    try:
        with aside.open("w", encoding="utf-8") as file:
            for image in images:
                if choice.limit is not None and tally.records >= choice.limit:
                    break
                record = _record(image, output.parent, choice, tally)
                if record is not None:
                    file.write(json.dumps(record, ensure_ascii=False) + "\n")
                    tally.records += 1
                    tally.objects += len(record["objects"])
        aside.rename(output)
    finally:
        aside.unlink(missing_ok=True)


def _record(image: AnnotatedImage, folder: Path, choice: RecordChoice, tally: Tally) -> dict[str, Any] | None:
    """Return the record of an image; None where it is left out."""
    try:
        width, height = _size(image)
    except _LeftOut as left_out:
        tally.leave_out_image(str(left_out), image.sample_id)
        return None
    wanted = [one for one in image.objects if choice.classes is None or one.desc in choice.classes]
    placed = [(_bins(one, width, height, choice.geometry, tally, image.sample_id), one.desc) for one in wanted]
    objects = [(bins, desc) for bins, desc in placed if bins]
    if choice.max_objects is not None and len(objects) > choice.max_objects:
        tally.leave_out_image(CROWDED, image.sample_id)
        return None
    if choice.order == "reading":
        objects.sort(key=lambda found: (min(found[0][1::2]), min(found[0][0::2])))
    key = "bbox_2d" if choice.geometry == "bbox" else "poly"
    return {
        "sample_id": image.sample_id,
        "images": [os.path.relpath(image.path.absolute(), folder.absolute())],
        "width": width,
        "height": height,
        "objects": [{"desc": desc, key: [coord_token(number) for number in bins]} for bins, desc in objects],
        **({"metadata": dict(image.metadata)} if image.metadata else {}),
    }


class _LeftOut(Exception):
    """An image is left out, for this reason."""


def _size(image: AnnotatedImage) -> tuple[int, int]:
    """Return width and height from the image's header. Raises _LeftOut."""
    if not image.path.is_file():
        raise _LeftOut(MISSING)
    try:
        header = read_header(str(image.path))
    except ImageError as error:
        raise _LeftOut(UNREADABLE) from error
    if header.turned and (header.stored == header.size or image.size in (None, header.stored)):
        raise _LeftOut(TURNED)
    if image.size not in (None, header.size):
        raise _LeftOut(OTHER_SIZE)
    return header.size


def _bins(
    one: AnnotatedObject, width: int, height: int, geometry: Geometry, tally: Tally, sample_id: str
) -> tuple[int, ...]:
    """Return an object's bins, x and y in turn; none where it is left out."""
    x1, y1, x2, y2 = one.box
    left, right = (min(max(x, 0.0), width) for x in (x1, x2))
    top, bottom = (min(max(y, 0.0), height) for y in (y1, y2))
    if right <= left or bottom <= top:
        tally.leave_out_object(NO_AREA, f"{sample_id} {one.desc}")
        return ()
    box = (to_bin(left, width), to_bin(top, height), to_bin(right, width), to_bin(bottom, height))
    if geometry == "bbox":
        return box
    return _outline_bins(one, box, width, height, tally, sample_id)


def _outline_bins(
    one: AnnotatedObject, box: tuple[int, ...], width: int, height: int, tally: Tally, sample_id: str
) -> tuple[int, ...]:
    """Return the outline of the largest part, or the corners of the box where there is none with three points."""
    parts = sorted(one.outlines, key=area, reverse=True)
    for _ in parts[1:]:
        tally.leave_out_object(FURTHER_PARTS, f"{sample_id} {one.desc}")
    for part in parts[:1]:
        scaled = np.asarray(part, dtype=np.float64) * (1000 / width, 1000 / height)
        few = simplified(scaled, TOLERANCE_BINS) if len(scaled) > 3 else scaled
        points = without_repeats([(to_bin(x, 1000), to_bin(y, 1000)) for x, y in few])
        if len(set(points)) >= 3:
            return tuple(number for point in points for number in point)
    x1, y1, x2, y2 = box
    return (x1, y1, x2, y1, x2, y2, x1, y2)
