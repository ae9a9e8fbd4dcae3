"""Rewards on form, by worked examples."""

import pytest

from stage2_trainer.grpo.rewards.registry import known_rewards
from tests.unit.trainer.grpo.summaries import IRRELEVANT, answer, irrelevant, sample, scored

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
def test_an_answer_scores_what_its_form_is_worth(name: str, text: str, expected: float) -> None:
    assert scored(name, sample(text)) == expected


@pytest.mark.parametrize(("name", "text", "expected"), ABOUT_IRRELEVANT)
def test_an_irrelevant_image_wants_its_fixed_text(name: str, text: str, expected: float) -> None:
    assert scored(name, irrelevant(text)) == expected


@pytest.mark.parametrize("name", sorted(known_rewards()))
def test_a_record_that_is_no_summary_scores_nothing(name: str) -> None:
    assert known_rewards()[name](sample(ONE_LINE, _fusion_mode="dense")) == 0.0


@pytest.mark.parametrize("name", sorted(known_rewards()))
def test_a_reward_is_a_pure_function(name: str) -> None:
    function = known_rewards()[name]
    assert function(sample(RIGHT)) == function(sample(RIGHT))
