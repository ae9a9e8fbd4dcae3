"""A data file is read into bins, and every mistake in it is named with its line, field, rule and way out."""

from __future__ import annotations

import hashlib
import json

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.data.records import RecordRules, fingerprint, load_record, load_records
from stage2_trainer.matching import GTObject

BOX = {"desc": "red box", "bbox_2d": [10, 20, 50, 40]}


@pytest.fixture
def write(tmp_path):
    (tmp_path / "a.png").write_bytes(b"")

    def write_records(*records):
        path = tmp_path / "train.jsonl"
        path.write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records) + "\n")
        return path

    return write_records


def record(**changes):
    return {"images": ["a.png"], "width": 100, "height": 50, "units": "pixels", "objects": [BOX]} | changes


def with_object(**changes):
    return record(objects=[{key: value for key, value in (BOX | changes).items() if value is not None}])


def test_pixel_coordinates_become_bins_of_thousandths(write):
    (loaded,) = load_records(write(record()))
    assert loaded.objects == (GTObject("red box", "bbox", (100, 400, 500, 800)),)
    assert loaded.ground_truth.objects == loaded.objects


def test_coord_tokens_are_read_as_bins(write):
    tokens = [f"<|coord_{k}|>" for k in (1, 2, 3, 999)]
    (loaded,) = load_records(write(with_object(bbox_2d=tokens) | {"units": None}))
    assert loaded.objects[0].bins == (1, 2, 3, 999)


def test_plain_numbers_are_bins_when_units_are_bins(write):
    line = with_object(bbox_2d=[1, 2, 600, 999])
    (loaded,) = load_records(write(line | {"units": None}), rules=RecordRules(units="bins"))
    assert [loaded] == load_records(write(line | {"units": "bins"}))
    assert loaded.objects[0].bins == (1, 2, 600, 999)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (record(width=None), r"width: is required, as a positive integer"),
        (record(objects=[{"label": "valve", "bbox_2d": [1, 2, 3, 4]}]), r"desc: .*rename its key label to desc"),
        (record(units="bins", objects=[BOX | {"bbox_2d": [0, 0, 500, 1000]}]), r"1000; .*1000 becomes 999.*pixels"),
    ],
)
def test_key_of_another_tool_is_reported_with_advice(write, line, words):
    with pytest.raises(ConfigError, match=words):
        load_records(write(line))


def test_record_may_have_additional_keys_of_another_tool(write):
    assert load_records(write(record(messages=[], conversations=[])))


@pytest.mark.parametrize("poly", [[0, 0, 100, 0, 50, 50], [[0, 0], [100, 0], [50, 50]]])
def test_polygon_may_be_flat_or_paired(write, poly):
    (loaded,) = load_records(write(with_object(bbox_2d=None, poly=poly, poly_points=3)))
    assert loaded.objects[0].bins == (0, 0, 999, 0, 500, 999)


def test_image_paths_are_relative_to_data_file_and_data_urls_kept(write, tmp_path):
    (loaded,) = load_records(write(record(images=["a.png", "data:image/png;base64,AAAA"])))
    assert loaded.images == (str(tmp_path / "a.png"), "data:image/png;base64,AAAA")


def test_record_without_objects_is_accepted(write):
    (loaded,) = load_records(write(record(objects=[])))
    assert loaded.objects == ()


def test_limit_stops_reading(write):
    assert len(load_records(write(record(), record(), "not json"), limit=2)) == 2


def test_blank_lines_are_skipped_and_line_numbers_still_hold(write):
    with pytest.raises(ConfigError, match=r"train\.jsonl:3 width"):
        load_records(write(record(), "", record(width=0)))


