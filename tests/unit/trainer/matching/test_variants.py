"""Opt-in variants of what a rollout teaches, each against targets that were worked out by hand."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stage2_trainer.matching.assign import MatchOptions
from stage2_trainer.matching.ground_truth import GroundTruth, GTObject, serialize_objects
from stage2_trainer.matching.masks import segment_meta, supervision
from stage2_trainer.matching.targets import build_target
from tests.unit.trainer.matching.strategies import objects, vocabs

CAT = GTObject("cat", "bbox", (100, 100, 300, 300))
DOG = GTObject("dog", "bbox", (500, 500, 800, 800))
OWL = GTObject("owl", "bbox", (600, 100, 900, 300))
NOISE = GTObject("dog", "bbox", (10, 800, 90, 980))  # overlaps nothing


def shifted(one, by):
    return replace(one, bins=tuple(value + by for value in one.bins))


def target_of(vocab, answered, gt, **options):
    return build_target(
        vocab.encode(serialize_objects(answered)), GroundTruth(tuple(gt)), vocab, MatchOptions(**options)
    )


def objects_in(target):
    """The objects of `Y_train`: key, description and bins."""
    return [
        (key, value["desc"], tuple(int(token[8:-2]) for token in value["bbox_2d"]))
        for key, value in json.loads(target.y_train_text).items()
    ]


def pieces(vocab, target, label):
    """The texts of the tokens with a label, each alone."""
    aligned = vocab.align(list(target.y_train_ids))
    return [piece for piece, found in zip(aligned.pieces, target.labels, strict=True) if found == label]


def masks(vocab, target):
    """The masks of the target behind a prompt of two tokens, positions counted from the prompt's end."""
    ids = [1, 1, *target.y_train_ids, 2]
    found = supervision(segment_meta(target, [1, 1], encoded_len=len(ids)), ids, vocab)
    return replace(found, labels=found.labels[2:], coord_positions=found.coord_positions - 2)


def test_missed_descriptions_with_weight_one_are_trained_as_ordinary_tokens(any_vocab):
    silent, named = (target_of(any_vocab, [], [CAT], missed_desc_weight=weight) for weight in (0.0, 1.0))
    assert named.y_train_ids == silent.y_train_ids
    assert named.tail_ignore_pos == named.weights == ()
    assert silent.tail_ignore_pos
    expected = ["ce" if i >= named.prefix_len and label == "none" else label for i, label in enumerate(silent.labels)]
    assert list(named.labels) == expected


def test_missed_descriptions_have_configured_weight(any_vocab):
    target = target_of(any_vocab, [], [CAT], missed_desc_weight=1.5)
    silent = target_of(any_vocab, [], [CAT])
    named = [silent.prefix_len + position for position in silent.tail_ignore_pos]
    assert target.weights == tuple((position, 1.5) for position in named)
    found = masks(any_vocab, target)
    assert found.labels[named].tolist() == [target.y_train_ids[position] for position in named]
    assert np.flatnonzero(found.weights[2:] == 1.5).tolist() == named


def test_coordinate_token_in_trained_description_has_no_loss(any_vocab):
    like = GTObject("like <|coord_7|>", "bbox", (1, 2, 3, 4))
    target = target_of(any_vocab, [], [like], missed_desc_weight=1.0)
    (silent,) = target.tail_ignore_pos
    assert any_vocab.bin_of(target.y_train_ids[target.prefix_len + silent]) == 7
    assert target.tail_coord_bins == (1, 2, 3, 4)


def test_duplicate_object_is_removed_before_matching(any_vocab):
    # The second dog lies on the true one, the first a little beside it: without the key the second is matched.
    beside, on_it = shifted(DOG, 12), DOG
    plain = target_of(any_vocab, [beside, on_it], [DOG])
    assert [pair.pred for pair in plain.matching.pairs] == [1]
    target = target_of(any_vocab, [beside, on_it], [DOG], duplicate_iou=0.8)
    assert (target.repeated, target.matching.false_positives) == ((1,), (1,))
    assert [pair.pred for pair in target.matching.pairs] == [0]
    assert objects_in(target) == [("object_1", "dog", beside.bins)]
    assert target.prefix_coord_target_bins == DOG.bins
    assert target.counters["duplicates_removed"] == 1
    assert target.counters["fp_count"] == 1  # of what was answered


