"""Data sets of Hugging Face's `datasets` with a column of images and one of objects, as annotated images.

The objects of a row are `{bbox: [...], category: [...]}`, or a list of such. A category is a text, or a number that the
feature (ClassLabel) or a person names. No data set states the meaning of a box's four numbers, so a person does.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

from stage2_api.errors import refused
from stage2_trainer.data.files import irregular_file
from stage2_trainer.prepare.annotations import (
    CROWD,
    NO_CATEGORY,
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    Box,
    LeftOut,
    Tally,
    Units,
    as_id,
    count_same_names,
    is_crowd,
    is_text,
    stated_size,
)
from stage2_trainer.prepare.picture_files import embedded_name
from stage2_trainer.prepare.shapes import shaped_object

BoxFormat = Literal["coco", "voc", "yolo"]
BOXES = ("bbox", "boxes", "box")
OUTLINES = "segmentation"  # counts where there are no boxes
CATEGORIES = ("category", "category_id", "label", "labels", "categories", "class")
CROWDS = ("iscrowd", "is_crowd")
SAMPLE_IDS = ("image_id", "id", "sample_id")
TEXTS = ("string", "large_string", "string_view")
SAVED = ("state.json", "dataset_dict.json")  # what save_to_disk leaves

NO_IMAGE = "its row has no image"
UNEVEN = "its objects are not lists, or lists of different lengths"


@dataclass(frozen=True)
class HubChoice:
    """What is read of a data set.

    boxes: the four numbers of a box: coco, left, top, width and height in pixels; voc, left, top, right and bottom in
    pixels; yolo, centre, width and height as shares. names: of numbered categories. image, objects: columns; None
    searches for them. units: None is shares for yolo, and else pixels.
    """

    boxes: BoxFormat
    split: str | None = None
    names: Sequence[str] = ()
    image: str | None = None
    objects: str | None = None
    units: Units | None = None

    @property
    def shares(self) -> bool:
        """Whether coordinates are shares of width and height."""
        return self.boxes == "yolo" if self.units is None else self.units == "shares"


@dataclass(frozen=True)
class _Columns:
    """The columns of images and objects, the keys of boxes and categories in objects, and the names of numbers."""

    image: str
    objects: str
    box: str
    category: str
    names: Sequence[str]


def read_hub(source: str, choice: HubChoice, tally: Tally, *, outlines: bool = False) -> AnnotatedSet:
    """Return the images of a folder that save_to_disk wrote, or of a data set's name on a hub. Raises ConfigError."""
    data = _load(source, choice.split)
    columns = _columns(data.features, choice)
    count_same_names(columns.names, tally)
    data = _undecoded(data.with_format(None), columns.image)  # save_to_disk keeps a format: arrays, or some columns

    root = Path(source) if os.path.isdir(source) else _cache()

    def read() -> Iterator[AnnotatedImage]:
        for index, row in enumerate(_rows(data, source)):
            name = _sample_id(row, index)
            try:
                content, path = _picture(row[columns.image], index)
                objects = list(_objects(row[columns.objects], name, columns, choice, tally, outlines=outlines))
            except LeftOut as left_out:
                tally.leave_out_image(left_out, name)
                continue
            size = stated_size(row.get("width"), row.get("height"))
            yield AnnotatedImage(name, path, size, objects, shares=choice.shares, content=content, root=root)

    return AnnotatedSet(len(data), read())


def _cache() -> Path:
    """Return the folder into which data sets of a hub are downloaded."""
    import datasets

    return Path(datasets.config.HF_CACHE_HOME)


def _load(source: str, split: str | None) -> Any:
    if (odd := irregular_file(Path(source))) is not None:
        raise refused("NAME_OR_DIR", source, f"{odd} is not a regular file", "remove it")
    import datasets

    try:
        saved = any(os.path.isfile(Path(source, name)) for name in SAVED)
        found = datasets.load_from_disk(source) if saved else datasets.load_dataset(source)
    except Exception as error:  # any error of the library: no network, no such name, a broken file
        rule = f"must be a folder of save_to_disk, or the name of a data set ({' '.join(str(error).split())[:300]})"
        raise refused("NAME_OR_DIR", source, rule, "check the name; for a name the hub must be reached") from error
    if not isinstance(found, Mapping):
        if split is not None:
            raise refused("--split", split, f"{source} has no splits", "leave it out")
        return found
    if split is None and len(found) == 1:
        return next(iter(found.values()))
    if split not in found:
        raise refused("--split", split, f"{source} has {', '.join(found)}", "name one of them")
    return found[split]


def _rows(data: Any, source: str) -> Iterator[Mapping[str, Any]]:
    """Yield the rows of a data set. Raises ConfigError for any error of the library in one of them."""
    rows, index = iter(data), 0
    while True:
        try:
            row = next(rows)
        except StopIteration:
            return
        except Exception as error:  # such as bytes that are not text
            why = " ".join(str(error).split())[:300]
            rule = f"must be readable; row {index}, or one that is read with it, is not ({why})"
            raise refused("NAME_OR_DIR", source, rule, "create it again, or remove the row with datasets") from error
        yield row
        index += 1


def _undecoded(data: Any, column: str) -> Any:
    from datasets import Image

    try:
        return data.cast_column(column, Image(decode=False))
    except Exception as error:  # any error of the library
        rule = f"must be a column of images, not of {data.features[column]}"
        raise refused("--image", column, rule, "name another one") from error


