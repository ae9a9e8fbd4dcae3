"""Rules of stage 1 (`custom.trainer_variant: sft`), and of the rows of coordinate tokens that it trains."""

from __future__ import annotations

from stage2_api.runconfig import RunConfig
from stage2_api.validation.rule import Rule

_MATCHING = "custom.extra.rollout_matching"
_SYNC_MODE = f"{_MATCHING}.vllm.sync.mode"
_STAGE_2 = "$(custom.trainer_variant) != 'sft'"
_TABLES = ("embed_tokens", "lm_head")


def _trains_tables_twice(config: RunConfig) -> bool:
    tuner = config.tuner
    return tuner.train_coord_rows and any(name.rpartition(".")[2] in _TABLES for name in tuner.modules_to_save)


SUPERVISED_RULES: tuple[Rule[RunConfig], ...] = (
    Rule(
        path=f"{_MATCHING}.pipeline.enabled",
        broken=lambda c: c.is_supervised and c.rollout_matching.pipeline.enabled,
        cel=f"{_STAGE_2} || !$({_MATCHING}.pipeline.enabled)",
        rule="stage 1 trains on the ground truth: there are no rollouts to make ahead",
        way_out="set pipeline.enabled to false",
    ),
    Rule(
        path=f"{_MATCHING}.rollout_buffer.enabled",
        broken=lambda c: c.is_supervised and c.rollout_matching.rollout_buffer.reuses,
        cel=f"{_STAGE_2} || !$({_MATCHING}.rollout_buffer.enabled) || $({_MATCHING}.rollout_buffer.m_steps) == 1",
        rule="stage 1 trains on the ground truth: there are no rollouts to use again",
        way_out="set rollout_buffer.enabled to false",
    ),
    Rule(
        path="custom.object_ordering",
        broken=lambda c: c.custom.object_ordering == "shuffled" and not c.is_supervised,
        cel=f"$(custom.object_ordering) != 'shuffled' || !({_STAGE_2})",
        rule="stage 2 appends what an answer missed in the order of the record",
        way_out="set object_ordering to sorted, or trainer_variant to sft",
    ),
    Rule(
        path="tuner.train_coord_rows",
        broken=lambda c: c.tuner.train_coord_rows and c.tuner.train_type != "lora",
        cel="!$(tuner.train_coord_rows) || $(tuner.train_type) == 'lora'",
        rule="training in full trains every row of the tables already",
        way_out="set tuner.train_coord_rows to false, or tuner.train_type to lora",
    ),
    Rule(
        path="tuner.train_coord_rows",
        broken=lambda c: c.tuner.train_coord_rows and c.tuner.freeze_llm,
        cel="!$(tuner.train_coord_rows) || !$(tuner.freeze_llm)",
        rule="the tables belong to the language model, which freeze_llm leaves as it is",
        way_out="set tuner.freeze_llm or tuner.train_coord_rows to false",
    ),
    Rule(
        path="tuner.train_coord_rows",
        broken=_trains_tables_twice,
        reads=("tuner.modules_to_save",),
        cel=None,  # names count by their ends, in a list
        rule="modules_to_save trains the whole table already",
        way_out="take embed_tokens and lm_head out of tuner.modules_to_save, or set tuner.train_coord_rows to false",
    ),
    Rule(
        path=_SYNC_MODE,
        broken=lambda c: c.tuner.train_coord_rows and c.rollout_matching.vllm.sync.mode == "adapter",
        cel=f"!$(tuner.train_coord_rows) || $({_SYNC_MODE}) != 'adapter'",
        rule="an adapter that vLLM loads cannot hold rows of the vocabulary (tuner.train_coord_rows)",
        way_out="set vllm.sync.mode to full, or tuner.train_coord_rows to false",
    ),
)
"""Rules of every training YAML that read `custom.trainer_variant: sft` or `tuner.train_coord_rows`."""