@pytest.mark.parametrize(
    ("answered", "least_iou", "repeated"),
    [
        ([CAT, CAT, CAT], 1.0, (1, 2)),
        ([CAT, replace(CAT, desc="dog")], 0.5, ()),  # another name in the same place is no duplicate
        ([CAT, shifted(CAT, 20), shifted(CAT, 40)], 0.6, (1,)),  # 180²/(2·200²-180²) = 0.68; 160²/… = 0.47
        ([CAT, CAT], None, ()),
    ],
)
def test_objects_count_as_duplicates_by_description_and_iou(any_vocab, answered, least_iou, repeated):
    assert target_of(any_vocab, answered, [CAT], duplicate_iou=least_iou).repeated == repeated


def wrongly_numbered(between="", first="object_1", second="object_2"):
    """An answer with the cat and the dog under these keys, and something between them."""
    answer = serialize_objects([CAT, DOG]).replace("object_1", first).replace("object_2", second)
    return answer.replace(', "object', f', {between}"object', 1)


NOT_PLAINLY_NUMBERED = {
    "another number": wrongly_numbered(second="object_111"),
    "a leading zero": wrongly_numbered(first="object_01"),
    "leading zeros": wrongly_numbered(second="object_" + "0" * 3000 + "2"),
    "a number twice": wrongly_numbered(second="object_1"),
    "numbers from 0": wrongly_numbered("", "object_0", "object_1"),
    "numbers in reverse": wrongly_numbered("", "object_2", "object_1"),
    "a broken object with a number of its own": wrongly_numbered('"object_7777777": {"desc": "x", "bbox_2d": []}, '),
    "a broken object with the number of the next": wrongly_numbered('"object_2": {"desc": "x", "bbox_2d": []}, '),
    "a broken object with a leading zero": wrongly_numbered('"object_02": {}, ', second="object_3"),
    "a number as an object": wrongly_numbered('"object_88888": 5, '),
    "a number as an object with the right key": wrongly_numbered('"object_2": 5, ', second="object_3"),
    "a list as an object": wrongly_numbered('"object_9": [{"desc": "x"}], '),
    "a key of full-width digits": wrongly_numbered('"object_２": {"desc": "x"}, '),
    "a key of Arabic digits": wrongly_numbered('"object_٢٢٢٢": {"desc": "x"}, '),
    "a key of 5,000 digits": wrongly_numbered('"object_' + "7" * 5000 + '": {"desc": "x"}, '),
    "an escaped key": wrongly_numbered('"object_\\u0032": {"desc": "x"}, '),
    "a key in capitals": wrongly_numbered('"OBJECT_77": {"desc": "x"}, '),
    "a key that is negative": wrongly_numbered('"object_-77": {"desc": "x"}, '),
    "a key that is a fraction": wrongly_numbered('"object_2.5": {"desc": "x"}, '),
    "a key with a blank": wrongly_numbered('"object_2 ": {"desc": "x"}, '),
    "another key": wrongly_numbered('"note": "77777", '),
    "two commas": wrongly_numbered(", "),
    "a comma before the first": "{, " + wrongly_numbered()[1:],
    "a no-break space": wrongly_numbered("\u00a0"),
    "a line separator": wrongly_numbered("\u2028"),
    "a form feed before the colon": wrongly_numbered().replace('"object_2":', '"object_2"\f:'),
}


@pytest.mark.parametrize("answer", NOT_PLAINLY_NUMBERED.values(), ids=NOT_PLAINLY_NUMBERED)
def test_objects_without_consecutive_numbers_are_renumbered(any_vocab, answer):
    truth, options = GroundTruth((CAT, DOG, OWL)), MatchOptions(matched_text_weight=1.0)
    target = build_target(any_vocab.encode(answer), truth, any_vocab, options)
    assert len(target.parsed.valid_objects) == 2
    assert target.y_train_text == serialize_objects([CAT, DOG, OWL])


PLAINLY_NUMBERED = {
    "nothing else": wrongly_numbered(),
    "white space of JSON": wrongly_numbered("\n\r\t ").replace('"object_2":', '"object_2" \n:\t'),
    "a broken object with the right number": wrongly_numbered('"object_2": {"desc": "x"}, ', second="object_3"),
    "a name like a key": wrongly_numbered().replace('"dog"', '"\\"object_77\\": {"'),
    "a key like a number inside an object": wrongly_numbered('"object_2": {"object_77": 5}, ', second="object_3"),
    "another number that is cut off": wrongly_numbered().replace("}}", '}, "object_77": {"desc": "ow'),
    "another number without an object at the end": wrongly_numbered().replace("}}", '}, "object_77": 5}'),
    "another number in what follows the answer": wrongly_numbered() + ', "object_77": {}}',
}


