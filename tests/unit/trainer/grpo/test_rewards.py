"""Rewards on the form and content of summaries, by worked examples; and by name: loaded, and added by others."""

from dataclasses import replace
from typing import Any

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.data.records import Record
from stage2_trainer.grpo.loaded_rewards import RewardError, load_rewards
from stage2_trainer.grpo.rewards import Sample, known_rewards
from tests.unit.trainer.grpo.reward_package import install
from tests.unit.trainer.grpo.summaries import IRRELEVANT, about, answer, irrelevant, sample, scored

EMPTY = Record(6, "train.jsonl:7", (), 96, 96)
SUMMARIES = sorted(name for name in known_rewards() if name.startswith("summary."))
PACKAGE = """
import math

def brevity(sample):
    return 1.0 / (1 + len(sample.text))

def area(sample):
    return len(sample.answer.objects) / len(sample.objects)

def infinite(sample):
    return math.inf
"""


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A function that installs a package with rewards under the entry point, by their names."""
    return lambda *names: install(tmp_path, monkeypatch, PACKAGE, names)


def test_package_adds_reward_by_entry_point(package):
    package("brevity")
    (reward,) = load_rewards(["theirs.brevity"], [1.0])
    assert reward(Sample("abc", EMPTY)) == 0.25


def test_entry_point_named_like_built_in_reward_is_refused(package):
    package("summary.format=their_rewards:brevity")
    with pytest.raises(ConfigError, match=r"summary\.format.*rename"):
        load_rewards(["summary.format"], [1.0])


def test_reward_missing_from_its_module_is_refused_on_loading(package):
    package("gone")
    with pytest.raises(ConfigError, match=r"theirs\.gone.*their_rewards has no `gone`"):
        load_rewards(["theirs.gone"], [1.0])


@pytest.mark.parametrize(
    ("target", "words"),
    [("area", r"ZeroDivisionError: division by zero.*their_rewards\.py:8"), ("infinite", "inf; must return a finite")],
)
def test_failing_reward_error_names_source_line_record_and_answer(package, target, words):
    package(target)
    (reward,) = load_rewards([f"theirs.{target}"], [1.0])
    with pytest.raises(RewardError, match=words) as failed:
        reward(Sample("abc", EMPTY))
    for words in (f"reward theirs.{target}, record train.jsonl:7", "the answer is 'abc'", "stage2 inspect"):
        assert words in str(failed.value)


def test_unknown_rewards_are_all_reported_with_known_names():
    with pytest.raises(ConfigError) as refused:
        load_rewards(["summary.format", "summary.fromat", "theirs.brevity"], [1.0] * 3)
    assert [problem.path for problem in refused.value.problems] == ["rlhf.reward_funcs[1]", "rlhf.reward_funcs[2]"]
    assert "objects.f1, " in refused.value.problems[0].rule
    assert "did you mean summary.format?" in refused.value.problems[0].way_out
    assert "install the package that adds theirs.brevity" in refused.value.problems[1].way_out


def test_summary_reward_without_contract_is_refused():
    (reward,) = load_rewards(["summary.format"], [1.0])
    with pytest.raises(ConfigError, match=r"custom\.grpo\.summary"):
        reward(Sample("x", EMPTY))


@pytest.mark.parametrize(
    ("metadata", "path"),
    [({"_fusion_template": "summary_space"}, "_fusion_template"), ({"summary_ref": "nothing"}, "summary_ref")],
)
def test_record_outside_summary_contract_is_refused(metadata, path):
    (reward,) = load_rewards(["summary.content_f1"], [1.0])
    one = about({"统计": []}, {"统计": []})
    with pytest.raises(ConfigError, match=path):
        reward(replace(one, record=replace(one.record, metadata={**one.metadata, **metadata})))


RIGHT = answer({"统计": []})
OTHER_DOMAIN = answer({"统计": []}, domain="OUTDOOR")
NO_JSON = answer("{'统计': []}")
LIST = answer("[]")
THREE_LINES = f"{RIGHT}\nmore"
ONE_LINE = '{"统计": []}'
TWICE = answer('{"统计": [{"类别": "cable", "fit": 1, "fit": 2}]}')
FORBIDDEN = answer({"统计": [], "dataset": "x"})

EXAMPLES = [
    ("format", RIGHT, 1.0),
    ("format", f"  {RIGHT}<|im_end|><|endoftext|>\n", 1.0),
    ("format", OTHER_DOMAIN, 1.0),
    ("format", NO_JSON, 1.0),
    ("format", LIST, 0.0),
    ("format", THREE_LINES, 0.0),
    ("format", ONE_LINE, 0.0),
    ("format", RIGHT.replace("INDOOR", "indoor"), 0.0),
    ("header", RIGHT, 1.0),
    ("header", THREE_LINES, 1.0),
    ("header", OTHER_DOMAIN, 0.0),
    ("header", ONE_LINE, 0.0),
    ("strict", RIGHT, 0.0),
    ("strict", NO_JSON, 0.0),
    ("strict", OTHER_DOMAIN, -1.0),
    ("strict", THREE_LINES, -1.0),
    ("strict", ONE_LINE, -1.0),
    ("parse", RIGHT, 0.0),
    ("parse", OTHER_DOMAIN, 0.0),
    ("parse", NO_JSON, -1.0),
    ("parse", LIST, -1.0),
    ("parse", ONE_LINE, -1.0),
    ("parse", FORBIDDEN, -1.0),
    ("no_dup_keys", RIGHT, 0.0),
    ("no_dup_keys", TWICE, -1.0),
    ("no_dup_keys", ONE_LINE, 0.0),
    ("dataset", RIGHT, 1.0),
    ("dataset", OTHER_DOMAIN, 0.0),
    ("dataset", NO_JSON, 0.0),
    ("dataset", FORBIDDEN, 0.0),
]
ABOUT_IRRELEVANT = [
    ("format", IRRELEVANT, 1.0),
    ("format", f"{IRRELEVANT}。", 0.0),
    ("format", RIGHT, 0.0),
    ("header", IRRELEVANT, 0.0),
    ("header", RIGHT, -1.0),
    ("header", f"{IRRELEVANT}<TASK=", -1.0),
    ("strict", IRRELEVANT, 0.0),
    ("parse", IRRELEVANT, 0.0),
    ("no_dup_keys", TWICE, 0.0),
    ("dataset", RIGHT, 0.0),
]


@pytest.mark.parametrize(("name", "text", "expected"), EXAMPLES)
def test_summary_form_rewards_match_worked_examples(name: str, text: str, expected: float) -> None:
    assert scored(name, sample(text)) == expected


@pytest.mark.parametrize(("name", "text", "expected"), ABOUT_IRRELEVANT)
def test_irrelevant_image_is_rewarded_for_its_fixed_text(name: str, text: str, expected: float) -> None:
    assert scored(name, irrelevant(text)) == expected


@pytest.mark.parametrize("name", SUMMARIES)
def test_record_without_summary_scores_zero(name: str) -> None:
    assert known_rewards()[name](sample(ONE_LINE, _fusion_mode="dense")) == 0.0


@pytest.mark.parametrize("name", SUMMARIES)
def test_reward_returns_same_score_on_second_call(name: str) -> None:
    function = known_rewards()[name]
    assert function(sample(RIGHT)) == function(sample(RIGHT))


Summary = dict[str, Any]
CONTENT = [
    "content_eq", "content_f1", "content_structured_tversky", "category_recall", "category_f1", "attr_key_recall",
    "attr_path_recall", "schema_tree", "text_bbu", "notes_bbu", "notes_presence", "group_stats_presence",
]  # fmt: skip


def summary(*items: Summary, **more: object) -> Summary:
    return {"统计": list(items), **more}


def item(category: str, **attributes: object) -> Summary:
    return {"类别": category, **attributes}


CABLE = item("cable", fit={"good": 2, "bad": 1}, side={"left": 3})
SCREW = item("screw", torque={"ok": 4})
MAST = item("mast", distance={"12 m": 1})

# reward, answer, truth, expected
INDOOR: list[tuple[str, Summary, Summary, float]] = [
    ("content_eq", summary(CABLE, SCREW), summary(SCREW, CABLE), 1.0),
    ("content_eq", summary(CABLE), summary(CABLE, SCREW), 0.0),
    ("content_eq", summary(备注=["b", "a"]), summary(备注=["a", "b"]), 1.0),
    ("content_f1", summary(CABLE), summary(CABLE), 1.0),
    ("content_f1", summary(), summary(), 1.0),
    ("content_f1", summary(), summary(CABLE), 0.0),
    # 6 of the answer's 6 facts, 6 of the truth's 10
    ("content_f1", summary(CABLE), summary(CABLE, SCREW), 2 * 6 / 16),
    # a mapping counts what it says, a list and a scalar count 1 each
    ("content_f1", summary(item("cable", fit=["good", "bad"])), summary(item("cable", fit={"good": 1, "bad": 1})), 1.0),
    ("content_f1", summary(item("cable", fit="good")), summary(item("cable", fit={"good": 1})), 1.0),
    ("content_f1", summary(item("cable", fit={"good": 0})), summary(), 1.0),
    ("content_f1", summary(item("cable", 文本={"A B": 1})), summary(item("cable", 文本={"AB": 1})), 1.0),
    ("content_f1", summary(备注=["a b"]), summary(备注=["ab"]), 1.0),
    ("content_f1", summary(item("cable", distance="12 m")), summary(item("cable", distance="about 12")), 1.0),
    # 4 facts too many at 0.3 each, none missing
    ("content_structured_tversky", summary(CABLE, SCREW), summary(CABLE), 6 / (6 + 0.3 * 4)),
    ("content_structured_tversky", summary(CABLE), summary(CABLE, SCREW), 6 / (6 + 4)),
    ("content_structured_tversky", summary(item("cable", 文本={"A": 1}), 备注=["x"]), summary(), 1.0),
    ("category_recall", summary(CABLE), summary(CABLE, SCREW), 0.5),
    ("category_recall", summary(), summary(), 1.0),
    ("category_recall", summary(CABLE), summary(), 0.0),
    ("category_f1", summary(CABLE), summary(CABLE, SCREW), 2 / 3),
    ("category_f1", summary(), summary(), 1.0),
    # cable: fit of fit and side; screw: nothing of torque
    ("attr_key_recall", summary(item("cable", fit="good")), summary(CABLE, SCREW), (0.5 + 0) / 2),
    ("attr_key_recall", summary(CABLE), summary(item("cable", fit="good", 文本="A")), 1.0),
    ("attr_key_recall", summary(CABLE), summary(), 0.0),
    # fit/good of fit/good, fit/bad, side/left
    ("attr_path_recall", summary(item("cable", fit={"good": 9})), summary(CABLE), 1 / 3),
    ("attr_path_recall", summary(CABLE), summary(SCREW), 0.0),
    ("attr_path_recall", summary(CABLE), summary(item("cable", fit={"17": 1, "a=b": 1, "x" * 33: 1, "good": 1})), 1.0),
    ("attr_path_recall", summary(SCREW), summary(SCREW), 0.0),
    ("text_bbu", summary(item("cable", 文本={"Ａ-1": 1})), summary(item("cable", 文本={"a-1": 1})), 1.0),
    ("text_bbu", summary(item("cable", 文本={"a": 1})), summary(item("cable", 文本={"a": 1, "b": 1})), 0.5),
    # four texts where one is right: one more than the reference and two
    ("text_bbu", summary(item("cable", 文本=["a", "b", "c", "d"])), summary(item("cable", 文本=["a"])), 0.9),
    ("text_bbu", summary(item("cable", 文本=["a"])), summary(), 0.0),
    ("notes_bbu", summary(备注=["a"]), summary(备注=["a", "b"]), 0.5),
    ("notes_bbu", summary(备注=["a"]), summary(), -1.0),
    ("notes_bbu", summary(), summary(), 0.0),
    ("notes_bbu", summary(), summary(备注=["a"]), 0.0),
    ("notes_presence", summary(备注=["a"]), summary(备注=["b"]), 1.0),
    ("notes_presence", summary(), summary(备注=["b"]), 0.0),
    ("schema_tree", summary(CABLE), summary(CABLE), 1.0),
    ("schema_tree", summary(item("cable", fit="good")), summary(), 0.5),
    ("schema_tree", summary(CABLE, item("cable")), summary(), 0.5),
    ("schema_tree", summary(SCREW), summary(), 1.0 - 0.35),
    ("schema_tree", summary(CABLE, item("nail")), summary(), 1.0 - 0.25),
    ("schema_tree", summary(CABLE, extra=1), summary(), 1.0 - 0.30),
    ("schema_tree", summary(item("screw", a=1, b=1, c=1, d=1, e=1, f=1)), summary(), -1.0),
    ("schema_tree", summary(), summary(), 0.0),
]
OUTDOOR: list[tuple[str, Summary, Summary, float]] = [
    ("content_f1", summary(分组统计={"group 7": 2}), summary(分组统计={"7": 2}), 1.0),
    ("content_structured_tversky", summary(MAST, 分组统计={"7": 2}), summary(MAST), 1 / (1 + 0.6 * 2)),
    ("group_stats_presence", summary(分组统计={"7": 2}), summary(分组统计={"8": 1}), 1.0),
    ("group_stats_presence", summary(分组统计={}), summary(分组统计={"8": 1}), 0.0),
    ("schema_tree", summary(item("mast", distance="12")), summary(), 1.0),
    ("schema_tree", summary(MAST), summary(), 1.0 - 0.60),
]


@pytest.mark.parametrize(("name", "found", "truth", "expected"), INDOOR)
def test_summary_content_rewards_match_worked_examples(
    name: str, found: Summary, truth: Summary, expected: float
) -> None:
    assert scored(name, about(found, truth)) == pytest.approx(expected)


@pytest.mark.parametrize(("name", "found", "truth", "expected"), OUTDOOR)
def test_summary_content_rewards_follow_rules_of_other_domain(
    name: str, found: Summary, truth: Summary, expected: float
) -> None:
    assert scored(name, about(found, truth, domain="OUTDOOR")) == pytest.approx(expected)


@pytest.mark.parametrize("name", CONTENT)
def test_summary_content_scores_only_in_right_form(name: str) -> None:
    right = summary(CABLE, 备注=["a"])
    assert scored(name, sample(answer(right, domain="OUTDOOR"), right)) == 0.0
    assert scored(name, sample(f"{answer(right)}\n", right)) == scored(name, about(right, right))
    assert scored(name, irrelevant(IRRELEVANT)) == 0.0


@pytest.mark.parametrize("name", CONTENT)
def test_summary_part_unknown_to_domain_scores_zero(name: str) -> None:
    assert scored(name, about(summary(CABLE, 分组统计={"1": 1}), summary(CABLE))) == 0.0
    assert scored(name, about(summary(CABLE), summary(CABLE, 分组统计={"1": 1}))) == 0.0
    assert scored(name, about(summary(MAST, 备注=["a"]), summary(MAST), domain="OUTDOOR")) == 0.0
