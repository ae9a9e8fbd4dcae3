"""Answers of other models: JSON with plain numbers, in the ways in which models write it."""

import json
import time

import pytest

from stage2_trainer.scores.plain_answers import PlainObject, read_plain_answer, seen_form

CAT, DOG = PlainObject("cat", "bbox", (10, 20, 300, 400)), PlainObject("dog", "bbox", (500, 5.5, 900, 80))
LISTED = '[{"bbox_2d": [10, 20, 300, 400], "label": "cat"}, {"bbox_2d": [500, 5.5, 900, 80], "label": "dog"}]'
ENTRIES = LISTED[1:-1]

WHOLE = {
    "a fenced list": f"```json\n{LISTED}\n```",
    "a list": LISTED,
    "a fence without a language": f"```\n{LISTED}```",
    "a fence that is not closed": f"```json\n{LISTED}",
    "a fence that is only closed": f"{LISTED}\n```",
    "text around the fence": f'Here are 2 objects [as requested] of "that":\n```json\n{LISTED}\n```\nDone {{so}}.',
    "text around the list": f"I see 2 things (see [1] and [2]): {LISTED} That is all.",
    "a bracket in text that is not closed": f"Objects [1: {LISTED}",
    "several fences": "".join(f"A:\n```json\n[{one}]\n```\n" for one in ENTRIES.replace("}, {", "}|{").split("|")),
    "commas before brackets": "[{" + ENTRIES[1:].replace("400]", "400,]").replace('"cat"}', '"cat", }') + ",\n]",
    "a mapping of a list": f'{{"objects": {LISTED}}}',
    "a mapping with more": f'{{"label": "scene", "count": 2, "objects": {LISTED}}}',
    "numbered objects": '{"object_1": {"desc": "cat", "bbox_2d": [10, 20, 300, 400]}, '
    '"object_2": {"desc": "dog", "bbox_2d": [500, 5.5, 900, 80]}}',
    "one object a line": ENTRIES.replace("}, {", "}\n{"),
    "numbers as text": LISTED.replace("10,", '"10",').replace("5.5", '" 5.5 "'),
    "corners in pairs": LISTED.replace("[10, 20, 300, 400]", "[[10, 20], [300, 400]]"),
    "thoughts before it": f'<think>Perhaps [{{"bbox_2d": [1, 2, 3, 4], "label": "bird"}}], or {{</think>{LISTED}',
    "further keys": LISTED.replace('"label": "cat"', '"label": "cat", "score": 0.9, "sub": {"a": [1]}'),
    "the name twice": LISTED.replace('"label": "cat"', '"label": "cat", "desc": "cat"'),
}


@pytest.mark.parametrize("text", WHOLE.values(), ids=WHOLE)
def test_complete_plain_answer_is_read(text):
    answer = read_plain_answer(text)
    assert answer.objects == (CAT, DOG)
    assert (answer.invalid, answer.points, answer.closed, answer.broken, answer.found_json) == (0, 0, True, False, True)
    read = answer.measured("pixels", (1000, 1000), None)
    assert (read.parsed, read.truncated, read.looped) == (True, False, False)
    assert not read_plain_answer(text).measured("pixels", (1000, 1000), "length").parsed


@pytest.mark.parametrize("text", ["[]", "```json\n[]\n```", "{}", '{"objects": []}', "[[]]"])
def test_answer_without_objects_is_complete(text):
    read = read_plain_answer(text).measured("bins", (10, 10), None)
    assert (read.objects, read.parsed, read.truncated) == ((), True, False)


@pytest.mark.parametrize(
    "name", ["grünes Dreieck", "红色的盒子", "صندوق أحمر", 'a "quoted" [name] {here}, ]', "```", "a\\b\n"]
)
def test_names_in_any_language_and_with_brackets_are_read(name):
    for ascii_only in (True, False):
        text = json.dumps([{"bbox_2d": [1, 2, 3, 4], "label": name}], ensure_ascii=ascii_only)
        (one,) = read_plain_answer(text).objects
        assert one.desc == name


@pytest.mark.parametrize("end", range(1, len(LISTED)))
def test_answer_cut_anywhere_is_truncated_and_keeps_complete_objects(end):
    for before in ("", "```json\n", "Here: "):
        answer = read_plain_answer(before + LISTED[:end])
        whole = LISTED[:end].count("}")
        assert answer.objects == (CAT, DOG)[:whole]
        assert not answer.closed
        read = answer.measured("bins", (10, 10), "stop")
        assert (read.truncated, read.parsed) == (True, False)


BROKEN = {
    "a comma is missing": (LISTED.replace('400], "label"', '400] "label"'), (DOG,)),
    "a bracket is missing": (LISTED.replace("400], ", "400, "), (DOG,)),
    "a closing brace is missing": (LISTED.replace('"cat"}', '"cat"'), (DOG,)),
    "quotation marks in a name": (LISTED.replace('"cat"', '"a "big" cat"'), (DOG,)),
    "one quotation mark in the last name": (LISTED.replace('"dog"', '"2" dog"'), (CAT,)),
    "single quotes": (LISTED.replace('"', "'"), ()),
    "a constant that is no JSON": (LISTED.replace("10,", "None,"), (DOG,)),
}


@pytest.mark.parametrize(("text", "kept"), BROKEN.values(), ids=BROKEN)
def test_broken_answer_is_not_reported_as_truncated(text, kept):
    answer = read_plain_answer(f"```json\n{text}\n```")
    read = answer.measured("bins", (10, 10), "stop")
    assert (read.parsed, read.truncated) == (False, False)
    assert answer.objects == kept


