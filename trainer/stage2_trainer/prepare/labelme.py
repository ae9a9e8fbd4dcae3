"""LabelMe's annotations, a JSON file for each image, as annotated images.

Format: https://github.com/wkentaro/labelme (labelme/label_file.py). X-AnyLabeling writes the same, and `rotation`.
"""

from __future__ import annotations

import json
import math
import os
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from stage2_api.errors import kind_of, refused
from stage2_trainer.data.files import files_below, name_below, read_regular
from stage2_trainer.prepare.annotations import (
    BROKEN_OUTLINE,
    IMAGE_ENDINGS,
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    LeftOut,
    Outline,
    Outlines,
    Tally,
    is_number,
    is_text,
    stated_size,
)
from stage2_trainer.prepare.picture_files import decode_base64, embedded_name, locate
from stage2_trainer.prepare.shapes import ROTATED, bounds, ellipse

LARGEST_FILE = 128 << 20  # bytes of an annotation file, which may hold its image
MOST_SHAPES, MOST_POINTS = 100_000, 100_000  # of an annotation file, and of a shape
CLOSED = ("polygon", "rectangle", "rotation", "circle", "mask")
FLAT = ("line", "linestrip", "point", "points")

BROKEN_FILE = "its annotation file cannot be read"
OTHER_FILE = "it is no annotation file of LabelMe: it has no list of shapes"
NO_ANNOTATION = "it has no annotation file"
TOO_MANY = f"its annotation file has more than {MOST_SHAPES:,} shapes"
NO_LABEL = "it has no label"
NO_OUTLINE = "it is a line or a point, which has no area"
OTHER_SHAPE = "its shape is none that LabelMe draws"
SEVERAL_FILES = "an image has several annotation files, and a record for each"
INSIDE = "an image without a file was written from its annotation file's imageData"
OWN_NAME = "the image that an annotation file names is not there; the one with the file's own name was taken"
MASK = "a mask was replaced by its box"


def read_labelme(folder: Path, tally: Tally) -> AnnotatedSet:
    """Return the images of a folder and those below, by name of their annotation files. Raises ConfigError."""
    there = sorted(files_below(folder))
    files = [path for path in there if path.suffix.lower() == ".json"]
    if not files:
        raise refused(
            "FOLDER", str(folder), "must have annotation files (*.json)", "give the folder of LabelMe's files"
        )

    pictures = [path for path in there if path.suffix.lower() in IMAGE_ENDINGS]
    by_stem = defaultdict[Path, list[Path]](list)
    for picture in pictures:
        by_stem[picture.with_suffix("")].append(picture)

    def read() -> Iterator[AnnotatedImage]:
        used: Counter[str] = Counter()
        for file in files:
            name = name_below(file, folder)
            try:
                image = _image(file, by_stem[file.with_suffix("")], folder, tally)
            except LeftOut as left_out:
                tally.leave_out_image(left_out, name)
                continue
            if image.content is None:
                used[os.path.realpath(image.path)] += 1
                if used[os.path.realpath(image.path)] == 2:
                    tally.change(SEVERAL_FILES, name_below(image.path, folder))
            yield image
        stems = {file.with_suffix("") for file in files}
        for path in pictures:
            if path.with_suffix("") not in stems and os.path.realpath(path) not in used:
                tally.leave_out_image(NO_ANNOTATION, name_below(path, folder))

    return AnnotatedSet(len(files), read())


def _image(file: Path, own: Sequence[Path], root: Path, tally: Tally) -> AnnotatedImage:
    """Return the image of an annotation file. own: images of its name. Raises LeftOut."""
    document = _document(file)
    path, content = _picture(file, document, own, root, tally)
    sample_id = Path(name_below(file, root)).with_suffix("").as_posix()
    objects = [*_objects(document["shapes"], sample_id, tally)]
    size = stated_size(document.get("imageWidth"), document.get("imageHeight"))
    return AnnotatedImage(sample_id, path, size, objects, content=content, root=root)


def _document(file: Path) -> Mapping[str, Any]:
    """Return the content of an annotation file. Raises LeftOut."""
    try:
        document = json.loads(read_regular(file, LARGEST_FILE))
    except (OSError, ValueError, RecursionError) as error:
        raise LeftOut(BROKEN_FILE, str(error)) from error
    shapes = document.get("shapes") if isinstance(document, dict) else None
    if not isinstance(shapes, list):
        raise LeftOut(OTHER_FILE, kind_of(document))
    if len(shapes) > MOST_SHAPES:
        raise LeftOut(TOO_MANY)
    return {**document, "shapes": shapes}


