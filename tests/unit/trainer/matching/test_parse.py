"""Parsing answers with real tokenizers; further cases are golden vectors."""

import pytest

from stage2_trainer.matching import parse
from stage2_trainer.matching.parse import (
    BLANK_DESC,
    NO_OBJECT_VALUE,
    NOT_COORD_TOKENS,
    NOT_JSON,
    NOT_ONE_GEOMETRY,
    OUTSIDE_PREFIX,
    TOKENS_DIFFER,
    UNKNOWN_KEY,
    WRONG_COUNT,
    parse_rollout,
)
from stage2_trainer.matching.tokens import CoordVocab
from tests.unit.trainer.matching.vocabularies import END_IN_TOKEN, STOP_IN_TOKEN

CAT = '"object_1": {"desc": "cat", "bbox_2d": ["<|coord_10|>", "<|coord_20|>", "<|coord_300|>", "<|coord_400|>"]}'
DOG = (
    '"object_2": {"desc": "dog", "poly": '
    '[["<|coord_1|>", "<|coord_2|>"], ["<|coord_3|>", "<|coord_4|>"], ["<|coord_5|>", "<|coord_6|>"]]}'
)
BOX = '"bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]'
PAIRED_BOX = '"bbox_2d": [["<|coord_1|>", "<|coord_2|>"], ["<|coord_3|>", "<|coord_4|>"]]'


def parsed(vocab, text):
    return parse_rollout(vocab.encode(text), vocab)


def test_complete_answer_keeps_all_but_last_brace(any_vocab):
    result = parsed(any_vocab, "{" + CAT + ", " + DOG + "}<|im_end|>")
    assert result.prefix_text == "{" + CAT + ", " + DOG
    assert not result.truncated
    assert result.clean
    assert result.max_object_index == 2
    cat, dog = result.valid_objects
    assert (cat.desc, cat.kind, cat.bins) == ("cat", "bbox", (10, 20, 300, 400))
    assert (dog.desc, dog.kind, dog.bins) == ("dog", "poly", (1, 2, 3, 4, 5, 6))


def test_token_positions_point_at_coordinates_in_prefix(any_vocab):
    result = parsed(any_vocab, "{" + CAT + ", " + DOG + "}")
    for found in result.objects:
        assert tuple(any_vocab.bin_of(result.prefix_ids[i]) for i in found.token_positions) == found.bins


@pytest.mark.parametrize("text", ["", "no json here", "<|im_end|>", '"', "[1, 2]", "}"])
def test_answer_without_brace_falls_back_to_opening_brace(any_vocab, text):
    result = parsed(any_vocab, text)
    assert result.prefix_text == "{"
    assert list(result.prefix_ids) == any_vocab.encode("{")
    assert result.truncated
    assert parse.NO_JSON in result.notes


def test_text_before_json_falls_back_to_opening_brace_and_is_noted(any_vocab):
    result = parsed(any_vocab, "```json\n{" + CAT + "}")
    assert result.prefix_text == "{"
    assert parse.TEXT_BEFORE_JSON in result.notes
    assert result.dropped == {OUTSIDE_PREFIX: 1}
    assert result.max_object_index is None


def test_whitespace_before_json_is_kept(any_vocab):
    result = parsed(any_vocab, " \n{" + CAT + "}")
    assert result.prefix_text == " \n{" + CAT
    assert result.clean


@pytest.mark.parametrize("blank", ["\u00a0", "\u2003", "\u3000", "\u2028", "\x0b", "\f", "\x1c", "\x85"])
def test_non_json_whitespace_counts_as_text_before_json(any_vocab, blank):
    result = parsed(any_vocab, blank + "{" + CAT + "}")
    assert result.prefix_text == "{"
    assert parse.TEXT_BEFORE_JSON in result.notes
    assert result.clean


def test_text_after_json_is_cut_off_and_noted(any_vocab):
    result = parsed(any_vocab, "{" + CAT + "} {" + DOG + "}")
    assert result.prefix_text == "{" + CAT
    assert result.notes == (parse.TEXT_AFTER_JSON,)
    assert not result.truncated


def test_answer_ends_at_first_end_of_turn(any_vocab):
    result = parsed(any_vocab, "{" + CAT + "<|im_end|>, " + DOG + "}")
    assert result.prefix_text == "{" + CAT
    assert result.truncated


def test_cut_inside_token_replaces_only_that_token(fused):
    ids = fused.encode("{" + CAT + ", " + DOG)[:-4]
    result = parse_rollout(ids, fused)
    fusion = fused.encode('"]}, "')
    assert len(fusion) == 1
    kept = ids.index(fusion[0])
    assert list(result.prefix_ids) == ids[:kept] + fused.encode('"]}')
    assert result.prefix_text == "{" + CAT


def test_end_of_turn_fused_into_token_is_cut_out(fused):
    ids = fused.encode("{" + CAT[:-3] + STOP_IN_TOKEN)
    assert fused.decode_piece(ids[-1]) == STOP_IN_TOKEN
    result = parse_rollout(ids, fused)
    assert result.prefix_text == "{" + CAT
    assert not result.truncated
    assert fused.decode(list(result.prefix_ids)) == "{" + CAT


