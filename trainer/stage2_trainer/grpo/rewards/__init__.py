"""Rewards: pure functions of an answer and its record."""

from stage2_trainer.grpo.rewards.registry import Reward, Scores, load_rewards, score
from stage2_trainer.grpo.rewards.sample import Contract, Sample

__all__ = ["Contract", "Reward", "Sample", "Scores", "load_rewards", "score"]