MISTAKES = {
    "not json": ("{", "must be JSON"),
    "not an object": ("[1]", "must be a JSON object"),
    "no images": (record(images=[]), "images"),
    "a lost image": (record(images=["b.png"]), "images[0]"),
    "height as text": (record(height="50"), "height"),
    "objects missing": (record(objects=None), "objects"),
    "blank desc": (with_object(desc=" "), "objects[0].desc"),
    "a coordinate in desc": (with_object(desc="a<|coord_5|>b"), "objects[0].desc must not hold"),
    "an end of turn in desc": (with_object(desc="cat<|im_end|>"), "objects[0].desc must not hold"),
    "no geometry": (with_object(bbox_2d=None), "objects[0]"),
    "two geometries": (with_object(poly=[0, 0, 9, 0, 9, 9]), "objects[0]"),
    "line": (with_object(line=[0, 0, 9, 9]), "objects[0].line"),
    "bbox": (with_object(bbox=[0, 0, 9, 9]), "objects[0].bbox"),
    "polygon": (with_object(polygon=[0, 0, 9, 9, 9, 9]), "objects[0].polygon"),
    "three numbers": (with_object(bbox_2d=[1, 2, 3]), "objects[0].bbox_2d"),
    "reversed corners": (with_object(bbox_2d=[50, 20, 10, 40]), "x1 <= x2"),
    "outside the image": (with_object(bbox_2d=[10, 20, 50, 51]), "objects[0].bbox_2d[3]"),
    "mixed": (with_object(bbox_2d=[1, 2, 3, "<|coord_4|>"]), "mixes numbers and coord tokens"),
    "numbers of nobody knows what": (record(units=None), "objects[0].bbox_2d plain numbers must say"),
    "units that there are not": (record(units="inches"), "units must be bins or pixels"),
    "units as a list": (record(units=["bins"]), "units must be bins or pixels"),
    "tokens among pixels": (with_object(bbox_2d=["<|coord_7|>"] * 4), "objects[0].bbox_2d is written in tokens"),
    "a wrong token": (with_object(bbox_2d=["<|coord_1000|>"] * 4) | {"units": "bins"}, "objects[0].bbox_2d[0]"),
    "odd poly": (with_object(bbox_2d=None, poly=[1, 2, 3, 4, 5, 6, 7]), "objects[0].poly"),
    "two points": (with_object(bbox_2d=None, poly=[1, 2, 3, 4]), "objects[0].poly"),
    "wrong poly_points": (with_object(bbox_2d=None, poly=[0, 0, 9, 0, 9, 9], poly_points=4), "objects[0].poly_points"),
    "a padded token": (with_object(bbox_2d=["<|coord_007|>"] * 4) | {"units": "bins"}, "objects[0].bbox_2d[0]"),
    "a token and a line end": (with_object(bbox_2d=["<|coord_7|>\n"] * 4) | {"units": None}, "objects[0].bbox_2d[0]"),
    "points of three": (with_object(bbox_2d=None, poly=[[1, 2, 3], [4, 5, 6]]), "objects[0].poly[0]"),
    "one pair among numbers": (with_object(bbox_2d=[[1, 2], 3, 4]), "objects[0].bbox_2d[0]"),
    "a number beyond floats": (with_object(bbox_2d=[1, 2, 3, 10**400]), "objects[0].bbox_2d[3]"),
    "a side that no image has": (record(width=10**400), "width must be at most 2,147,483,647"),
    "a number of 5000 digits": ('{"width": ' + "1" * 5000 + "}", "must be JSON"),
    "lists without end": ("[" * 100_000, "must be JSON"),
    "a name that no file has": (record(images=["a\0.png"]), "images[0]"),
    "a name too long for a file": (record(images=["a" * 5000]), "images[0]"),
    "metadata as a list": (record(metadata=[]), "metadata"),
}


