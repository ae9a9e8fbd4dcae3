"""The estimate of objects without a label, on cases made by hand."""

import math

import pytest

from stage2_trainer.infer.unlabelled import Agreement, Estimate, Named, agreed

CAT, DOG, BIRD = Named("cat", (0, 0, 10, 10)), Named("dog", (20, 0, 30, 10)), Named("bird", (40, 0, 50, 10))


def moved(one: Named, by: float) -> Named:
    left, top, right, bottom = one.box
    return Named(one.desc, (left + by, top, right + by, bottom))


def test_box_found_by_enough_answers_is_their_median_with_commonest_name() -> None:
    answers = [[CAT], [moved(CAT, 1)], [Named("lion", moved(CAT, 2).box), DOG], []]
    assert list(agreed(answers, 3)) == [moved(CAT, 1)]
    assert list(agreed(answers, 4)) == []


def test_box_repeated_within_one_answer_counts_once() -> None:
    assert list(agreed([[CAT, CAT, CAT], [], []], 2)) == []


def test_agreed_box_that_overlaps_no_label_is_unlabelled() -> None:
    found = Agreement.of_answers([CAT, BIRD], [[CAT, DOG]] * 3)
    assert found == Agreement(labels=2, found=1, unlabelled=(DOG,))


@pytest.mark.parametrize(("by", "unlabelled", "found"), [(0, 0, 1), (4, 0, 0), (8, 1, 0)])
def test_box_with_medium_overlap_is_neither_found_nor_unlabelled(by: float, unlabelled: int, found: int) -> None:
    agreement = Agreement.of_answers([CAT], [[moved(CAT, by)]] * 3)  # IoU 1, .43 and .11
    assert (len(agreement.unlabelled), agreement.found) == (unlabelled, found)


def test_image_without_labels_or_answers_has_zero_counts() -> None:
    assert Agreement.of_answers([], [[DOG]] * 3) == Agreement(0, 0, (DOG,))
    assert Agreement.of_answers([CAT], [[]] * 3) == Agreement(1, 0, ())


def test_estimated_share_corrects_for_labels_that_answers_miss() -> None:
    # 8 of 10 labels are found, so 4 agreed boxes stand for 5 objects: 5 of 15
    estimate = Estimate.of_images([Agreement(5, 4, (DOG, DOG)), Agreement(5, 4, (DOG, DOG))])
    assert (estimate.images, estimate.labels, estimate.found, estimate.beside) == (2, 10, 8, 4)
    assert estimate.share == pytest.approx((1 / 3, 1 / 3, 1 / 3))


def test_interval_is_wider_if_images_differ_more() -> None:
    alike = Estimate.of_images([Agreement(5, 4, (DOG,))] * 20)
    unlike = Estimate.of_images([Agreement(5, 4, (DOG, DOG)), Agreement(5, 4, ())] * 10)
    assert alike.share is not None
    assert unlike.share is not None
    assert math.isclose(alike.share[0], unlike.share[0])
    assert alike.share[1] == alike.share[2]
    assert unlike.share[1] < unlike.share[0] < unlike.share[2]


@pytest.mark.parametrize("images", [[], [Agreement(5, 0, (DOG,))], [Agreement(0, 0, ())]])
def test_share_is_undefined_if_no_label_is_found(images: list[Agreement]) -> None:
    assert Estimate.of_images(images).share is None
