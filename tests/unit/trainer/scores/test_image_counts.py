"""F1 with and without class, duplicates, what cannot be judged, and the verdict on each object."""

import numpy as np
import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.scores.answer_scores import (
    AnswerScores,
    bootstrap_weights,
    bounded,
    differences,
    intervals,
    without_nan,
)
from stage2_trainer.scores.image_counts import image_counts, matches, verdicts
from stage2_trainer.scores.scored_image import NO_ANSWER, normalised, read_answer, scored_images
from tests.unit.trainer.scores.scenes import answer, box, line_object, poly, random_scene, record

CAT, DOG = box("cat", 0, 0, 200, 200), box("dog", 500, 500, 900, 900)


def document(records, answers, naming=None, **options):
    images = scored_images(records, answers, *([naming] if naming else []))
    return AnswerScores.from_images(images).document(**options)


def test_misnamed_boxes_count_for_f1_but_not_for_f1_class():
    found = document([record(0, [CAT, DOG])], [answer([CAT, box("cat", 500, 500, 900, 900)])])
    assert (found["f1@0.5"], found["f1_class@0.5"], found["desc_exact"]) == (1.0, 0.5, 0.5)


def test_class_unknown_to_records_is_wrong():
    found = document([record(0, [CAT])], [answer([CAT, box("unicorn", 500, 0, 700, 200)])])
    assert (found["AP"], found["precision_class@0.5"]) == (pytest.approx(1), 0.5)


def test_undefined_rates_are_not_compared():
    """None of 0 matched objects is well named; all of 1 are no improvement of that."""
    none, one = (AnswerScores.from_images(scored_images([record(0, [CAT])], [answer(a)])) for a in ([DOG], [CAT]))
    draws = bootstrap_weights(1, draws=3, seed=0)
    for pair in ((none, one), (one, none), (none, none)):
        assert not differences(*pair, draws).keys() & {"desc_exact", "desc_normalised"}
    assert differences(one, one, draws)["desc_exact"]["difference"] == 0


def test_matching_maximises_number_of_matched_objects():
    """The wide box fits both true ones, the narrow box the first alone; an order or a score would leave one over."""
    truth = [box("cat", 0, 0, 100, 100), box("cat", 0, 0, 150, 100)]
    answered = [box("cat", 0, 0, 130, 100), box("cat", 0, 0, 70, 100)]
    for order in (answered, answered[::-1]):
        assert document([record(0, truth)], [answer(order)])["recall@0.5"] == 1.0


def test_additional_match_outweighs_any_overlap():
    overlaps = np.eye(5) / 2 + np.eye(5, k=1)  # each half on its own, and four wholly on their neighbour's
    assert len(matches(overlaps)) == 5


def test_object_that_overlaps_only_duplicate_is_not_duplicate():
    shifted = [box("cat", start, 0, start + 800, 900) for start in (0, 50, 100)]
    assert document([record(0, [shifted[0]])], [answer(shifted)])["duplicates"] == 1


def test_duplicates_are_counted_and_left_out():
    found = document([record(0, [CAT, DOG])], [answer([CAT, box("cat", 2, 0, 200, 202), DOG])])
    assert (found["duplicates"], found["precision@0.5"]) == (1, pytest.approx(2 / 3))
    assert found["without_duplicates"]["precision@0.5"] == 1.0
    assert found["objects_per_truth"] == 1.5


def test_objects_of_different_classes_in_same_place_are_not_duplicates():
    assert document([record(0, [CAT])], [answer([CAT, box("dog", *CAT.bins)])])["duplicates"] == 0


def test_object_of_unannotated_class_is_neither_right_nor_wrong():
    federated = {"neg_category_ids": ["bird"], "not_exhaustive_category_ids": ["cat"]}
    answered = [CAT, DOG, box("cat", 600, 0, 700, 90), box("bird", 0, 600, 90, 700)]
    counts = image_counts(scored_images([record(0, [CAT], **federated), record(1, [DOG])], [answer(answered)] * 2)[0])
    assert (counts.judged, counts.right) == (2, 1)  # the cat, and the bird that was looked for
    unknown = image_counts(scored_images([record(0, [CAT], neg_category_ids=[])], [answer([CAT, DOG])])[0])
    assert unknown.judged == 2, "a class of no record is wrong"


