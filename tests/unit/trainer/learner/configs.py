"""A small RunConfig for tests of the learner."""

from __future__ import annotations

from typing import Any

from stage2_api.parsing import parse_run_config
from stage2_api.runconfig import RunConfig

SERVER = {"servers": [{"base_url": "http://127.0.0.1:1", "group_port": 2}]}


def run_config(
    *,
    matching: dict[str, Any] | None = None,
    training: dict[str, Any] | None = None,
    train_jsonl: str = "train.jsonl",
    **top: Any,
) -> RunConfig:
    """Return a configuration in server mode; `matching` and `training` override keys, `top` whole sections."""
    rollout_matching = {"vllm": {"mode": "server", "server": SERVER}, **(matching or {})}
    return parse_run_config(
        {
            "model": {"model": "model"},
            "training": {"output_dir": "out", **(training or {})},
            "custom": {
                "train_jsonl": train_jsonl,
                "val_jsonl": train_jsonl,
                "extra": {"rollout_matching": rollout_matching},
            },
            **top,
        }
    )
