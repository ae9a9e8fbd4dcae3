"""The options of matching, as one plain value. Source: semantics, sections 3 and 4.5; defaults: stage2_api."""

from __future__ import annotations

from dataclasses import dataclass, fields

from stage2_api.rollout_matching import (
    MaskIouMode,
    MissedPlace,
    OtBboxTarget,
    OtCost,
    OtEpsilonMode,
    RolloutMatching,
    UnmatchedObjects,
)

_CONFIG = RolloutMatching()


@dataclass(frozen=True)
class MatchOptions:
    """The options of matching predicted objects to ground truth, and of supervising them.

    candidate_top_k: ground-truth objects compared with each prediction.
    maskiou_gate: smallest mask IoU of a match; equal passes.
    maskiou_resolution: side R of the canvas in pixels; at most 0 makes every IoU 0.
    maskiou_scales: sides of the cells of coarser grids, in pixels of the canvas; gate and cost then take the mean of
    IoU over the canvas and these (`geometry.iou_of_scales`).
    fp_cost, fn_cost: costs of leaving a prediction or a true object unmatched; a match costs 1 - IoU.
    ot_cost, ot_epsilon, ot_iters: ground distance, entropic regularisation and Sinkhorn rounds of polygon transport.
    maskiou_mode: `canvas` draws everything on the canvas; `analytic` computes box against box exactly and draws the
    rest; `supersample` is `analytic`, and stretches the canvas over each other pair, so that no shape is too small.
    ot_epsilon_mode: `bins` takes `ot_epsilon` in bins; `relative` takes it in thousandths of the true object's
    diagonal, so that small polygons do not learn to shrink.
    ot_bbox_target: what a predicted box learns from a polygon: the box of its transported corners (`barycentric`), or
    the polygon's own bounding box (`aabb`).
    missed_desc_weight: factor of the cross entropy of missed objects' descriptions; 0 leaves them out.
    missed_place: where missed objects are taught: after the prefix (`tail`), before the objects that follow them in the
    record (`sorted`), or at random places among the others (`shuffled`).
    duplicate_iou: IoU of boxes from which an object is a duplicate of an earlier one of its description, and removed;
    None keeps all.
    unmatched_objects: unmatched ones stay without a loss (`neutral`), are removed (`dropped`), or stay, and the token
    that led to each is taught against with `unmatched_weight` (`penalised`).
    recovery_weight: factor of the loss of missed objects that a further answer to the prompt found.
    """

    candidate_top_k: int = _CONFIG.candidate_top_k
    maskiou_gate: float = _CONFIG.maskiou_gate
    maskiou_resolution: int = _CONFIG.maskiou_resolution
    fp_cost: float = _CONFIG.fp_cost
    fn_cost: float = _CONFIG.fn_cost
    ot_cost: OtCost = _CONFIG.ot_cost
    ot_epsilon: float = _CONFIG.ot_epsilon
    ot_iters: int = _CONFIG.ot_iters
    maskiou_mode: MaskIouMode = _CONFIG.maskiou_mode
    ot_epsilon_mode: OtEpsilonMode = _CONFIG.ot_epsilon_mode
    ot_bbox_target: OtBboxTarget = _CONFIG.ot_bbox_target
    missed_desc_weight: float = _CONFIG.missed_desc_weight
    missed_place: MissedPlace = _CONFIG.missed_place
    duplicate_iou: float | None = _CONFIG.duplicate_iou
    unmatched_objects: UnmatchedObjects = _CONFIG.unmatched_objects
    unmatched_weight: float = _CONFIG.unmatched_weight
    maskiou_scales: tuple[int, ...] = tuple(_CONFIG.maskiou_scales)
    recovery_weight: float = _CONFIG.recovery.weight

    def __post_init__(self) -> None:
        """Convert the list of a configuration, or of a run's record, to a tuple."""
        object.__setattr__(self, "maskiou_scales", tuple(self.maskiou_scales))

    @classmethod
    def from_config(cls, rollout_matching: RolloutMatching) -> MatchOptions:
        """Return the options of `custom.extra.rollout_matching`."""
        own = {name: getattr(rollout_matching, name) for name in _NAMES}
        return cls(**own, recovery_weight=rollout_matching.recovery.weight)


_NAMES = [field.name for field in fields(MatchOptions) if field.name != "recovery_weight"]
DEFAULTS = MatchOptions()
