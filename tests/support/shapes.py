"""Images of coloured shapes with their records, and the configuration of a run on them."""

import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]


def make_shapes(folder: Path, *, train: int, held_out: int = 0, max_shapes: int = 2) -> Path:
    """Write images of up to `max_shapes` shapes and both JSONL files into a folder; return the folder."""
    counts = [f"--train={train}", f"--held-out={held_out}", f"--max-shapes={max_shapes}"]
    command = [sys.executable, ROOT / "examples/make_shapes.py", folder, *counts]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def supervised_config(shapes: Path, folder: Path, *, steps: int, zero: int = 0) -> dict[str, Any]:
    """Return the configuration of a run on the shapes' ground truth. zero: the stage of DeepSpeed's ZeRO; 0: none."""
    config: dict[str, Any] = {
        "global_max_length": 512,
        "model": {"model": str(ROOT / "examples/tiny-qwen3-vl"), "torch_dtype": "float32", "attn_impl": "sdpa"},
        "tuner": {"train_type": "lora", "lora_rank": 2, "lora_dropout": 0.1},
        "training": {
            "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 1, "packing": True,
            "effective_batch_size": 1, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 1,
            "save_total_limit": 2, "eval_strategy": "no",
        },
        "custom": {"trainer_variant": "sft", "train_jsonl": str(shapes / "train.jsonl"), "user_prompt": "List them."},
    }  # fmt: skip
    if zero:
        config["deepspeed"] = {"zero_optimization": {"stage": zero}, "zero_allow_untested_optimizer": True}
    return config
