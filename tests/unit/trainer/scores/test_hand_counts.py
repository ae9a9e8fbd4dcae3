"""Figures of answers that were counted by hand."""

import json
import math

import pytest

from stage2_trainer.scores.answer_scores import AnswerScores, without_nan
from stage2_trainer.scores.image_counts import image_counts, rank_of, sample_f1
from stage2_trainer.scores.scored_image import NO_ANSWER, normalised, read_answer, scored_images
from tests.unit.trainer.scores.scenes import answer, box, line_object, poly, record

CAT, DOG = box("cat", 0, 0, 200, 200), box("dog", 500, 500, 900, 900)
FAR = box("cat", 600, 0, 800, 200)
TRIANGLE = poly("cat", 0, 0, 400, 0, 0, 400)


def document(records, answers):
    return AnswerScores.from_images(scored_images(records, answers)).document()


def one_image(truth, answered, naming=None, **metadata):
    options = [naming] if naming else []
    return scored_images([record(0, truth, **metadata)], [answer(answered)], *options)[0]


def test_all_predicted_objects_but_no_crowds_are_counted():
    crowd = line_object(box("cat", 500, 0, 999, 400))
    found = document([record(0, [CAT], crowds=[crowd])], [answer([CAT, FAR, DOG])])
    assert (found["images"], found["objects"], found["predictions"]) == (1, 1, 3)


@pytest.mark.parametrize(("truth", "overlap"), [([CAT], "boxes"), ([CAT, TRIANGLE], "masks")])
def test_overlap_is_of_masks_if_any_record_has_outline(truth, overlap):
    assert document([record(0, [DOG]), record(1, truth)], [NO_ANSWER] * 2)["overlap_of"] == overlap


def test_counts_are_whole_numbers_in_json():
    found = document([record(0, [CAT, DOG])], [answer([FAR])])
    assert json.dumps(found["misses"]) == json.dumps(found["worst_image"]["misses"]) == "2"


def test_nested_nan_becomes_null():
    assert without_nan({"a": {"b": [math.nan, 1.5]}, "c": math.nan}) == {"a": {"b": [None, 1.5]}, "c": None}


def test_rates_have_expected_denominators():
    near = box("cat", 2, 0, 200, 202)
    found = document([record(0, [CAT, DOG, TRIANGLE])], [answer([CAT, near])])
    assert found["duplicate_rate"] == 1 / 2
    assert found["true_outline_share"] == 1 / 3
    assert found["outline_share"] == 0


def test_object_with_wrong_class_is_misnamed_not_missed():
    found = document([record(0, [CAT, DOG])], [answer([CAT, box("cat", *DOG.bins)])])
    assert (found["misses"], found["recall@0.5"], found["recall_class@0.5"]) == (0, 1, 1 / 2)


def test_image_without_errors_is_not_worst_image():
    """Not even where there is nothing to find, and F1 is 0 of 0: it ranks with the best, but it has no F1."""
    found = document([record(0, [CAT, DOG]), record(1, [])], [answer([CAT]), answer([])])
    assert found["worst_image"]["sample_id"] == "data.jsonl:1"
    nothing = sample_f1(one_image([], []))
    assert (nothing, rank_of(nothing)) == (None, 1.0)
    assert sample_f1(one_image([CAT, DOG], [CAT])) == pytest.approx(2 / 3)


@pytest.mark.parametrize(("right", "judged"), [(999, 0), (880, 1)])
def test_object_is_judged_if_less_than_half_lies_in_crowd(right, judged):
    answered = box("cat", 800, 100, 999, 300)
    crowd = line_object(box("cat", 500, 0, right, 400))
    assert image_counts(one_image([DOG], [answered], crowds=[crowd])).judged == judged


def test_crowd_in_plain_numbers_is_read_as_pixels():
    crowd = {"desc": "cat", "bbox_2d": [320, 0, 640, 192]}  # the upper right of 640 x 480
    assert image_counts(one_image([DOG], [FAR], crowds=[crowd])).judged == 0
    assert image_counts(one_image([DOG], [CAT], crowds=[crowd])).judged == 1


@pytest.mark.parametrize(("bottom", "duplicates"), [(85, 1), (84, 0)])
def test_object_is_duplicate_from_iou_0_85(bottom, duplicates):
    first, second = box("cat", 0, 0, 100, 100), box("cat", 0, 0, 100, bottom)
    images = scored_images([record(0, [first], size=(1000, 1000))], [answer([first, second])])
    assert image_counts(images[0]).duplicates == duplicates


def test_removing_duplicates_keeps_scores_of_remaining_objects():
    image = scored_images([record(0, [CAT, DOG])], [answer([CAT, CAT, DOG], [0.9, 0.8, 0.1])])[0]
    assert image.without_duplicates().scores.tolist() == [0.9, 0.1]


def test_three_objects_of_same_class_in_different_places_are_not_loop():
    assert not answer([CAT, FAR, box("cat", 0, 600, 200, 800)]).looped


BROKEN = '{"object_1": {"desc": "cat", "bbox_2d": ["<|coord_1|>"]}}'


@pytest.mark.parametrize(
    ("text", "reason", "parsed", "truncated"),
    [("{}", "stop", True, False), ("{}", "length", False, True), (BROKEN, "stop", False, False)],
)
def test_answer_counts_as_parsed_only_if_it_stopped_and_is_valid(text, reason, parsed, truncated):
    found = read_answer(text, finish_reason=reason)
    assert (found.parsed, found.truncated) == (parsed, truncated)


def test_class_is_judged_only_in_records_that_list_it_as_negative():
    bird = box("bird", 0, 600, 90, 700)
    looked, elsewhere = record(0, [CAT], neg_category_ids=["bird"]), record(1, [CAT], neg_category_ids=[])
    counts = [image_counts(one) for one in scored_images([looked, elsewhere], [answer([CAT, bird])] * 2)]
    assert [one.judged for one in counts] == [2, 1]


def test_lvis_category_lists_are_compared_by_normalised_name():
    federated = {"neg_category_ids": ["Sea-Bird"], "not_exhaustive_category_ids": ["CAT"]}
    answered = [box("sea bird", 0, 600, 90, 700), FAR]
    counts = image_counts(one_image([CAT], answered, naming=normalised, **federated))
    assert counts.judged == 1, "the bird was looked for, and not every cat is annotated"
