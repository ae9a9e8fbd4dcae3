"""Texts are read without a tokenizer as the trainer reads the ids of the model's own."""

import pytest
from transformers import AutoTokenizer

from stage2_trainer.matching import CoordVocab, parse_rollout, serialize_objects
from stage2_trainer.scores.scored_image import read_answer, text_vocab
from tests.unit.trainer.scores.scenes import box, poly

OBJECTS = [box('Katze, 猫 \\ "\ufffd"', 1, 2, 3, 999), poly("dog", 1, 2, 3, 4, 500, 600)]
WHOLE = serialize_objects(OBJECTS)
TEXTS = [
    WHOLE,
    WHOLE[:-1],
    WHOLE[:40],
    WHOLE + "<|im_end|>" + WHOLE,
    f"Here: {WHOLE}",
    f"{WHOLE} Done.",
    WHOLE.replace("<|coord_3|>", "<|coord_1003|>"),
    WHOLE.replace('"dog"', '""'),
    "",
    "{}",
]


@pytest.mark.parametrize("text", TEXTS)
def test_objects_read_from_text_equal_objects_read_from_token_ids(model_path, text):
    vocab = CoordVocab.from_tokenizer(AutoTokenizer.from_pretrained(model_path))
    theirs, ours = parse_rollout(vocab.encode(text), vocab), parse_rollout(text_vocab().encode(text), text_vocab())
    expected = [(one.desc, one.kind, one.bins) for one in theirs.valid_objects]
    assert [(one.desc, one.kind, one.bins) for one in ours.valid_objects] == expected
    assert [(one.desc, one.kind, one.bins) for one in read_answer(text).objects] == expected
    for name in ("truncated", "clean", "dropped", "notes", "prefix_text"):
        assert getattr(ours, name) == getattr(theirs, name), name


def test_text_vocabulary_round_trips_every_text():
    for text in TEXTS:
        assert text_vocab().decode(text_vocab().encode(text)) == text
