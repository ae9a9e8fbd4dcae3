"""A small RunConfig for tests of the learner."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from stage2_api.parsing import parse_run_config
from stage2_api.runconfig import RunConfig

SERVER = {"servers": [{"base_url": "http://127.0.0.1:1", "group_port": 2}]}


def write_box_records(path: Path, *images: object, boxes: int = 1) -> str:
    """Write a record of 96 by 96 pixels for each image, with a red box or none; return the file's name."""
    line = {"width": 96, "height": 96, "units": "bins"}
    objects = [{"desc": "red box", "bbox_2d": [100, 100, 400, 400]}] * boxes
    path.write_text("\n".join(json.dumps({"images": [str(one)], **line, "objects": objects}) for one in images))
    return str(path)


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
