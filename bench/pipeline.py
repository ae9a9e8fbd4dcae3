"""A training step of the tiny job with the next window's rollouts made during training, against one after the other.

Both are whole runs of `stage2 run` with real vLLM servers. Here servers and learner share the CPU, so that what one
gains the other loses; with a GPU for each, waiting ends where it is shorter than the training step.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import yaml
from bench.sync import free_ports
from bench.tables import Row, Table

ROOT = Path(__file__).parents[1]
STAGE2 = str(Path(sys.executable).with_name("stage2"))
STEPS, WARM_UP_STEPS = 12, 2
SERVERS = 2
WAITING = ("sync/seconds", "time/rollout_generate_s")
TRAINING = ("time/rollout_parse_match_s", "time/rollout_teacher_encode_s", "time/mask_build_s", "time/forward_s")


def rows() -> Iterator[Row]:
    """What a step waits for sync and rollouts, and what it takes with its own work."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shapes = [str(folder / "shapes"), "--train", "256", "--held-out", "1"]
        subprocess.run(
            [sys.executable, ROOT / "examples/make_shapes.py", *shapes], check=True, stdout=subprocess.DEVNULL
        )
        plain, ahead = (steps(folder, pipelined) for pipelined in (False, True))
    what = f"{SERVERS} servers, 16 images a step"
    for part, keys in (("waiting in a step", WAITING), ("waiting, encoding and forward", (*WAITING, *TRAINING))):
        yield Row(f"{what}: {part}", "pipeline.enabled: false", middle(ahead, keys), middle(plain, keys))


def middle(found: list[dict[str, Any]], keys: tuple[str, ...]) -> float:
    """The median of these seconds over the steps, after the first ones."""
    return float(median(sum(step[key] for key in keys) for step in found[WARM_UP_STEPS:]))


def steps(folder: Path, pipelined: bool) -> list[dict[str, Any]]:
    """Train, and return the steps' log lines."""
    work = folder / f"pipelined-{pipelined}"
    work.mkdir()
    job = yaml.safe_load((ROOT / "examples/job-3v1-tiny.yaml").read_text())
    spec, config = job["spec"], job["spec"]["config"]
    spec["rollout"] |= {"servers": SERVERS, "port": free_ports(1)[0]}
    config["training"] |= {"max_steps": STEPS, "eval_strategy": "no", "save_strategy": "no"}
    config["custom"]["extra"]["rollout_matching"]["pipeline"] = {"enabled": pipelined}
    (work / "job.yaml").write_text(yaml.safe_dump(job))
    examples = "/opt/stage2/examples"
    maps = [
        f"{examples}/few={folder / 'shapes'}",
        f"{examples}/tiny-few={ROOT / 'examples/tiny-few'}",
    ]
    options = ["--cpu", "--work-dir", str(work), *(part for text in maps for part in ("--map", text))]
    done = subprocess.run(
        [STAGE2, "run", str(work / "job.yaml"), *options], capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"stage2 run: exit code {done.returncode}\n{done.stdout[-4000:]}{done.stderr[-4000:]}")
    lines = (work / "logs" / "learner.log").read_text().splitlines()
    return [json.loads(line) for line in lines if line.startswith('{"event": "step"')]


TABLE = Table("Pipelined rollouts", "s", 1.0, rows)
