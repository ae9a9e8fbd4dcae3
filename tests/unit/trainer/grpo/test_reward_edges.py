"""What a reward does not count."""

import pytest

from stage2_api.coordinates import coord_token
from tests.unit.trainer.grpo.summaries import about, scored
from tests.unit.trainer.grpo.test_object_rewards import CAT, box, scores
from tests.unit.trainer.grpo.test_rewards import CABLE, item, summary

CROWD = {"desc": "cat", "bbox_2d": [coord_token(bin_) for bin_ in (200, 0, 999, 400)]}


def test_overlap_of_object_in_crowd_region_earns_no_iou_reward():
    in_the_crowd = box("cat", 250, 0, 650, 400)  # a fifth of it lies on the true cat
    assert scores([CAT], [in_the_crowd], crowds=[CROWD])["iou"] == 0.0
    assert scores([CAT], [in_the_crowd])["iou"] == pytest.approx(150 / 650, abs=0.01)


@pytest.mark.parametrize(("length", "recall"), [(32, 1 / 2), (33, 1.0)])
def test_value_of_more_than_32_characters_is_free_text(length, recall):
    truth = summary(item("cable", fit={"x" * length: 1, "good": 1}))
    assert scored("attr_path_recall", about(summary(CABLE), truth)) == recall


def test_unknown_category_costs_once_however_many_items_have_it():
    answer = summary(CABLE, item("nail"), item("nail"), item("bolt"))
    assert scored("schema_tree", about(answer, summary())) == pytest.approx(1 - 2 * 0.25)


def test_text_reward_is_at_least_minus_one():
    answer = summary(item("cable", 文本=[str(number) for number in range(20)]))
    assert scored("text_bbu", about(answer, summary(item("cable", 文本=["a"])))) == -1.0


@pytest.mark.parametrize("count", [0, -1])
def test_value_counted_less_than_once_is_ignored(count):
    truth = summary(item("cable", fit={"good": 1, "bad": count}))
    assert scored("attr_path_recall", about(summary(item("cable", fit="good")), truth)) == 1.0
    groups = summary(分组统计={"7": 2, "8": count})
    assert scored("content_f1", about(groups, summary(分组统计={"7": 2}), domain="OUTDOOR")) == 1.0
