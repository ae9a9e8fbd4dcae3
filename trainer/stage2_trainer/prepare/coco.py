"""COCO's annotations (and LVIS's, which have the same form): read as annotated images, and written from records.

Format: https://cocodataset.org/#format-data
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stage2_api.coordinates import BINS
from stage2_trainer.data.files import new_file, read_named, relative_path
from stage2_trainer.data.records import Line, Record, RecordRules, lines
from stage2_trainer.matching.ground_truth import GTObject
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
    refused,
    stated_size,
)
from stage2_trainer.prepare.outlines import area, outlines_of

DIGITS = 4  # of a pixel
MOST_DIGITS = 18  # of an id, so that it is a 64-bit integer in other tools

SEVERAL_IMAGES = "it has several images, and an entry of COCO has one"
NO_FILE = "its image is in the record itself (data: URL), and an entry of COCO names a file"
NO_PLACE = "a summary, or a key of metadata, which COCO cannot hold"


def write_coco(
    path: Path, output: Path, rules: RecordRules, tally: Tally, on_line: Callable[[Line], None] | None = None
) -> None:
    """Write a COCO file of a data file's records; it replaces no file.

    Categories are numbered by name. Images keep their sample ids if all of these are different whole numbers, as
    after an import of COCO; otherwise their lines number them, from 1. Coordinates are pixels again.

    Raises ConfigError where a record is broken, or the output exists already.
    """
    with new_file("--coco", output) as aside:
        records = []
        for line in lines(path):
            if on_line is not None:
                on_line(line)
            records.append(line.record(rules.without_images()))
        aside.write_text(json.dumps(_document_of(records, output.parent, tally), ensure_ascii=False), encoding="utf-8")


def _document_of(records: Sequence[Record], folder: Path, tally: Tally) -> dict[str, Any]:
    names = {one.desc for record in records for one in record.objects}
    names |= {name for record in records for listed in _federated_lists(record).values() for name in listed}
    numbers = {name: number for number, name in enumerate(sorted(names), start=1)}
    ids = [record.sample_id for record in records]
    numbered = len(set(ids)) == len(ids) and all(map(_is_number, ids))
    images: list[dict[str, Any]] = []
    annotations: list[dict[str, Any]] = []
    for record in records:
        if len(record.images) > 1 or record.images[0].startswith("data:"):
            tally.leave_out_image(SEVERAL_IMAGES if len(record.images) > 1 else NO_FILE, record.sample_id)
            continue
        images.append(_image_entry(record, numbers, folder, tally, numbered=numbered))
        for one in record.objects:
            identity = {"id": len(annotations) + 1, "image_id": images[-1]["id"], "category_id": numbers[one.desc]}
            annotations.append(identity | _geometry(one, record))
    tally.records, tally.objects = len(images), len(annotations)
    categories = [{"id": number, "name": name} for name, number in numbers.items()]
    return {"info": {}, "licenses": [], "categories": categories, "images": images, "annotations": annotations}


def _federated_lists(record: Record) -> dict[str, list[str]]:
    """Return LVIS's lists in a record's metadata."""
    found = {key: record.metadata.get(key) for key in FEDERATED}
    return {key: one for key, one in found.items() if isinstance(one, list) and all(isinstance(n, str) for n in one)}


def _is_number(name: str) -> bool:
    return name.isdecimal() and name.isascii() and len(name) <= MOST_DIGITS and str(int(name)) == name


def _image_entry(
    record: Record, numbers: Mapping[str, int], folder: Path, tally: Tally, *, numbered: bool
) -> dict[str, Any]:
    federated = _federated_lists(record)
    if record.summary is not None or set(record.metadata) - set(federated):
        tally.change(NO_PLACE, record.sample_id)
    return {
        "id": int(record.sample_id) if numbered else record.index + 1,
        **({} if numbered else {"sample_id": record.sample_id}),
        "file_name": relative_path(Path(record.images[0]), folder),
        "width": record.width,
        "height": record.height,
        **{key: [numbers[name] for name in names] for key, names in federated.items()},
    }


def _geometry(one: GTObject, record: Record) -> dict[str, Any]:
    sides = record.width, record.height
    pixels = [k * sides[i % 2] / BINS for i, k in enumerate(one.bins)]
    xs, ys = pixels[::2], pixels[1::2]
    left, top, width, height = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
    covered = width * height if one.kind == "bbox" else area(list(zip(xs, ys, strict=True)))
    return {
        "bbox": [round(value, DIGITS) for value in (left, top, width, height)],
        "area": round(covered, DIGITS),
        "segmentation": [] if one.kind == "bbox" else [[round(value, DIGITS) for value in pixels]],
        "iscrowd": 0,
    }


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
        if _id(annotation.get("image_id")) not in entries:
            tally.leave_out_object(NO_IMAGE, str(annotation.get("id")))
            continue
        of_image[annotation["image_id"]].append(annotation)
    federated = {number: _federated(entry, names, annotations, tally) for number, entry in entries.items()}
    count_same_names(names.values(), tally)
    used = {_id(annotation.get("category_id")) for annotation in document["annotations"]}
    for number, name in names.items():
        if number not in used:
            tally.change(NO_OBJECT, name)

    def read() -> Iterator[AnnotatedImage]:
        for number, entry in entries.items():
            objects = list(_annotated_objects(of_image.get(number, ()), names, tally, outlines=outlines))
            size = stated_size(entry.get("width"), entry.get("height"))
            yield AnnotatedImage(str(number), paths[number], size, objects, metadata=federated[number])

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
            found[key] = [names[one] for one in listed if one in names]
        for one in listed:
            if one not in names:
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
    category = _id(annotation.get("category_id"))
    if category not in names:
        raise LeftOut(NO_CATEGORY)
    x, y, width, height = four_numbers(annotation.get("bbox"))
    parts = outlines_of(annotation.get("segmentation")) if outlines else Outlines()
    return AnnotatedObject(names[category], (x, y, x + width, y + height), parts)
