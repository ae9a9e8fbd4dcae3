"""A data file is inspected: its content is counted, and what is wrong or looks wrong is named by its line."""

import base64
import io
import json
import random
import shutil
from collections import Counter

import pytest
from PIL import Image

from stage2_api.errors import ConfigError
from stage2_trainer.data import profile as module
from stage2_trainer.data.image_oddities import HIDDEN, ONE_COLOUR
from stage2_trainer.data.images import SCALE
from stage2_trainer.data.profile import Lengths, profile, survey
from stage2_trainer.data.records import AS_DECLARED, RecordRules
from stage2_trainer.data.signatures import REPLACE
from stage2_trainer.matching import GTObject
from tests.unit.trainer.prepare.odd_sets import picture


def encoded(image):
    """An image as the text of a PNG's bytes."""
    file = io.BytesIO()
    image.save(file, format="PNG")
    return base64.b64encode(file.getvalue()).decode()


BLANK = encoded(Image.new("RGB", (1000, 500), "green"))
BOX = {"desc": "cat", "bbox_2d": [100, 100, 300, 300]}
TRIANGLE = {"desc": "dog", "poly": [0, 0, 500, 0, 0, 500]}


def dotted(color, mode="RGB"):
    """An image of one colour but for a pixel."""
    image = Image.new(mode, (1000, 500), color)
    image.putpixel((999, 499), (255, 255, 255, *color[3:]))
    return image


@pytest.fixture
def look(tmp_path):
    """A function that profiles records, each with an image of its own unless it names one."""

    def look_at(*changes, rules=None, lengths_of=lambda texts: [len(text) for text in texts]):
        lines = []
        for number, change in enumerate(changes):
            if isinstance(change, str):
                lines.append(change)
                continue
            good = {"images": [f"{number}.png"], "width": 1000, "height": 500, "units": "bins", "objects": [BOX]}
            record = good | change
            if record["images"] == [f"{number}.png"]:
                dotted((number, 0, 0)).save(tmp_path / f"{number}.png")
            lines.append(json.dumps(record))
        (tmp_path / "x.jsonl").write_text("\n".join(lines) + "\n")
        return profile(tmp_path / "x.jsonl", rules or RecordRules(), lengths_of)

    return look_at


def test_records_objects_kinds_and_classes_are_counted(look):
    found = look({}, {"objects": [BOX, TRIANGLE]}, {"objects": []})
    assert (found.records, found.broken, found.problems) == (3, 0, [])
    assert (found.kinds, found.classes) == ({"bbox": 2, "poly": 1}, {"cat": 2, "dog": 1})
    assert found.objects.counts == {1: 1, 2: 1, 0: 1}
    assert found.suspicions.counts == {}


def boxes(*corners):
    return {
        "objects": [
            {"desc": "cat", "bbox_2d": [x, y, x + 90 - number, y + 90]} for number, (x, y) in enumerate(corners)
        ]
    }


def test_object_order_is_measured(look):
    draw = random.Random(1)
    records = [boxes(*sorted((draw.randrange(900), draw.randrange(900)) for _ in range(10))) for _ in range(10)]
    assert look(*records[:5]).order.best is None, "too few neighbours"
    assert look(*records).order.best == ("left to right", 1.0)


@pytest.mark.parametrize(
    ("one", "size"),
    [
        (GTObject("a", "bbox", (0, 0, 32, 62)), "small"),
        (GTObject("a", "bbox", (0, 0, 32, 64)), "medium"),
        (GTObject("a", "bbox", (0, 0, 96, 190)), "medium"),
        (GTObject("a", "bbox", (0, 0, 96, 192)), "large"),
        (GTObject("a", "poly", (0, 0, 96, 0, 96, 192, 48, 96)), "medium"),
        (GTObject("a", "poly", (0, 0, 32, 0, 32, 64)), "small"),
    ],
)
def test_object_sizes_follow_coco_pixel_areas(look, one, size):
    """The image is 1,000 by 500 pixels: 32 by 64 bins are 32 by 32 pixels."""
    key = "bbox_2d" if one.kind == "bbox" else "poly"
    assert look({"objects": [{"desc": "a", key: list(one.bins)}]}).sizes == {size: 1}


