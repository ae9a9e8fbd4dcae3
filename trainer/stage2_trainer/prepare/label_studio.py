"""Label Studio's exports, JSON and JSON-MIN, as annotated images.

Coordinates are percent of the image, and a box turns clockwise about its upper left corner.
Format: https://labelstud.io/guide/export (JSON, JSON_MIN) and https://labelstud.io/tags/rectanglelabels
"""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from stage2_api.errors import kind_of, refused
from stage2_trainer.data.files import read_named
from stage2_trainer.prepare.annotations import (
    BROKEN_BOX,
    BROKEN_OUTLINE,
    IMAGE_ENDINGS,
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    Box,
    LeftOut,
    Outline,
    Outlines,
    Tally,
    as_id,
    is_number,
    is_text,
    stated_size,
)
from stage2_trainer.prepare.picture_files import decode_base64, embedded_name, is_address, is_data_url, locate
from stage2_trainer.prepare.shapes import ROTATED_SHARES, bounds, ellipse, rotated_object

IMAGE_KEYS = ("image", "img", "picture", "photo", "captioning", "ocr", "url")  # whose values may lack an ending
RECTANGLE = ("x", "y", "width", "height")
ELLIPSE = ("x", "y", "radiusX", "radiusY")
PERCENT, MOST_PERCENT = 100.0, 1000.0  # a region may reach out of its image; numbers beyond are something else
MOST_POINTS = 100_000  # of a polygon

NO_IMAGE = "its task names no image"
NOT_ANNOTATED = "its task has no annotation"
PREDICTIONS = "its task has predictions only: accept them in Label Studio, or they are a model's word"
SKIPPED = "its annotator skipped the task"
SEVERAL_ANNOTATIONS = "of a task's annotations the one marked as ground truth was taken, or else the latest"
WHICH_IMAGE = "its task has several images, and a region does not say which is its own"
OTHER_RESULT = "a choice, text, rating or relation, which records have no key for"
NO_LABEL = "its region has no label"
SEVERAL_LABELS = "a region with several labels has the first"
BRUSH = "it is a brush mask: export COCO, or draw polygons"
KEYPOINT = "it is a point, which has no area"
OTHER_REGION = "its region is no rectangle, polygon or ellipse"
NOT_PERCENT = "its numbers are not percent of the image"
TURNED_IMAGE = "its image was rotated in the editor, and its numbers do not say by which sides"


@dataclass(frozen=True)
class _Task:
    """A task. images: path or address of each, by its key of the data and its place in that key's list."""

    name: str
    images: Mapping[tuple[str, int], str]
    regions: Sequence[Mapping[str, Any]]


def read_label_studio(export: Path, images: Path, tally: Tally) -> AnnotatedSet:
    """Return the images of an export, in its order. Raises ConfigError for a file that is no export."""
    tasks = _tasks(export, tally)
    stated = [one for task in tasks for one in task.images.values() if not is_data_url(one)]
    paths = locate(stated, images, tally)

    def read() -> Iterator[AnnotatedImage]:
        for task in tasks:
            try:
                yield from _images(task, paths, images, tally)
            except LeftOut as left_out:
                tally.leave_out_image(left_out, task.name)

    return AnnotatedSet(sum(len(task.images) for task in tasks), read())


def _tasks(export: Path, tally: Tally) -> list[_Task]:
    tasks = []
    for name, entries in _entries(export).items():
        try:
            tasks.append(_task(name, entries, tally))
        except LeftOut as left_out:
            tally.leave_out_image(left_out, name)
    return tasks


def _entries(export: Path) -> Mapping[str, Sequence[Mapping[str, Any]]]:
    """Return the entries of each task: JSON has one, JSON-MIN one for each annotation. Raises ConfigError."""
    try:
        document = json.loads(read_named(export))
    except OSError as error:
        raise refused("FILE", str(export), f"must be readable ({error.strerror})", "check the path") from error
    except (ValueError, RecursionError) as error:
        rule, way_out = f"must be JSON ({error})", "export JSON or JSON-MIN"
        raise refused("FILE", str(export), rule, way_out) from error
    if not isinstance(document, list):
        rule = f"must be a list of tasks, and is {kind_of(document)}"
        raise refused("FILE", str(export), rule, "export JSON or JSON-MIN from Label Studio")
    entries = defaultdict[str, list[Mapping[str, Any]]](list)
    for position, entry in enumerate(document):
        if not isinstance(entry, dict):
            rule = f"must be a task, and is {kind_of(entry)}"
            raise refused(f"{export}[{position}]", entry, rule, "export JSON or JSON-MIN from Label Studio")
        number = as_id(entry.get("id"))
        entries[f"task {position}" if number is None else str(number)].append(entry)
    return entries


