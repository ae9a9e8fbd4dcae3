"""Rules of training variants: stage 1, trained rows of coordinate tokens, supervised shares."""

from __future__ import annotations

from stage2_api.runconfig import RunConfig
from stage2_api.validation.validate import Rule

_MATCHING = "custom.extra.rollout_matching"
_SHARE = f"{_MATCHING}.supervised_share"
_BUFFER = f"{_MATCHING}.rollout_buffer"
_SYNC_MODE = f"{_MATCHING}.vllm.sync.mode"
_STAGE_2 = "$(custom.trainer_variant) != 'sft'"
_TABLES = ("embed_tokens", "lm_head")


def _trains_tables_twice(config: RunConfig) -> bool:
    tuner = config.tuner
    return tuner.train_coord_rows and any(name.rpartition(".")[2] in _TABLES for name in tuner.modules_to_save)


VARIANT_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path=f"{_MATCHING}.pipeline.enabled",
        cel=f"{_STAGE_2} || !$({_MATCHING}.pipeline.enabled)",
        rule="stage 1 trains on the ground truth: there are no rollouts to make ahead",
        way_out="set pipeline.enabled to false",
    ),
    Rule(
        path=f"{_MATCHING}.rollout_buffer.enabled",
        cel=f"{_STAGE_2} || !$({_MATCHING}.rollout_buffer.enabled) || $({_MATCHING}.rollout_buffer.m_steps) == 1",
        rule="stage 1 trains on the ground truth: there are no rollouts to reuse",
        way_out="set rollout_buffer.enabled to false",
    ),
    Rule(
        path="custom.object_ordering",
        cel=f"$(custom.object_ordering) != 'shuffled' || !({_STAGE_2})",
        rule="stage 2 appends missed objects in the order of the record",
        way_out="set object_ordering to sorted, or trainer_variant to sft",
    ),
    Rule(
        path="tuner.train_coord_rows",
        cel="!$(tuner.train_coord_rows) || $(tuner.train_type) == 'lora'",
        rule="full training already trains every row of the embeddings",
        way_out="set tuner.train_coord_rows to false, or tuner.train_type to lora",
    ),
    Rule(
        path="tuner.train_coord_rows",
        cel="!$(tuner.train_coord_rows) || !$(tuner.freeze_llm)",
        rule="the embeddings belong to the language model, which freeze_llm freezes",
        way_out="set tuner.freeze_llm or tuner.train_coord_rows to false",
    ),
    Rule(
        path="tuner.train_coord_rows",
        breaks=_trains_tables_twice,
        reads=("tuner.modules_to_save",),
        # Not in CEL: modules are named by their last part.
        rule="modules_to_save already trains the whole table",
        way_out="remove embed_tokens and lm_head from tuner.modules_to_save, or set tuner.train_coord_rows to false",
    ),
    Rule(
        path=_SYNC_MODE,
        cel=f"!$(tuner.train_coord_rows) || $({_SYNC_MODE}) != 'adapter'",
        rule="an adapter in vLLM cannot hold rows of the vocabulary (tuner.train_coord_rows)",
        way_out="set vllm.sync.mode to full, or tuner.train_coord_rows to false",
    ),
    Rule(
        path=_SHARE,
        cel=f"{_STAGE_2} || $({_SHARE}) == 0.0",
        rule="stage 1 already trains on the ground truth in every step",
        way_out="remove it, or set trainer_variant to rollout_matching_sft",
    ),
    Rule(
        path=_SHARE,
        cel=f"$({_SHARE}) == 0.0 || !$({_MATCHING}.pipeline.enabled)",
        rule="steps without rollouts leave nothing to make one step ahead",
        way_out="set supervised_share to 0, or pipeline.enabled to false",
    ),
    Rule(
        path=_SHARE,
        cel=f"$({_SHARE}) == 0.0 || !$({_BUFFER}.enabled) || $({_BUFFER}.m_steps) == 1",
        rule="reused rollouts make several steps of one window, so no share of steps can be kept",
        way_out="set supervised_share to 0, or rollout_buffer.enabled to false",
    ),
)
"""Rules of the training variants, for every training YAML."""