TOKENS = [f"<|coord_{k}|>" for k in (1, 2, 300, 400)]
PAIRS = [[f"<|coord_{k}|>", f"<|coord_{k}|>"] for k in (1, 2, 300)]


def test_coordinate_forms_are_counted(look):
    found = look(
        {},
        {"units": "pixels", "objects": [{"desc": "a", "bbox_2d": [1, 2, 1000, 400]}]},
        {"units": None, "objects": [{"desc": "a", "bbox_2d": TOKENS}, {"desc": "a", "poly": PAIRS}]},
        {"objects": [{"desc": "a", "bbox_2d": TOKENS}, BOX]},
        {"objects": []},
    )
    assert found.written == {"bins": 1, "pixels": 1, "tokens": 1, "both": 1, "none": 1}
    assert look({"units": None}, rules=RecordRules(units="pixels")).written == {"pixels": 1}


def test_broken_lines_are_counted_and_first_twenty_reported(look):
    found = look({}, "{", *[{"units": None}] * 30)
    assert (found.records, found.broken, len(found.problems)) == (1, 31, 20)
    assert "x.jsonl:2" in str(found.problems[0])
    assert "must say whether they are bins or pixels" in str(found.problems[1])


SUSPICIOUS = {
    module.TWO_AT_ONE_PLACE: {"objects": [BOX, TRIANGLE, BOX | {"desc": "other"}]},
    module.NO_AREA: {"objects": [{"desc": "a", "bbox_2d": [5, 5, 5, 50]}]},
    module.ONE_BIN: {"objects": [{"desc": "a", "poly": [5, 5, 6, 50, 5, 90]}]},
    module.MISSING_IMAGE: {"images": ["lost.png"]},
    f"{module.BROKEN_IMAGE}: it is text, no image; {REPLACE}": {"images": ["broken.png"]},
    module.OTHER_SIZE: {"width": 999},
    module.SAME_IMAGE: {"images": ["0.png"]},
}


@pytest.mark.parametrize("reason", SUSPICIOUS)
def test_suspicious_record_is_reported_with_its_line(look, tmp_path, reason):
    (tmp_path / "broken.png").write_bytes(b"no image")
    found = look({}, SUSPICIOUS[reason] | {"sample_id": "odd"}, {})
    assert found.suspicions.counts == {reason: 1}
    (place,) = found.suspicions.places[reason]
    assert place.startswith("line 2, odd")


def test_images_are_duplicates_only_if_all_bytes_match(look, tmp_path):
    picture(tmp_path / "copy.bmp", (1000, 500))
    shutil.copy(tmp_path / "copy.bmp", tmp_path / "again.bmp")
    other = bytearray((tmp_path / "copy.bmp").read_bytes())
    other[-1] ^= 1
    (tmp_path / "other.bmp").write_bytes(other)
    names = ("copy.bmp", "again.bmp", "other.bmp", "data:,", "data:,")
    found = look(*({"images": [name], "sample_id": name} for name in names))
    assert found.suspicions.places[module.SAME_IMAGE] == ["line 2, again.bmp", "line 5, data:,"]


def test_missing_image_of_several_records_is_counted_once(look):
    found = look(*({"images": [name]} for name in ("lost.png", "lost.png", "gone.png", "lost.png")))
    assert found.suspicions.counts[module.MISSING_IMAGE] == 2
    assert [place.rpartition("/")[2] for place in found.suspicions.places[module.MISSING_IMAGE]] == [
        "lost.png",
        "gone.png",
    ]


def test_same_image_twice_in_one_record_is_not_suspicious(look, tmp_path):
    dotted((9, 9, 9)).save(tmp_path / "a.png")
    assert look({"images": ["a.png", "a.png"]}).suspicions.counts == {}


