"""Grounding data in the form of a chat, one JSON object a line or a list of them, as annotated images.

ms-swift lists the boxes beside the messages: `objects` of `ref`, `bbox`, `bbox_type` and `image_id`.
Qwen-VL's answers have them as JSON: `[{"bbox_2d": [x1, y1, x2, y2], "label": "cat"}]`.
Formats: https://swift.readthedocs.io/en/latest/Customization/Custom-dataset.html (Grounding) and
https://github.com/QwenLM/Qwen3-VL/tree/main/qwen-vl-finetune
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from stage2_api.errors import kind_of, refused
from stage2_trainer.data.files import read_named
from stage2_trainer.data.record_forms import form_of
from stage2_trainer.prepare.annotations import (
    AnnotatedImage,
    AnnotatedObject,
    AnnotatedSet,
    Box,
    LeftOut,
    Tally,
    as_id,
    four_numbers,
    is_text,
    stated_size,
)
from stage2_trainer.prepare.picture_files import decode_base64, embedded_name, is_address, is_data_url, locate

ChatUnits = Literal["pixels", "shares", "thousandths"]
SCALES: Mapping[ChatUnits, int] = {"pixels": 1, "shares": 1, "thousandths": 1000}
BBOX_TYPES: Mapping[str, ChatUnits] = {"real": "pixels", "norm1": "shares"}
ANSWERING = ("assistant", "gpt")
LABELS = ("label", "sub_label", "text_content", "desc", "description", "category", "name", "object")
PLACEHOLDER = re.compile("<ref-object>|<bbox>")
FENCE = re.compile(r"```(?:json)?\s*")
LONGEST_TEXT, MOST_STARTS = 4_000_000, 16  # characters of an answer; brackets at which its JSON may begin
MOST_BOXES = 100_000  # of a line

BROKEN_LINE = "its line is no JSON object"
NO_CHAT = "its line has neither messages nor conversations"
NO_IMAGE = "its line names no image"
NO_BOXES = "its line has no box: neither objects nor an answer with bbox_2d"
BROKEN_OBJECTS = "its objects are not lists, ref and bbox"
TOO_MANY = f"its line has more than {MOST_BOXES:,} boxes"
UNPAIRED = "its refs cannot be paired with its boxes: as many of both, one ref, or each ref before its boxes"
BBOX_TYPE = "its bbox_type is neither real (pixels) nor norm1 (shares)"
OTHER_IMAGE = "its image_id is no place in its line's images, from 0"
NO_LABEL = "its box has no label"
POINT = "it is a point, not a box"
NO_BOX_IN_IMAGE = "its line has several images, and no box in this one"
JOINED = "lines about one image are one record, which has the objects of all"
UNITS_RULE = (
    "must name the units of bbox_2d, which the file does not: pixels (Qwen2.5-VL), or thousandths of the image's sides "
    "(Qwen3-VL, and Qwen2-VL)"
)


@dataclass
class _Seen:
    """An image of the file: its first line, and the objects of all lines. units: None where the file has none."""

    line: str
    stated: str
    size: tuple[float, float] | None
    units: ChatUnits | None
    objects: dict[AnnotatedObject, None] = field(default_factory=dict)


@dataclass(frozen=True)
class _Found:
    """A box of a line. image: its place among the line's images. units: None where the line has none."""

    image: int
    desc: str
    box: Box
    units: ChatUnits | None


def read_chat(file: Path, images: Path, tally: Tally, *, units: ChatUnits | None = None) -> AnnotatedSet:
    """Return the images of a file, in its order, each once. units: of boxes whose line does not name them.

    Raises ConfigError for a file that cannot be read, or if units are needed and not given.
    """
    seen: dict[tuple[str, ChatUnits | None], _Seen] = {}
    for name, value in _lines(file):
        try:
            _read_line(name, value, units, seen, tally)
        except LeftOut as left_out:
            tally.leave_out_image(left_out, name)
    if units is None and (unnamed := [one for one in seen.values() if one.units is None and one.objects]):
        largest = max(number for one in unnamed for found in one.objects for number in found.box)
        where = f"{unnamed[0].line} and others; their largest number is {largest:g}"
        raise refused("--units", None, f"{UNITS_RULE} ({where})", "give --units pixels or --units thousandths")
    paths = locate([one.stated for one in seen.values() if not is_data_url(one.stated)], images, tally)

    def read() -> Iterator[AnnotatedImage]:
        for one in seen.values():
            try:
                yield _image(one, paths, images)
            except LeftOut as left_out:
                tally.leave_out_image(left_out, one.line)

    return AnnotatedSet(len(seen), read())


