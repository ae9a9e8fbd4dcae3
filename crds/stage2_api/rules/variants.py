"""Rules of variants of what a rollout teaches: what they are matched by, and what recovers missed objects."""

from __future__ import annotations

from stage2_api.runconfig import RunConfig
from stage2_api.validation.rule import Rule

_MATCHING = "custom.extra.rollout_matching"
_SCALES = f"{_MATCHING}.maskiou_scales"
_ROLLOUTS = f"{_MATCHING}.recovery.rollouts"
_PROTOCOL = f"{_MATCHING}.vllm.server.protocol"


def _asks_again(config: RunConfig) -> bool:
    return config.rollout_matching.recovery.rollouts > 1


def _too_coarse(config: RunConfig) -> bool:
    matching = config.rollout_matching
    return any(2 * side > matching.maskiou_resolution for side in matching.maskiou_scales)


VARIANT_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path=_SCALES,
        broken=lambda c: bool(c.rollout_matching.maskiou_scales) and c.rollout_matching.maskiou_mode != "canvas",
        cel=f"$({_SCALES}).size() == 0 || $({_MATCHING}.maskiou_mode) == 'canvas'",
        rule="coarser grids are laid over the one canvas of the whole image, which analytic and supersample do without",
        way_out="set maskiou_mode to canvas, or remove maskiou_scales",
    ),
    Rule(
        path=_SCALES,
        broken=_too_coarse,
        reads=(f"{_MATCHING}.maskiou_resolution",),
        cel=None,  # a look at each item of a list that may be missing costs more than the API server allows
        rule="a grid needs at least two cells a side, and the canvas has maskiou_resolution pixels",
        way_out="remove the largest cells from maskiou_scales, or raise maskiou_resolution",
    ),
    Rule(
        path=_SCALES,
        broken=lambda c: len(set(c.rollout_matching.maskiou_scales)) < len(c.rollout_matching.maskiou_scales),
        cel=None,  # the same
        rule="a grid that stands twice would count twice",
        way_out="name each side of cells once",
    ),
    Rule(
        path=_ROLLOUTS,
        broken=lambda c: c.is_supervised and _asks_again(c),
        cel=f"$(custom.trainer_variant) != 'sft' || $({_ROLLOUTS}) == 1",
        rule="stage 1 trains on the ground truth: it misses nothing that another rollout could find",
        way_out="remove recovery, or set trainer_variant to rollout_matching_sft",
    ),
    Rule(
        path=_ROLLOUTS,
        broken=lambda c: _asks_again(c) and c.rollout_matching.vllm.server.protocol == "swift",
        cel=f"$({_ROLLOUTS}) == 1 || $({_PROTOCOL}) != 'swift'",
        rule="servers of `swift rollout` are asked for one answer to a prompt, all with one temperature",
        way_out="set recovery.rollouts to 1, or ask servers that `stage2 serve` starts (vllm.server.protocol: vllm)",
    ),
)
"""Rules of every training YAML that read variants of section 20."""
