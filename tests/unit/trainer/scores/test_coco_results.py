"""COCO's results are scored as pycocotools scores them, and what cannot be read is named by its place."""

import contextlib
import io
import json
import math
import subprocess
from dataclasses import replace

import numpy as np
import pytest
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from stage2_api.errors import ConfigError
from stage2_trainer.scores.answer_file import Reading, read_rollouts
from stage2_trainer.scores.answer_scores import AnswerScores
from stage2_trainer.scores.coco_results import FROM_CORNERS, id_text
from stage2_trainer.scores.rollout_file import Rollouts
from stage2_trainer.scores.scored_image import scored_images
from tests.unit.trainer.scores.scenes import box, poly, random_scene, record
from tests.unit.trainer.scores.test_average_precision import NAMES, entry

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools itself
CATEGORIES = [{"id": 7, "name": "cat"}, {"id": 3, "name": "dog"}, {"id": 40, "name": "traffic light"}]
IDS = {one["name"]: one["id"] for one in CATEGORIES}


def annotation_file(folder, records, *, masks=False):
    """Write the true objects of records as COCO's annotation file; return its path."""
    images, annotations = [], []
    for number, one in enumerate(records):
        width, height = one.width, one.height
        images.append({"id": number, "file_name": one.images[0], "width": width, "height": height})
        for true in one.objects:
            known = {"id": len(annotations) + 1, "image_id": number, "category_id": IDS[true.desc], "iscrowd": 0}
            annotations.append({**plain(entry(true, (width, height), masks=masks)), **known})
    path = folder / "instances.json"
    path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": CATEGORIES}))
    return path


def plain(found):
    """An object as JSON can hold it."""
    outline = found.get("segmentation")
    return {**found, "segmentation": {**outline, "counts": outline["counts"].decode()}} if outline else found


def detections(seed, records, answers, *, masks=False):
    """What a detector might say: the answers' objects, moved by parts of pixels, in any order."""
    draw = np.random.default_rng(seed)
    found = []
    for number, (one, answer) in enumerate(zip(records, answers, strict=True)):
        for shape, score in zip(answer.objects, answer.scores, strict=True):
            if shape.desc not in IDS:
                continue
            detection = plain(entry(shape, (one.width, one.height), masks=masks))
            if not masks:
                detection["bbox"] = [value + draw.uniform(0, 2) for value in detection["bbox"]]
            detection.pop("area")
            known = {"image_id": number, "category_id": IDS[shape.desc], "score": float(score)}
            found.append({**detection, **known})
    draw.shuffle(found)
    return found


def reference(annotations, results, *, masks):
    """The figures of pycocotools."""
    with contextlib.redirect_stdout(io.StringIO()):
        coco = COCO(str(annotations))
        evaluation = COCOeval(coco, coco.loadRes(str(results)), "segm" if masks else "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: evaluation.stats[place] for name, place in NAMES.items()}


def without_crowds(records):
    return [replace(one, sample_id=str(number), metadata={}) for number, one in enumerate(records)]


def read(path, records, **reading):
    return read_rollouts(
        Rollouts(path), records, [f"data.jsonl:{k + 1}" for k in range(len(records))], Reading(**reading)
    )


@pytest.mark.parametrize("masks", [False, True])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"crowded": True}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_coco_result_scores_equal_pycocotools(tmp_path, seed, options, masks):
    records, answers = random_scene(seed, kind="poly" if masks else "bbox", **options)
    records = without_crowds(records)
    annotations = annotation_file(tmp_path, records, masks=masks)
    results = tmp_path / "results.json"
    results.write_text(json.dumps(detections(seed, records, answers, masks=masks)))
    expected = reference(annotations, results, masks=masks)
    answered = read(results, records, annotations=annotations)
    assert (answered.form, answered.unit) == ("coco", "pixels")
    scores = AnswerScores.from_images(scored_images(records, answered.answers))
    figures = scores.figures(np.ones(len(records)))
    for name, value in expected.items():
        assert figures[name] == pytest.approx(value, abs=1e-9) or (value == -1 and math.isnan(figures[name])), name
    assert 0.05 < figures["AP"] < 0.95