ODD_PIXELS = {
    "black.png": (Image.new("RGB", (1000, 500)), {}, {ONE_COLOUR: 1}),
    "white.jpg": (Image.new("L", (1000, 500), 255), {}, {ONE_COLOUR: 1}),
    "blue.jpg": (Image.new("RGB", (1000, 500), "blue"), {"quality": 100, "subsampling": 0}, {ONE_COLOUR: 1}),
    "blue.webp": (Image.new("RGB", (1000, 500), "blue"), {"lossless": True}, {ONE_COLOUR: 1}),
    "blue.bmp": (Image.new("RGB", (1000, 500), "blue"), {}, {ONE_COLOUR: 1}),
    "clear.png": (Image.new("RGBA", (1000, 500), (9, 9, 9, 0)), {}, {ONE_COLOUR: 1, HIDDEN: 1}),
    "hidden.png": (dotted((9, 9, 9, 0), "RGBA"), {}, {HIDDEN: 1}),
    "hidden.webp": (dotted((9, 9, 9, 0), "RGBA"), {"lossless": True, "exact": True}, {HIDDEN: 1}),
    "opaque.png": (dotted((9, 9, 9, 255), "RGBA"), {}, {}),
    "dotted.png": (dotted((9, 9, 9)), {}, {}),
    "dotted.bmp": (dotted((9, 9, 9)), {}, {}),
}


@pytest.mark.parametrize("name", ODD_PIXELS)
def test_single_colour_and_fully_transparent_images_are_counted(look, tmp_path, name):
    image, options, counts = ODD_PIXELS[name]
    image.save(tmp_path / name, **options)
    found = look({"images": [name]}, {"images": ["data:image/png;base64," + BLANK]})
    assert found.suspicions.counts == {**counts, ONE_COLOUR: counts.get(ONE_COLOUR, 0) + 1}


def test_truncated_image_is_not_suspicious(look, tmp_path):
    Image.new("RGB", (1000, 500)).save(tmp_path / "a.png")
    (tmp_path / "a.png").write_bytes((tmp_path / "a.png").read_bytes()[:600])
    assert look({"images": ["a.png"]}).suspicions.counts == {}


def test_descriptions_that_differ_only_in_case_or_spaces_are_grouped(look):
    names = ["cat", "Cat", "cat", " cat", "dog", "traffic light", "traffic  light"]
    found = look({"objects": [BOX | {"desc": name, "bbox_2d": [0, 0, 9, 9 + i]} for i, name in enumerate(names)]})
    assert found.alike == [["cat", "Cat", " cat"], ["traffic light", "traffic  light"]]


def test_number_of_counted_classes_is_bounded(look, monkeypatch):
    monkeypatch.setattr(module, "MOST_CLASSES", 2)
    found = look({"objects": [BOX | {"desc": name, "bbox_2d": [0, 0, 9, 9 + i]} for i, name in enumerate("abcab")]})
    assert (found.classes, found.further_classes) == ({"a": 2, "b": 2}, 1)


def test_answer_lengths_are_measured_in_batches_and_longest_reported(look, monkeypatch):
    monkeypatch.setattr(module, "BATCH", 2)
    asked = []

    def lengths_of(texts):
        asked.append(len(texts))
        return [text.count("cat") for text in texts]

    found = look(*({"objects": [BOX] * count} for count in (1, 5, 0, 9, 3)), lengths_of=lengths_of)
    assert asked == [2, 2, 1]
    assert found.answers.counts == Counter([1, 5, 0, 9, 3])
    assert found.answers.longest == [(9, "line 4, x.jsonl:4"), (5, "line 2, x.jsonl:2"), (3, "line 5, x.jsonl:5")]


@pytest.mark.parametrize(("share", "length"), [(0.5, 5), (0.9, 9), (0.99, 10), (1.0, 10)])
def test_length_quantile_is_not_exceeded_by_given_share(share, length):
    lengths = Lengths()
    for number in range(1, 11):
        lengths.add(number, "x")
    assert lengths.quantile(share) == length
    assert Lengths().quantile(share) == 0


