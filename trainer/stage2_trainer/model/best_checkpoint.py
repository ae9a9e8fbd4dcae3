"""The best checkpoint of a run: scores are compared only with scores of the same figure.

A run may resume with another `training.metric_for_best_model`, or with a version of stage2 that counts another thing
under the same name. A checkpoint records the best score, but not what it is a score of; its log of evaluations does.
"""

from __future__ import annotations

import logging
from typing import Any

logger = logging.getLogger(__name__)

EVALUATION = "eval_"
FOLLOWING = "eval_rollout_following"
"""A figure of every evaluation since boxes that follow a true one no longer count as found."""
COUNTED_FOLLOWING = frozenset(
    f"eval_rollout_{name}"
    for name in (
        "precision", "recall", "f1", "recall_iou50", "f1_iou50", "matched", "fp", "fn", "sample_any_match_rate",
    )
)  # fmt: skip
"""Figures that counted such boxes as found in evaluations without `FOLLOWING`."""


def metric_key(args: Any) -> str | None:
    """Return the key of `metric_for_best_model` in an evaluation; None where no checkpoint is the best."""
    name: str | None = args.metric_for_best_model
    return None if name is None else f"{EVALUATION}{name.removeprefix(EVALUATION)}"


def forget_other_figure(args: Any, state: Any) -> None:
    """Forget the best score of a resumed run, with a warning, if it is no score of the figure that chooses now."""
    key, score, step = metric_key(args), state.best_metric, state.best_global_step
    if key is None or score is None or _is_score(state, key):
        return
    state.best_metric = state.best_global_step = state.best_model_checkpoint = None
    if step is not None and state.is_world_process_zero:
        logger.warning(
            "training.metric_for_best_model: the best score so far, %.4g at step %d, is not one of %s as it is"
            " counted now, so the two cannot be compared; the best checkpoint is chosen anew from here on",
            score,
            step,
            key,
        )


def _is_score(state: Any, key: str) -> bool:
    evaluations = (one for one in state.log_history if one.get("step") == state.best_global_step)
    counted_following = key in COUNTED_FOLLOWING
    return any(one.get(key) == state.best_metric and (FOLLOWING in one or not counted_following) for one in evaluations)