@pytest.mark.parametrize("text", ["", "There is a cat.", "None", "A cat at (10, 20), (300, 400)", "5"])
def test_text_without_json_counts_as_unparsed_answer(text):
    read = read_plain_answer(text).measured("bins", (10, 10), "stop")
    assert (read.objects, read.parsed, read.truncated) == ((), False, False)


INVALID = {
    "no name": '{"bbox_2d": [1, 2, 3, 4]}',
    "a blank name": '{"bbox_2d": [1, 2, 3, 4], "label": " "}',
    "a number as name": '{"bbox_2d": [1, 2, 3, 4], "label": 7}',
    "two names": '{"bbox_2d": [1, 2, 3, 4], "label": "cat", "desc": "dog"}',
    "three numbers": '{"bbox_2d": [1, 2, 3], "label": "cat"}',
    "reversed corners": '{"bbox_2d": [3, 2, 1, 4], "label": "cat"}',
    "no number": '{"bbox_2d": [1, 2, 3, "four"], "label": "cat"}',
    "a truth value": '{"bbox_2d": [true, 2, 3, 4], "label": "cat"}',
    "not finite": '{"bbox_2d": [1, 2, NaN, Infinity], "label": "cat"}',
    "a giant number": '{"bbox_2d": [1, 2, 1e300, 4], "label": "cat"}',
    "a token among numbers": '{"bbox_2d": ["<|coord_1|>", 2, 3, 4], "label": "cat"}',
    "a text as place": '{"bbox_2d": "1, 2, 3, 4", "label": "cat"}',
    "another key": '{"bbox": [1, 2, 3, 4], "label": "cat"}',
    "numbers alone": "[1, 2, 3, 4]",
    "a point": '{"point_2d": [1, 2], "label": "cat"}',
    "no place": '{"label": "cat"}',
    "an outline of two points": '{"poly": [1, 2, 3, 4], "label": "cat"}',
}


@pytest.mark.parametrize("entry", INVALID.values(), ids=INVALID)
def test_invalid_entry_is_left_out_and_answer_counts_as_broken(entry):
    answer = read_plain_answer(f"[{ENTRIES}, {entry}]")
    assert answer.objects == (CAT, DOG)
    assert answer.invalid == 1
    assert answer.points == ("point_2d" in entry)
    assert not answer.measured("bins", (10, 10), None).parsed


def test_bins_and_pixels_become_image_pixels():
    bins, pixels = (
        read_plain_answer(LISTED).measured(unit, (640, 480), None).objects[0] for unit in ("bins", "pixels")
    )
    assert bins.box == pytest.approx((6.4, 9.6, 185.6, 182.4))
    assert pixels.box == (10, 20, 290, 380)


def test_coordinate_tokens_are_bins_whatever_unit_is_configured():
    text = '[{"bbox_2d": ["<|coord_10|>", "<|coord_20|>", "<|coord_300|>", "<|coord_400|>"], "label": "cat"}]'
    (one,) = read_plain_answer(text).measured("pixels", (640, 480), None).objects
    assert one.box == pytest.approx((6.4, 9.6, 185.6, 182.4))
    assert not [*read_plain_answer(text).numbers((640, 480))]


def test_outline_is_read_as_object():
    (flat,) = read_plain_answer('[{"poly": [0, 0, 50, 0, 0, 50], "label": "cat"}]').objects
    (pairs,) = read_plain_answer('[{"poly": [[0, 0], [50, 0], [0, 50]], "label": "cat"}]').objects
    assert flat == pairs == PlainObject("cat", "poly", (0, 0, 50, 0, 0, 50))
    assert flat.measured("pixels", (100, 100)).kind == "poly"


def test_same_object_three_times_in_row_is_loop():
    for count, looped in ((2, False), (3, True)):
        text = json.dumps(count * [{"bbox_2d": [1, 2, 3, 4], "label": "cat"}])
        assert read_plain_answer(text).measured("bins", (10, 10), None).looped is looped


FORMS = {
    "points": '[{"point_2d": [1, 2], "label": "cat"}]',
    r"marked by <\|box_start\|>": "<|object_ref_start|>cat<|object_ref_end|><|box_start|>(1,2),(3,4)<|box_end|>",
    "marked by <box>": "<ref>cat</ref><box>[[1, 2, 3, 4]]</box>",
    "entries have no label": '[{"bbox": [1, 2, 3, 4], "category": "cat"}]',
    "text without JSON": "A cat.",
    "broken JSON": "[{'a': 1}]",
    "no text": " ",
}


@pytest.mark.parametrize(("words", "text"), FORMS.items())
def test_unreadable_answer_format_is_described(words, text):
    assert words.replace("\\", "") in seen_form(text)


ENDLESS = (
    "[" * 30_000, "{" * 30_000 + "]" * 30_000, "[{" * 15_000 + "}]" * 15_000, '["' * 30_000,
    "[" * 30_000 + "]" * 30_000, '{"a":' * 9_000 + "1" + "}" * 9_000, "```" * 20_000, "[]" * 30_000,
)  # fmt: skip


@pytest.mark.parametrize("text", ENDLESS, ids=range(len(ENDLESS)))
def test_deeply_nested_brackets_are_read_within_seconds(text):
    began = time.process_time()
    read_plain_answer(text)
    assert time.process_time() - began < 5  # by the clock: milliseconds, or minutes where brackets are read again
