"""What the advice of an evaluation depends on, on either side of each threshold."""

from collections import Counter

import pytest

from stage2_trainer.data.object_order import FEWEST_NEIGHBOURS, ORDERS, ObjectOrder
from stage2_trainer.scores.advice import advice


def order(share):
    """The order of objects of which so many neighbours follow each of the known ones."""
    neighbours = 100 * FEWEST_NEIGHBOURS
    compared = Counter(dict.fromkeys(ORDERS, neighbours))
    return ObjectOrder(neighbours, compared, Counter(dict.fromkeys(ORDERS, round(neighbours * share))))


MISSING, READING = order(0.5), order(1.0)


def advised(*, whole=1.0, f1=0.8, without_duplicates=0.8, for_each_true=1.0, objects=READING):
    found = {"parse_rate": whole, "recall@0.5": f1, "f1@0.5": f1, "objects_per_truth": for_each_true}
    found["without_duplicates"] = {"f1@0.5": without_duplicates}
    return [sentence.split(",")[0].split(":")[0] for sentence in advice(found, objects)]


@pytest.mark.parametrize(("whole", "broken"), [(97 / 100, False), (969 / 1000, True)])
def test_more_than_three_percent_broken_answers_advise_stage_1(whole, broken):
    found = advised(whole=whole, without_duplicates=0.9)
    assert (found == ["continue stage 1"]) is broken


@pytest.mark.parametrize(("without", "advised_to"), [(0.806, True), (0.804, False), (0.8, False), (0.7, False)])
def test_removing_duplicates_is_advised_if_f1_gains_half_a_hundredth(without, advised_to):
    assert (
        "remove duplicates from the answers where you use them" in advised(without_duplicates=without)
    ) is advised_to


@pytest.mark.parametrize(("f1", "sentences"), [(0.5, 1), (0.49, 2)])
def test_f1_below_half_with_unordered_objects_gives_second_advice(f1, sentences):
    assert len(advised(f1=f1, without_duplicates=f1, objects=MISSING)) == sentences
    assert advised(f1=f1, without_duplicates=f1) == ["continue stage 1 while it improves; with annotations in an order"]


@pytest.mark.parametrize(("for_each_true", "runs_away"), [(3.0, False), (3.01, True), (75.0, True)])
def test_runaway_answers_advise_against_continuing_stage_1(for_each_true, runs_away):
    found = advised(for_each_true=for_each_true, whole=0.2)
    assert found == (["the answers run away"] if runs_away else ["continue stage 1"])