def _lines(file: Path) -> Iterator[tuple[str, Any]]:
    """Yield the values of a file with the names of their lines; None for what is no JSON. Raises ConfigError."""
    try:
        content = read_named(file).removeprefix(b"\xef\xbb\xbf").strip()
        if content[:1] == b"[":
            yield from ((f"[{place}]", value) for place, value in enumerate(json.loads(content)))
            return
    except OSError as error:
        raise refused("FILE", str(file), f"must be readable ({error.strerror})", "check the path") from error
    except (ValueError, RecursionError) as error:
        rule = f"must be JSON lines, or one list ({error})"
        raise refused("FILE", str(file), rule, "write one JSON object a line") from error
    for number, text in enumerate(content.splitlines(), start=1):
        if text.strip():
            try:
                yield f"line {number}", json.loads(text)
            except (ValueError, RecursionError):
                yield f"line {number}", None


def _read_line(
    name: str,
    line: Any,
    units: ChatUnits | None,
    seen: dict[tuple[str, ChatUnits | None], _Seen],
    tally: Tally,
) -> None:
    """Add the images and boxes of a line to those of the lines before. Raises LeftOut for the whole line."""
    if not isinstance(line, Mapping):
        raise LeftOut(BROKEN_LINE, kind_of(line))
    turns = _turns(line)
    images = _images(line, turns)
    found = _boxes(line, turns, len(images), name, tally)
    own_size = stated_size(line.get("width"), line.get("height")) if len(images) == 1 else None
    for place, stated in enumerate(images):
        here = [one for one in found if one.image == place]
        if not here and len(images) > 1:
            tally.leave_out_image(NO_BOX_IN_IMAGE, f"{name}: {stated[:60]}")
            continue
        in_units = (here[0].units if here else None) or units  # a line has one kind of them
        sample = _sample(line, name) + (f"-{place}" if len(images) > 1 else "")
        record = seen.setdefault((_key(stated), in_units), _Seen(sample, stated, own_size, in_units))
        if record.line != sample:
            tally.change(JOINED, f"{sample} and {record.line}")
        record.objects |= dict.fromkeys(AnnotatedObject(one.desc, one.box) for one in here)


def _key(stated: str) -> str:
    return embedded_name(stated.encode(), None) if is_data_url(stated) else os.path.normpath(stated)


def _sample(line: Mapping[str, Any], name: str) -> str:
    number = as_id(line.get("id"))
    return name if number is None else str(number)


def _image(seen: _Seen, paths: Mapping[str, Path], root: Path) -> AnnotatedImage:
    """Return an image with its objects. Raises LeftOut."""
    content = decode_base64(seen.stated) if is_data_url(seen.stated) else None
    path = paths[seen.stated] if content is None else Path(embedded_name(content))
    units = seen.units or "pixels"  # without units it has no objects
    objects = [replace(one, box=_divided(one.box, SCALES[units])) for one in seen.objects]
    return AnnotatedImage(seen.line, path, seen.size, objects, shares=units != "pixels", content=content, root=root)


def _divided(box: Box, scale: float) -> Box:
    first, second, third, fourth = box
    return first / scale, second / scale, third / scale, fourth / scale