@pytest.mark.parametrize("answer", PLAINLY_NUMBERED.values(), ids=PLAINLY_NUMBERED)
def test_consecutively_numbered_objects_keep_every_token(any_vocab, answer):
    truth = GroundTruth((CAT, DOG, OWL))
    ids = any_vocab.encode(answer)
    taught, plain = (
        build_target(ids, truth, any_vocab, MatchOptions(matched_text_weight=weight)) for weight in (1.0, 0.0)
    )
    assert taught.y_train_ids == plain.y_train_ids
    assert taught.prefix_text == taught.parsed.prefix_text
    *_, last = json.loads(taught.y_train_text)
    assert last == f"object_{len(json.loads(taught.y_train_text))}"


@pytest.mark.parametrize(
    ("between", "second", "appended"),
    [("", "object_111", 112), ("", "object_002", 3), ('"object_9": {"desc": "x"}, ', "object_2", 10)],
)
def test_answer_keeps_its_numbers_when_matched_text_is_not_trained(any_vocab, between, second, appended):
    answer = wrongly_numbered(between, second=second)
    target = build_target(any_vocab.encode(answer), GroundTruth((CAT, DOG, OWL)), any_vocab)
    assert target.prefix_text == answer[:-1]
    assert target.append_text.startswith(f', "object_{appended}": ')
    assert target.text_labels == ()


def test_appended_numbers_ignore_broken_last_object(any_vocab):
    broken = ', "object_77777777777777": {"desc": "x", "bbox_2d": []}}'
    ids = any_vocab.encode(serialize_objects([CAT])[:-1] + broken)
    target = build_target(ids, GroundTruth((CAT, DOG)), any_vocab, MatchOptions(matched_text_weight=1.0))
    assert target.y_train_text == serialize_objects([CAT, DOG])


def test_unmatched_objects_are_dropped_and_keys_renumbered(any_vocab):
    answered = [NOISE, shifted(CAT, 5), shifted(NOISE, 5), shifted(OWL, 5)]
    target = target_of(any_vocab, answered, [CAT, DOG, OWL], unmatched_objects="dropped")
    assert objects_in(target) == [
        ("object_1", "cat", shifted(CAT, 5).bins),
        ("object_2", "owl", shifted(OWL, 5).bins),
        ("object_3", "dog", DOG.bins),
    ]
    assert target.dropped == (0, 2)
    assert target.prefix_coord_target_bins == (*CAT.bins, *OWL.bins)
    taken = [any_vocab.bin_of(target.y_train_ids[position]) for position in target.prefix_coord_pos]
    assert taken == [*shifted(CAT, 5).bins, *shifted(OWL, 5).bins]
    assert target.y_train_text == target.prefix_text + target.append_text
    assert target.append_text == ', "object_3": {"desc": "dog", "bbox_2d": ["' + '", "'.join(
        f"<|coord_{one}|>" for one in DOG.bins
    ) + '"]}}'  # fmt: skip


def test_objects_before_dropped_object_keep_every_token(any_vocab):
    answered = [shifted(CAT, 5), shifted(OWL, 5), NOISE]
    answer = any_vocab.encode(serialize_objects(answered))
    target = target_of(any_vocab, answered, [CAT, OWL], unmatched_objects="dropped")
    kept = serialize_objects(answered[:2])[:-1]
    assert target.prefix_text == kept
    whole = any_vocab.align(answer).token_at(len(kept) - 1)  # the one that ends the last object may reach beyond it
    assert list(target.y_train_ids[:whole]) == answer[:whole]


def test_answer_without_match_is_dropped_entirely(any_vocab):
    target = target_of(any_vocab, [NOISE], [CAT], unmatched_objects="dropped")
    assert target.y_train_text == serialize_objects([CAT])
    assert target.prefix_text == "{"


def test_token_leading_to_unmatched_object_is_penalised(any_vocab):
    answered = [CAT, NOISE, DOG]
    target = target_of(any_vocab, answered, [CAT, DOG], unmatched_objects="penalised", unmatched_weight=0.25)
    neutral = target_of(any_vocab, answered, [CAT, DOG])
    assert target.y_train_ids == neutral.y_train_ids
    aligned = any_vocab.align(list(target.y_train_ids))
    comma = aligned.text.index('}, "object_2"') + 1
    at = aligned.token_at(comma)
    assert target.weights == ((at, -0.25),)
    assert "," in aligned.pieces[at]
    assert target.labels[at] == "penalised"
    found = masks(any_vocab, target)
    assert (found.labels[at], found.weights[2 + at]) == (target.y_train_ids[at], -0.25)
    others = [label for i, label in enumerate(target.labels) if i != at]
    assert others == [label for i, label in enumerate(neutral.labels) if i != at]


