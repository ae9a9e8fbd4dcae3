"""Data sets in the layout of Ultralytics' YOLO as annotated images.

`data.yaml` names the classes, and the images of each split. The labels of an image are in the file of its path with the
last `images` replaced by `labels`: a line for each object with its class, and its box (centre, width, height) or its
outline, as shares of the image. Format: https://docs.ultralytics.com/datasets/detect/
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stage2_api.errors import counted, kind_of, refused
from stage2_trainer.data.bounded_yaml import read_documents
from stage2_trainer.data.files import files_below, name_below, read_regular
from stage2_trainer.prepare.annotations import (
    IMAGE_ENDINGS,
    KEYPOINTS,
    NO_CATEGORY,
    NOT_SHARES,
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    LeftOut,
    Outlines,
    Tally,
    Units,
    all_shares,
    count_same_names,
    is_number,
)
from stage2_trainer.prepare.shapes import bounds

SPLITS = ("train", "val", "test")
NOTHING: tuple[object, ...] = (None, "", "~", "null", [])
CLASS_NUMBER = re.compile("0|[1-9][0-9]{0,8}")
LABEL_ENDINGS = (".txt", ".TXT")

BROKEN_LINE = "its line is neither a class and four numbers, nor a class and at least three points"
CONFIDENCE = (
    "its line has a number or two behind the box, such as a confidence or an angle: remove the confidence, and write a "
    "rotated box as four corners"
)
THREE_POINTS = (
    "a line with six numbers was read as an outline of three points; if it is a box and two numbers, remove these"
)
KEYPOINT_NUMBERS = "its line has other numbers behind the box than the keypoints that kpt_shape names"
BROKEN_LABELS = "its label file cannot be read"
BACKGROUND = "an image without a label file has no objects, as in Ultralytics"
NO_IMAGE = "its label file has no image"
FOUR_POINTS = "a box of four corners, which may be rotated, was replaced by its bounds, or with --geometry poly kept"
REPEATED = "a repeated line of a label file counts once, as in Ultralytics"


@dataclass(frozen=True)
class _Layout:
    """The content of data.yaml. root: the folder of its paths. names: of classes, by number. units: of the labels."""

    file: Path
    root: Path
    document: Mapping[str, Any]
    names: Mapping[int, str]
    units: Units


def read_yolo(data: Path, split: str, tally: Tally, *, units: Units = "shares") -> AnnotatedSet:
    """Return the images of a split, by name. data: the data.yaml, or its folder. Raises ConfigError."""
    data = data.absolute()  # a path relative to this folder may lack the `images` that labels replace
    layout = _layout(data / "data.yaml" if os.path.isdir(data) else data, units)
    count_same_names(layout.names.values(), tally)
    places = _split_paths(layout, split)
    images = [image for place in places for image in _images(place, layout)]
    if not images:
        raise refused(f"{layout.file} {split}", [str(one) for one in places], "has no images", "correct the path")

    def read() -> Iterator[AnnotatedImage]:
        for image in images:
            name = Path(os.path.relpath(image, layout.root)).with_suffix("").as_posix()
            try:
                objects = list(_objects(image, layout, tally, name))
            except LeftOut as left_out:
                tally.leave_out_image(left_out, name)
                continue
            yield AnnotatedImage(name, image, None, objects, shares=units == "shares", root=layout.file.parent)
        _count_lost(places, images, layout, tally)

    return AnnotatedSet(len(images), read())


def _layout(file: Path, units: Units) -> _Layout:
    """Return the content of a data.yaml. Raises ConfigError."""
    documents = read_documents(file, as_text=True)
    if len(documents) != 1:
        raise refused(str(file), counted(len(documents), "document"), "must be one mapping", "give the data.yaml")
    (document,) = documents
    if not isinstance(document, dict):
        raise refused(str(file), kind_of(document), "must be one mapping", "give the data.yaml")
    path = document.get("path")
    if not isinstance(path, str | None):
        raise refused(f"{file} path", path, "must be the path of a folder", "correct it")
    named = file.parent / ("." if path is None or path in NOTHING else path)
    return _Layout(file, named if os.path.isdir(named) else file.parent, document, _names(document, file), units)


def _names(document: Mapping[str, Any], file: Path) -> dict[int, str]:
    names = document.get("names")
    numbered = dict(enumerate(names)) if isinstance(names, list) else names
    listed = {str(number): name for number, name in numbered.items()} if isinstance(numbered, dict) else None
    if not listed:
        raise refused(f"{file} names", names, "must list the classes", "write names: [cat, dog]")
    for number, name in listed.items():
        if not CLASS_NUMBER.fullmatch(number) or not isinstance(name, str) or not name.strip():
            rule = "must be a number in decimal digits, with a name"
            raise refused(f"{file} names.{number}", name, rule, "write 0: cat")
    if document.get("nc") not in (None, str(len(listed))):
        rule = f"must be the number of names, {len(listed)}"
        raise refused(f"{file} nc", document["nc"], rule, "correct one of them")
    return {int(number): name.strip() for number, name in listed.items()}


def _split_paths(layout: _Layout, split: str) -> list[Path]:
    """Return the folders and lists of a split. Raises ConfigError."""
    value = layout.document.get(split)
    if value in NOTHING:
        there = [key for key in SPLITS if layout.document.get(key) not in NOTHING]
        raise refused("--split", split, f"{layout.file} has {', '.join(there) or 'no split'}", "name one of them")
    found = []
    for one in value if isinstance(value, list) else [value]:
        if not isinstance(one, str) or not one:
            rule = "must be the path of a folder or a list, or a list of such paths"
            raise refused(f"{layout.file} {split}", one, rule, "write a path")
        # Roboflow exports ../train/images beside the folder train; Ultralytics reads it as train/images.
        beside = [layout.root / one, layout.root / one.removeprefix("../")]
        place = next((path for path in beside if os.path.exists(path)), None)
        if place is None:
            way_out = "write / for \\" if "\\" in one else "correct path, or the split's"
            raise refused(f"{layout.file} {split}", one, f"is not under {layout.root}", way_out)
        found.append(place)
    return found


def _images(place: Path, layout: _Layout) -> list[Path]:
    if os.path.isdir(place):
        return sorted(path for path in files_below(place) if path.suffix.lower() in IMAGE_ENDINGS)
    try:
        lines = read_regular(place).decode("utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else error
        raise refused(f"{layout.file}", str(place), f"must be a folder, or a list ({why})", "correct it") from error
    listed = [line.strip() for line in lines if line.strip()]
    under = [(layout.root / one, place.parent / one) for one in listed]
    return [beside if os.path.exists(beside) and not os.path.exists(root) else root for root, beside in under]


def _label_file(image: Path) -> Path:
    """Return the label file of an image, which may be missing; its ending may be in capitals."""
    parts = list(image.parts)
    if "images" in parts[:-1]:
        parts[len(parts) - 2 - parts[-2::-1].index("images")] = "labels"
    files = [Path(*parts).with_suffix(ending) for ending in LABEL_ENDINGS]
    return next((file for file in files if os.path.lexists(file)), files[0])


def _labels(image: Path) -> list[str] | None:
    """Return the non-blank lines of an image's label file; None where there is no file. Raises LeftOut."""
    try:
        return [line for line in read_regular(_label_file(image)).decode("utf-8-sig").splitlines() if line.strip()]
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as error:
        raise LeftOut(BROKEN_LABELS) from error