CAT, DOG = box("cat", 100, 100, 500, 500), box("dog", 0, 0, 200, 900)
RECORDS = [
    replace(record(0, [CAT], size=(200, 100)), sample_id="17", images=("/data/a.b/one.jpg",)),
    replace(record(1, [DOG], size=(200, 100)), sample_id="x", images=("/data/a.b/000000000042.jpg",)),
]
RIGHT = {"image_id": 17, "category_id": 7, "bbox": [20, 10, 80, 40], "score": 0.9}


@pytest.fixture
def files(tmp_path):
    annotations = annotation_file(tmp_path, RECORDS)

    def look(*entries, records=RECORDS, with_names=True, **reading):
        (tmp_path / "results.json").write_text(json.dumps(entries))
        known = {"annotations": annotations} if with_names else {}
        return read(tmp_path / "results.json", records, **known, **reading)

    return look


def test_detection_is_read_as_pixel_box_with_category_name(files):
    answered = files(RIGHT, {**RIGHT, "bbox": [0.25, 1.5, 3.125, 4], "category_id": "3", "score": 1})
    first, second = answered.answers[0].objects
    assert (first.desc, first.box, first.kind) == ("cat", (20, 10, 80, 40), "bbox")
    assert (second.desc, second.box) == ("dog", (0.25, 1.5, 3.125, 4))
    assert answered.answers[0].scores == (0.9, 1.0)
    assert answered.missing == ["x"], "an image without a detection"
    assert answered.answers[1].objects == ()
    figures = AnswerScores.from_images(scored_images(RECORDS, answered.answers)).figures(np.ones(2))
    assert (figures["precision@0.5"], figures["recall@0.5"]) == (0.5, 0.5)


@pytest.mark.parametrize(
    ("image", "place"),
    [(17, 0), ("17", 0), (17.0, 0), ("17.0", 0), ("one.jpg", 0), ("/data/a.b/one.jpg", 0), ("one", 0),
     ("data.jsonl:1", 0), ("x", 1), ("000000000042", 1), (42, 1), ("000000000042.jpg", 1)],
)  # fmt: skip
def test_image_is_identified_by_id_file_name_or_stem(files, image, place):
    answered = files({**RIGHT, "image_id": image}, records=RECORDS)
    assert [bool(one.objects) for one in answered.answers] == [place == 0, place == 1]


def test_annotation_file_maps_image_ids_that_records_lack(tmp_path):
    records = [replace(one, sample_id=f"data.jsonl:{number}") for number, one in enumerate(RECORDS)]
    annotations = annotation_file(tmp_path, records)  # with ids 0 and 1
    (tmp_path / "results.json").write_text(json.dumps([{**RIGHT, "image_id": 1}]))
    assert read(tmp_path / "results.json", records, annotations=annotations).missing == ["data.jsonl:0"]


def test_image_id_and_file_name_of_different_records_are_refused(tmp_path):
    records = [replace(one, sample_id=str(1 - number)) for number, one in enumerate(RECORDS)]
    annotations = annotation_file(tmp_path, records)
    (tmp_path / "results.json").write_text(json.dumps([{**RIGHT, "image_id": 1}]))
    with pytest.raises(ConfigError, match=r"is the id of one record, and its file .* is another's"):
        read(tmp_path / "results.json", records, annotations=annotations)


def test_without_scores_all_detections_rank_equally(files):
    unscored = {key: value for key, value in RIGHT.items() if key != "score"}
    for without in (unscored, {**RIGHT, "score": None}):
        assert files(without).answers[0].scores is None
        with pytest.raises(ConfigError, match=r"\[1\].score: .*in all entries, or in none"):
            files(RIGHT, without)


SQUARE = np.zeros((100, 200), dtype=np.uint8, order="F")
SQUARE[10:50, 20:100] = 1
RUNS = rle.encode(SQUARE)["counts"].decode()
PLAIN_RUNS = [20 * 100 + 10, *([40, 60] * 80)[:-1], 50 + 100 * 100]