def test_unmatched_first_object_penalises_token_after_opening_brace(any_vocab):
    target = target_of(any_vocab, [NOISE, CAT], [CAT], unmatched_objects="penalised")
    (piece,) = pieces(any_vocab, target, "penalised")
    assert '"' in piece
    assert target.labels.index("penalised") <= 1


VARIANTS = st.fixed_dictionaries(
    {
        "missed_desc_weight": st.sampled_from([0.0, 1.0, 1.5]),
        "duplicate_iou": st.sampled_from([None, 0.5, 1.0]),
        "unmatched_objects": st.sampled_from(["neutral", "dropped", "penalised"]),
    }
)


@given(objects, objects, vocabs, VARIANTS, st.data())
@settings(max_examples=120, deadline=None)
def test_every_variant_gives_consistent_targets_for_any_answer(pred, gt, vocab, variant, data):
    ids = vocab.encode(serialize_objects(pred))
    options = MatchOptions(maskiou_resolution=64, ot_iters=2, **variant)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    target = build_target(ids, GroundTruth(tuple(gt)), vocab, options)
    trained_on = json.loads(target.y_train_text)
    assert vocab.align(list(target.y_train_ids)).text == target.y_train_text
    stay = len(target.parsed.valid_objects) - len(target.repeated) - len(target.dropped)
    assert len(trained_on) == stay + len(target.appended)
    found = masks(vocab, target)
    where, taught = found.coord_positions.tolist(), found.coord_targets.tolist()
    assert dict(zip(where, taught, strict=True)) == target.coord_targets
    assert all(vocab.bin_of(target.y_train_ids[position]) is not None for position in where)
    assert len(where) == sum(len(one.bins) for one in _taught(target))
    penalised = len(target.penalised_pos)
    unmatched = len(set(target.matching.unmatched) - set(target.repeated))
    assert penalised == (unmatched if variant["unmatched_objects"] == "penalised" else 0)


def _taught(target):
    """The objects whose coordinates are taught: those of the answer that match or follow, and the missed ones."""
    pred = target.parsed.valid_objects
    yield from (pred[pair.pred] for pair in target.matching.supervised)
    yield from (target.ground_truth.objects[i] for i in target.appended)


def labelled(vocab, target):
    """The taught text: each token's own piece, or `own>taught` where another one is taught."""
    found = masks(vocab, target)
    return [
        piece if label == token else f"{piece}>{vocab.decode_piece(int(label))}"
        for piece, token, label in zip(
            vocab.align(list(target.y_train_ids)).pieces, target.y_train_ids, found.labels, strict=False
        )
        if label >= 0
    ]


def test_matched_description_is_supervised_with_true_name_of_equal_token_count(vocab):
    answered = [replace(shifted(DOG, 5), desc="cat"), NOISE, replace(shifted(OWL, 5), desc="owls"), shifted(CAT, 5)]
    target = target_of(vocab, answered, [CAT, DOG, OWL], matched_text_weight=0.5)
    coordinates = '": ["' + '", "' * 3 + '"]}'
    dog = '{"object_1": {"desc": "c>da>ot>g", "bbox_2d' + coordinates
    owls = ', "object_3": {"desc": "", "bbox_2d' + coordinates
    cat = ', "object_4": {"desc": "cat", "bbox_2d' + coordinates
    assert (
        "".join(labelled(vocab, target)) == dog + owls + cat + "}"
    )  # one token holds the first brace and a quote; the last one is the tail
    assert {weight for _, weight in target.weights} == {0.5}
    assert len(target.weights) == len(target.text_labels) == len(labelled(vocab, target)) - 1
    assert [at for at, _ in target.text_labels] == [
        i for i, label in enumerate(target.labels) if label == "ce" and i < target.prefix_len
    ]


def test_matched_text_is_found_with_any_whitespace(vocab):
    answer = serialize_objects([replace(CAT, desc="cot")]).replace('"desc": "cot"', '"desc":"cow", "desc" :\n"cot"')
    target = build_target(vocab.encode(answer), GroundTruth((CAT,)), vocab, MatchOptions(matched_text_weight=1.0))
    assert "".join(labelled(vocab, target)).startswith('{"object_1": {"desc":"cow", "desc" :\n"co>at", "bbox_2d')


def test_remainder_of_token_split_by_cut_is_not_trained(fused):
    target = target_of(fused, [CAT], [CAT, DOG], matched_text_weight=1.0)
    left = fused.align(list(target.y_train_ids[: target.prefix_len])).pieces
    assert left[-2:] == ['"]', "}"]
    assert max(at for at, _ in target.text_labels) < target.prefix_len - 2


