"""Reading a file costs no more than its size: work and memory are counted at doubling sizes, never seconds."""

import json
import re
import sys
import tracemalloc
from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from PIL import Image

from stage2_trainer.data import images
from stage2_trainer.data.run_lengths import run_lengths
from stage2_trainer.prepare import annotations, chat, outlines, picture_files, voc
from stage2_trainer.prepare.annotations import LeftOut, Tally
from stage2_trainer.prepare.coco import read_coco
from stage2_trainer.prepare.outlines import drawn, outlines_of, simplified
from stage2_trainer.prepare.record_writer import NothingKept, RecordChoice, write_records
from stage2_trainer.scores import coco_results
from tests.unit.trainer.prepare.odd_sets import picture

pytestmark = pytest.mark.in_turns(3, apart=True)


def lines_run(work: Callable[[], object]) -> int:
    """Return how many lines of Python a call runs."""
    count = 0

    def trace(frame, event, argument):
        nonlocal count
        count += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return count


def refused(read: Callable[..., object], *given: object) -> None:
    with pytest.raises((ValueError, LeftOut)):
        read(*given)


def peak(work: Callable[[], object]) -> int:
    """Return the most bytes that a call has allocated at once."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


NAMES = {
    "marks": lambda n: "a" + " 1" * n,
    "white space and no mark": lambda n: "a" + " " * n + "x",
    "marks and no end": lambda n: "a" + " 1" * n + " x",
    "digits": lambda n: "a " + "1" * n + "x",
}


@pytest.mark.parametrize("name", NAMES)
def test_split_marks_are_stripped_in_linear_time(name):
    """Matched at each white space anew, a line of 200 kB took minutes."""
    text = NAMES[name](200_000)
    assert voc.unmarked(text) == ("a" if name == "marks" else text)
    assert not hasattr(voc, "MARKS")


@pytest.mark.parametrize(
    "name", ["a", "a 1", "a  -1", "a +1 0", "a b 1", "a 1 b", "1", "1 -1", "a\t1\v2", "a 1.0", "a 1-"]
)
def test_split_marks_are_stripped_like_reference_regex(name):
    assert voc.unmarked(name) == re.sub(r"(\s+[-+]?[0-9]+)+$", "", name)


def test_overlong_run_length_is_refused_in_bounded_time():
    """A number of n characters was shifted n times."""
    for size in (20, 10**6):
        with pytest.raises(ValueError, match="a number is longer than any mask"):
            run_lengths("o" * size + "0", 100)
    assert lines_run(lambda: refused(run_lengths, "o" * 10**6, 100)) < 1000


OTHER = {"size": [9000, 9999], "counts": [0, 9000 * 9999]}


@pytest.mark.parametrize("geometry", ["bbox", "poly"])
@pytest.mark.parametrize("sides", [{"width": 100, "height": 200}, {}])
@pytest.mark.parametrize("box", [[1, 2, 30, 40], None])
def test_mask_with_wrong_size_is_left_out_without_drawing(tmp_path, monkeypatch, geometry, sides, box):
    monkeypatch.setattr(outlines, "outlines_of_mask", lambda mask: pytest.fail(f"a mask of {mask.shape} is drawn"))
    monkeypatch.setattr(outlines, "mask_of_runs", lambda *size: pytest.fail("a mask is drawn"))
    picture(tmp_path / "a.png")
    annotation = {"id": 1, "image_id": 1, "category_id": 1, "bbox": box, "segmentation": OTHER}
    document = {"images": [{"id": 1, "file_name": "a.png", **sides}], "categories": [{"id": 1, "name": "cat"}]}
    (tmp_path / "x.json").write_text(json.dumps({**document, "annotations": [annotation]}))
    tally = Tally()
    found = read_coco(tmp_path / "x.json", tmp_path, tally, outlines=geometry == "poly")
    try:
        write_records(found, tmp_path / "x.jsonl", RecordChoice(geometry=geometry), tally)
    except NothingKept:
        assert tally.objects_left_out == {annotations.OTHER_MASK: 1}
    else:
        assert geometry == "bbox", "a box of its own needs no mask"
        assert box


def test_mask_with_wrong_size_on_rotated_image_is_not_drawn(tmp_path, monkeypatch):
    monkeypatch.setattr(outlines, "mask_of_runs", lambda *size: pytest.fail("a mask is drawn"))
    picture(tmp_path / "a.png", orientation=6)
    annotation = {"id": 1, "image_id": 1, "category_id": 1, "bbox": [1, 2, 30, 40], "segmentation": OTHER}
    image = {"id": 1, "file_name": "a.png", "width": 100, "height": 200}
    document = {"images": [image], "categories": [{"id": 1, "name": "cat"}], "annotations": [annotation]}
    (tmp_path / "x.json").write_text(json.dumps(document))
    tally = Tally()
    with pytest.raises(NothingKept):
        write_records(
            read_coco(tmp_path / "x.json", tmp_path, tally, outlines=True),
            tmp_path / "x.jsonl",
            RecordChoice(geometry="poly"),
            tally,
        )
    assert tally.objects_left_out == {annotations.OTHER_MASK: 1}


@pytest.mark.parametrize("seed", range(20))
def test_box_of_run_lengths_equals_box_of_drawn_mask(seed):
    drawing = np.random.default_rng(seed)
    mask = drawing.random(drawing.integers(1, 9, 2)) < drawing.choice([0.1, 0.3, 0.8])
    flat = mask.T.ravel()
    edges = [0, *(np.flatnonzero(np.diff(np.concatenate([[0], flat]))).tolist()), len(flat)]
    found = outlines_of({"size": [*mask.shape], "counts": np.diff(edges).tolist()})
    xs, ys = (found.bounds[::2], found.bounds[1::2]) if found.bounds else ((), ())
    parts = drawn(found).parts
    assert bool(parts) == bool(found.bounds) == bool(mask.any())
    if parts:
        points = [point for part in parts for point in part]
        assert (min(xs), min(ys)) == tuple(map(min, zip(*points, strict=True)))
        assert (max(xs), max(ys)) == tuple(map(max, zip(*points, strict=True)))


@pytest.mark.parametrize("size", [[-10, -10], [0, 0], ["a", 1], [1.5, 2], [True, 1], [10**9, 10**9], [1], None])
def test_mask_with_invalid_size_is_left_out(size):
    with pytest.raises(LeftOut, match=annotations.BROKEN_OUTLINE):
        outlines_of({"size": size, "counts": []})


def zigzag(count: int) -> np.ndarray:
    """Return an outline of which each cut takes off one point."""
    places = np.arange(count)
    return np.stack([places * 10.0, places * (places % 2) * 1000.0], axis=1)


def test_simplifying_outline_is_linear_in_number_of_points(monkeypatch):
    """Each kept point costs a pass over a part of the outline, so the number of kept points has a bound."""
    passes, real = [], outlines._distances
    monkeypatch.setattr(outlines, "_distances", lambda *one: passes.append(1) or real(*one))
    for count in (4000, 8000):
        passes.clear()
        with pytest.raises(LeftOut, match="has more than"):
            simplified(zigzag(count), 1.0)
        assert len(passes) <= 2 * outlines.MOST_POINTS + 2


def test_overlong_result_polygon_is_refused():
    corner = [0, 0, 9000, 9000] * 1000
    with pytest.raises(ValueError, match="longer than"):
        coco_results.check_length(corner)
    coco_results.check_length([0, 0, 9000, 0, 9000, 9000])


XML = {
    "nested": lambda n: "<a>" * n + "</a>" * n,
    "beside each other": lambda n: "<a/>" * n,
    "objects": lambda n: "<object/>" * n,
}


@pytest.mark.parametrize("form", XML)
def test_annotation_file_is_read_in_bounded_memory(tmp_path, form):
    """2,000,000 nested elements made a tree of a gigabyte, which took minutes to go."""
    peaks = []
    for count in (500_000, 1_000_000):
        file = tmp_path / f"{count}.xml"
        file.write_text(f"<annotation>{XML[form](count)}</annotation>")
        peaks.append(peak(partial(refused, voc._parsed, file)) - file.stat().st_size)
    assert max(peaks) < 120 << 20
    (tmp_path / "x.xml").write_text("<annotation>" + "<object><name>cat</name></object>" * 20_000 + "</annotation>")
    assert len(voc._parsed(tmp_path / "x.xml")) == 20_000
    (tmp_path / "y.xml").write_text("<annotation>" + " " * voc.LARGEST_ANNOTATION + "</annotation>")
    with pytest.raises(LeftOut, match=voc.BROKEN_ANNOTATION):
        voc._parsed(tmp_path / "y.xml")


BRACKETS = {
    "lists": lambda n: "[" * n,
    "mappings": lambda n: '{"a":' * n,
    "closed lists": lambda n: "[1]" * n,
    "fences": lambda n: "```json" * n,
}


@pytest.mark.parametrize("form", BRACKETS)
def test_search_for_json_in_answer_takes_bounded_time(form):
    """Sought at each bracket anew, an answer of 1 MB would be parsed a million times."""
    for count in (100_000, 200_000):
        text = BRACKETS[form](count)
        assert lines_run(lambda text=text: chat._json_in(text)) < 2000


def test_search_for_image_tries_bounded_number_of_paths(tmp_path, monkeypatch):
    tried, real = [], picture_files.os.path.isfile
    monkeypatch.setattr(picture_files.os.path, "isfile", lambda path: tried.append(path) or real(path))
    for count in (1000, 100_000):
        tried.clear()
        stated = "http://" + "%61/" * count + "a.png?d=" + "b/" * count
        assert picture_files.locate([stated], tmp_path, Tally()) == {stated: tmp_path / stated}
        assert len(tried) < 5 * picture_files.MOST_FOLDERS


@pytest.mark.parametrize("pattern", [picture_files.SCHEME, picture_files.DATA_URL, chat.FENCE, chat.PLACEHOLDER])
def test_patterns_for_paths_and_answers_match_in_linear_time(pattern):
    """Two repetitions beside each other are what makes a search quadratic."""
    for text in ("a" * 10**6, "data:" * 10**5, "`" * 10**6, "<" * 10**6, "```" + " " * 10**6):
        assert lines_run(lambda text=text: pattern.search(text)) < 10


MODES = {"RGBA": "white", "LA": (9, 99), "P": 3, "I;16": 40_000, "CMYK": (1, 2, 3, 4), "L": 7, "PA": 3}


@pytest.mark.parametrize("mode", MODES)
def test_image_is_converted_in_strips(mode, monkeypatch):
    """Whole, a transparent image was in memory four times: 1.3 GB of 90 MP."""
    pixels = np.random.default_rng(1).integers(20_000, 65_000, (50, 30)).astype("<u2")
    base = Image.fromarray(pixels) if mode == "I;16" else Image.effect_noise((30, 50), 90).convert("RGB").convert(mode)
    if mode == "RGBA":
        base.putalpha(Image.effect_noise((30, 50), 90))
    if mode == "P":
        base.info["transparency"] = 3
    whole = images.displayed(base)
    sizes = []
    monkeypatch.setattr(images, "STRIP_PIXELS", 90)
    real = images._as_rgb
    monkeypatch.setattr(images, "_as_rgb", lambda part, **options: sizes.append(part.size) or real(part, **options))
    assert images.displayed(base).tobytes() == whole.tobytes()
    assert {width * height for width, height in sizes} <= {90, 60}