def test_object_in_crowd_is_neither_right_nor_wrong():
    crowd = {"desc": "cat", "bbox_2d": ["<|coord_500|>", "<|coord_0|>", "<|coord_999|>", "<|coord_400|>"]}
    images = scored_images([record(0, [CAT], crowds=[crowd])], [answer([CAT, box("cat", 600, 50, 700, 200), DOG])])
    counts = image_counts(images[0])
    assert (counts.truth, counts.judged, counts.class_judged, counts.right) == (1, 2, 2, 1)


def test_invalid_crowd_is_refused():
    with pytest.raises(ConfigError, match=r"data.jsonl:1 metadata.crowds\[0\].bbox_2d"):
        scored_images([record(0, [CAT], crowds=[{"desc": "cat", "bbox_2d": [1, 2]}])], [NO_ANSWER])


def test_names_can_be_compared_in_normalised_form():
    answers = [answer([box(" Traffic-Light.", *CAT.bins)])]
    found = document([record(0, [box("traffic light", *CAT.bins)])], answers)
    assert (found["f1_class@0.5"], found["desc_exact"], found["desc_normalised"]) == (0, 0, 1)
    found = document([record(0, [box("traffic light", *CAT.bins)])], answers, naming=normalised)
    assert (found["f1_class@0.5"], found["AP"]) == (1, pytest.approx(1))


def test_worst_image_is_reported():
    records = [record(0, [CAT]), record(1, [CAT, DOG]), record(2, []), record(3, [DOG])]
    found = document(records, [answer([CAT]), answer([]), answer([]), answer([])])
    assert found["worst_image"] == {
        "sample_id": "data.jsonl:2", "f1_class@0.5": 0, "f1@0.5": 0, "misses": 2, "duplicates": 0, "objects": 2,
        "predictions": 0,
    }  # fmt: skip


def test_truncated_answers_count_as_not_parsed():
    whole = '{"object_1": {"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}'
    texts = [whole + "}", whole, "no JSON", "{}", "{} Done."]
    found = document([record(i, [CAT]) for i in range(5)], [read_answer(text) for text in texts])
    assert (found["parse_rate"], found["truncated_rate"]) == (0.4, 0.4)


def test_loops_are_recognised():
    three = answer([CAT, DOG, DOG, DOG])
    assert (three.looped, answer([DOG, CAT, DOG, DOG]).looped) == (True, False)
    assert read_answer("{}", finish_reason="repetition").looped


def test_counting_error_is_mean_over_images():
    found = document([record(0, [CAT]), record(1, [CAT, DOG])], [answer([CAT, DOG]), NO_ANSWER])
    assert (found["counting_error"], found["misses"], found["predictions"]) == (1.5, 2, 2)


def test_scores_without_predictions_are_null():
    found = without_nan(document([record(0, [])], [NO_ANSWER]))
    assert {found[name] for name in ("AP", "f1@0.5", "precision@0.5", "recall@0.5", "desc_exact")} == {None}
    assert (found["misses"], found["parse_rate"]) == (0, 0.0)


def test_confidence_intervals_contain_score_and_are_reproducible_by_seed():
    scores = AnswerScores.from_images(scored_images(*random_scene(1)))
    draws = bootstrap_weights(40, draws=100, seed=3)
    assert np.array_equal(draws, bootstrap_weights(40, draws=100, seed=3))
    assert (draws.sum(1) == 40).all()
    figures = scores.figures(np.ones(40))
    found = intervals(scores.resample(draws), figures)
    for name in ("AP", "f1@0.5", "f1_class@0.5", "parse_rate"):
        assert found[name][0] <= figures[name] <= found[name][1], name
    assert found["AP"][0] < found["AP"][1]


