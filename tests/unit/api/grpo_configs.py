"""A GRPO run with six rollout GPUs and two learner GPUs, as a base for tests."""

from __future__ import annotations

from typing import Any

from stage2_api.errors import Problem
from stage2_api.parsing import parse_job, parse_run_config
from tests.unit.api.wrong_jobs import patched, problems_of

GOOD: dict[str, Any] = {
    "model": {"model": "m"},
    "tuner": {"use_dora": True},
    "global_max_length": 8192,
    "training": {"output_dir": "out", "per_device_train_batch_size": 4, "effective_batch_size": 48},
    "rlhf": {
        "rlhf_type": "grpo",
        "use_vllm": True,
        "vllm_mode": "server",
        "vllm_server_host": ["127.0.0.1"],
        "vllm_server_port": [8080],
        "reward_funcs": ["summary.format", "summary.header"],
        "reward_weights": [1.0, 2.0],
        "num_generations": 4,
        "generation_batch_size": 48,
    },
    "custom": {
        "trainer_variant": "grpo",
        "train_jsonl": "train.jsonl",
        "use_summary": True,
        "assistant_prefix_format": "<DOMAIN={domain}>, <TASK={task}>",
        "grpo": {"summary": {"domains": [{"name": "BBU", "template": "summary_bbu"}]}},
        "extra": {
            "rollout_server": {"vllm_tensor_parallel_size": 1, "vllm_data_parallel_size": 6, "vllm_max_model_len": 8192}
        },
    },
}
GOOD_JOB: dict[str, Any] = {
    "apiVersion": "stage2.dev/v1alpha1",
    "kind": "RolloutMatchingJob",
    "metadata": {"name": "grpo"},
    "spec": {"rollout": {"servers": 1, "gpusPerServer": 6, "port": 8080}, "learner": {"gpus": 2}, "config": GOOD},
}
PLAN = {"enabled": True, "per_device_train_batch_size": 6, "unified_batch_size": 48}


def planned(**changes: object) -> dict[str, Any]:
    """The patch that makes the good run one with a batch plan, changed."""
    return {
        "training": {"per_device_train_batch_size": None, "effective_batch_size": None},
        "rlhf": {"generation_batch_size": None},
        "custom": {"grpo": {"batch_plan": {**PLAN, **changes}}},
    }


def server(**changes: object) -> dict[str, Any]:
    """The patch of the server's section."""
    return {"custom": {"extra": {"rollout_server": changes}}}


def run_problems(*patches: dict[str, Any]) -> tuple[Problem, ...]:
    """The problems of the good run after patches."""
    return problems_of(parse_run_config, patched(GOOD, *patches))


def job_problems(*patches: dict[str, Any]) -> tuple[Problem, ...]:
    """The problems of the good job after patches of its spec."""
    return problems_of(parse_job, patched(GOOD_JOB, *({"spec": patch} for patch in patches)))
