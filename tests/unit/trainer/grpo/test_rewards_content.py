"""Rewards on content, by worked examples."""

from typing import Any

import pytest

from tests.unit.trainer.grpo.summaries import IRRELEVANT, about, answer, irrelevant, sample, scored

Summary = dict[str, Any]
CONTENT = [
    "content_eq", "content_f1", "content_structured_tversky", "category_recall", "category_f1", "attr_key_recall",
    "attr_path_recall", "schema_tree", "text_bbu", "notes_bbu", "notes_presence", "group_stats_presence",
]  # fmt: skip


def of(*items: Summary, **more: object) -> Summary:
    return {"统计": list(items), **more}


def item(category: str, **attributes: object) -> Summary:
    return {"类别": category, **attributes}


CABLE = item("cable", fit={"good": 2, "bad": 1}, side={"left": 3})
SCREW = item("screw", torque={"ok": 4})
MAST = item("mast", distance={"12 m": 1})

# reward, answer, truth, expected
INDOOR: list[tuple[str, Summary, Summary, float]] = [
    ("content_eq", of(CABLE, SCREW), of(SCREW, CABLE), 1.0),
    ("content_eq", of(CABLE), of(CABLE, SCREW), 0.0),
    ("content_eq", of(备注=["b", "a"]), of(备注=["a", "b"]), 1.0),
    ("content_f1", of(CABLE), of(CABLE), 1.0),
    ("content_f1", of(), of(), 1.0),
    ("content_f1", of(), of(CABLE), 0.0),
    # 6 of the answer's 6 facts, 6 of the truth's 10
    ("content_f1", of(CABLE), of(CABLE, SCREW), 2 * 6 / 16),
    # a mapping counts what it says, a list and a scalar count 1 each
    ("content_f1", of(item("cable", fit=["good", "bad"])), of(item("cable", fit={"good": 1, "bad": 1})), 1.0),
    ("content_f1", of(item("cable", fit="good")), of(item("cable", fit={"good": 1})), 1.0),
    ("content_f1", of(item("cable", fit={"good": 0})), of(), 1.0),
    ("content_f1", of(item("cable", 文本={"A B": 1})), of(item("cable", 文本={"AB": 1})), 1.0),
    ("content_f1", of(备注=["a b"]), of(备注=["ab"]), 1.0),
    ("content_f1", of(item("cable", distance="12 m")), of(item("cable", distance="about 12")), 1.0),
    # 4 facts too many at 0.3 each, none missing
    ("content_structured_tversky", of(CABLE, SCREW), of(CABLE), 6 / (6 + 0.3 * 4)),
    ("content_structured_tversky", of(CABLE), of(CABLE, SCREW), 6 / (6 + 4)),
    ("content_structured_tversky", of(item("cable", 文本={"A": 1}), 备注=["x"]), of(), 1.0),
    ("category_recall", of(CABLE), of(CABLE, SCREW), 0.5),
    ("category_recall", of(), of(), 1.0),
    ("category_recall", of(CABLE), of(), 0.0),
    ("category_f1", of(CABLE), of(CABLE, SCREW), 2 / 3),
    ("category_f1", of(), of(), 1.0),
    # cable: fit of fit and side; screw: nothing of torque
    ("attr_key_recall", of(item("cable", fit="good")), of(CABLE, SCREW), (0.5 + 0) / 2),
    ("attr_key_recall", of(CABLE), of(item("cable", fit="good", 文本="A")), 1.0),
    ("attr_key_recall", of(CABLE), of(), 0.0),
    # fit/good of fit/good, fit/bad, side/left
    ("attr_path_recall", of(item("cable", fit={"good": 9})), of(CABLE), 1 / 3),
    ("attr_path_recall", of(CABLE), of(SCREW), 0.0),
    ("attr_path_recall", of(CABLE), of(item("cable", fit={"17": 1, "a=b": 1, "x" * 33: 1, "good": 1})), 1.0),
    ("attr_path_recall", of(SCREW), of(SCREW), 0.0),
    ("text_bbu", of(item("cable", 文本={"Ａ-1": 1})), of(item("cable", 文本={"a-1": 1})), 1.0),
    ("text_bbu", of(item("cable", 文本={"a": 1})), of(item("cable", 文本={"a": 1, "b": 1})), 0.5),
    # four texts where one is right: one more than the reference and two
    ("text_bbu", of(item("cable", 文本=["a", "b", "c", "d"])), of(item("cable", 文本=["a"])), 0.9),
    ("text_bbu", of(item("cable", 文本=["a"])), of(), 0.0),
    ("notes_bbu", of(备注=["a"]), of(备注=["a", "b"]), 0.5),
    ("notes_bbu", of(备注=["a"]), of(), -1.0),
    ("notes_bbu", of(), of(), 0.0),
    ("notes_bbu", of(), of(备注=["a"]), 0.0),
    ("notes_presence", of(备注=["a"]), of(备注=["b"]), 1.0),
    ("notes_presence", of(), of(备注=["b"]), 0.0),
    ("schema_tree", of(CABLE), of(CABLE), 1.0),
    ("schema_tree", of(item("cable", fit="good")), of(), 0.5),
    ("schema_tree", of(CABLE, item("cable")), of(), 0.5),
    ("schema_tree", of(SCREW), of(), 1.0 - 0.35),
    ("schema_tree", of(CABLE, item("nail")), of(), 1.0 - 0.25),
    ("schema_tree", of(CABLE, extra=1), of(), 1.0 - 0.30),
    ("schema_tree", of(item("screw", a=1, b=1, c=1, d=1, e=1, f=1)), of(), -1.0),
    ("schema_tree", of(), of(), 0.0),
]
OUTDOOR: list[tuple[str, Summary, Summary, float]] = [
    ("content_f1", of(分组统计={"group 7": 2}), of(分组统计={"7": 2}), 1.0),
    ("content_structured_tversky", of(MAST, 分组统计={"7": 2}), of(MAST), 1 / (1 + 0.6 * 2)),
    ("group_stats_presence", of(分组统计={"7": 2}), of(分组统计={"8": 1}), 1.0),
    ("group_stats_presence", of(分组统计={}), of(分组统计={"8": 1}), 0.0),
    ("schema_tree", of(item("mast", distance="12")), of(), 1.0),
    ("schema_tree", of(MAST), of(), 1.0 - 0.60),
]


