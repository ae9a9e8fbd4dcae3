"""Average precision and recall: pycocotools' own figures, on predictions made to find differences."""

import contextlib
import io
import math

import numpy as np
import pytest
from pycocotools import mask as rle
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from stage2_trainer.scores.answer_scores import average_precision, by_class, class_matches, image_matches
from stage2_trainer.scores.scored_image import scored_images
from tests.unit.trainer.scores.scenes import answer, box, random_scene, record

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")  # of pycocotools itself
NAMES = {"AP": 0, "AP50": 1, "AP75": 2, "AP_small": 3, "AP_medium": 4, "AP_large": 5, "AR": 8}
NAMES |= {"AR_small": 9, "AR_medium": 10, "AR_large": 11}


def matched(images):
    return class_matches([image_matches(image) for image in images])


def entry(one, size, *, masks):
    """An object as a COCO file has it."""
    xs, ys = ([value * side / 1000 for value in one.bins[axis::2]] for axis, side in enumerate(size))
    left, top, right, bottom = min(xs), min(ys), max(xs), max(ys)
    if not masks:
        return {"bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top)}
    outline = [value for pair in zip(xs, ys, strict=True) for value in pair]
    if one.kind == "bbox":
        outline = [left, top, right, top, right, bottom, left, bottom]
    drawn = rle.frPyObjects([outline], size[1], size[0])[0]
    return {"segmentation": drawn, "area": float(rle.area(drawn))}


def reference(images):
    """The figures of pycocotools."""
    names = sorted({name for image in images for name in image.true_names})
    truth, detections = [], []
    for number, image in enumerate(images):
        for one, name, crowd in zip(image.truth, image.true_names, image.crowds, strict=True):
            known = {"id": len(truth) + 1, "image_id": number, "category_id": names.index(name), "iscrowd": int(crowd)}
            truth.append({**entry(one, image.size, masks=image.masks), **known})
        for one, name, score in zip(image.answer.objects, image.names, image.scores, strict=True):
            if name in names:
                known = {"image_id": number, "category_id": names.index(name), "score": score}
                detections.append({**entry(one, image.size, masks=image.masks), **known})
    coco = COCO()
    sizes = [{"id": i, "width": image.size[0], "height": image.size[1]} for i, image in enumerate(images)]
    coco.dataset = {
        "images": sizes, "annotations": truth, "categories": [{"id": i, "name": n} for i, n in enumerate(names)],
    }  # fmt: skip
    with contextlib.redirect_stdout(io.StringIO()):
        coco.createIndex()
        evaluation = COCOeval(coco, coco.loadRes(detections), "segm" if images[0].masks else "bbox")
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
    return {name: evaluation.stats[place] for name, place in NAMES.items()}


@pytest.mark.parametrize("kind", ["bbox", "poly"])
@pytest.mark.parametrize("options", [{}, {"tied": True}, {"crowded": True, "tied": True}], ids=str)
@pytest.mark.parametrize("seed", range(3))
def test_average_precision_equals_pycocotools(seed, options, kind):
    images = scored_images(*random_scene(seed, kind=kind, **options))
    expected = reference(images)
    found = average_precision(matched(images), np.ones(len(images)))
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert found[name] == pytest.approx(value, abs=1e-6) or (value == -1 and math.isnan(found[name])), name
    assert 0.05 < found["AP"] < 0.95


@pytest.mark.parametrize("seed", range(3))
def test_image_with_weight_two_counts_like_two_images(seed):
    records, answers = random_scene(seed)
    weights = np.random.default_rng(seed).integers(0, 3, len(records))
    found = average_precision(matched(scored_images(records, answers)), weights.astype(float))
    twice = [place for place, count in enumerate(weights) for _ in range(count)]
    images = scored_images([records[i] for i in twice], [answers[i] for i in twice])
    assert found == pytest.approx(average_precision(matched(images), np.ones(len(images))), abs=1e-9)


def test_equal_scores_rank_in_answer_order():
    first, second = box("cat", 0, 0, 100, 100), box("cat", 500, 500, 900, 900)
    right_first = scored_images([record(0, [first])], [answer([first, second])])
    wrong_first = scored_images([record(0, [first])], [answer([second, first])])
    assert average_precision(matched(right_first), np.ones(1))["AP"] == pytest.approx(1.0)
    assert average_precision(matched(wrong_first), np.ones(1))["AP"] == pytest.approx(0.5)


def test_each_class_has_its_own_average_precision():
    truth = [box("cat", 0, 0, 100, 100), box("dog", 500, 500, 900, 900)]
    found = by_class(matched(scored_images([record(0, truth)], [answer(truth[:1])])), np.ones(1))
    assert found["cat"] == pytest.approx({"AP": 1, "AP50": 1, "AP75": 1, "AR": 1, "objects": 1})
    assert found["dog"] == {"AP": 0, "AP50": 0, "AP75": 0, "AR": 0, "objects": 1}


def test_unannotated_classes_are_neutral():
    cat, dog, bird = box("cat", 0, 0, 100, 100), box("dog", 300, 300, 500, 500), box("bird", 600, 600, 900, 900)
    records = [
        record(0, [cat], neg_category_ids=["bird"], not_exhaustive_category_ids=["cat"]),
        record(1, [dog, bird], neg_category_ids=[]),
    ]
    elsewhere = box("cat", 700, 100, 900, 300)
    answers = [answer([elsewhere, dog, bird, cat]), answer([dog, bird])]
    found = by_class(matched(scored_images(records, answers)), np.ones(2))
    assert (found["cat"]["AP"], found["dog"]["AP"]) == pytest.approx((1, 1))
    assert found["bird"]["AP"] == pytest.approx(0.5)  # it was looked for in the first image, and is not there


@pytest.mark.parametrize("order", [1, -1])
def test_equal_overlaps_match_last_true_object_as_in_pycocotools(order):
    left, between, right = (box("cat", start, 0, start + 100, 100) for start in (0, 20, 40))
    truth = record(0, [left, right][::order], size=(1000, 1000))
    images = scored_images([truth], [answer([between, right], [0.9, 0.8])])
    found = average_precision(matched(images), np.ones(1))
    assert found["AP50"] == pytest.approx(reference(images)["AP50"])
    assert (found["AP50"] > 0.9) == (order < 0)


def test_only_best_hundred_detections_per_class_and_image_count():
    cat, elsewhere = box("cat", 0, 0, 100, 100), [box("cat", 500 + i, 500, 700 + i, 900) for i in range(100)]
    images = scored_images([record(0, [cat])], [answer([*elsewhere, cat], [0.9] * 100 + [0.1])])
    assert average_precision(matched(images), np.ones(1))["AP50"] == reference(images)["AP50"] == 0