def _picture(
    file: Path, document: Mapping[str, Any], own: Sequence[Path], root: Path, tally: Tally
) -> tuple[Path, bytes | None]:
    """Return the image's file, or a name and the bytes in `imageData`. Raises LeftOut."""
    path, data = document.get("imagePath"), document.get("imageData")
    stated = path if is_text(path) and path else None
    named = [file.parent / one for one in (stated, stated.replace("\\", "/"))] if stated else []
    if there := [one for one in named if os.path.isfile(one)]:  # false for a name that is too long, too
        return there[0], None
    if len(own) == 1:
        tally.change(OWN_NAME, f"{name_below(file, root)}: {stated}")
        return own[0], None
    if isinstance(data, str) and data:
        tally.change(INSIDE, name_below(file, root))
        content = decode_base64(data)
        return Path(embedded_name(content)), content
    return (locate([stated], file.parent, tally)[stated] if stated else file.with_suffix(".jpg")), None


def _objects(shapes: Sequence[Any], name: str, tally: Tally) -> Iterator[AnnotatedObject]:
    """Yield the objects of an image. Shapes of one label and one group are parts of one object."""
    parts = defaultdict[Hashable, list[AnnotatedObject]](list)
    for number, shape in enumerate(shapes):
        try:
            found = _object(shape)
        except LeftOut as left_out:
            tally.leave_out_object(left_out, f"{name} shape {number}")
            continue
        group = shape.get("group_id")
        is_grouped = isinstance(group, int | str) and group != ""
        parts[(found.desc, type(group).__name__, group) if is_grouped else number].append(found)
    for first, *others in parts.values():
        yield _joined([first, *others]) if others else first


def _joined(parts: Sequence[AnnotatedObject]) -> AnnotatedObject:
    outlines = Outlines([outline for part in parts for outline in part.outlines.parts or [_corners(part)]])
    noted = list(dict.fromkeys(rule for part in parts for rule in part.noted))
    return replace(parts[0], box=bounds(outlines), outlines=outlines, noted=noted)


def _corners(part: AnnotatedObject) -> Outline:
    x1, y1, x2, y2 = part.box
    return [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]


def _object(shape: Any) -> AnnotatedObject:
    """Return the object of a shape. Raises LeftOut."""
    if not isinstance(shape, Mapping):
        raise LeftOut(OTHER_SHAPE, shape)
    label, kind = shape.get("label"), shape.get("shape_type") or "polygon"  # old files have no type
    if not is_text(label) or not label.strip():
        raise LeftOut(NO_LABEL, label)
    desc = label.strip()
    if kind in FLAT:
        raise LeftOut(NO_OUTLINE, kind)
    if kind not in CLOSED:
        raise LeftOut(OTHER_SHAPE, kind)
    points = _points(shape.get("points"))
    outline = Outlines([points])
    if kind == "circle" and len(points) == 2:
        (x, y), edge = points
        radius = math.hypot(edge[0] - x, edge[1] - y)
        box, around = ellipse(x, y, radius, radius, 0.0)
        return AnnotatedObject(desc, box, around)
    if kind == "mask" and len(points) == 2:
        x1, y1, x2, y2 = bounds(outline)  # its last pixels are inside
        return AnnotatedObject(desc, (x1, y1, x2 + 1, y2 + 1), noted=[MASK])
    if kind == "rectangle" and len(points) in (2, 4):
        return AnnotatedObject(desc, bounds(outline))
    if kind in ("polygon", "rotation") and len(points) >= 3:
        return AnnotatedObject(desc, bounds(outline), outline, [ROTATED] if kind == "rotation" else [])
    raise LeftOut(BROKEN_OUTLINE, f"{kind} of {len(points)} points")


def _points(listed: Any) -> Outline:
    """Return the points of a shape. Raises LeftOut."""
    if not isinstance(listed, list) or not 0 < len(listed) <= MOST_POINTS:
        raise LeftOut(BROKEN_OUTLINE, listed)
    points = []
    for point in listed:
        if not isinstance(point, list) or len(point) != 2 or not all(map(is_number, point)):
            raise LeftOut(BROKEN_OUTLINE, point)
        points.append((point[0], point[1]))
    return points
