"""Rules of runs that mix steps on the ground truth with steps on rollouts."""

from __future__ import annotations

from stage2_api.runconfig import RunConfig
from stage2_api.validation.rule import Rule

_MATCHING = "custom.extra.rollout_matching"
_SHARE = f"{_MATCHING}.supervised_share"
_BUFFER = f"{_MATCHING}.rollout_buffer"


def _mixes(config: RunConfig) -> bool:
    return config.rollout_matching.supervised_share > 0


MIXING_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path=_SHARE,
        broken=lambda c: c.is_supervised and _mixes(c),
        cel=f"$(custom.trainer_variant) != 'sft' || $({_SHARE}) == 0.0",
        rule="stage 1 trains on the ground truth in every step already",
        way_out="remove it, or set trainer_variant to rollout_matching_sft",
    ),
    Rule(
        path=_SHARE,
        broken=lambda c: _mixes(c) and c.rollout_matching.pipeline.enabled,
        cel=f"$({_SHARE}) == 0.0 || !$({_MATCHING}.pipeline.enabled)",
        rule="steps that make no rollouts leave nothing to make one step ahead",
        way_out="set supervised_share to 0, or pipeline.enabled to false",
    ),
    Rule(
        path=_SHARE,
        broken=lambda c: _mixes(c) and c.rollout_matching.rollout_buffer.reuses,
        cel=f"$({_SHARE}) == 0.0 || !$({_BUFFER}.enabled) || $({_BUFFER}.m_steps) == 1",
        rule="steps that train on kept rollouts are no steps of their own, so no share of steps can be kept",
        way_out="set supervised_share to 0, or rollout_buffer.enabled to false",
    ),
)
"""Rules of every training YAML that read `supervised_share`."""