def test_sample_of_shown_records_keeps_file_order(look):
    found = look({"objects": []}, {"images": ["lost.png"]}, *[{}] * 40)
    assert len(found.shown) == module.SHOWN
    indices = [record.index for record in found.shown]
    assert indices == sorted(indices)
    assert min(indices) >= 2
    assert max(indices) > 20


SURVEYED = [{"desc": "a", "bbox_2d": [1, 2, 3, 4]}, *[{"desc": "b", "poly": [1, 2, 3, 4, 5, 6]}] * 2]


@pytest.fixture
def write(tmp_path):
    picture(tmp_path / "a.png", (10, 10))

    def write_records(*changes):
        good = {"images": ["a.png"], "width": 10, "height": 10, "units": "pixels", "objects": SURVEYED}
        path = tmp_path / "train.jsonl"
        path.write_text("".join(json.dumps(good | change) + "\n" for change in changes))
        return path

    return write_records


def test_survey_counts_records_and_objects(write):
    found = survey(write({}, {"objects": []}, {}), AS_DECLARED)
    assert (found.records, found.objects, found.problems, found.whole) == (3, {"bbox": 2, "poly": 4}, [], True)


def test_survey_reports_every_broken_line(write):
    found = survey(write({}, *[{"width": 0}] * 50), AS_DECLARED)
    assert found.records == 1
    assert [problem.path.rpartition(":")[2] for problem in found.problems] == [f"{k} width" for k in range(2, 52)]


def test_survey_counts_each_missing_image_once_and_names_first_five(write, tmp_path):
    found = survey(write({}, *[{"images": [f"{k // 2}.png"]} for k in range(20)]), AS_DECLARED)
    (problem,) = found.problems
    assert found.records == 21
    assert problem.value == [str(tmp_path / f"{k}.png") for k in range(5)]
    assert problem.rule == "10 images are missing"
    assert problem.way_out.endswith("folder"), "no file is like it"


def test_missing_image_is_reported_with_most_similar_file(write, look, tmp_path):
    found = survey(write({"images": ["A.png"]}, {"images": ["gone\\\\a.png"]}), AS_DECLARED)
    nearest = f"; there is {tmp_path}/a.png: its name differs in upper and lower case"
    assert found.problems[0].way_out.endswith(nearest)
    suspicions = look({"images": ["A.png"]}, {"images": ["gone\\\\a.png"]}).suspicions
    first, second = suspicions.places[module.MISSING_IMAGE]
    assert first.endswith(nearest)
    assert second.endswith(f"there is {tmp_path}/a.png: it is in another folder")


def test_survey_reports_unreadable_images_with_advice(write, tmp_path):
    (tmp_path / "b.png").write_bytes(b"<html>Not found</html>")
    Image.new("F", (10, 10), 0.5).save(tmp_path / "c.tif")
    found = survey(write({}, {"images": ["b.png"]}, {"images": ["c.tif"]}), AS_DECLARED)
    assert found.records == 1
    assert [problem.path.rpartition(":")[2] for problem in found.problems] == ["2 images[0]", "3 images[0]"]
    assert found.problems[0].rule == "cannot be read: it is HTML, no image"
    assert found.problems[1].way_out == SCALE


def test_survey_with_limit_stops_reading_and_reports_it(write):
    path = write({}, {}, {"width": 0})
    assert (survey(path, AS_DECLARED, 2).problems, survey(path, AS_DECLARED, 2).whole) == ([], False)
    assert survey(path, AS_DECLARED, 3).whole
    assert len(survey(path, AS_DECLARED, 3).problems) == 1


def test_survey_passes_each_line_to_callback(write):
    path, seen = write({}, {"width": 0}), []
    survey(path, AS_DECLARED, on_line=seen.append)
    assert sum(len(line.text) for line in seen) == path.stat().st_size


def test_survey_reports_empty_file_and_unreadable_file(write, tmp_path):
    assert "at least one record" in survey(write(), AS_DECLARED).problems[0].rule
    with pytest.raises(ConfigError, match="no such file"):
        survey(tmp_path, AS_DECLARED)
