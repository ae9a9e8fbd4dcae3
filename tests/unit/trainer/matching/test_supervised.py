"""The target of stage 1 is the ground truth's own text, and every part of it is taught in its own way."""

from __future__ import annotations

import json

import numpy as np
import pytest

from stage2_trainer.matching import (
    GroundTruth,
    GTObject,
    ground_truth_target,
    segment_meta,
    serialize_objects,
    supervision,
)

PROMPT = [1, 2, 3]
CAT = GTObject('cat "é" 猫', "bbox", (10, 20, 300, 999))
DOG = GTObject("dog", "poly", (1, 2, 30, 4, 50, 600))
TRUTHS = [(), (CAT,), (CAT, DOG), (DOG, CAT, DOG)]


def supervised(objects, vocab, *, plain=False):
    target = ground_truth_target(GroundTruth(tuple(objects)), vocab)
    ids = [*PROMPT, *target.y_train_ids, 4]
    meta = segment_meta(target, PROMPT, encoded_len=len(ids), plain_coords=plain)
    return target, np.asarray(ids), supervision(meta, ids, vocab)


@pytest.mark.parametrize("objects", TRUTHS)
def test_stage_1_target_is_whole_serialized_ground_truth(objects, vocab):
    target, _, _ = supervised(objects, vocab)
    assert target.y_train_text == serialize_objects(objects)
    assert len(json.loads(target.y_train_text)) == len(objects)
    assert target.prefix_len == 0
    assert list(target.y_train_ids) == vocab.encode(target.y_train_text)


@pytest.mark.parametrize("objects", TRUTHS)
def test_each_stage_1_token_is_supervised_once(objects, vocab):
    """Structure and descriptions by cross entropy, coordinates by their bins."""
    _, ids, found = supervised(objects, vocab)
    ordinary = np.flatnonzero(found.labels >= 0)
    assert sorted([*ordinary, *found.coord_positions]) == list(range(len(PROMPT), len(ids)))
    assert (found.labels[ordinary] == ids[ordinary]).all()
    assert found.coord_targets.tolist() == [k for one in objects for k in one.bins]
    assert not found.coord_in_prefix.any()


@pytest.mark.parametrize("objects", TRUTHS)
def test_without_coordinate_loss_coordinates_are_ordinary_tokens(objects, vocab):
    _, ids, found = supervised(objects, vocab, plain=True)
    assert (found.labels[len(PROMPT) :] == ids[len(PROMPT) :]).all()
    assert len(found.coord_positions) == 0


def test_coordinate_token_within_description_is_not_supervised(vocab):
    _, ids, found = supervised([GTObject("a <|coord_7|> sign", "bbox", (1, 2, 3, 4))], vocab)
    assert found.coord_targets.tolist() == [1, 2, 3, 4]
    (silent,) = [at for at in range(len(PROMPT), len(ids)) if found.labels[at] < 0 and at not in found.coord_positions]
    assert vocab.bin_of(int(ids[silent])) == 7
