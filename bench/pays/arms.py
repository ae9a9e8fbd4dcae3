"""The arms of the comparison, as training YAML."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Config = dict[str, Any]

PROMPT = "List the digits."
PIXELS = 32 * 32, 64 * 64  # least and most of an image
ROW = 600
ANSWER = 64
COORDINATE_WEIGHT = 0.1  # of their losses, in all arms: at 1 names are a fifteenth of a small part, and fade
GROUP = 4  # answers to an image in GRPO
_COORDINATE_WEIGHTS = ("soft_ce_weight", "w1_weight", "gate_weight")
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
    "d": Arm("GRPO, F1 as reward", "grpo", {}),
    "names": Arm("stage 2, names of missed objects", "rollout_matching_sft", {"missed_desc_weight": 1.0}),
    "dropped": Arm("recipe, unmatched dropped", "rollout_matching_sft", {**RECIPE, "unmatched_objects": "dropped"}),
    "quarter": Arm("recipe, a quarter supervised", "rollout_matching_sft", {**RECIPE, "supervised_share": 0.25}),
    "rest": Arm("recipe, three quarters supervised", "rollout_matching_sft", {**RECIPE, "supervised_share": 0.75}),
}
COMPARED = ("a", "b", "c", "d")
BASELINE, TIMED = "a", "b"


@dataclass(frozen=True)
class Sizes:
    """The sizes of the comparison.

    steps: optimizer steps of an arm; places_steps, names_steps: before it, in this order; tower_steps: before each of
    these. batch: images of a step of an arm; stage1_batch, tower_batch: before it. train, held_out: images of the data.
    rate, stage1_rate, tower_rate: peaks.
    """

    steps: int = 60
    places_steps: int = 600
    names_steps: int = 500
    tower_steps: int = 600
    batch: int = 8
    stage1_batch: int = 16
    tower_batch: int = 32
    train: int = 3000
    held_out: int = 300
    rate: float = 3e-4
    stage1_rate: float = 1e-3
    tower_rate: float = 1e-3


def places_config(sizes: Sizes, model: Path, data: Path, output: Path) -> Config:
    """Return the first part of stage 1: all of the model, and the loss as it is, which learns places before names."""
    found = _stage1(sizes, sizes.places_steps, model, data, output)
    found["tuner"] |= {"freeze_vit": False, "freeze_aligner": False}
    found["custom"]["extra"]["rollout_matching"] |= dict.fromkeys(_COORDINATE_WEIGHTS, 1.0)
    return found


def names_config(sizes: Sizes, model: Path, data: Path, output: Path) -> Config:
    """Return the second part of stage 1, which learns names: as the arms train, but on more images a step."""
    return _stage1(sizes, sizes.names_steps, model, data, output)


def _stage1(sizes: Sizes, steps: int, model: Path, data: Path, output: Path) -> Config:
    found = _config(sizes.stage1_batch, model, data, output, seed=17)
    found["training"] |= {"max_steps": steps, "learning_rate": sizes.stage1_rate, "save_steps": steps}
    found["custom"]["trainer_variant"] = "sft"
    return found


def arm_config(arm: Arm, seed: int, sizes: Sizes, model: Path, data: Path, output: Path) -> Config:
    """Return the run of an arm with a seed."""
    found = _config(sizes.batch, model, data, output, seed=seed)
    found["training"] |= {"max_steps": sizes.steps, "learning_rate": sizes.rate, "save_steps": sizes.steps}
    found["custom"]["trainer_variant"] = arm.variant
    if arm.variant == "grpo":
        return _rewarded(found, sizes.batch * GROUP)
    found["custom"]["extra"]["rollout_matching"] |= arm.matching
    return found


def answer_config(sizes: Sizes, model: Path, data: Path, output: Path) -> Config:
    """Return the configuration with which every checkpoint answers the held-out images."""
    found = _config(sizes.batch, model, data, output, seed=17)
    found["training"] |= {"max_steps": 1, "eval_strategy": "steps", "per_device_eval_batch_size": 32}
    told = {"val_jsonl": str(data / "val.jsonl"), "val_sample_limit": sizes.held_out}
    found["custom"] |= {"trainer_variant": "rollout_matching_sft", **told}
    return found


def _rewarded(found: Config, answers: int) -> Config:
    """Make a run one of GRPO, with so many answers in a step; its server is none (see `bench.pays.rewarded`)."""
    batches = {"per_device_train_batch_size": answers, "effective_batch_size": answers, "packing": False}
    found["training"] |= batches
    found["rlhf"] = {
        "use_vllm": True,
        "vllm_mode": "server",
        "reward_funcs": ["digits.f1_class"],
        "num_generations": GROUP,
        "generation_batch_size": answers,
        "max_completion_length": ANSWER,
        "temperature": 1.0,
        "beta": 0.0,
    }
    server = {"vllm_tensor_parallel_size": 1, "vllm_data_parallel_size": 1, "vllm_max_model_len": ROW}
    found["custom"]["extra"] = {"rollout_server": server}
    return found


def _config(batch: int, model: Path, data: Path, output: Path, *, seed: int) -> Config:
    return {
        "global_max_length": ROW,
        "model": {"model": str(model), "torch_dtype": "float32"},
        "template": {"min_pixels": PIXELS[0], "max_pixels": PIXELS[1]},
        "tuner": {"train_type": "full", "freeze_vit": True, "freeze_aligner": True},
        "training": {
            "output_dir": str(output),
            "per_device_train_batch_size": batch,
            "effective_batch_size": batch,
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
                    **dict.fromkeys(_COORDINATE_WEIGHTS, COORDINATE_WEIGHT),
                    "post_rollout_pack_scope": "step",
                }
            },
        },
    }
