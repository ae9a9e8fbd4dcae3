"""Ground truth read from a payload, and what is dropped of it."""

import pytest

from stage2_trainer.matching.ground_truth import GTObject, append_text, ground_truth, serialize_objects
from stage2_trainer.matching.tokens import MatchingError

BOX = {"desc": "cat", "bbox_2d": [10, 20, 300, 400]}


def test_objects_are_ordered_by_index():
    payload = {"object_10": {**BOX, "desc": "b"}, "object_2": {**BOX, "desc": "a"}, "note": 1}
    assert [one.desc for one in ground_truth(payload).objects] == ["a", "b"]


def test_object_key_with_thousands_of_digits_is_ignored():
    assert ground_truth({"object_" + "9" * 5000: BOX}).objects == ()


def test_coordinates_may_be_tokens_numbers_or_pairs():
    tokens = ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>", "<|coord_5|>", "<|coord_6|>"]
    payload = {
        "object_1": {"desc": "x", "poly": tokens},
        "object_2": {"desc": "x", "poly": [[1, 2.4], [3, 4.2], [5, 6]], "bbox_2d": None},
    }
    assert [one.bins for one in ground_truth(payload).objects] == [(1, 2, 3, 4, 5, 6)] * 2


@pytest.mark.parametrize(("given", "bins"), [([5, 7, 5, 7], (5, 7, 5, 7)), ([0.6, 1.4, 2.6, 999.4], (1, 1, 3, 999))])
def test_box_may_be_point_and_numbers_are_rounded_to_bins(given, bins):
    (one,) = ground_truth({"object_1": {**BOX, "bbox_2d": given}}).objects
    assert one.bins == bins


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (3, "value_is_no_object"),
        ({"bbox_2d": [1, 2, 3, 4]}, "desc_missing_or_blank"),
        ({"desc": " ", "bbox_2d": [1, 2, 3, 4]}, "desc_missing_or_blank"),
        ({**BOX, "desc": "a<|coord_5|>b"}, "desc_holds_a_token"),
        ({**BOX, "desc": "<|im_end|>"}, "desc_holds_a_token"),
        ({"desc": "x"}, "not_exactly_one_geometry"),
        ({**BOX, "poly": [1, 2, 3, 4, 5, 6]}, "not_exactly_one_geometry"),
        ({"desc": "x", "bbox_2d": [1, 2, 3]}, "wrong_number_of_coordinates"),
        ({"desc": "x", "poly": [1, 2, 3, 4]}, "wrong_number_of_coordinates"),
        ({"desc": "x", "poly": [1, 2, 3, 4, 5, 6, 7]}, "wrong_number_of_coordinates"),
        ({"desc": "x", "bbox_2d": [1, 2, 3, 1000]}, "coordinates_are_no_bins"),
        ({"desc": "x", "bbox_2d": [1, 2, 3, float("nan")]}, "coordinates_are_no_bins"),
        ({"desc": "x", "bbox_2d": [1, 2, 3, True]}, "coordinates_are_no_bins"),
        ({"desc": "x", "bbox_2d": "1234"}, "coordinates_are_no_bins"),
        ({"desc": "x", "bbox_2d": [1, 2, 3, "<|coord_4|>"]}, "tokens_and_numbers_mixed"),
        ({"desc": "x", "bbox_2d": [1, 2, 3, 10**400]}, "coordinates_are_no_bins"),
        ({"desc": "x", "bbox_2d": [1, 2, 3, 999.6]}, "coordinates_are_no_bins"),
        ({"desc": "x", "poly": [[1, 2, 3], [4, 5, 6]]}, "coordinates_are_no_bins"),
        ({**BOX, "line": [1, 2, 3, 4]}, "geometry_is_not_of_this_format"),
        ({"desc": "x", "bbox_2d": [30, 20, 10, 40]}, "corners_are_reversed"),
        ({"desc": "x", "bbox_2d": [10, 40, 30, 20]}, "corners_are_reversed"),
        ({"desc": "x", "poly": [1, 2, 3, 4, 5, 6], "poly_points": 4}, "poly_points_differ"),
    ],
)
def test_invalid_objects_are_left_out_and_listed_with_reason(value, reason):
    truth = ground_truth({"object_1": value, "object_2": BOX})
    assert truth.dropped == (("object_1", reason),)
    assert truth.objects == (GTObject("cat", "bbox", (10, 20, 300, 400)),)


def test_serialized_objects_are_one_line_of_json_with_tokens_as_strings():
    text = serialize_objects([GTObject("cät", "bbox", (10, 20, 300, 400)), GTObject("d", "poly", (1, 2, 3, 4, 5, 6))])
    assert text == (
        '{"object_1": {"desc": "cät", "bbox_2d": ["<|coord_10|>", "<|coord_20|>", "<|coord_300|>", "<|coord_400|>"]}, '
        '"object_2": {"desc": "d", "poly": [["<|coord_1|>", "<|coord_2|>"], ["<|coord_3|>", "<|coord_4|>"], '
        '["<|coord_5|>", "<|coord_6|>"]]}}'
    )


def test_no_objects_serialize_to_empty_json_object():
    assert serialize_objects([]) == "{}"


CAT = GTObject("cat", "bbox", (1, 2, 3, 4))
ENTRY = '"object_7": {"desc": "cat", "bbox_2d": ["<|coord_1|>", "<|coord_2|>", "<|coord_3|>", "<|coord_4|>"]}'


@pytest.mark.parametrize(
    ("prefix", "objects", "expected"),
    [
        ("{", [], "}"),
        ("{", [CAT], ENTRY + "}"),
        ('{"a": {}', [], "}"),
        ('{"a": {}', [CAT], ", " + ENTRY + "}"),
        ('{"a": {}, ', [CAT], ENTRY + "}"),
        ('{"a": {} \n', [CAT], ", " + ENTRY + "}"),
    ],
)
def test_appended_text_continues_prefix_as_valid_json(prefix, objects, expected):
    assert append_text(prefix, objects, 7) == expected


@pytest.mark.parametrize(("prefix", "objects"), [('{"a": {},', []), ('{"a"', [CAT]), ("", [CAT])])
def test_prefix_that_cannot_be_continued_is_refused(prefix, objects):
    with pytest.raises(MatchingError, match="prefix ends in"):
        append_text(prefix, objects, 1)
