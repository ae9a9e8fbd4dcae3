"""COCO's annotations (and LVIS's and Objects365's, which have the same form): read as annotated images.

Format: https://cocodataset.org/#format-data, https://www.lvisdataset.org/dataset
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, cast

from stage2_api.errors import refused
from stage2_trainer.data.files import read_named
from stage2_trainer.data.record_forms import form_of
from stage2_trainer.prepare.annotations import (
    CROWD,
    KEYPOINTS,
    NO_CATEGORY,
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    Box,
    KnownIds,
    LeftOut,
    Tally,
    Units,
    as_id,
    count_same_names,
    is_crowd,
    is_text,
    stated_size,
)
from stage2_trainer.prepare.picture_files import is_address
from stage2_trainer.prepare.shapes import shaped_object

NO_IMAGE = "its image is not in the file"
NO_OBJECT = "a category without objects in the file, which records cannot hold"
NO_FEDERATED = "a category in an image's federated lists that is not in the file"
SAME_FILE = "an image of the file is the picture of an earlier one, whose record has the objects of both"
OBJECTS365 = re.compile(
    "^images/v[12]/"
)  # before patch8/objects365_v1_00000017.jpg, where archives have no such folder
FEDERATED = ("neg_category_ids", "not_exhaustive_category_ids")


@dataclass(frozen=True)
class _Entries:
    """The entries of a list, by id."""

    by_id: Mapping[int | str, Mapping[str, Any]]
    ids: KnownIds


@dataclass(frozen=True)
class _Reading:
    """What the objects of a file are read with. names: of categories, by id."""

    names: Mapping[int | str, str]
    categories: KnownIds
    outlines: bool
    shares: bool
    tally: Tally


def read_coco(
    annotations: Path, images: Path, tally: Tally, *, outlines: bool = False, units: Units = "pixels"
) -> AnnotatedSet:
    """Return the images of an annotation file, in its order. outlines: segmentations are read too.

    Raises ConfigError if the file cannot be read, is no COCO file, or has one image or category twice.
    """
    document = _document(annotations)
    categories = _by_id(document["categories"], f"{annotations} categories")
    names = {number: _name(number, entry, annotations) for number, entry in categories.by_id.items()}
    reading = _Reading(names, categories.ids, outlines, units == "shares", tally)
    entries = _by_id(document["images"], f"{annotations} images")
    paths = {number: _path(entry, images, annotations) for number, entry in entries.by_id.items()}
    of_image = _by_image(document["annotations"], entries.ids, tally)
    federated = {number: _federated(entry, reading, annotations) for number, entry in entries.by_id.items()}
    joined = _joined(paths, tally)
    _count_categories(document["annotations"], reading)

    def read() -> Iterator[AnnotatedImage]:
        for number, others in joined.items():
            entry = entries.by_id[number]
            objects = list(_annotated_objects(of_image.get(number, ()), reading))
            for other in others:
                further = _annotated_objects(of_image.get(other, ()), reading)
                objects += [one for one in further if one not in objects]
            size = stated_size(entry.get("width"), entry.get("height"))
            yield AnnotatedImage(
                str(number),
                paths[number],
                size,
                objects,
                metadata=_merged([federated[one] for one in (number, *others)]),
                shares=reading.shares,
                root=images,
            )

    return AnnotatedSet(len(joined), read())


def _joined(paths: Mapping[int | str, Path], tally: Tally) -> Mapping[int | str, Sequence[int | str]]:
    """Return the first image of each file, with the others of the file: two records would contradict each other."""
    of_file: dict[str, list[int | str]] = defaultdict(list)
    for number, path in paths.items():
        of_file[os.path.normpath(path)].append(number)
    for first, *others in of_file.values():
        for other in others:
            tally.change(SAME_FILE, f"{other} and {first}: {paths[first].name}")
    return {first: others for first, *others in of_file.values()}


def _merged(lists: Sequence[Mapping[str, Sequence[str]]]) -> dict[str, list[str]]:
    """Return all that lists of the same names hold, each once."""
    keys = dict.fromkeys(key for one in lists for key in one)
    return {key: [*dict.fromkeys(name for one in lists for name in one.get(key, ()))] for key in keys}


def _by_image(
    annotations: Sequence[Mapping[str, Any]], images: KnownIds, tally: Tally
) -> Mapping[int | str, Sequence[Mapping[str, Any]]]:
    """Return the annotations of each image; those of no image are left out."""
    of_image: dict[int | str, list[Mapping[str, Any]]] = defaultdict(list)
    for annotation in annotations:
        try:
            of_image[_known(annotation, "image_id", images, NO_IMAGE)].append(annotation)
        except LeftOut as left_out:
            tally.leave_out_object(left_out, f"annotation {annotation.get('id')}")
    return of_image


def _known(annotation: Mapping[str, Any], key: str, ids: KnownIds, reason: str) -> int | str:
    """Return the id in a list that an annotation names. Raises LeftOut."""
    number = ids.find(annotation.get(key))
    if number is None:
        raise LeftOut(reason, key, annotation.get(key))
    return number


def _count_categories(annotations: Sequence[Mapping[str, Any]], reading: _Reading) -> None:
    """Count categories of the same name, and those without objects."""
    count_same_names(reading.names.values(), reading.tally)
    used: set[int | str | None] = set()
    for annotation in annotations:
        with suppress(LeftOut):
            used.add(reading.categories.find(annotation.get("category_id")))
    for number, name in reading.names.items():
        if number not in used:
            reading.tally.change(NO_OBJECT, name)


def _document(path: Path) -> Mapping[str, Any]:
    content = b""
    try:
        content = read_named(path)
        document = json.loads(content)
    except OSError as error:
        raise refused("--annotations", str(path), f"must be readable ({error.strerror})", "check the path") from error
    except (ValueError, RecursionError) as error:
        seen, way_out = _form_seen(_first_line(content))
        raise refused("--annotations", str(path), f"must be JSON ({error}){seen}", way_out) from error
    for key in ("images", "annotations", "categories"):
        listed = document.get(key) if isinstance(document, dict) else None
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            seen, way_out = _form_seen(document)
            raise refused("--annotations", str(path), f"must have a list of objects {key}{seen}", way_out)
    return cast("Mapping[str, Any]", document)


def _first_line(content: bytes) -> object:
    """Return the value of a file's first line; None where it is no JSON."""
    try:
        return json.loads(content.partition(b"\n")[0])
    except (ValueError, RecursionError):
        return None


