"""Rules of what a GRPO run is rewarded for, and of the supervised loss that is mixed in.

Source: semantics sections 15.1 and 15.4.
"""

from __future__ import annotations

from stage2_api.runconfig import RunConfig
from stage2_api.validation.rule import Rule

_CHORD = "custom.grpo.chord"
_CHORD_KEYS = (
    "sft_per_device_train_batch_size", "mu_warmup_steps", "mu_decay_steps", "mu_peak", "mu_valley",
    "enable_phi_function",
)  # fmt: skip


def _weights_do_not_pair(config: RunConfig) -> bool:
    rlhf = config.rlhf
    return rlhf is not None and rlhf.reward_weights is not None and len(rlhf.reward_weights) != len(rlhf.reward_funcs)


def _repeats_a_reward(config: RunConfig) -> bool:
    return config.rlhf is not None and len(set(config.rlhf.reward_funcs)) < len(config.rlhf.reward_funcs)


def _scores_summaries(config: RunConfig) -> bool:
    return config.rlhf is not None and any(name.startswith("summary.") for name in config.rlhf.reward_funcs)


def _chord_lacks(config: RunConfig) -> bool:
    chord = config.custom.grpo.chord
    return chord.enabled and any(getattr(chord, name) is None for name in _CHORD_KEYS)


REWARD_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path="rlhf.reward_weights",
        broken=_weights_do_not_pair,
        reads=("rlhf.reward_funcs",),
        cel="!$?(rlhf.reward_weights) || $(rlhf.reward_weights, []).size() == $(rlhf.reward_funcs, []).size()",
        rule="must be as long as rlhf.reward_funcs: one weight for each reward",
        way_out="add or remove weights",
    ),
    Rule(
        path="rlhf.reward_funcs",
        broken=_repeats_a_reward,
        cel=None,
        rule="every reward counts once",
        way_out="remove the one that stands twice, and raise the other's weight",
    ),
    Rule(
        path="custom.grpo.summary",
        broken=lambda c: _scores_summaries(c) and c.custom.grpo.summary is None,
        reads=("rlhf.reward_funcs",),
        cel=None,
        rule="rewards named summary.* score against the contract of summaries",
        way_out="write the section, or take other rewards",
    ),
    Rule(
        path="custom.use_summary",
        broken=lambda c: _scores_summaries(c) and not c.custom.use_summary,
        reads=("rlhf.reward_funcs",),
        cel=None,
        rule="rewards named summary.* need records with summaries",
        way_out="set it to true, or take other rewards",
    ),
    Rule(
        path="custom.assistant_prefix_format",
        broken=lambda c: _scores_summaries(c) and not c.custom.assistant_prefix_format,
        reads=("rlhf.reward_funcs",),
        cel=None,
        rule="rewards named summary.* need to know the header line",
        way_out='set it, such as "<DOMAIN={domain}>, <TASK={task}>"',
    ),
    Rule(
        path=_CHORD,
        broken=_chord_lacks,
        reads=tuple(f"{_CHORD}.{name}" for name in ("enabled", *_CHORD_KEYS)),
        cel=None,
        rule=f"needs all of {', '.join(_CHORD_KEYS)} when it is enabled",
        way_out="set those that are missing, or enabled to false",
    ),
)
"""Rules of rewards, of summaries and of CHORD."""
