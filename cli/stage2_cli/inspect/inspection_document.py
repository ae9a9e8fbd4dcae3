"""The inspected sample as JSON. Its keys are a promise to machines; nothing here is computed a second time."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from stage2_trainer.matching import CoordVocab, MatchedTarget, segment_meta, supervision
from stage2_trainer.matching.masks import IGNORED
from stage2_trainer.matching.parsed_objects import KIND_OF_KEY, Kind, ParsedObject
from stage2_trainer.matching.targets import TokenLabel

KEY_OF_KIND: dict[Kind, str] = {kind: key for key, kind in KIND_OF_KEY.items()}
# Positions are told within `y_train`, so any prompt of one token does.
_PROMPT = (0,)


@dataclass(frozen=True)
class TokenSupervision:
    """The supervision of each token of `y_train_ids`: its label, and the bin where the label is `coord`."""

    labels: tuple[TokenLabel, ...]
    coord_targets: dict[int, int]


def token_supervision(target: MatchedTarget, vocab: CoordVocab) -> TokenSupervision:
    """What training makes of a target, by the masks that training uses; the end of turn is left out."""
    ids = (*_PROMPT, *target.y_train_ids)
    meta = segment_meta(target, _PROMPT, encoded_len=len(ids), end_of_turn_len=0)
    found = supervision(meta, ids, vocab)
    positions = found.coord_positions - len(_PROMPT)
    order = np.argsort(positions)
    targets = dict(zip(positions[order].tolist(), found.coord_targets[order].tolist(), strict=True))
    learnt = found.labels[len(_PROMPT) :] != IGNORED
    against = set(target.penalised_pos)
    labels: list[TokenLabel] = [
        "coord" if i in targets else "penalised" if i in against else "ce" if ce else "none"
        for i, ce in enumerate(learnt.tolist())
    ]
    return TokenSupervision(tuple(labels), targets)


def document(target: MatchedTarget, vocab: CoordVocab) -> dict[str, Any]:
    """The whole E-step of one answer, ready for `json.dumps`.

    `type` is the key of the geometry in a record, `bbox_2d` or `poly` (null where an object has none); coordinates are
    bins 0..999, x and y in turn; positions count tokens of the prefix, which are those of `y_train`.
    """
    parsed, supervised = target.parsed, token_supervision(target, vocab)
    return {
        "prefix_ids": list(target.y_train_ids[: target.prefix_len]),
        "prefix_text": target.prefix_text,
        "truncated": parsed.truncated,
        "objects": [_object(one) for one in parsed.objects],
        "ground_truth": [
            {"desc": one.desc, "type": KEY_OF_KIND[one.kind], "bins": list(one.bins)}
            for one in target.ground_truth.objects
        ],
        "matches": _matches(target),
        "gating_rejections": target.matching.gating_rejections,
        "false_negatives": list(target.false_negatives),
        "append_text": target.append_text,
        "y_train_ids": list(target.y_train_ids),
        "y_train_text": target.y_train_text,
        "labels": list(supervised.labels),
        "coord_targets": {str(position): taught for position, taught in supervised.coord_targets.items()},
    }


def _object(one: ParsedObject) -> dict[str, Any]:
    return {
        "key": one.key,
        "valid": one.valid,
        "reason": one.reason,
        "desc": one.desc,
        "type": KEY_OF_KIND[one.kind] if one.kind else None,
        "bins": list(one.bins),
        "token_positions": list(one.token_positions),
    }


def _matches(target: MatchedTarget) -> list[dict[str, Any]]:
    pred = target.parsed.valid_objects
    return [
        {"pred": pred[pair.pred].key, "gt": pair.gt, "iou": pair.iou, "cost": pair.cost}
        for pair in target.matching.pairs
    ]