def _task(name: str, entries: Sequence[Mapping[str, Any]], tally: Tally) -> _Task:
    """Return a task with its regions. Raises LeftOut."""
    data = entries[0].get("data")
    if isinstance(data, Mapping):
        annotations = [one for entry in entries for one in _annotations(entry)]
        chosen = _latest(annotations, name, tally)
        results = chosen.get("result")
        listed = results if isinstance(results, list) else []
        regions = [_region(one) for one in listed if isinstance(one, Mapping)]
    else:
        data = chosen = _latest(entries, name, tally)
        lists = [value for value in chosen.values() if isinstance(value, list)]
        regions = [one for value in lists for one in value if isinstance(one, Mapping)]
    images = dict(_stated(data))
    if not images:
        raise LeftOut(NO_IMAGE)
    return _Task(name, images, regions)


def _annotations(entry: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the annotations of a task that were not skipped. Raises LeftOut."""
    listed = entry.get("annotations", entry.get("completions"))  # completions: before version 1.0
    found = [one for one in listed if isinstance(one, Mapping)] if isinstance(listed, list) else []
    kept = [one for one in found if not one.get("was_cancelled")]
    if not kept:
        raise LeftOut(SKIPPED if found else PREDICTIONS if entry.get("predictions") else NOT_ANNOTATED)
    return kept


def _latest(annotations: Sequence[Mapping[str, Any]], name: str, tally: Tally) -> Mapping[str, Any]:
    """Return the annotation that is marked as ground truth, or else the latest."""
    if len(annotations) > 1:
        tally.change(SEVERAL_ANNOTATIONS, f"task {name}: {len(annotations)}")

    def rank(place: int) -> tuple[bool, str, int]:
        one = annotations[place]
        return one.get("ground_truth") is True, str(one.get("updated_at") or one.get("created_at") or ""), place

    return annotations[max(range(len(annotations)), key=rank)]


def _region(result: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a result of JSON in the form of JSON-MIN: its value and what says more about it, side by side."""
    value = result.get("value")
    more = {key: result[key] for key in result if key != "value"}
    return {**(value if isinstance(value, Mapping) else {}), **more}


def _stated(data: Mapping[str, Any]) -> Iterator[tuple[tuple[str, int], str]]:
    """Yield the images of a task."""
    for key, value in data.items():
        for place, one in enumerate(value if isinstance(value, list) else [value]):
            if is_address(one) and _is_image(key, one):
                yield (key, place), one


def _is_image(key: str, value: str) -> bool:
    plain = unquote(value.partition("?")[0] if "?d=" not in value else value).lower()
    has_ending = len(plain) < 10_000 and plain[plain.rfind(".") :] in IMAGE_ENDINGS
    return has_ending or value.startswith("data:image/") or (key in IMAGE_KEYS and bool(value.strip()))


def _images(task: _Task, paths: Mapping[str, Path], root: Path, tally: Tally) -> Iterator[AnnotatedImage]:
    """Yield the images of a task. Raises LeftOut for all of them."""
    of_image = defaultdict[tuple[str, int], list[Mapping[str, Any]]](list)
    for region in task.regions:
        if _is_region(region):
            of_image[_image_of(region, task)].append(region)
        else:
            tally.change(OTHER_RESULT, f"task {task.name}")
    for number, (place, stated) in enumerate(task.images.items()):
        name = task.name if len(task.images) == 1 else f"{task.name}-{number}"
        regions = of_image[place]
        size = next((size for one in regions if (size := _size(one)) is not None), None)
        objects = [*_objects(regions, name, tally)]
        content = decode_base64(stated) if is_data_url(stated) else None
        path = paths[stated] if content is None else Path(embedded_name(content))
        yield AnnotatedImage(name, path, size, objects, shares=True, content=content, root=root)


def _is_region(region: Mapping[str, Any]) -> bool:
    """Whether a result lies in an image: a choice, a text or a relation has no place."""
    return any(key in region for key in ("x", "points", "rle", "vertices"))


def _image_of(region: Mapping[str, Any], task: _Task) -> tuple[str, int]:
    """Return the image in which a region lies. Raises LeftOut."""
    if len(task.images) == 1:
        return next(iter(task.images))
    index = region.get("item_index")
    keys = {key for key, _ in task.images}
    key = region.get("to_name") if region.get("to_name") in keys else None
    if key is None and len(keys) == 1:
        (key,) = keys
    place = (str(key), index if isinstance(index, int) else 0)
    is_clear = key is not None and (isinstance(index, int) or sum(one == key for one, _ in task.images) == 1)
    if not is_clear or place not in task.images:
        raise LeftOut(WHICH_IMAGE, str(region.get("to_name")))
    return place


def _size(region: Mapping[str, Any]) -> tuple[float, float] | None:
    return stated_size(region.get("original_width"), region.get("original_height"))


def _objects(regions: Sequence[Mapping[str, Any]], name: str, tally: Tally) -> Iterator[AnnotatedObject]:
    """Yield the objects of an image. A shape and its label are two results of one id where the labels stand apart."""
    of_id = defaultdict[str, list[Mapping[str, Any]]](list)
    for region in regions:
        marks = (region.get("id"), *(region.get(key) for key in (*RECTANGLE, "points", "radiusX")))
        of_id[repr(region["id"] if is_text(region.get("id")) else marks)].append(region)
    for parts in of_id.values():
        region = {key: value for part in parts for key, value in part.items()}
        labels = [label for part in parts for label in _labels(part)]
        try:
            yield _object(region, labels)
        except LeftOut as left_out:
            tally.leave_out_object(left_out, f"{name} {labels[0] if labels else ''}".strip())
            continue
        if len(set(labels)) > 1:
            tally.change(SEVERAL_LABELS, f"{name}: {', '.join(labels[:4])}")


def _labels(region: Mapping[str, Any]) -> list[str]:
    """Return the labels of a region: of `labels`, `rectanglelabels`, `polygonlabels` and so on."""
    lists = [value for key, value in region.items() if key.endswith("labels") and isinstance(value, list)]
    return [label.strip() for value in lists for label in value if is_text(label) and label.strip()]


def _object(region: Mapping[str, Any], labels: Sequence[str]) -> AnnotatedObject:
    """Return the object of a region, in shares of its image. Raises LeftOut."""
    if not labels:
        raise LeftOut(NO_LABEL)
    if region.get("image_rotation") not in (None, 0):
        raise LeftOut(TURNED_IMAGE, region["image_rotation"])
    if "rle" in region:
        raise LeftOut(BRUSH)
    if "points" in region:
        outline = Outlines([_points(region["points"])])
        return AnnotatedObject(labels[0], bounds(outline), outline)
    turn, sides = _turn(region), _size(region) or (PERCENT, PERCENT)
    if "radiusX" in region:
        x, y, across, down = _pixels(region, ELLIPSE, sides)
        box, outline = ellipse(x, y, across, down, turn)
        return _in_shares(AnnotatedObject(labels[0], box, outline), sides)
    if "width" in region and "height" in region:
        x, y, width, height = _pixels(region, RECTANGLE, sides)
        if not turn:
            return _in_shares(AnnotatedObject(labels[0], (x, y, x + width, y + height)), sides)
        return _in_shares(_turned(labels[0], (x, y, width, height), turn), sides)
    raise LeftOut(KEYPOINT if "x" in region and "vertices" not in region else OTHER_REGION)


def _turned(desc: str, place: Box, turn: float) -> AnnotatedObject:
    """Return the object of a box that is rotated about its upper left corner."""
    x, y, width, height = place
    cos, sin = math.cos(turn), math.sin(turn)
    left = x + cos * width / 2 - sin * height / 2 - width / 2
    top = y + sin * width / 2 + cos * height / 2 - height / 2
    return rotated_object(desc, (left, top, left + width, top + height), turn, Outlines())


def _turn(region: Mapping[str, Any]) -> float:
    """Return the angle of a region in radians. Raises LeftOut where the size of the image, and so the angle, lacks."""
    degrees = region.get("rotation") or 0
    if not is_number(degrees):
        raise LeftOut(BROKEN_BOX, degrees)
    if degrees % 360 and _size(region) is None:
        raise LeftOut(ROTATED_SHARES)
    return math.radians(degrees % 360)


def _pixels(region: Mapping[str, Any], keys: Sequence[str], sides: tuple[float, float]) -> Box:
    """Return numbers of a region, along x and y in turn, in pixels. Raises LeftOut."""
    first, second, third, fourth = (_percent(region.get(key)) for key in keys)
    width, height = (side / PERCENT for side in sides)
    return first * width, second * height, third * width, fourth * height


def _percent(value: Any) -> float:
    """Return a number that can be percent of an image. Raises LeftOut."""
    if not is_number(value):
        raise LeftOut(BROKEN_BOX, value)
    if abs(value) > MOST_PERCENT:
        raise LeftOut(NOT_PERCENT, value)
    return float(value)


def _in_shares(one: AnnotatedObject, sides: tuple[float, float]) -> AnnotatedObject:
    width, height = sides
    x1, y1, x2, y2 = one.box
    parts = [[(x / width, y / height) for x, y in part] for part in one.outlines.parts]
    box = (x1 / width, y1 / height, x2 / width, y2 / height)
    return AnnotatedObject(one.desc, box, Outlines(parts), one.noted)


def _points(listed: Any) -> Outline:
    """Return the points of a polygon, in shares. Raises LeftOut."""
    if not isinstance(listed, list) or not 3 <= len(listed) <= MOST_POINTS:
        raise LeftOut(BROKEN_OUTLINE, listed)
    points = []
    for point in listed:
        if not isinstance(point, list) or len(point) != 2:
            raise LeftOut(BROKEN_OUTLINE, point)
        points.append((_percent(point[0]) / PERCENT, _percent(point[1]) / PERCENT))
    return points
