"""A short real training run with a colocated vLLM, several times over: packed or not, rollouts reused or not.

    python -m bench.smoke_colocate [--samples 64] [--backend hf]

Every variant is a run of `stage2 learn` on the tiny model: one epoch over the same images, rollouts of all of them.
Steps a second are counted from the first finished step on, so that loading and the start of vLLM are left out.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import yaml

ROOT = Path(__file__).parents[1]
STAGE2 = str(Path(sys.executable).with_name("stage2"))
BATCH = 8
LENGTH = 1024


@dataclass(frozen=True)
class Variant:
    """What differs from run to run."""

    packing: bool
    m_steps: int

    @property
    def name(self) -> str:
        """The variant in words."""
        return f"packing {'on' if self.packing else 'off'}, m_steps {self.m_steps}"


@dataclass(frozen=True)
class Finished:
    """The steps of a run as its log has them, and the seconds at which each one ended."""

    variant: Variant
    steps: list[dict[str, Any]]
    ends: list[float]

    def total(self, key: str) -> float:
        """The sum of a figure over the steps that are timed: all but the first."""
        return sum(float(step[key]) for step in self.steps[1:])

    def row(self) -> str:
        """A line of the table."""
        seconds = self.ends[-1] - self.ends[0]
        fills = [step["packing/post_rollout_fill"] for step in self.steps if "packing/post_rollout_fill" in step]
        cells = (
            self.variant.name,
            str(len(self.steps)),
            f"{(len(self.steps) - 1) / seconds:.2f}",
            f"{self.total('time/rollout_generate_s') / seconds:.0%}",
            f"{self.total('time/forward_s') / seconds:.0%}",
            f"{self.total('sync/seconds') / seconds:.0%}",
            f"{mean(fills):.2f}" if fills else "–",
            f"{max(step['memory/peak_bytes'] for step in self.steps) / 2**30:.2f}",
        )
        return f"| {' | '.join(cells)} |"


VARIANTS = (Variant(True, 1), Variant(False, 1), Variant(True, 2), Variant(True, 4))
HEAD = ("run", "steps", "steps/s", "rollouts", "forward", "sync", "fill", "peak GiB")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run all variants and print both tables."""
    parser = argparse.ArgumentParser(prog="bench.smoke_colocate", description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--samples", type=int, default=64, help="images, each answered once in every run")
    parser.add_argument("--backend", choices=("vllm", "hf"), default="vllm", help="what makes the rollouts")
    options = parser.parse_args(arguments)
    print(f"| {' | '.join(HEAD)} |\n|{' --- |' * len(HEAD)}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        shapes = [str(ROOT / "examples/make_shapes.py"), f"{folder}/shapes", "--train", str(options.samples)]
        subprocess.run([sys.executable, *shapes, "--held-out", "1"], check=True, stdout=subprocess.DEVNULL)
        finished = []
        for number, variant in enumerate(VARIANTS):
            finished.append(run(variant, options.backend, Path(folder), number))
            print(finished[-1].row(), flush=True)
    print("\nMean loss by how many steps had trained on the same rollouts before:\n")
    for one in finished:
        print(f"{one.variant.name}: {', '.join(f'{n}: {loss:.3f}' for n, loss in by_reuse(one.steps).items())}")
    return 0


def run(variant: Variant, backend: str, folder: Path, number: int) -> Finished:
    """Train, and note when each step ends."""
    path = folder / f"{number}.yaml"
    path.write_text(yaml.safe_dump(configuration(variant, backend, folder, folder / f"run-{number}")))
    steps, ends = [], []
    with (folder / f"{number}.log").open("w+") as log:
        command = [STAGE2, "learn", str(path)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=log, text=True, env=environment()) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"event": "step"'):
                    steps.append(json.loads(line))
                    ends.append(time.monotonic())
        if process.returncode:
            log.seek(0)
            sys.exit(f"{variant.name}: exit code {process.returncode}\n{log.read()[-4000:]}")
    return Finished(variant, steps, ends)


def by_reuse(steps: Sequence[Mapping[str, Any]]) -> dict[int, float]:
    """The mean loss of steps on fresh rollouts, on rollouts that one step has seen before, and so on."""
    losses: dict[int, list[float]] = defaultdict(list)
    for step in steps:
        losses[int(step.get("rollout/buffer_completed_steps", 0))].append(step["loss"])
    return {n: mean(found) for n, found in sorted(losses.items())}


def environment() -> dict[str, str]:
    """This process's environment, with one thread unless somebody chose another number."""
    return {"OMP_NUM_THREADS": "1", **os.environ, "HF_HUB_OFFLINE": "1"}


def configuration(variant: Variant, backend: str, folder: Path, output: Path) -> dict[str, Any]:
    """The training YAML of a variant."""
    vllm = {
        "mode": "colocate",
        "max_model_len": 512,
        "max_num_seqs": BATCH,
        "enforce_eager": True,
        "limit_mm_per_prompt": {"image": 1, "video": 0},
    }
    matching = {
        "rollout_backend": backend,
        "rollout_generate_batch_size": BATCH,
        "max_new_tokens": 128,
        "maskiou_gate": 0.0,
        "target_sigma": 8.0,
        "rollout_buffer": {"enabled": True, "m_steps": variant.m_steps},
        "vllm": vllm,
    }
    training = {
        "output_dir": str(output),
        "num_train_epochs": 1,
        "per_device_train_batch_size": BATCH,
        "learning_rate": 5e-4,
        "gradient_checkpointing": False,
        "seed": 17,
        "save_strategy": "no",
        "packing": variant.packing,
        "packing_min_fill_ratio": 0.1,
    }
    return {
        "global_max_length": LENGTH,
        "model": {"model": str(ROOT / "examples/tiny-qwen3-vl"), "torch_dtype": "float32", "attn_impl": "sdpa"},
        "tuner": {"train_type": "lora", "lora_rank": 16, "freeze_vit": True, "freeze_aligner": True},
        "training": training,
        "custom": {
            "train_jsonl": str(folder / "shapes/train.jsonl"),
            "user_prompt": "List the shapes.",
            "extra": {"rollout_matching": matching},
        },
    }


if __name__ == "__main__":
    sys.exit(main())