@pytest.mark.parametrize(
    "outline",
    [{"size": [100, 200], "counts": RUNS}, {"size": [100, 200], "counts": PLAIN_RUNS},
     [[20, 10, 100, 10, 100, 50, 20, 50]],
     [[20, 10, 60, 10, 60, 50, 20, 50], [60, 10, 100, 10, 100, 50, 60, 50]]],
    ids=["compressed", "plain run lengths", "polygon", "two polygons"],
)  # fmt: skip
def test_segmentations_are_compared_as_masks_with_outlines_and_as_boxes_with_boxes(files, outline):
    entry = {"image_id": 17, "category_id": 7, "segmentation": outline, "score": 0.5}
    (one,) = files(entry).answers[0].objects
    assert (one.kind, one.box) == ("poly", (20, 10, 80, 40))
    outlined = [replace(RECORDS[0], objects=(poly("cat", 100, 100, 500, 100, 500, 500, 100, 500),)), RECORDS[1]]
    for records in (RECORDS, outlined):
        (image, _) = scored_images(records, files(entry, records=records).answers)
        assert image.iou.tolist() == [[1.0]]
        assert image.answered_areas.tolist() == [80 * 40]


BOXES = [(20, 10, 100, 50), (100, 40, 190, 95), (60, 20, 120, 90), (5, 60, 150, 99)]  # x1, y1, x2, y2


@pytest.mark.parametrize(
    ("write", "rule", "way_out"),
    [
        (
            lambda x1, y1, x2, y2: [x1 / 200, y1 / 100, (x2 - x1) / 200, (y2 - y1) / 100],
            "4 of 4 detections lie between 0 and 1: they are shares of their images",
            "multiply x and width by the image's width",
        ),
        (
            lambda *corners: [*corners],
            "2 of 4 detections leave their images, and would not as corners x1, y1, x2, y2",
            "write x, y, width, height: jq -c",
        ),
        (
            lambda x1, y1, x2, y2: [x1 * 5, y1 * 10, (x2 - x1) * 5, (y2 - y1) * 10],
            "4 of 4 detections leave their images: they may be pixels of another size",
            "scale them",
        ),
    ],
    ids=["shares", "corners", "bins"],
)
def test_boxes_in_another_format_are_refused_unless_form_is_given(files, write, rule, way_out):
    entries = [{**RIGHT, "bbox": write(*box)} for box in BOXES]
    with pytest.raises(ConfigError, match=rf"results.json bbox: {rule}; {way_out}.*--answers coco scores them as they"):
        files(*entries)
    assert files(*entries, form="coco").notes == (rule,)
    right = [[x1, y1, x2 - x1, y2 - y1] for x1, y1, x2, y2 in BOXES] * 2
    assert files(*({**RIGHT, "bbox": box} for box in (*right, entries[0]["bbox"], [150, 90, 190, 95]))).notes == ()


def test_documented_jq_command_converts_corners_to_boxes(files):
    entries = json.dumps([{**RIGHT, "bbox": [*box]} for box in BOXES])
    written = subprocess.run(["jq", "-c", FROM_CORNERS], input=entries, capture_output=True, check=True, text=True)
    assert [one.box for one in files(*json.loads(written.stdout)).answers[0].objects] == [
        (x1, y1, x2 - x1, y2 - y1) for x1, y1, x2, y2 in BOXES
    ]


@pytest.mark.parametrize("form", ["auto", "coco"])
def test_results_may_be_json_lines(tmp_path, form):
    annotations = annotation_file(tmp_path, RECORDS)
    path = tmp_path / "results.jsonl"
    path.write_text(json.dumps(RIGHT) + "\n" + json.dumps({**RIGHT, "category_id": 3}) + "\n")
    answered = read(path, RECORDS, annotations=annotations, form=form)
    assert [one.desc for one in answered.answers[0].objects] == ["cat", "dog"]
    path.write_text(json.dumps(RIGHT) + "\n{half")
    with pytest.raises(ConfigError, match=r"results.jsonl \[1\]: must be a detection"):
        read(path, RECORDS, annotations=annotations, form=form)


