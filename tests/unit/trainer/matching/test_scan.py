"""The scanner, which takes strings and flat arrays whole, equals a scan character by character."""

import random

from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_trainer.matching.ground_truth import serialize_objects
from stage2_trainer.matching.scan import scan
from tests.unit.trainer.matching.strategies import objects


class Plain:
    """Semantics, section 4.2 (b), a character at a time; it stops where the top-level object closes."""

    def __init__(self, text):
        self.depth = self.brackets = 0
        self.in_string = self.escaped = False
        self.expecting = {}
        self.last_key = ""
        self.pending = self.active = None
        self.capture = None
        self.entries = []
        self.first_open = self.closed_at = -1
        for i, character in enumerate(text):
            if self.closed_at < 0:
                self.step(text, i, character)

    def step(self, text, i, character):  # noqa: C901 the rules, one after the other
        if self.in_string:
            if self.escaped:
                self.escaped = False
            elif character == "\\":
                self.escaped = True
            elif character == '"':
                self.in_string = False
                self.string(text[self.string_start + 1 : i])
            return
        if character == '"':
            self.in_string, self.string_start = True, i
        elif character == "{":
            self.depth += 1
            self.expecting[self.depth] = True
            if self.depth == 1:
                self.first_open = i + 1
            if self.depth == 2 and self.pending and not self.brackets:
                self.active, self.pending = self.pending, None
                self.active["value"] = [i, -1]
        elif character == "}" and self.depth:
            if self.depth == 2 and self.active:
                self.active["value"][1] = i + 1
                self.active = self.capture = None
            self.depth -= 1
            if self.depth == 0:
                self.closed_at = i + 1
        elif character == "[":
            if self.active and self.depth == 2 and self.capture is None and self.last_key in ("bbox_2d", "poly"):
                self.capture = (i, self.brackets)
            self.brackets += 1
        elif character == "]":
            self.brackets = max(0, self.brackets - 1)
            if self.active and self.capture and self.brackets == self.capture[1]:
                self.active["captures"].append((self.capture[0], i + 1))
                self.capture = None
        elif character in ":," and self.depth and not self.brackets:
            self.expecting[self.depth] = character == ","

    def string(self, value):
        if self.brackets or not self.depth or not self.expecting[self.depth]:
            return
        self.last_key = value
        if self.depth == 1:
            digits = value.removeprefix("object_")
            is_key = value != digits and digits.isascii() and digits.isdigit() and len(digits) <= 4000
            self.pending = {"key": value, "value": [-1, -1], "captures": []} if is_key else None
            if is_key:
                self.entries.append(self.pending)


def check(text):
    found, expected = scan(text), Plain(text)
    assert [
        {"key": one.key, "value": [one.value_start, one.value_end], "captures": one.captures} for one in found.entries
    ] == expected.entries
    assert (found.first_open, found.closed_at) == (expected.first_open, expected.closed_at)
    open_ended = expected.depth > 0 or expected.brackets > 0 or expected.in_string or expected.first_open < 0
    assert found.truncated == open_ended


FRAGMENTS = [
    '"object_1": {"desc": "a", "bbox_2d": ["<|coord_1|>", "<|coord_2|>"]}',
    '"object_2": {"desc": "b", "poly": [["<|coord_1|>", "<|coord_2|>"], ["<|coord_3|>"]]}',
    '"object_3": {"desc": "\\"", "poly": []}', '"object_4"', '"desc"', '"bbox_2d"', '"', "\\", "{", "}", "[", "]",
    ":", ",", ", ", ": ", " ", "x", '"x"', "[1, 2]", '["a", "b"]',
]  # fmt: skip


@given(st.lists(st.sampled_from(FRAGMENTS), max_size=30))
@settings(max_examples=500, deadline=None)
def test_scanner_equals_character_scan_on_any_fragments(fragments):
    check("".join(fragments))
    check("{" + "".join(fragments))


@given(objects, st.randoms(use_true_random=False))
@settings(max_examples=200, deadline=None)
def test_scanner_equals_character_scan_on_damaged_answers(gt, rng: random.Random):
    text = list(serialize_objects(gt))
    for _ in range(rng.randint(0, 4)):
        where = rng.randrange(len(text))
        text[where : where + rng.randint(0, 2)] = rng.choice(['"', "{", "}", "[", "]", ":", ",", "\\", ""])
        if not text:
            return
    check("".join(text))
