"""Listeners of matched rollouts: they write the rollout log, the run's log, and trackers' tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from stage2_trainer.learner.supervise import Matched
from stage2_trainer.matching import Pair
from stage2_trainer.rollouts.replay import ids_sha256
from stage2_trainer.scores.scored_image import UNJUDGED_KEYS
from stage2_trainer.telemetry.answer_tables import AnswerTables, HeldOutAnswer
from stage2_trainer.telemetry.run_log import EventLog, JsonLines
from stage2_trainer.telemetry.timeline import TIMELINE

EVALUATION_SAMPLES = 8  # rollouts of each evaluation in the run's log; enough for a picture
OnMatched = Callable[[int, Sequence[Matched]], None]
"""Receives an optimizer step and the rollouts of that step."""


def log_training_rollouts(rollout_log: JsonLines) -> OnMatched:
    """Return a listener that writes each training rollout to the rollout log."""

    def note(step: int, matched: Sequence[Matched]) -> None:
        with TIMELINE.measure("log"):
            for one in matched:
                rollout_log.write({"event": "rollout", "part": "train", "step": step, **rollout_document(one)})

    return note


def log_held_out_rollouts(log: EventLog, rollout_log: JsonLines, tables: AnswerTables) -> OnMatched:
    """Return a listener that writes each held-out rollout to the rollout log, and a few to the run's log and tables."""

    def note(step: int, matched: Sequence[Matched]) -> None:
        for one in matched:
            rollout_log.write({"event": "rollout", "part": "held-out", "step": step, **rollout_document(one)})
        for one in matched[:EVALUATION_SAMPLES]:
            log.write("evaluation_sample", {"step": step, **sample_document(one)})
        tables(step, [HeldOutAnswer(one.record, one.rollout.text, one.rollout.finish_reason) for one in matched])

    return note


def rollout_document(matched: Matched) -> dict[str, Any]:
    """Return one rollout with all that `replay` needs to rebuild its training target, and the hash of that target."""
    rollout = matched.rollout
    return {
        **sample_document(matched),
        **matched.origin,
        "seed": rollout.seed,
        "seconds": rollout.seconds,
        "token_ids": rollout.token_ids,
        **({} if matched.kept is None else {"kept_tokens": matched.kept}),
        **({"skipped": True} if matched.skipped else {}),
        "prompt_tokens": len(rollout.prompt_token_ids),
        "y_train_tokens": matched.target.train_len,
        "y_train_sha256": ids_sha256(matched.target.y_train_ids),
    }


def sample_document(matched: Matched) -> dict[str, Any]:
    """Return one rollout with its record's ground truth; coordinates in bins 0..999, x and y in turn."""
    record, rollout, target = matched.record, matched.rollout, matched.target
    found = {pair.pred for pair in target.matching.pairs}
    unjudged = {key: record.metadata[key] for key in UNJUDGED_KEYS if key in record.metadata}
    return {
        "sample_id": record.sample_id,
        "record_index": record.index,
        "width": record.width,
        "height": record.height,
        **({"metadata": unjudged} if unjudged else {}),
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
        "pairs": _pairs(target.matching.pairs),
        "following": _pairs(target.matching.following),
    }


def _pairs(pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    return [{"prediction": one.pred, "ground_truth": one.gt, "iou": round(one.iou, 4)} for one in pairs]