def test_cut_that_tokenizer_cannot_spell_moves_to_previous_object(fused):
    ids = fused.encode("{" + CAT + ", " + DOG[:-4] + END_IN_TOKEN)
    assert fused.decode_piece(ids[-1]) == END_IN_TOKEN

    def encode(piece: str) -> list[int]:
        return fused.encode("?" if piece == DOG[-4:] else piece)

    unable = CoordVocab(fused.ids, fused.decode, encode, fused.size)
    result = parse_rollout(ids, unable)
    assert result.prefix_text == "{" + CAT
    assert result.dropped == {OUTSIDE_PREFIX: 1}
    assert parse.CUT_MOVED in result.notes


def test_token_id_outside_vocabulary_ends_answer(vocab):
    ids = vocab.encode("{" + CAT + ", ")
    for foreign in (-1, vocab.size, 10**30):
        result = parse_rollout([*ids, foreign, *vocab.encode(DOG + "}")], vocab)
        assert result.prefix_text == "{" + CAT
        assert result.notes == (parse.UNKNOWN_ID,)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        ('{"desc": "", ' + BOX + "}", BLANK_DESC),
        ('{"desc": "  ", ' + BOX + "}", BLANK_DESC),
        ('{"desc": 3, ' + BOX + "}", BLANK_DESC),
        ("{" + BOX + "}", BLANK_DESC),
        ('{"desc": "x"}', NOT_ONE_GEOMETRY),
        ('{"desc": "x", ' + BOX + ', "poly": []}', NOT_ONE_GEOMETRY),
        ('{"desc": "x", "color": "red", ' + BOX + "}", UNKNOWN_KEY),
        ('{"desc": "x", "bbox_2d": [1, 2, 3, 4]}', NOT_COORD_TOKENS),
        ('{"desc": "x", "bbox_2d": "<|coord_1|>"}', NOT_COORD_TOKENS),
        ('{"desc": "x", ' + PAIRED_BOX + "}", NOT_COORD_TOKENS),
        ('{"desc": "x", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>"]}', WRONG_COUNT),
        ('{"desc": "x", "bbox_2d": [' + ", ".join(['"<|coord_1|>"'] * 5) + "]}", WRONG_COUNT),
        ('{"desc": "x", "poly": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}', WRONG_COUNT),
        ('{"desc": "x", "poly": [' + ", ".join(['"<|coord_1|>"'] * 7) + "]}", WRONG_COUNT),
        ('{"desc": "x", "poly": [[["<|coord_1|>", "<|coord_2|>"]]]}', NOT_COORD_TOKENS),
        ('{"desc": "x", "bbox_2d": [<|coord_1|>, <|coord_2|>, <|coord_3|>, <|coord_4|>]}', NOT_JSON),
        ('{"desc": "x", ' + BOX + ", " + BOX + "}", TOKENS_DIFFER),
        ('{"desc": NaN, "desc": "x", ' + BOX + "}", NOT_JSON),
        ('{"desc":\u00a0"x", ' + BOX + "}", NOT_JSON),
        ("3", NO_OBJECT_VALUE),
        ('[{"desc": "x", ' + BOX + "}]", NO_OBJECT_VALUE),
    ],
)  # fmt: skip
def test_invalid_object_stays_in_prefix_without_supervision(any_vocab, value, reason):
    result = parsed(any_vocab, '{"object_9": ' + value + ", " + DOG + "}")
    bad, dog = result.objects
    assert (bad.key, bad.valid, bad.reason, bad.in_prefix) == ("object_9", False, reason, True)
    assert dog.valid
    assert result.dropped == {reason: 1}
    assert result.max_object_index == 9
    assert value in result.prefix_text


def test_coordinate_spelled_with_other_tokens_is_dropped(vocab):
    ids = vocab.encode('{"object_1": {"desc": "x", "bbox_2d": ["')
    spelled = [one for character in "<|coord_1|>" for one in vocab.encode(character)]
    rest = vocab.encode('", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}}')
    result = parse_rollout([*ids, *spelled, *rest], vocab)
    assert result.dropped == {TOKENS_DIFFER: 1}


def test_values_under_other_keys_are_not_objects(any_vocab):
    result = parsed(any_vocab, '{"thing": {"desc": "x", ' + BOX + "}, " + CAT + "}")
    assert [found.key for found in result.objects] == ["object_1"]


def test_parser_survives_deeply_nested_answer(vocab):
    deep = vocab.encode("{") * 4000 + vocab.encode("[") * 4000
    assert parse_rollout(deep, vocab).prefix_text == "{"
    inside = vocab.encode('{"object_1": {"desc": ') + vocab.encode("[") * 4000 + vocab.encode("]") * 4000
    assert parse_rollout([*inside, *vocab.encode("}}")], vocab).dropped == {NOT_JSON: 1}


def test_object_key_with_thousands_of_digits_is_ignored(vocab):
    assert parsed(vocab, '{"object_' + "9" * 5000 + '": {}, ' + CAT + "}").max_object_index == 1


def test_long_object_index_is_accepted(vocab):
    assert parsed(vocab, "{" + CAT.replace("object_1", "object_12345678901") + "}").max_object_index == 12345678901
