"""The rules of every training YAML about GRPO, in the order in which they are told."""

from __future__ import annotations

from stage2_api.rules.grpo_batches import BATCH_RULES
from stage2_api.rules.grpo_mode import MODE_RULES
from stage2_api.rules.grpo_rewards import REWARD_RULES
from stage2_api.rules.grpo_server import SERVER_RULES
from stage2_api.runconfig import RunConfig
from stage2_api.validation.rule import Rule

GRPO_RULES: tuple[Rule[RunConfig], ...] = (*MODE_RULES, *SERVER_RULES, *REWARD_RULES, *BATCH_RULES)
"""Rules of every training YAML about GRPO."""