def _objects(image: Path, layout: _Layout, tally: Tally, name: str) -> Iterator[AnnotatedObject]:
    lines = _labels(image)
    if lines is None:
        tally.change(BACKGROUND, f"{name}: no {name_below(_label_file(image), layout.root)}")
        return
    unique = list(dict.fromkeys(" ".join(line.split()) for line in lines))
    for _ in range(len(lines) - len(unique)):
        tally.change(REPEATED, name)
    for line in unique:
        try:
            yield _object(line, layout, tally, name)
        except LeftOut as left_out:
            tally.leave_out_object(left_out, f"{name}: {line[:40]}")


def _object(line: str, layout: _Layout, tally: Tally, name: str) -> AnnotatedObject:
    """Return the object of a line. Raises LeftOut."""
    try:
        number, *shares = [float(word) for word in line.split()]
    except ValueError as error:
        raise LeftOut(BROKEN_LINE) from error
    if layout.document.get("kpt_shape") not in NOTHING and len(shares) > 4:
        if len(shares) != 4 + _keypoint_numbers(layout):
            raise LeftOut(KEYPOINT_NUMBERS)
        tally.change(KEYPOINTS, name)
        shares = shares[:4]
    is_box_and_two = len(shares) == 6 and layout.units == "shares" and all_shares(shares[:4]) and not all_shares(shares)
    if len(shares) == 5 or is_box_and_two:
        raise LeftOut(CONFIDENCE)
    if not all(map(is_number, (number, *shares))) or int(number) != number or len(shares) < 4 or len(shares) % 2:
        raise LeftOut(BROKEN_LINE)
    if int(number) not in layout.names:
        raise LeftOut(NO_CATEGORY, f"data.yaml has {counted(len(layout.names), 'name')}")
    if layout.units == "shares" and not all_shares(shares):
        raise LeftOut(NOT_SHARES)
    desc = layout.names[int(number)]
    if len(shares) == 4:
        x, y, width, height = shares
        return AnnotatedObject(desc, (x - width / 2, y - height / 2, x + width / 2, y + height / 2))
    xs, ys = shares[::2], shares[1::2]
    outline = Outlines([list(zip(xs, ys, strict=True))])
    noted = {3: (THREE_POINTS,), 4: (FOUR_POINTS,)}
    return AnnotatedObject(desc, bounds(outline), outline, noted.get(len(xs), ()))


def _keypoint_numbers(layout: _Layout) -> int:
    """Return how many numbers the keypoints of an object have, by `kpt_shape`: points, and numbers of each.

    Raises ConfigError.
    """
    shape = layout.document["kpt_shape"]
    if isinstance(shape, list) and len(shape) == 2 and all(CLASS_NUMBER.fullmatch(str(one)) for one in shape):
        return int(shape[0]) * int(shape[1])
    raise refused(f"{layout.file} kpt_shape", shape, "must be the numbers of points and of values", "write [17, 3]")


def _count_lost(places: Sequence[Path], images: Sequence[Path], layout: _Layout, tally: Tally) -> None:
    """Count the label files of a split's folders that have no image."""
    labelled = {_label_file(image) for image in images}
    for place in places:
        folder = _label_file(place / "x").parent
        if os.path.isdir(place) and folder != place:
            for file in sorted({path for path in files_below(folder) if path.suffix in LABEL_ENDINGS} - labelled):
                tally.leave_out_image(NO_IMAGE, name_below(file, layout.root))