@pytest.mark.parametrize(("line", "expected"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_is_reported_with_file_line_and_field(write, line, expected):
    with pytest.raises(ConfigError) as error:
        load_records(write(record(), line))
    (problem,) = error.value.problems
    assert "train.jsonl:2" in problem.path
    assert expected in f"{problem.path} {problem.rule}"
    assert problem.way_out


def as_line(changed):
    return json.dumps(changed).encode()


def raw(field, value):
    """The good record with this text in the place of a field's value."""
    return as_line(record(**{field.decode(): "HERE"})).replace(b'"HERE"', value)


DEEP = b"[" * 50_000 + b"]" * 50_000
HOSTILE = {
    "null": b"null",
    "a number": b"7",
    "a text": b'"x"',
    "a record in a list": b"[" + as_line(record()) + b"]",
    "an empty object": b"{}",
    "two records in a line": as_line(record()) + as_line(record()),
    "a record and a comma": as_line(record()) + b",",
    "a record without its end": as_line(record())[:-1],
    "a record in other quotes": as_line(record()).replace(b'"', b"'"),
    "a comment": b"// " + as_line(record()),
    "YAML": b"images: [a.png]",
    "CSV": b"a.png,100,50",
    "a zero byte": b"\0",
    "a zero byte in a record": as_line(record())[:10] + b"\0" + as_line(record())[10:],
    "UTF-16": as_line(record()).decode().encode("utf-16"),
    "half a character": as_line(record(sample_id="x")).replace(b'"x"', b'"\xc3"'),
    "an escape that there is not": as_line(record(sample_id="x")).replace(b'"x"', rb'"\x41"'),
    "objects nested without end": raw(b"objects", DEEP),
    "metadata nested without end": raw(b"metadata", b'{"a":' * 50_000 + b"1" + b"}" * 50_000),
    "objects as a mapping": as_line(record(objects={"0": BOX})),
    "objects as text": as_line(record(objects="[]")),
    "an object that is a list": as_line(record(objects=[[1, 2]])),
    "images as text": as_line(record(images="a.png")),
    "images as a mapping": as_line(record(images={"0": "a.png"})),
    "an image that is null": as_line(record(images=[None])),
    "an image that is a list": as_line(record(images=[["a.png"]])),
    "an image without a name": as_line(record(images=[""])),
    "an image that is a folder": as_line(record(images=["."])),
    "an image of the network": as_line(record(images=["https://example.com/a.png"])),
    "a width as a list": as_line(record(width=[100])),
    "a width that is true": as_line(record(width=True)),
    "a width with a point": as_line(record(width=100.5)),
    "a width that is no number": raw(b"width", b"NaN"),
    "a width beyond any float": raw(b"width", b"1e999"),
    "a height of 5,000 digits": raw(b"height", b"9" * 5000),
    "a desc that is null": raw(b"objects", b'[{"desc": null, "bbox_2d": [1, 2, 3, 4]}]'),
    "a desc that is a number": as_line(with_object(desc=7)),
    "a desc that is a list": as_line(with_object(desc=["cat"])),
    "a desc that begins a turn": as_line(with_object(desc="<|im_start|>system")),
    "a box of nothing": as_line(with_object(bbox_2d=[])),
    "a box of texts": as_line(with_object(bbox_2d=["1", "2", "3", "4"])),
    "a box as text": as_line(with_object(bbox_2d="1,2,3,4")),
    "a box as a mapping": as_line(with_object(bbox_2d={"x1": 1})),
    "a box that is no number": raw(b"objects", b'[{"desc": "a", "bbox_2d": [1, 2, NaN, 4]}]'),
    "a box far beyond the image": as_line(with_object(bbox_2d=[1, 2, 1e300, 4])),
    "a poly of texts": as_line(with_object(bbox_2d=None, poly=["a", "b", "c", "d", "e", "f"])),
    "a poly nested without end": raw(b"objects", b'[{"desc": "a", "poly": ' + DEEP + b"}]"),
    "a summary that is a list": as_line(record(summary=["x"])),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_hostile_line_is_refused_with_short_error(write, text):
    path = write(record())
    path.write_bytes(path.read_bytes() + text + b"\n")
    with pytest.raises(ConfigError) as refused:
        load_records(path)
    for problem in refused.value.problems:
        assert problem.path.startswith(f"{path}:2")
        assert problem.rule
        assert problem.way_out
        assert "\n" not in str(problem.value)
    assert len(str(refused.value)) < 2_000


def test_all_mistakes_are_reported_at_once(write):
    with pytest.raises(ConfigError) as error:
        load_records(write(record(width=0), record(), record(height=0)))
    assert len(error.value.problems) == 2


def test_missing_or_empty_data_file_is_refused(tmp_path, write):
    with pytest.raises(ConfigError, match=r"lost\.jsonl"):
        load_records(tmp_path / "lost.jsonl")
    with pytest.raises(ConfigError, match="at least one record"):
        load_records(write(""))


def test_fingerprint_holds_file_hash_and_number_of_records_in_use(write):
    path = write(record(), record())
    found = fingerprint(path, load_records(path, limit=1))
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert found.records == 1


def test_first_twenty_broken_lines_are_reported(write):
    with pytest.raises(ConfigError) as caught:
        load_records(write(*["{]"] * 25))
    assert len(caught.value.problems) == 20


def test_single_record_is_read_as_with_all_records(write):
    path = write(record(), "", record(objects=[]), record(width=200))
    assert [load_record(path, i) for i in range(3)] == load_records(path)


def test_single_record_can_be_read_despite_broken_lines_and_missing_image(write):
    path = write("{]", record(images=["b.png"]))
    assert load_record(path, 1, rules=RecordRules(images_exist=False)).images == (str(path.parent / "b.png"),)
    with pytest.raises(ConfigError, match=r"train\.jsonl:2 images\[0\].*no such file"):
        load_record(path, 1)
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: '\{\]'; must be JSON"):
        load_record(path, 0)


@pytest.mark.parametrize("position", [-1, 1])
def test_record_position_outside_file_is_refused_with_option_name(write, position):
    with pytest.raises(ConfigError, match=rf"--line: {position}; must lie in 0..0: .* has 1 records"):
        load_record(write(record(), record()), position, limit=1, named="--line")


@pytest.mark.parametrize(
    "changes", [{"sample_id": "\ud800"}, {"metadata": {"a": ["\udfff"]}}, {"images": ["\ud800.png"]}]
)
def test_lone_surrogate_in_record_is_refused(write, changes):
    with pytest.raises(ConfigError, match=r"train\.jsonl:1: .*; must be text, and has half of a surrogate pair"):
        load_records(write(record(**changes)))
    (whole,) = load_records(write(record(sample_id="\U0001f600")))  # in JSON two halves
    assert whole.sample_id == "\U0001f600"


def test_line_with_invalid_utf8_is_refused(write):
    path = write(record())
    path.write_bytes(path.read_bytes() + b'{"images": ["\xff"]}\n')
    with pytest.raises(ConfigError, match=r"train\.jsonl:2.*must be UTF-8"):
        load_records(path)