def _form_seen(value: object) -> tuple[str, str]:
    """Return what form another tool's file has, for a rule, and the way out of it."""
    form = form_of(value)
    return (f"; it has the form of {form.name}", form.way_out) if form else ("", "give COCO's instances_*.json")


def _by_id(entries: Sequence[Mapping[str, Any]], where: str) -> _Entries:
    by_id: dict[int | str, Mapping[str, Any]] = {}
    for position, entry in enumerate(entries):
        number = as_id(entry.get("id"))
        if number is None or number in by_id:
            rule = "must have an id that no other has, a whole number (below 2^53 as a float) or a text"
            raise refused(f"{where}[{position}].id", entry.get("id"), rule, "correct the file")
        by_id[number] = entry
    return _Entries(by_id, KnownIds(by_id))


def _name(number: int | str, category: Mapping[str, Any], path: Path) -> str:
    name = category.get("name")
    if not is_text(name) or not name.strip():
        raise refused(f"{path} categories {number}.name", name, "must be a non-blank string", "name it")
    return name.strip()


def _path(entry: Mapping[str, Any], images: Path, annotations: Path) -> Path:
    """Return the file of an image: by its name, without the folders of Objects365's archive, or by LVIS's address."""
    url = entry.get("coco_url")
    address = PurePosixPath(url).parts[-2:] if is_address(url) else ()  # train2017/000000000017.jpg
    name = entry.get("file_name") or "".join(address[-1:])
    if not isinstance(name, str) or not name or "\0" in name:
        raise refused(f"{annotations} images {entry['id']}.file_name", name, "must name a file", "correct the file")
    unpacked = OBJECTS365.sub("", name)
    names = [name, unpacked, "/".join(address), *address[-1:]] if address or unpacked != name else [name]
    return next((images / one for one in names if one and os.path.isfile(images / one)), images / name)


def _federated(entry: Mapping[str, Any], reading: _Reading, path: Path) -> dict[str, Any]:
    """Return LVIS's lists of an image by name: categories that are absent, and categories that are not fully listed."""
    federated = {}
    for key in FEDERATED:
        listed = entry.get(key) or []
        if not isinstance(listed, list) or None in map(as_id, listed):
            where = f"{path} images {entry['id']}.{key}"
            raise refused(where, listed, "must be a list of categories' ids", "correct the file, or take the key out")
        numbers = [reading.categories.find(value) for value in listed]
        if listed:
            federated[key] = [reading.names[number] for number in numbers if number is not None]
        for value, number in zip(listed, numbers, strict=True):
            if number is None:
                reading.tally.change(NO_FEDERATED, f"image {entry['id']}: {value}")
    return federated


def _annotated_objects(annotations: Iterable[Mapping[str, Any]], reading: _Reading) -> Iterator[AnnotatedObject]:
    for annotation in annotations:
        try:
            yield _object(annotation, reading)
            if annotation.get("keypoints"):
                reading.tally.change(KEYPOINTS, f"annotation {annotation.get('id')}")
        except LeftOut as left_out:
            reading.tally.leave_out_object(left_out, f"annotation {annotation.get('id')}")


def _object(annotation: Mapping[str, Any], reading: _Reading) -> AnnotatedObject:
    """Return the object of an annotation. Raises LeftOut."""
    if is_crowd(annotation.get("iscrowd")):
        raise LeftOut(CROWD)
    desc = reading.names[_known(annotation, "category_id", reading.categories, NO_CATEGORY)]
    box = annotation.get("bbox")
    return shaped_object(desc, annotation, box, _corners, outlines=reading.outlines, shares=reading.shares)


def _corners(box: Box) -> Box:
    x, y, width, height = box
    return x, y, x + width, y + height
