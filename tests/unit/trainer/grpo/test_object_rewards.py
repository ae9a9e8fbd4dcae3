"""Rewards on lists of objects, by worked examples and against the figures of `stage2 evaluate`."""

import random
import re
from pathlib import Path

import pytest

from stage2_trainer.data.records import Record
from stage2_trainer.grpo.rewards import Sample, known_rewards
from stage2_trainer.matching import GTObject
from stage2_trainer.matching.ground_truth import serialize_objects
from stage2_trainer.scores.answer_scores import AnswerScores
from stage2_trainer.scores.scored_image import NOT_EXHAUSTIVE, Comparison, read_answer, scored_images


def box(name, *corners):
    return GTObject(name, "bbox", corners)


CAT, DOG = box("cat", 0, 0, 400, 400), box("dog", 500, 500, 900, 900)
NEAR_CAT = box("cat", 0, 0, 400, 200)  # half of it
FAR_CAT = box("cat", 0, 0, 400, 100)  # a quarter
EDGE = box("edge", 950, 950, 999, 999)
OUTLINE = GTObject("cat", "poly", (0, 0, 400, 0, 400, 100, 0, 400))  # five eighths of its box
CORNER = GTObject("cat", "poly", (0, 0, 400, 0, 0, 60, 0, 400))


def scores(truth, answer, *, comparison=None, **metadata):
    """What each reward of objects gives an answer to a record with these objects."""
    text = answer if isinstance(answer, str) else serialize_objects(answer)
    sample = Sample(f"{text}<|im_end|>", Record(0, "one", (), 100, 100, tuple(truth), None, metadata), None, comparison)
    return {name: known_rewards()[f"objects.{name}"](sample) for name in ALL}


ALL = dict.fromkeys(("f1", "f1_class", "box_f1", "iou", "count", "format"), 1.0)
NONE = dict.fromkeys(ALL, 0.0)
TWO_OF_THREE = {**dict.fromkeys(("f1", "f1_class", "box_f1", "iou"), 2 / 3), "count": 0.5}
CUT_OFF = serialize_objects([CAT])[:-1] + ', "object_2": {"desc": "do'
EXAMPLES = {
    "the truth": ([CAT, DOG], [DOG, CAT], ALL),
    "one of two": ([CAT, DOG], [CAT], TWO_OF_THREE),
    "twice the same": ([CAT], [CAT, CAT], TWO_OF_THREE),
    "the wrong name": ([CAT], [box("dog", *CAT.bins)], {"f1_class": 0.0}),
    "half of it": ([CAT], [NEAR_CAT], {"iou": 0.5}),
    "a quarter of it": ([CAT], [FAR_CAT], {"f1": 0.0, "f1_class": 0.0, "box_f1": 0.0, "iou": 0.25}),
    "elsewhere": ([CAT], [EDGE], {**NONE, "count": 1.0, "format": 1.0}),
    "nothing": ([CAT], "{}", {**NONE, "format": 1.0}),
    "no list": ([CAT], "a cat", NONE),
    "nothing where there is nothing": ([], "{}", ALL),
    "no list where there is nothing": ([], "nothing", NONE),
    "an object where there is nothing": ([], [CAT], {**NONE, "format": 1.0}),
    "cut off after the first": ([CAT, DOG], CUT_OFF, {**TWO_OF_THREE, "format": 0.0}),
    "a box around an outline": ([OUTLINE], [CAT], {"iou": 5 / 8}),
    "a box around a thin outline": ([CORNER], [CAT], {"f1": 0.0, "f1_class": 0.0, "iou": 0.075}),
}


@pytest.mark.parametrize(("truth", "answer", "expected"), EXAMPLES.values(), ids=EXAMPLES)
def test_object_rewards_match_worked_examples(truth, answer, expected):
    assert scores(truth, answer) == pytest.approx({**ALL, **expected}, abs=0.02)


def test_unjudged_objects_cost_no_reward():
    assert scores([CAT], [CAT, EDGE], **{NOT_EXHAUSTIVE: ["edge"]}) == pytest.approx(ALL)
    checked = Comparison.from_records([Record(1, "other", (), 100, 100, (EDGE,))])
    assert scores([CAT], [CAT, EDGE], comparison=checked, neg_category_ids=[]) == pytest.approx(ALL)
    assert scores([CAT], [CAT, EDGE], comparison=checked, neg_category_ids=["edge"])["f1"] == pytest.approx(2 / 3)


def test_misnamed_object_of_incompletely_annotated_class_costs_no_precision_in_f1_class():
    named_edge = box("edge", *DOG.bins)  # finds the dog, and nobody can say that it is no edge
    found = scores([CAT, DOG], [CAT, named_edge], **{NOT_EXHAUSTIVE: ["edge"]})
    assert found["f1"] == pytest.approx(1.0)
    assert found["f1_class"] == pytest.approx(2 * 1 / (1 + 2))


def test_object_rewards_equal_evaluation_scores_of_single_image():
    rng = random.Random(5)

    def any_box():
        left, top = rng.randrange(600), rng.randrange(600)
        return box(rng.choice(["cat", "dog"]), left, top, left + rng.randrange(50, 399), top + rng.randrange(50, 399))

    for _ in range(200):
        truth = [any_box() for _ in range(rng.randrange(1, 6))]
        answer = [rng.choice([*truth, any_box()]) for _ in range(rng.randrange(1, 6))]
        record = Record(0, "one", (), 100, 100, tuple(truth))
        figures = AnswerScores.from_images(scored_images([record], [read_answer(serialize_objects(answer))])).document()
        found = scores(truth, answer)
        assert found["f1"] == pytest.approx(figures["f1@0.5"])
        assert found["f1_class"] == pytest.approx(figures["f1_class@0.5"])
        assert found["f1"] / 2 <= found["iou"] <= 1.0


def test_reward_receives_record_and_parsed_answer():
    record = Record(3, "train.jsonl:4", ("/data/a.png",), 640, 480, (CAT,), None, {"camera": "left"})
    sample = Sample(serialize_objects([NEAR_CAT]) + "<|im_end|>", record)
    assert (sample.objects, sample.size, sample.images) == ((CAT,), (640, 480), ("/data/a.png",))
    assert (sample.metadata["camera"], sample.answer.objects, sample.answer.parsed) == ("left", (NEAR_CAT,), True)
    assert sample.scored.iou[0, 0] == pytest.approx(0.5)
    assert sample.text == serialize_objects([NEAR_CAT])


def test_example_reward_in_docs_scores_small_objects():
    page = (Path(__file__).parents[4] / "docs" / "grpo.md").read_text()
    names = {}
    exec(re.search(r"my_rewards\.py <<'END'\n(.*?)END\n", page, re.DOTALL)[1], names)
    for answer, expected in (([EDGE], 1.0), ([CAT], 0.0)):
        assert (
            names["small"](Sample(serialize_objects(answer), Record(0, "one", (), 100, 100, (CAT, EDGE)))) == expected
        )