REFUSED = {
    "no annotation file": (RIGHT, {"with_names": False}, r"--annotations: .*names? of each category"),
    "an unknown category": ({**RIGHT, "category_id": 8}, {}, r"\[0\].category_id: 8; must be the id of a category"),
    "an unknown image": ({**RIGHT, "image_id": 99}, {}, r"\[0\].image_id: 99; names none of the records"),
    "no image": ({**RIGHT, "image_id": None}, {}, r"\[0\].image_id: must be a number or a text"),
    "a truth value": ({**RIGHT, "image_id": True}, {}, r"\[0\].image_id: "),
    "three numbers": ({**RIGHT, "bbox": [1, 2, 3]}, {}, r"\[0\].bbox: \[1, 2, 3\]; must be x, y, width and height"),
    "a negative width": ({**RIGHT, "bbox": [1, 2, -3, 4]}, {}, r"\[0\].bbox: "),
    "not finite": ({**RIGHT, "bbox": [1, 2, float("nan"), 4]}, {}, r"\[0\].bbox: "),
    "a giant": ({**RIGHT, "bbox": [1, 2, 1e300, 4]}, {}, r"\[0\].bbox: "),
    "neither box nor outline": ({**RIGHT, "bbox": None}, {}, r"\[0\].bbox: must be x, y, width and height"),
    "a text as score": ({**RIGHT, "score": "0.9"}, {}, r"\[0\].score: '0.9'; must be a number"),
    "another size": (
        {**RIGHT, "segmentation": {"size": [200, 100], "counts": RUNS}},
        {},
        r"\[0\].segmentation: .*size",
    ),
    "too few runs": (
        {**RIGHT, "segmentation": {"size": [100, 200], "counts": "PPPP0"}},
        {},
        r"cover 0 of 20000 pixels",
    ),
    "too many runs": ({**RIGHT, "segmentation": {"size": [100, 200], "counts": [20000, 7]}}, {}, "cover 20007"),
    "a polygon of two points": ({**RIGHT, "segmentation": [[1, 2, 3, 4]]}, {}, r"\[0\].segmentation: "),
    "an answer as text": ({"sample_id": "17", "text": "[]"}, {}, r"\[0\]: .*it has sample_id, text.*jq -c '.\[\]'"),
    "no mapping": (7, {}, r"\[0\]: .*it has no keys"),
}


@pytest.mark.parametrize(("entry", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_unreadable_entry_is_refused_with_its_position(files, entry, options, message):
    with pytest.raises(ConfigError, match=message):
        files(entry, **options)


@pytest.mark.parametrize(
    ("text", "message"),
    [("[]", "a JSON list without entries, so no answers"),
     ('{"images": [], "annotations": []}', "with 'images', 'annotations'"),
     ('{\n "images": [],\n "annotations": []\n}', "with 'images', 'annotations'"), ("[{", "no JSON"), ("", "no JSON")],
)  # fmt: skip
def test_file_without_list_of_detections_is_refused_with_its_format(tmp_path, text, message):
    (tmp_path / "results.json").write_text(text)
    with pytest.raises(ConfigError, match=f"must be COCO's results, a JSON list of detections; seen: .*{message}"):
        read(tmp_path / "results.json", RECORDS, form="coco")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "must be readable"),
        ("{", "must be JSON"),
        ("[]", "must list categories"),
        ('{"categories": [7]}', "must list"),
    ],
)
def test_annotation_file_without_categories_is_refused(tmp_path, text, message):
    (tmp_path / "results.json").write_text(json.dumps([RIGHT]))
    if text is not None:
        (tmp_path / "names.json").write_text(text)
    with pytest.raises(ConfigError, match=f"--annotations: .*{message}"):
        read(tmp_path / "results.json", RECORDS, annotations=tmp_path / "names.json")


@pytest.mark.parametrize(
    ("value", "text"),
    [(17, "17"), ("17", "17"), (17.0, "17"), ("17.0", "17"), ("0017", "17"), (1.5, "1.5"), ("a.0", "a.0"),
     ("v1.20", "v1.20"), (True, None), (None, None), ([1], None), ("9" * 30, "9" * 30)],
)  # fmt: skip
def test_numeric_ids_are_compared_as_numbers(value, text):
    assert id_text(value) == text
