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

    Each is described at the key of its name in `stage2_api.rollout_matching`; `recovery_weight` is `recovery.weight`.
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