def _turns(line: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return who says what, in order. Raises LeftOut."""
    for key, who, what in (("messages", "role", "content"), ("conversations", "from", "value")):
        listed = line.get(key)
        if isinstance(listed, list):
            return [(str(one.get(who)), one.get(what)) for one in listed if isinstance(one, Mapping)]
    form = form_of(line)
    raise LeftOut(NO_CHAT, f"it has the form of {form.name}" if form else ", ".join(list(line)[:4]))


def _parts(content: Any) -> list[Mapping[str, Any]]:
    """Return the parts of a message, whose content is a text or a list of parts."""
    if is_text(content):
        return [{"type": "text", "text": content}]
    return [part for part in content if isinstance(part, Mapping)] if isinstance(content, list) else []


def _text(content: Any) -> str:
    return "\n".join(part["text"] for part in _parts(content) if is_text(part.get("text")))


def _images(line: Mapping[str, Any], turns: Sequence[tuple[str, Any]]) -> list[str]:
    """Return the paths, addresses or contents of a line's images. Raises LeftOut."""
    listed = line.get("images", line.get("image"))
    values = listed if isinstance(listed, list) else [listed]
    if listed is None:
        values = [part.get("image") or part.get("image_url") for _, content in turns for part in _parts(content)]
    stated = [one.get("path") or one.get("url") if isinstance(one, Mapping) else one for one in values if one]
    texts = [one for one in stated if is_address(one)]
    if not texts or len(texts) < len(stated):
        raise LeftOut(NO_IMAGE, listed)
    return texts


def _boxes(
    line: Mapping[str, Any], turns: Sequence[tuple[str, Any]], images: int, name: str, tally: Tally
) -> list[_Found]:
    """Return the boxes of a line with this many images. Raises LeftOut for the whole line."""
    objects = line.get("objects")
    listed = _listed_boxes(objects, turns) if objects else _answered_boxes(turns)
    if len(listed) > MOST_BOXES:
        raise LeftOut(TOO_MANY)
    found = []
    for number, (desc, box, image, units) in enumerate(listed):
        try:
            if image not in range(images):
                raise LeftOut(OTHER_IMAGE, image)
            found.append(_found(desc, box, image, units))
        except LeftOut as left_out:
            tally.leave_out_object(left_out, f"{name} box {number}")
    return found


_Listed = list[tuple[Any, Any, Any, ChatUnits | None]]


def _found(desc: Any, box: Any, image: int, units: ChatUnits | None) -> _Found:
    """Return a box that has a label. Raises LeftOut."""
    if not is_text(desc) or not desc.strip():
        raise LeftOut(NO_LABEL, desc)
    if isinstance(box, list) and len(box) == 2:
        raise LeftOut(POINT, box)
    return _Found(image, desc.strip(), four_numbers(box), units)


def _listed_boxes(objects: Any, turns: Sequence[tuple[str, Any]]) -> _Listed:
    """Return the boxes of ms-swift's objects. Raises LeftOut."""
    refs, boxes = (objects.get(key) for key in ("ref", "bbox")) if isinstance(objects, Mapping) else (None, None)
    if not isinstance(refs, list) or not isinstance(boxes, list):
        raise LeftOut(BROKEN_OBJECTS, objects)
    bbox_type = objects.get("bbox_type")
    if not isinstance(bbox_type, str | None) or bbox_type not in (None, *BBOX_TYPES):
        raise LeftOut(BBOX_TYPE, bbox_type)
    units = BBOX_TYPES[bbox_type or "real"]
    ids = objects.get("image_id")
    places = ids if isinstance(ids, list) and len(ids) == len(boxes) else [0] * len(boxes) if not ids else None
    if places is None:
        raise LeftOut(OTHER_IMAGE, ids)
    names = _paired(refs, len(boxes), "".join(_text(content) for _, content in turns))
    return [*zip(names, boxes, places, [units] * len(boxes), strict=True)]


def _paired(refs: Sequence[Any], count: int, text: str) -> list[Any]:
    """Return the ref of each box. Raises LeftOut.

    Where the messages place more than one box behind a ref, their placeholders say which; otherwise the lists do.
    """
    order = PLACEHOLDER.findall(text)
    is_placed = order.count("<ref-object>") == len(refs) and order.count("<bbox>") == count
    runs = "".join("r" if one == "<ref-object>" else "b" for one in order)
    plain = re.fullmatch("(rb)*|(br)*|r*b*|b*r*", runs) is not None
    if len(refs) == count and (plain or not is_placed):
        return [*refs]
    if len(refs) == 1:
        return [*refs] * count
    if not is_placed or runs.startswith("b"):
        raise LeftOut(UNPAIRED, f"{len(refs)} refs, {count} boxes")
    last, names = -1, []
    for one in runs:
        last += one == "r"
        if one == "b":
            names.append(refs[last])
    return names


def _answered_boxes(turns: Sequence[tuple[str, Any]]) -> _Listed:
    """Return the boxes of the answers' JSON. Raises LeftOut where no answer has any JSON."""
    values = [_json_in(_text(content)) for who, content in turns if who in ANSWERING]
    lists = [value for value in values if value is not None]
    if not lists:
        raise LeftOut(NO_BOXES)
    found: _Listed = []
    for item in chain.from_iterable(lists):
        desc = next((item[key] for key in LABELS if item.get(key)), None)
        box = item.get("bbox_2d", item.get("bbox", item.get("point_2d")))
        is_several = isinstance(box, list) and bool(box) and all(isinstance(one, list) for one in box)
        found += [(desc, one, 0, None) for one in (box if is_several else [box])]
    return found


def _json_in(text: str) -> list[Mapping[str, Any]] | None:
    """Return the objects of the JSON in an answer, which text or a fence may surround; None where it has none."""
    text = text[:LONGEST_TEXT]
    fence = FENCE.search(text)
    starts = (match.start() for match in re.finditer(r"[\[{]", text[fence.end() :] if fence else text))
    offset = fence.end() if fence else 0
    for _, start in zip(range(MOST_STARTS), starts, strict=False):
        try:
            value, _ = json.JSONDecoder().raw_decode(text, offset + start)
        except (ValueError, RecursionError):
            continue
        listed = value if isinstance(value, list) else [value]
        items = [one for one in listed if isinstance(one, Mapping)]
        inner = next((one for one in items[0].values() if _are_mappings(one)), None) if len(items) == 1 else None
        items = inner if inner is not None else items
        if not listed or any({"bbox_2d", "bbox", "point_2d"} & one.keys() for one in items):
            return items
    return None


def _are_mappings(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and all(isinstance(one, Mapping) for one in value)
