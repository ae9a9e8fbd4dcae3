"""COCO's annotations (and LVIS's, which have the same form) as annotated images.

Format: https://cocodataset.org/#format-data
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.prepare.annotated_image import AnnotatedImage, AnnotatedObject, Outline, Tally
from stage2_trainer.prepare.outline import mask_of_runs, of_mask

CROWD = "it is a crowd, not an object (iscrowd)"
BROKEN_BOX = "its bbox is not four numbers"
NO_CATEGORY = "its category is not in the file"
NO_IMAGE = "its image is not in the file"
BROKEN_OUTLINE = "its segmentation cannot be read"
FEDERATED = ("neg_category_ids", "not_exhaustive_category_ids")


def read_coco(annotations: Path, images: Path, tally: Tally, *, outlines: bool = False) -> Iterator[AnnotatedImage]:
    """Yield the images of an annotation file, in its order. outlines: segmentations are read too.

    Raises:
        ConfigError: the file cannot be read, is no COCO file, or has one image or category twice.
    """
    document = _document(annotations)
    names = _names(document["categories"], annotations)
    entries = _by_id(document["images"], f"{annotations} images")
    of_image: dict[Any, list[Mapping[str, Any]]] = defaultdict(list)
    for annotation in document["annotations"]:
        if annotation.get("image_id") not in entries:
            tally.leave_out_object(NO_IMAGE, str(annotation.get("id")))
            continue
        of_image[annotation["image_id"]].append(annotation)
    for number, entry in entries.items():
        yield AnnotatedImage(
            sample_id=str(number),
            path=images / _file_name(entry, annotations),
            size=_size(entry),
            objects=list(_objects(of_image.get(number, ()), names, tally, outlines=outlines)),
            metadata=_federated(entry, names),
        )


def count_images(annotations: Path) -> int:
    """Return how many images an annotation file lists, for a progress bar. Raises ConfigError."""
    return len(_document(annotations)["images"])


def _document(path: Path) -> Mapping[str, Any]:
    try:
        found = json.loads(path.read_bytes())
    except OSError as error:
        raise _broken("--annotations", str(path), f"must be readable ({error.strerror})", "check the path") from error
    except (ValueError, RecursionError) as error:
        raise _broken("--annotations", str(path), f"must be JSON ({error})", "give COCO's instances_*.json") from error
    for key in ("images", "annotations", "categories"):
        listed = found.get(key) if isinstance(found, dict) else None
        if not isinstance(listed, list) or not all(isinstance(entry, dict) for entry in listed):
            raise _broken("--annotations", str(path), f"must have a list of objects {key}", "give instances_*.json")
    document: Mapping[str, Any] = found
    return document


def _by_id(entries: Sequence[Mapping[str, Any]], where: str) -> dict[Any, Mapping[str, Any]]:
    found: dict[Any, Mapping[str, Any]] = {}
    for position, entry in enumerate(entries):
        number = entry.get("id")
        if not isinstance(number, int | str) or number in found:
            rule = "must have an id that no other has"
            raise _broken(f"{where}[{position}].id", number, rule, "correct the file")
        found[number] = entry
    return found


def _names(categories: Sequence[Mapping[str, Any]], path: Path) -> dict[Any, str]:
    found = {}
    for number, category in _by_id(categories, f"{path} categories").items():
        name = category.get("name")
        if not isinstance(name, str) or not name.strip():
            raise _broken(f"{path} categories {number}.name", name, "must be a non-blank string", "name it")
        found[number] = name.strip()
    return found


def _file_name(entry: Mapping[str, Any], path: Path) -> str:
    name = entry.get("file_name") or str(entry.get("coco_url", "")).rpartition("/")[2]
    if not isinstance(name, str) or not name or "\0" in name:
        raise _broken(f"{path} images {entry['id']}.file_name", name, "must name a file", "correct the file")
    return name


def _size(entry: Mapping[str, Any]) -> tuple[int, int] | None:
    width, height = entry.get("width"), entry.get("height")
    return (width, height) if isinstance(width, int) and isinstance(height, int) else None


def _federated(entry: Mapping[str, Any], names: Mapping[Any, str]) -> dict[str, Any]:
    """Return LVIS's lists of an image by name: what was looked for and is not there, and what is not listed whole."""
    return {key: [names[one] for one in entry[key] if one in names] for key in FEDERATED if entry.get(key)}


class _LeftOut(Exception):
    """An object is left out, for this reason."""


def _objects(
    annotations: Iterable[Mapping[str, Any]], names: Mapping[Any, str], tally: Tally, *, outlines: bool
) -> Iterator[AnnotatedObject]:
    for annotation in annotations:
        try:
            yield _object(annotation, names, outlines=outlines)
        except _LeftOut as left_out:
            tally.leave_out_object(str(left_out), f"annotation {annotation.get('id')}")


def _object(annotation: Mapping[str, Any], names: Mapping[Any, str], *, outlines: bool) -> AnnotatedObject:
    """Return the object of an annotation. Raises _LeftOut."""
    if annotation.get("iscrowd"):
        raise _LeftOut(CROWD)
    category = annotation.get("category_id")
    if not isinstance(category, int | str) or category not in names:
        raise _LeftOut(NO_CATEGORY)
    box = annotation.get("bbox")
    if not isinstance(box, list) or len(box) != 4 or not all(_is_number(number) for number in box):
        raise _LeftOut(BROKEN_BOX)
    x, y, width, height = box
    try:
        parts = _outlines(annotation.get("segmentation")) if outlines else []
    except (ValueError, TypeError, KeyError) as error:
        raise _LeftOut(BROKEN_OUTLINE) from error
    return AnnotatedObject(names[category], (x, y, x + width, y + height), parts)


def _outlines(segmentation: Any) -> list[Outline]:
    """Return the outlines of polygons, or of a run-length mask. Raises ValueError, TypeError, KeyError."""
    if isinstance(segmentation, dict):
        height, width = segmentation["size"]
        return of_mask(mask_of_runs(segmentation["counts"], height, width))
    found: list[Outline] = []
    for flat in segmentation or ():
        if len(flat) < 6 or len(flat) % 2 or not all(_is_number(number) for number in flat):
            raise ValueError("a polygon is a list of at least three points, x and y in turn")
        found.append(list(zip(flat[::2], flat[1::2], strict=True)))
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _broken(path: str, value: object, rule: str, way_out: str) -> ConfigError:
    return ConfigError([Problem(path, value, rule, way_out)])
