"""Rollouts as JSON, for people, pictures and reports: prompt, answer, matches and misses."""

from __future__ import annotations

from typing import Any

from stage2_trainer.data.records import Record
from stage2_trainer.learner.supervise import Matched
from stage2_trainer.rollouts.replay import ids_sha256
from stage2_trainer.scores.scored_image import UNJUDGED_KEYS


def rollout_document(matched: Matched) -> dict[str, Any]:
    """Return one rollout with all that `replay` needs to rebuild its training target, and the hash of that target."""
    rollout = matched.rollout
    return {
        **sample_document(matched),
        **matched.origin,
        "seed": rollout.seed,
        "seconds": rollout.seconds,
        "token_ids": rollout.token_ids,
        **_overlong(matched),
        **_recovery(matched),
        "prompt_tokens": len(rollout.prompt_token_ids),
        "y_train_tokens": matched.target.train_len,
        "y_train_sha256": ids_sha256(matched.target.y_train_ids),
    }


def _overlong(matched: Matched) -> dict[str, Any]:
    """Return the fields of an answer that was too long for a packed row; none for any other."""
    cut = {} if matched.kept is None else {"kept_tokens": matched.kept}
    return {**cut, "skipped": True} if matched.skipped else cut


def _recovery(matched: Matched) -> dict[str, Any]:
    """Return the further answers to the prompt and the misses that they recovered, where there are any."""
    further = [list(ids) for ids in matched.rollout.further]
    return {"further_token_ids": further, "recovered": list(matched.target.recovered)} if further else {}


def _unjudged(record: Record) -> dict[str, Any]:
    """Return the part of a record's metadata that its scores need, where it has any."""
    found = {key: record.metadata[key] for key in UNJUDGED_KEYS if key in record.metadata}
    return {"metadata": found} if found else {}


def sample_document(matched: Matched) -> dict[str, Any]:
    """Return one rollout with its record's ground truth; coordinates in bins 0..999, x and y in turn."""
    record, rollout, target = matched.record, matched.rollout, matched.target
    found = {pair.pred for pair in target.matching.pairs}
    return {
        "sample_id": record.sample_id,
        "record_index": record.index,
        "width": record.width,
        "height": record.height,
        **_unjudged(record),
        "image": next((source for source in record.images if not source.startswith("data:")), None),
        "server": rollout.server,
        "version": rollout.version,
        "finish_reason": rollout.finish_reason,
        "text": rollout.text,
        "dropped": target.parsed.dropped,
        "ground_truth": [
            {"desc": one.desc, "kind": one.kind, "bins": list(one.bins)} for one in target.ground_truth.objects
        ],
        "predictions": [
            {"desc": one.desc, "kind": one.kind, "bins": list(one.bins), "matched": i in found}
            for i, one in enumerate(target.parsed.valid_objects)
        ],
        "pairs": [{"prediction": p.pred, "ground_truth": p.gt, "iou": round(p.iou, 4)} for p in target.matching.pairs],
    }
