"""Workarounds for TRL 1.16, each with its upstream thread and the condition under which it can go.

`GRPOTrainer` is taken from here, so that no process imports it without them.
"""

from __future__ import annotations

from trl import import_utils


def _is_vllm_available(*_: object, **__: object) -> bool:
    return False


# TRL imports vLLM with its trainers wherever vLLM is installed (generation/vllm_client.py), which takes 10 CPU seconds
# in each process of a learner; ours asks its rollout servers itself. It also warns that it does not know this vLLM. No
# upstream issue found. Goes when TRL imports vLLM only where `use_vllm` is set.
import_utils.is_vllm_available = _is_vllm_available

from trl.trainer.grpo_trainer import GRPOTrainer  # noqa: E402

__all__ = ["GRPOTrainer"]
