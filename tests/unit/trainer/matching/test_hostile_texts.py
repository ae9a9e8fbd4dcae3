"""One true answer, damaged in every place and in every way of a family: each is a target that training can take."""

from collections.abc import Callable, Iterator

import pytest

from stage2_trainer.matching.ground_truth import GTObject, serialize_objects
from stage2_trainer.matching.parse import END_OF_TURN
from tests.unit.trainer.matching.test_properties import check_target

SAID = [GTObject("red box", "bbox", (1, 2, 30, 40)), GTObject("dög", "poly", (1, 2, 30, 4, 5, 60))]
TRUTH = [GTObject("red box", "bbox", (1, 2, 31, 41))]
ANSWER = serialize_objects(SAID) + END_OF_TURN
STRUCTURE = '{}[]":,\\'
ODD = (
    "\0",
    "\u202e",
    "\ufffd",
    "\U0001f600",
    "<|im_end|>",
    "<|im_start|>",
    "<|coord_1000|>",
    "<|coord_5|>",
    '"}}',
    "{" * 99,
)
PLACES = range(len(ANSWER))

FAMILIES: dict[str, Callable[[], Iterator[str]]] = {
    "cut off after each character": lambda: (ANSWER[:at] for at in PLACES),
    "begun at each character": lambda: (ANSWER[at:] for at in PLACES),
    "without each character": lambda: (ANSWER[:at] + ANSWER[at + 1 :] for at in PLACES),
    "each character twice": lambda: (ANSWER[:at] + ANSWER[at] + ANSWER[at:] for at in PLACES),
    "another sign of JSON in each place": lambda: (
        ANSWER[:at] + sign + ANSWER[at + 1 :] for at in PLACES for sign in STRUCTURE
    ),
    "something odd before each character": lambda: (ANSWER[:at] + odd + ANSWER[at:] for at in PLACES for odd in ODD),
}


@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_whatever_is_wrong_with_an_answer_it_is_a_target(vocab, family: Callable[[], Iterator[str]]) -> None:
    cases = 0
    for text in family():
        check_target(vocab.encode(text), TRUTH, vocab)
        cases += 1
    assert cases >= len(ANSWER)
