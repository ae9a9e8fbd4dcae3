"""The arms of the comparison, as training YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = dict[str, Any]

PROMPT = "List the digits."
PIXELS = 96 * 96  # of each image, as the tiny model knows them
ROW = 600
ANSWER = 128
RECIPE: Mapping[str, Any] = {
    "supervised_share": 0.5,
    "missed_desc_weight": 1.0,
    "duplicate_iou": 0.9,
    "unmatched_objects": "penalised",
}


@dataclass(frozen=True)
class Arm:
    """One way to train on. what: for the table. variant: trainer. matching: keys of `rollout_matching` it sets."""

    what: str
    variant: str
    matching: Mapping[str, Any]


ARMS: Mapping[str, Arm] = {
    "a": Arm("stage 1 continued", "sft", {}),
    "b": Arm("stage 2", "rollout_matching_sft", {}),
    "c": Arm("stage 2, recipe", "rollout_matching_sft", RECIPE),
}
BASELINE = "a"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the comparison.

    steps: optimizer steps of an arm; stage1_steps: before it. batch: images of a step. train, held_out: images of the
    data. rate, stage1_rate: peak learning rates.
    """

    steps: int = 120
    stage1_steps: int = 1000
    batch: int = 16
    train: int = 4000
    held_out: int = 400
    rate: float = 3e-4
    stage1_rate: float = 1.5e-3


def stage1_config(sizes: Sizes, model: Path, data: Path, output: Path) -> Config:
    """Return the run that makes the checkpoint from which all arms start."""
    found = _config(sizes, model, data, output, seed=17)
    found["training"] |= {"max_steps": sizes.stage1_steps, "learning_rate": sizes.stage1_rate, "save_steps": 100}
    found["custom"]["trainer_variant"] = "sft"
    return found


def arm_config(arm: Arm, seed: int, sizes: Sizes, model: Path, data: Path, output: Path) -> Config:
    """Return the run of an arm with a seed; it is evaluated before its first step and after its last."""
    found = _config(sizes, model, data, output, seed=seed)
    found["training"] |= {
        "max_steps": sizes.steps,
        "learning_rate": sizes.rate,
        "save_steps": sizes.steps,
        "eval_strategy": "steps",
        "eval_steps": sizes.steps,
        "per_device_eval_batch_size": 32,
    }
    custom = found["custom"]
    custom |= {"trainer_variant": arm.variant, "val_jsonl": str(data / "val.jsonl"), "val_sample_limit": sizes.held_out}
    custom["extra"]["rollout_matching"] |= arm.matching
    return found


def _config(sizes: Sizes, model: Path, data: Path, output: Path, *, seed: int) -> Config:
    return {
        "global_max_length": ROW,
        "model": {"model": str(model), "torch_dtype": "float32"},
        "template": {"min_pixels": PIXELS, "max_pixels": PIXELS},
        "tuner": {"train_type": "full", "freeze_vit": False, "freeze_aligner": False},
        "training": {
            "output_dir": str(output),
            "per_device_train_batch_size": sizes.batch,
            "effective_batch_size": sizes.batch,
            "warmup_ratio": 0.05,
            "lr_scheduler_type": "cosine",
            "gradient_checkpointing": False,
            "seed": seed,
            "save_strategy": "steps",
            "save_total_limit": 1,
            "dataloader_drop_last": True,
            "packing": True,
        },
        "custom": {
            "train_jsonl": str(data / "train.jsonl"),
            "user_prompt": PROMPT,
            "extra": {
                "rollout_matching": {
                    "rollout_backend": "hf",
                    "rollout_generate_batch_size": 32,
                    "max_new_tokens": ANSWER,
                    "target_sigma": 8.0,
                    "post_rollout_pack_scope": "step",
                }
            },
        },
    }