@pytest.mark.parametrize(("name", "found", "truth", "expected"), INDOOR)
def test_a_summary_scores_what_it_says(name: str, found: Summary, truth: Summary, expected: float) -> None:
    assert scored(name, about(found, truth)) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "found", "truth", "expected"), OUTDOOR)
def test_another_domain_has_rules_of_its_own(name: str, found: Summary, truth: Summary, expected: float) -> None:
    assert scored(name, about(found, truth, domain="OUTDOOR")) == pytest.approx(expected)


@pytest.mark.parametrize("name", CONTENT)
def test_content_counts_only_in_the_right_form(name: str) -> None:
    right = of(CABLE, 备注=["a"])
    assert scored(name, sample(answer(right, domain="OUTDOOR"), right)) == 0.0
    assert scored(name, sample(f"{answer(right)}\n", right)) == scored(name, about(right, right))
    assert scored(name, irrelevant(IRRELEVANT)) == 0.0


@pytest.mark.parametrize("name", CONTENT)
def test_a_part_that_the_domain_has_not_costs_the_whole_content(name: str) -> None:
    assert scored(name, about(of(CABLE, 分组统计={"1": 1}), of(CABLE))) == 0.0
    assert scored(name, about(of(CABLE), of(CABLE, 分组统计={"1": 1}))) == 0.0
    assert scored(name, about(of(MAST, 备注=["a"]), of(MAST), domain="OUTDOOR")) == 0.0
