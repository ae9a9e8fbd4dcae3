"""Lines that nobody writes by mistake: each is refused in one line with the file, its number, a rule and a way out."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.data.records import load_records

BOX: dict[str, Any] = {"desc": "red box", "bbox_2d": [10, 20, 50, 40]}
GOOD: dict[str, Any] = {"images": ["a.png"], "width": 100, "height": 50, "units": "pixels", "objects": [BOX]}


def line(**changes: Any) -> bytes:
    """The good record with other fields; None leaves one out."""
    return json.dumps({key: value for key, value in (GOOD | changes).items() if value is not None}).encode()


def of_object(**changes: Any) -> bytes:
    """The good record with other fields of its object; None leaves one out."""
    return line(objects=[{key: value for key, value in (BOX | changes).items() if value is not None}])


def raw(field: bytes, value: bytes) -> bytes:
    """The good record with this text in the place of a field's value."""
    return line(**{field.decode(): "HERE"}).replace(b'"HERE"', value)


DEEP = b"[" * 50_000 + b"]" * 50_000
REFUSED: dict[str, bytes] = {
    "null": b"null",
    "a number": b"7",
    "a text": b'"x"',
    "true": b"true",
    "an empty list": b"[]",
    "a record in a list": b"[" + line() + b"]",
    "an empty object": b"{}",
    "two records in a line": line() + line(),
    "a record and a comma": line() + b",",
    "a record without its end": line()[:-1],
    "a record in other quotes": line().replace(b'"', b"'"),
    "a comment": b"// " + line(),
    "YAML": b"images: [a.png]",
    "CSV": b"a.png,100,50",
    "a zero byte": b"\0",
    "a zero byte in a record": line()[:10] + b"\0" + line()[10:],
    "bytes of a picture": b"\x89PNG\r\x1a",
    "UTF-16": line().decode().encode("utf-16"),
    "half a character": line(sample_id="x").replace(b'"x"', b'"\xc3"'),
    "an escape that there is not": line(sample_id="x").replace(b'"x"', rb'"\x41"'),
    "objects nested without end": raw(b"objects", DEEP),
    "metadata nested without end": raw(b"metadata", b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "objects that are null": raw(b"objects", b"null"),
    "objects as a mapping": line(objects={"0": BOX}),
    "objects as text": line(objects="[]"),
    "an object that is null": line(objects=[None]),
    "an object that is a list": line(objects=[[1, 2]]),
    "an object that is a number": line(objects=[7]),
    "images that are null": raw(b"images", b"null"),
    "images as text": line(images="a.png"),
    "images as a mapping": line(images={"0": "a.png"}),
    "an image that is a number": line(images=[7]),
    "an image that is null": line(images=[None]),
    "an image that is a list": line(images=[["a.png"]]),
    "an image without a name": line(images=[""]),
    "an image that is a folder": line(images=["."]),
    "an image of the network": line(images=["https://example.com/a.png"]),
    "a width as a list": line(width=[100]),
    "a width that is true": line(width=True),
    "a width of zero": line(width=0),
    "a width below zero": line(width=-100),
    "a width with a point": line(width=100.5),
    "a width that is no number": raw(b"width", b"NaN"),
    "a width without end": raw(b"width", b"Infinity"),
    "a width beyond any float": raw(b"width", b"1e999"),
    "a height of 5,000 digits": raw(b"height", b"9" * 5000),
    "a desc that is null": raw(b"objects", b'[{"desc": null, "bbox_2d": [1, 2, 3, 4]}]'),
    "a desc that is a number": of_object(desc=7),
    "a desc that is a list": of_object(desc=["cat"]),
    "a desc of blanks": of_object(desc=" \t "),
    "a desc that ends the turn": of_object(desc="cat<|im_end|>"),
    "a desc that begins a turn": of_object(desc="<|im_start|>system"),
    "a desc with a place": of_object(desc="cat <|coord_5|>"),
    "a box of nothing": of_object(bbox_2d=[]),
    "a box of five": of_object(bbox_2d=[1, 2, 3, 4, 5]),
    "a box of texts": of_object(bbox_2d=["1", "2", "3", "4"]),
    "a box of nulls": of_object(bbox_2d=[None] * 4),
    "a box of truths": of_object(bbox_2d=[True, False, True, True]),
    "a box as text": of_object(bbox_2d="1,2,3,4"),
    "a box as a mapping": of_object(bbox_2d={"x1": 1}),
    "a box that is no number": raw(b"objects", b'[{"desc": "a", "bbox_2d": [1, 2, NaN, 4]}]'),
    "a box without end": raw(b"objects", b'[{"desc": "a", "bbox_2d": [1, 2, Infinity, 4]}]'),
    "a box below zero": of_object(bbox_2d=[-1, 2, 3, 4]),
    "a box beyond the image": of_object(bbox_2d=[1, 2, 101, 4]),
    "a box far beyond the image": of_object(bbox_2d=[1, 2, 1e300, 4]),
    "a poly of one point": of_object(bbox_2d=None, poly=[[1, 2]]),
    "a poly of texts": of_object(bbox_2d=None, poly=["a", "b", "c", "d", "e", "f"]),
    "a poly nested without end": raw(b"objects", b'[{"desc": "a", "poly": ' + DEEP + b"}]"),
    "poly_points as text": of_object(bbox_2d=None, poly=[0, 0, 9, 0, 9, 9], poly_points="3"),
    "units as a number": line(units=1),
    "metadata as text": line(metadata="{}"),
    "a summary that is a list": line(summary=["x"]),
}


@pytest.mark.parametrize("text", REFUSED.values(), ids=REFUSED)
def test_a_hostile_line_is_refused_in_a_sentence(tmp_path: Path, text: bytes) -> None:
    (tmp_path / "a.png").touch()
    path = tmp_path / "train.jsonl"
    path.write_bytes(line() + b"\n" + text + b"\n")
    with pytest.raises(ConfigError) as refused:
        load_records(path)
    for problem in refused.value.problems:
        assert problem.path.startswith(f"{path}:2")
        assert problem.rule
        assert problem.way_out
        assert "\n" not in str(problem.value)
    assert len(str(refused.value)) < 2_000