def test_matched_text_weight_changes_only_text_labels(any_vocab):
    answered = [NOISE, shifted(CAT, 5), shifted(DOG, 5)]
    plain, taught = (target_of(any_vocab, answered, [CAT, DOG, OWL], matched_text_weight=one) for one in (0.0, 1.0))
    assert taught.text_labels
    assert replace(taught, text_labels=()) == plain


def test_token_closing_object_and_opening_next_belongs_to_next(fused):
    answered = [NOISE, shifted(CAT, 5)]
    target = target_of(fused, answered, [CAT], matched_text_weight=1.0)
    aligned = fused.align(list(target.y_train_ids))
    leads = aligned.token_at(aligned.text.index('}, "object_2"'))
    assert "}," in aligned.pieces[leads]
    assert (leads, target.y_train_ids[leads]) in target.text_labels
    assert min(at for at, _ in target.text_labels) == leads


def test_unmatched_box_targets_follow_ground_truth_nearest_to_written_coordinates(any_vocab):
    left, right = GTObject("a", "bbox", (100, 500, 300, 700)), GTObject("b", "bbox", (200, 100, 400, 300))
    begun = GTObject("a", "bbox", (140, 120, 160, 140))  # x1 is nearer to the left one, all that follows to the right
    target = target_of(any_vocab, [begun], [left, right], assignment="dynamic")
    assert target.prefix_coord_target_bins == (100, 500, 400, 300)
    assert [(pair.pred, pair.gt) for pair in target.matching.following] == [(0, 1)]
    assert target.appended == (0,)


def test_unmatched_boxes_are_assigned_until_no_ground_truth_is_free(any_vocab):
    said = [NOISE, shifted(NOISE, 5), CAT]
    target = target_of(any_vocab, said, [CAT, DOG], assignment="dynamic", unmatched_objects="dropped")
    assert [(pair.pred, pair.gt) for pair in target.matching.supervised] == [(0, 1), (2, 0)]
    assert target.prefix_coord_target_bins == (*DOG.bins, *CAT.bins)
    assert target.dropped == (1,)


def test_unmatched_box_assigned_to_ground_truth_counts_as_false_positive(any_vocab):
    target = target_of(any_vocab, [NOISE, CAT], [CAT, DOG], assignment="dynamic")
    assert [(pair.pred, pair.gt) for pair in target.matching.pairs] == [(1, 0)]
    assert [(pair.pred, pair.gt) for pair in target.matching.following] == [(0, 1)]
    assert (target.matching.false_positives, target.false_negatives, target.appended) == ((0,), (1,), ())
    counters = {
        "matched_pairs": 1, "matched_for_supervision": 1, "excluded_from_supervision": 0, "following": 1,
        "fp_count": 1, "fn_count": 1, "fn_appended": 0, "matched_maskiou_sum": 1.0, "matched_maskiou_count": 1,
    }  # fmt: skip
    assert {name: target.counters[name] for name in counters} == counters


def test_duplicate_box_takes_no_ground_truth(any_vocab):
    answered = [shifted(CAT, 5), CAT, DOG]
    target = target_of(any_vocab, answered, [CAT, DOG], assignment="dynamic", duplicate_iou=0.9)
    assert [(pair.pred, pair.gt) for pair in target.matching.supervised] == [(0, 0), (2, 1)]


def test_dynamic_assignment_with_polygons_equals_default_assignment(any_vocab):
    square = GTObject("cat", "poly", (100, 100, 300, 100, 300, 300, 100, 300))
    for answered, gt in (([NOISE, CAT], [square]), ([square, CAT], [CAT, DOG])):
        assert target_of(any_vocab, answered, gt, assignment="dynamic") == target_of(any_vocab, answered, gt)


@pytest.mark.parametrize("how", [{"unmatched_objects": "dropped"}, {"duplicate_iou": 0.9}])
def test_rewritten_answer_has_tokens_of_its_text(any_vocab, how):
    answered = [NOISE, shifted(CAT, 5), shifted(NOISE, 1), shifted(OWL, 5), shifted(NOISE, 2)]
    target = target_of(any_vocab, answered, [CAT, DOG, OWL], **how)
    natural = any_vocab.encode(target.y_train_text)
    closing = len(any_vocab.encode('"]}}'))  # parsing may have cut the last token
    assert list(target.y_train_ids[: len(natural) - closing]) == natural[:-closing]