def _columns(features: Mapping[str, Any], choice: HubChoice) -> _Columns:
    """Return the columns of a data set. Raises ConfigError where one is missing, or a category has no name."""
    there = ", ".join(features)
    image = choice.image or next((name for name, one in features.items() if type(one).__name__ == "Image"), None)
    if image is None or image not in features:
        raise refused("--image", choice.image, f"must be a column of images; there are {there}", "name it")
    shapes = (*BOXES, OUTLINES)
    objects = choice.objects or next((name for name, one in features.items() if _first_key(_inner(one), shapes)), None)
    inner = _inner(features.get(objects or ""))
    box, category = _first_key(inner, shapes), _first_key(inner, CATEGORIES)
    if objects is None or box is None or category is None:
        rule = f"must be a column with {' or '.join(BOXES[:2])} and {' or '.join(CATEGORIES[:3])}; there are {there}"
        raise refused("--objects", choice.objects, rule, "name it, or rename its keys with datasets first")
    return _Columns(image, objects, box, category, _names(inner[category], f"{objects}.{category}", choice))


def _names(kind: Any, column: str, choice: HubChoice) -> list[str]:
    """Return the names of numbered categories, by number; none where the column holds texts. Raises ConfigError."""
    kind = getattr(kind, "feature", kind)
    where, names = ("--names", choice.names) if choice.names else (f"{column} names", getattr(kind, "names", ()))
    texts = type(kind).__name__ == "Value" and kind.dtype in TEXTS
    if texts and choice.names:
        raise refused("--names", choice.names, f"names numbers, and {column} holds texts", "leave it out")
    if not names and not texts:
        rule = f"{column} holds numbers, and nothing names them"
        raise refused("--names", None, rule, "write --names cat,dog for 0 and 1")
    if not all(is_text(name) and name.strip() for name in names):
        raise refused(where, names, "must be non-blank names, one for each number from 0", "name all with --names")
    return [name.strip() for name in names]


def _inner(feature: Any) -> Mapping[str, Any]:
    """Return the features of an object, of a mapping of lists or a list of mappings; of anything else none."""
    feature = getattr(feature, "feature", feature)
    return feature if isinstance(feature, Mapping) else {}


def _first_key(mapping: Mapping[str, Any], keys: Sequence[str]) -> str | None:
    return next((key for key in keys if key in mapping), None)


def _sample_id(row: Mapping[str, Any], index: int) -> str:
    ids = (as_id(row.get(key)) for key in SAMPLE_IDS)
    return str(next((number for number in ids if number is not None), index))


def _picture(cell: Mapping[str, Any] | None, index: int) -> tuple[bytes | None, Path]:
    """Return the encoded image of a cell and the name of its future file, or the path of its file. Raises LeftOut."""
    content, path = (cell or {}).get("bytes"), (cell or {}).get("path")
    if content is None and not path:
        raise LeftOut(NO_IMAGE)
    return content, Path(str(path)) if content is None else Path(embedded_name(content, f"{index:08d}"))


def _objects(
    listed: Any, name: str, columns: _Columns, choice: HubChoice, tally: Tally, *, outlines: bool
) -> Iterator[AnnotatedObject]:
    for number, one in enumerate(_split_objects(listed, columns.box)):
        try:
            yield _object(one, columns, choice, outlines=outlines)
        except LeftOut as left_out:
            tally.leave_out_object(left_out, f"{name} object {number}")


def _split_objects(objects: Any, box: str) -> list[dict[str, Any]]:
    """Return objects one by one, from a mapping of lists or a list of mappings. Raises LeftOut."""
    if isinstance(objects, list) and all(isinstance(one, Mapping) for one in objects):
        return objects
    lists = {key: value for key, value in objects.items() if value is not None} if isinstance(objects, Mapping) else {}
    if box not in lists or not all(isinstance(value, list) for value in lists.values()):
        raise LeftOut(UNEVEN)
    if len({*map(len, lists.values())}) > 1:
        raise LeftOut(UNEVEN)
    return [dict(zip(lists, values, strict=True)) for values in zip(*lists.values(), strict=True)]


def _object(one: Mapping[str, Any], columns: _Columns, choice: HubChoice, *, outlines: bool) -> AnnotatedObject:
    """Return an object. Raises LeftOut."""
    if any(is_crowd(one.get(key)) for key in CROWDS):
        raise LeftOut(CROWD)
    desc = _desc(one.get(columns.category), columns.names)
    box = None if columns.box == OUTLINES else one.get(columns.box)
    corners = partial(_corners, boxes=choice.boxes)
    return shaped_object(desc, one, box, corners, outlines=outlines, shares=choice.shares)


def _desc(category: Any, names: Sequence[str]) -> str:
    if isinstance(category, str) and category.strip():
        return category.strip()
    if isinstance(category, int | float) and 0 <= category < len(names) and category == int(category):
        return names[int(category)]  # pandas writes a column of integers with gaps as floats
    raise LeftOut(NO_CATEGORY, category)


def _corners(box: Box, *, boxes: BoxFormat) -> Box:
    first, second, third, fourth = box
    if boxes == "voc":
        return box
    if boxes == "coco":
        return first, second, first + third, second + fourth
    return first - third / 2, second - fourth / 2, first + third / 2, second + fourth / 2
