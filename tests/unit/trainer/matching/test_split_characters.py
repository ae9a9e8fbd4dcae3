"""Tokens that end inside a character, at the edge of what is kept of an answer."""

import pytest

from stage2_trainer.matching.assign import MatchOptions
from stage2_trainer.matching.ground_truth import GroundTruth, serialize_objects
from stage2_trainer.matching.targets import build_target
from stage2_trainer.matching.tokens import CoordVocab
from tests.unit.trainer.matching.test_variants import CAT, NOISE
from tests.unit.trainer.matching.vocabularies import FUSED, build_tokenizer

BRACE_AND_HALF = "}Ã"  # a brace, and the first byte of é, as a byte-level tokenizer spells them


@pytest.mark.parametrize("options", [{"unmatched_objects": "dropped"}, {"unmatched_objects": "neutral"}])
def test_kept_object_includes_no_part_of_following_character(options):
    tokenizer = build_tokenizer(FUSED, BRACE_AND_HALF)
    vocab = CoordVocab.from_tokenizer(tokenizer)
    first, second = serialize_objects([CAT])[:-2], serialize_objects([NOISE], 2)[1:]
    halves = tokenizer.convert_tokens_to_ids([BRACE_AND_HALF, "©"])
    ids = [*vocab.encode(first), *halves, *vocab.encode(", " + second)]
    assert vocab.decode(ids) == f"{first}}}é, {second}"
    target = build_target(ids, GroundTruth((CAT,)), vocab, MatchOptions(**options))
    assert vocab.decode(list(target.y_train_ids)) == target.y_train_text
    assert target.y_train_text.startswith(first + "}")
