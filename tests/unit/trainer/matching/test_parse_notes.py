"""What is noted of an answer, and why its objects were dropped, one by one."""

import pytest

from stage2_trainer.matching.ground_truth import serialize_objects
from stage2_trainer.matching.parse import (
    CUT_OFF,
    NO_OBJECT_VALUE,
    TEXT_AFTER_JSON,
    TEXT_BEFORE_JSON,
    object_ends,
    parse_rollout,
)
from tests.unit.trainer.matching.test_variants import CAT, DOG

ANSWER = serialize_objects([CAT])


@pytest.mark.parametrize(
    ("text", "notes"),
    [
        (ANSWER, ()),
        (ANSWER + "\n", ()),
        ("\n " + ANSWER, ()),
        (ANSWER + " Done.", (TEXT_AFTER_JSON,)),
        ("Sure: " + ANSWER, (TEXT_BEFORE_JSON,)),
        ("Sure: " + ANSWER + "!", (TEXT_BEFORE_JSON, TEXT_AFTER_JSON)),
    ],
)
def test_text_around_answer_is_noted_once_and_whitespace_is_not(any_vocab, text, notes):
    assert parse_rollout(any_vocab.encode(text), any_vocab).notes == notes


def test_only_last_object_of_truncated_answer_is_cut_off(any_vocab):
    parsed = parse_rollout(any_vocab.encode('{"object_1": 5, "object_2": {"desc": "ca'), any_vocab)
    assert [one.reason for one in parsed.objects] == [NO_OBJECT_VALUE, CUT_OFF]


def test_objects_after_end_of_turn_do_not_belong_to_answer(any_vocab):
    ids = any_vocab.encode(ANSWER[:-1])  # not closed, so that what follows would go on with it
    more = serialize_objects([DOG], 2)[1:]
    assert object_ends([*ids, *any_vocab.encode("<|im_end|>, " + more)], any_vocab) == object_ends(ids, any_vocab)
    assert len(object_ends(ids, any_vocab)) == 1
    assert len(object_ends([*ids, *any_vocab.encode(", " + more)], any_vocab)) == 2
