"""From a rollout to what is learnt from it."""

import json

import pytest

from stage2_trainer.matching.assign import MatchOptions
from stage2_trainer.matching.ground_truth import GroundTruth, GTObject, serialize_objects
from stage2_trainer.matching.targets import build_target

CAT = GTObject("cat", "bbox", (100, 100, 300, 300))
DOG = GTObject("dog", "bbox", (500, 500, 800, 800))
BIRD = GTObject("bird", "poly", (10, 900, 60, 900, 35, 990))


def shifted(one, by):
    return GTObject(one.desc, one.kind, tuple(value + by for value in one.bins))


def target_of(vocab, answer, gt, options=None):
    return build_target(vocab.encode(answer), GroundTruth(tuple(gt)), vocab, options or MatchOptions())


def test_matched_object_keeps_its_tokens_and_has_ground_truth_bins_as_targets(any_vocab):
    answer = serialize_objects([shifted(CAT, 5)])
    target = target_of(any_vocab, answer, [CAT])
    assert target.prefix_coord_target_bins == CAT.bins
    spelled = [any_vocab.bin_of(target.y_train_ids[i]) for i in target.prefix_coord_pos]
    assert spelled == [105, 105, 305, 305]
    assert target.append_text == "}"
    assert target.y_train_text == answer


def test_missed_objects_are_appended_in_order_with_new_indices(any_vocab):
    target = target_of(any_vocab, serialize_objects([shifted(DOG, 3)], start_index=4), [CAT, DOG, BIRD])
    assert target.false_negatives == (0, 2)
    loaded = json.loads(target.y_train_text)
    assert list(loaded) == ["object_4", "object_5", "object_6"]
    assert [one["desc"] for one in loaded.values()] == ["dog", "cat", "bird"]
    assert any_vocab.decode(list(target.y_train_ids)) == target.y_train_text


def test_empty_answer_without_ground_truth_gives_empty_json_object(any_vocab):
    assert target_of(any_vocab, "", []).y_train_text == "{}"


def test_false_positives_stay_unsupervised(any_vocab):
    target = target_of(any_vocab, serialize_objects([CAT, DOG]), [CAT])
    assert target.matching.false_positives == (1,)
    assert set(target.prefix_coord_pos) == set(target.parsed.objects[0].token_positions)
    labels = target.labels
    assert all(labels[i] == "none" for i in target.parsed.objects[1].token_positions)
    assert labels[-1] == "ce"


def test_appended_descriptions_are_unsupervised_and_coordinates_supervised(any_vocab):
    target = target_of(any_vocab, "", [GTObject('rød "ræv" 🦊', "bbox", (1, 2, 3, 4))])
    tail = list(target.y_train_ids[target.prefix_len :])
    aligned = any_vocab.align(tail)
    silent = "".join(aligned.pieces[i] for i in target.tail_ignore_pos)
    assert silent.strip('":, ') == r"rød \"ræv\" 🦊".strip('":, ')
    assert target.tail_coord_bins == (1, 2, 3, 4)
    assert [any_vocab.bin_of(tail[i]) for i in target.tail_coord_pos] == [1, 2, 3, 4]
    kinds = {label: target.labels.count(label) for label in ("none", "ce", "coord")}
    assert kinds["coord"] == 4
    assert kinds["none"] == target.prefix_len + len(target.tail_ignore_pos)


def test_token_fusing_quote_and_description_is_unsupervised(any_vocab):
    # `": "` followed by a quote inside the description: byte-level BPE may fuse it with the opening quote.
    target = target_of(any_vocab, "", [GTObject('", "x', "bbox", (1, 2, 3, 4))])
    aligned = any_vocab.align(list(target.y_train_ids[target.prefix_len :]))
    first = aligned.text.index('": "', aligned.text.index('"desc"')) + 4
    last = aligned.text.index('", "bbox_2d"')
    for i in range(len(aligned.pieces)):
        inside = aligned.starts[i] < last and aligned.starts[i + 1] > first
        assert (i in target.tail_ignore_pos) == inside


@pytest.mark.parametrize("desc", ["猫", "猫 on a 桌", "cat 猫", "🦊🦊"])
def test_tokens_of_multi_token_character_in_description_are_unsupervised(any_vocab, desc):
    tail = target_of(any_vocab, "", [GTObject(desc, "bbox", (1, 2, 3, 4))])
    ids = list(tail.y_train_ids[tail.prefix_len :])
    taught = [token for i, token in enumerate(ids) if i not in tail.tail_ignore_pos]
    text = any_vocab.decode(taught)
    assert text.isascii()  # neither a character nor one of its bytes, which would spell U+FFFD


def test_coordinate_token_inside_appended_description_is_unsupervised(any_vocab):
    target = target_of(any_vocab, "", [GTObject("like <|coord_7|>", "bbox", (1, 2, 3, 4))])
    assert target.tail_coord_bins == (1, 2, 3, 4)


def test_polygon_prediction_has_target_for_each_coordinate(any_vocab):
    target = target_of(any_vocab, serialize_objects([shifted(BIRD, 4)]), [BIRD], MatchOptions(ot_epsilon=0.5))
    assert target.prefix_coord_target_bins == BIRD.bins
    assert list(target.coord_targets.values())[:6] == list(BIRD.bins)


def test_counters_add_up(any_vocab):
    answer = serialize_objects([shifted(CAT, 2), GTObject("?", "bbox", (0, 0, 50, 50))])
    target = target_of(any_vocab, answer[:-1] + ', "object_3": {"desc', [CAT, DOG])
    counters = target.counters
    expected = {
        "valid_pred_objects": 2, "gt_objects": 2, "matched_for_supervision": 1, "fp_count": 1, "fn_count": 1,
        "parse_dropped_invalid": 1, "parse_truncated": 1, "prefix_coord_targets": 4, "excluded_from_supervision": 0,
    }  # fmt: skip
    assert {name: counters[name] for name in expected} == expected
    assert counters["matched_maskiou_sum"] == pytest.approx(target.matching.pairs[0].iou)
    assert counters["prefix_len"] + counters["append_len"] == counters["train_len"] == len(target.y_train_ids)
