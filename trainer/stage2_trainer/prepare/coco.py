"""COCO's annotations (and LVIS's, which have the same form): read as annotated images.

Format: https://cocodataset.org/#format-data
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stage2_api.errors import refused
from stage2_trainer.data.files import read_named
from stage2_trainer.prepare.annotations import (
    CROWD,
    KEYPOINTS,
    NO_CATEGORY,
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    LeftOut,
    Outlines,
    Tally,
    count_same_names,
    four_numbers,
    is_crowd,
    is_text,
    stated_size,
)
from stage2_trainer.prepare.outlines import outlines_of

MOST_DIGITS = 18  # of an id, so that it is a 64-bit integer in other tools
NO_IMAGE = "its image is not in the file"
NO_OBJECT = "a category without objects in the file, which records cannot hold"
NO_FEDERATED = "a category in an image's federated lists that is not in the file"
FEDERATED = ("neg_category_ids", "not_exhaustive_category_ids")

Entries = Mapping[Any, Mapping[str, Any]]


def read_coco(annotations: Path, images: Path, tally: Tally, *, outlines: bool = False) -> AnnotatedSet:
    """Return the images of an annotation file, in its order. outlines: segmentations are read too.

    Raises ConfigError if the file cannot be read, is no COCO file, or has one image or category twice.
    """
    document = _document(annotations)
    names = _names(document["categories"], annotations)
    entries = _by_id(document["images"], f"{annotations} images")
    paths = {number: images / _file_name(entry, annotations) for number, entry in entries.items()}
    of_image: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for annotation in document["annotations"]:
        number = _known_id(annotation.get("image_id"), entries)
        if number not in entries:
            tally.leave_out_object(NO_IMAGE, str(annotation.get("id")))
            continue
        of_image[number].append(annotation)
    federated = {number: _federated(entry, names, annotations, tally) for number, entry in entries.items()}
    count_same_names(names.values(), tally)
    used = {_known_id(annotation.get("category_id"), names) for annotation in document["annotations"]}
    for number, name in names.items():
        if number not in used:
            tally.change(NO_OBJECT, name)

    def read() -> Iterator[AnnotatedImage]:
        for number, entry in entries.items():
            objects = list(_annotated_objects(of_image.get(number, ()), names, tally, outlines=outlines))
            size = stated_size(entry.get("width"), entry.get("height"))
            yield AnnotatedImage(str(number), paths[number], size, objects, metadata=federated[number], root=images)

    return AnnotatedSet(len(entries), read())


def _document(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(read_named(path))
    except OSError as error:
        raise refused("--annotations", str(path), f"must be readable ({error.strerror})", "check the path") from error
    except (ValueError, RecursionError) as error:
        raise refused("--annotations", str(path), f"must be JSON ({error})", "give COCO's instances_*.json") from error
    for key in ("images", "annotations", "categories"):
        listed = found.get(key) if isinstance(found, dict) else None
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise refused("--annotations", str(path), f"must have a list of objects {key}", "give instances_*.json")
    document: Mapping[str, Any] = found
    return document


def _by_id(entries: Sequence[Mapping[str, Any]], where: str) -> Entries:
    found: dict[Any, Mapping[str, Any]] = {}
    for position, entry in enumerate(entries):
        number = _id(entry.get("id"))
        if number is None or number in found:
            rule = "must have an id that no other has"
            raise refused(f"{where}[{position}].id", entry.get("id"), rule, "correct the file")
        found[number] = entry
    return found


def _id(value: Any) -> int | str | None:
    """Return a value that can be an id; None for any other, and for true, which equals 1 in Python."""
    return value if (isinstance(value, int) and not isinstance(value, bool)) or is_text(value) else None


def _known_id(value: Any, known: Container[Any]) -> int | str | None:
    """Return the id that is meant: some tools write 17 in one list and "17" in another."""
    number = _id(value)
    if number is None or number in known:
        return number
    is_number = isinstance(number, str) and number.isdecimal() and len(number) <= MOST_DIGITS
    other = int(number) if is_number else str(number)
    return other if other in known else number


def _names(categories: Sequence[Mapping[str, Any]], path: Path) -> dict[Any, str]:
    found = {}
    for number, category in _by_id(categories, f"{path} categories").items():
        name = category.get("name")
        if not is_text(name) or not name.strip():
            raise refused(f"{path} categories {number}.name", name, "must be a non-blank string", "name it")
        found[number] = name.strip()
    return found


def _file_name(entry: Mapping[str, Any], path: Path) -> str:
    name = entry.get("file_name") or str(entry.get("coco_url", "")).rpartition("/")[2]
    if not isinstance(name, str) or not name or "\0" in name:
        raise refused(f"{path} images {entry['id']}.file_name", name, "must name a file", "correct the file")
    return name


def _federated(entry: Mapping[str, Any], names: Mapping[Any, str], path: Path, tally: Tally) -> dict[str, Any]:
    """Return LVIS's lists of an image by name: categories that are absent, and categories that are not fully listed."""
    found = {}
    for key in FEDERATED:
        listed = entry.get(key) or []
        if not isinstance(listed, list) or None in map(_id, listed):
            where = f"{path} images {entry['id']}.{key}"
            raise refused(where, listed, "must be a list of categories' ids", "correct the file, or take the key out")
        if listed:
            numbers = [_known_id(one, names) for one in listed]
            found[key] = [names[number] for number in numbers if number in names]
        for one in listed:
            if _known_id(one, names) not in names:
                tally.change(NO_FEDERATED, f"image {entry['id']}: {one}")
    return found


def _annotated_objects(
    annotations: Iterable[Mapping[str, Any]], names: Mapping[Any, str], tally: Tally, *, outlines: bool
) -> Iterator[AnnotatedObject]:
    for annotation in annotations:
        try:
            yield _object(annotation, names, outlines=outlines)
            if annotation.get("keypoints"):
                tally.change(KEYPOINTS, f"annotation {annotation.get('id')}")
        except LeftOut as left_out:
            tally.leave_out_object(str(left_out), f"annotation {annotation.get('id')}")


def _object(annotation: Mapping[str, Any], names: Mapping[Any, str], *, outlines: bool) -> AnnotatedObject:
    """Return the object of an annotation. Raises LeftOut."""
    if is_crowd(annotation.get("iscrowd")):
        raise LeftOut(CROWD)
    category = _known_id(annotation.get("category_id"), names)
    if category not in names:
        raise LeftOut(NO_CATEGORY)
    x, y, width, height = four_numbers(annotation.get("bbox"))
    parts = outlines_of(annotation.get("segmentation")) if outlines else Outlines()
    return AnnotatedObject(names[category], (x, y, x + width, y + height), parts)
