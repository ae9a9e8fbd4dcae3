"""Golden vectors: inputs and expected outputs that any implementation could run."""

import numpy as np
import pytest

from stage2_trainer.matching.assign import MatchOptions, candidate_pairs, match
from stage2_trainer.matching.geometry import mask_iou
from stage2_trainer.matching.ground_truth import GroundTruth, GTObject
from stage2_trainer.matching.masks import SegmentMeta, packed_supervision, supervision
from stage2_trainer.matching.parse import parse_rollout
from stage2_trainer.matching.sinkhorn import barycentric, target_bins
from stage2_trainer.matching.targets import build_target
from tests.unit.trainer.matching.golden import golden, toy_vocab

LETTERS = {"none": ".", "ce": "x", "coord": "c"}


def cases(section):
    return pytest.mark.parametrize("case", golden()[section], ids=lambda case: case.get("name"))


def thing(value):
    return GTObject(value["desc"], value["kind"], tuple(value["bins"]))


def ids_of(tokens):
    return [toy_vocab().encode(token)[0] for token in tokens]


@cases("mask_iou")
def test_mask_iou_matches_golden_vectors(case):
    shapes = [thing(case["left"])], [thing(case["right"])]
    mode = case.get("mode", "canvas")
    found = mask_iou(*shapes, np.array([[0, 0]]), resolution=case["resolution"], mode=mode)
    assert found[0] == pytest.approx(case["iou"], abs=5e-7)


@cases("transport")
def test_transport_matches_golden_vectors(case):
    points, targets = (np.array(case[name], dtype=float) for name in ("points", "targets"))
    (found,) = barycentric(
        [points], [targets], np.array([case["epsilon"]]), cost=case["cost"], iterations=case["iterations"]
    )
    np.testing.assert_allclose(found, case["projected"], atol=5.1e-5)


@cases("target_bins")
def test_target_bins_match_golden_vectors(case):
    pair = (thing(case["pred"]), thing(case["gt"]))
    assert target_bins([pair], MatchOptions(**case["options"])) == [tuple(case["bins"])]


@cases("candidates")
def test_candidates_match_golden_vectors(case):
    found = candidate_pairs(np.array(case["pred"]), np.array(case["gt"]), case["top_k"])
    assert found.tolist() == case["pairs"]


@cases("match")
def test_match_results_equal_golden_vectors(case):
    found = match(
        [thing(one) for one in case["pred"]], [thing(one) for one in case["gt"]], MatchOptions(**case["options"])
    )
    assert [[pair.pred, pair.gt, round(pair.iou, 6)] for pair in found.pairs] == case["pairs"]
    for name in ("false_positives", "false_negatives"):
        assert list(getattr(found, name)) == case[name]
    assert found.gating_rejections == case["gating_rejections"]


@cases("parse")
def test_parsed_rollouts_match_golden_vectors(case):
    found = parse_rollout(ids_of(case["tokens"]), toy_vocab())
    assert list(map(toy_vocab().decode_piece, found.prefix_ids)) == case["prefix"]
    objects = [[one.key, one.reason, list(one.token_positions) if one.valid else []] for one in found.objects]
    assert objects == case["objects"]
    for name in ("prefix_text", "truncated", "clean", "max_object_index"):
        assert getattr(found, name) == case[name]


@cases("target")
def test_targets_match_golden_vectors(case):
    gt = GroundTruth(tuple(map(thing, case["gt"])))
    found = build_target(ids_of(case["tokens"]), gt, toy_vocab())
    assert list(map(toy_vocab().decode_piece, found.y_train_ids)) == case["y_train"]
    assert "".join(LETTERS[label] for label in found.labels) == case["labels"]
    assert sorted(map(list, found.coord_targets.items())) == case["coord_targets"]
    assert (found.prefix_len, found.append_text) == (case["prefix_len"], case["append_text"])


def segment(case):
    """Ids and meta data of a case of masks."""
    # 10000 + k stands for the coordinate token of bin k; ordinary ids are moved away from the coordinates' 0..999.
    ids = [one - 10000 if one >= 10000 else one + 1000 for one in case["input_ids"]]
    return ids, SegmentMeta(
        prompt_ids=tuple(one + 1000 for one in case["prompt_ids"]),
        prefix_len=case["prefix_len"],
        train_len=case["train_len"],
        end_of_turn_len=case["end_of_turn_len"],
        encoded_len=len(ids),
        prefix_coord_pos=tuple(case["prefix_coord_pos"]),
        prefix_coord_target_bins=tuple(case["prefix_coord_target_bins"]),
        tail_ignore_pos=tuple(case["tail_ignore_pos"]),
    )


def check_supervision(found, case):
    assert np.flatnonzero(found.labels != -100).tolist() == case["supervised"]
    coords = zip(found.coord_positions.tolist(), found.coord_targets.tolist(), strict=True)
    assert list(map(list, coords)) == case["coord"]


@cases("masks")
def test_supervision_masks_match_golden_vectors(case):
    ids, meta = segment(case)
    check_supervision(supervision(meta, ids, toy_vocab()), case)


@cases("packed_masks")
def test_packed_supervision_masks_match_golden_vectors(case):
    parts = [segment(golden()["masks"][k]) for k in case["segments"]]
    row = [one for ids, _ in parts for one in ids] + [1000] * case["padding"]
    check_supervision(packed_supervision([meta for _, meta in parts], row, toy_vocab()), case)