def test_confidence_interval_is_centred_on_score_not_on_mean_of_resamples():
    assert intervals({"AP": np.array([0.2, 0.3, 0.4])}, {"AP": 0.5})["AP"] == pytest.approx([0.405, 0.595])


def test_outlines_also_have_box_scores():
    triangle, filled = poly("cat", 0, 0, 400, 0, 0, 400), box("cat", 0, 0, 400, 420)
    found = document([record(0, [triangle, DOG])], [answer([filled, box("cat", 500, 500, 900, 900)])])
    assert (found["f1@0.5"], found["box_f1@0.5"], found["box_f1_class@0.5"]) == (0.5, 1.0, 0.5)
    assert (found["outline_share"], found["true_outline_share"], found["overlap_of"]) == (0.0, 0.5, "masks")
    boxes = document(*random_scene(4), None)
    assert (boxes["box_f1@0.5"], boxes["box_f1_class@0.5"]) == (boxes["f1@0.5"], boxes["f1_class@0.5"])


def test_image_rates_have_wilson_intervals_within_valid_range():
    count = 20
    records = [record(place, [CAT]) for place in range(count)]
    found = document(records, [answer([CAT])] * count, resamples=bootstrap_weights(count, draws=50, seed=0))
    z = 1.959964  # of none in n, Wilson's interval ends at z² / (n + z²)
    assert found["intervals"]["truncated_rate"] == pytest.approx([0, z**2 / (count + z**2)])
    assert bounded({"f1@0.5": [-0.1, 1.2], "misses": [-3, 12]}) == {"f1@0.5": [0, 1], "misses": [0, 12]}


def test_two_answer_sets_are_compared_on_same_resamples():
    records, answers = random_scene(2)
    images = scored_images(records, answers)
    worse = scored_images(records, [one if place % 3 else NO_ANSWER for place, one in enumerate(answers)])
    draws = bootstrap_weights(len(records), draws=100, seed=0)
    same = differences(AnswerScores.from_images(images), AnswerScores.from_images(images), draws)
    assert all(one == {"difference": 0, "interval": [0, 0]} for one in same.values())
    found = differences(AnswerScores.from_images(images), AnswerScores.from_images(worse), draws)["recall@0.5"]
    assert found["interval"][0] < found["difference"] < found["interval"][1] < 0


def judged(truth, answered, **metadata):
    (image,) = scored_images([record(0, truth, **metadata)], [answer(answered)])
    return verdicts(image)


def test_each_object_has_its_verdict():
    near, named = box("cat", 2, 0, 200, 202), box("cat", *DOG.bins)
    found = judged([CAT, DOG], [CAT, near, named, box("cat", 0, 800, 100, 900)])
    assert found.answered == ("right", "duplicate", "misnamed", "wrong")
    assert found.found == (True, False)


def test_unjudgeable_object_is_not_wrong():
    crowd = line_object(box("cat", 500, 0, 900, 400))
    found = judged([DOG], [box("cat", 600, 100, 700, 200)], crowds=[crowd])
    assert found.answered == ("unjudged",)
    assert found.found == (False, True)
    loose = judged([DOG], [box("bird", *DOG.bins)], not_exhaustive_category_ids=["bird"])
    assert loose.answered == ("unjudged",), "and not misnamed"


@pytest.mark.parametrize("kind", ["bbox", "poly"])
def test_number_of_right_verdicts_equals_counts(kind):
    images = scored_images(*random_scene(11, kind=kind, crowded=True))
    for image in images:
        counts, found = image_counts(image), verdicts(image)
        free = found.answered.count("unjudged")
        assert found.answered.count("right") == counts.class_right
        assert len(found.answered) - free == counts.class_judged
        assert found.found.count(False) == counts.truth - counts.class_right
    assert np.sum([image.duplicates.sum() for image in images]) > 0
