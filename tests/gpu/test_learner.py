"""The whole learner on a GPU, without servers: it trains in mixed precision, saves, and goes on from what it saved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from stage2_trainer.telemetry.run_log import STEP_LOG
from tests.support.shapes import make_shapes, supervised_config

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("shapes"), train=8, held_out=1)


def learn(shapes, folder, steps):
    """Train to a step in a process of its own; return its output."""
    config = supervised_config(shapes, folder, steps=steps)
    config["model"] |= {"torch_dtype": "bfloat16", "attn_impl": "auto"}
    config["training"] |= {"bf16": True, "gradient_checkpointing": True, "lr_scheduler_type": "constant"}
    written = folder.with_suffix(".yaml")
    written.write_text(json.dumps(config))
    command = [sys.executable, "-m", "stage2_cli", "learn", str(written)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.timeout(600)
def test_learner_on_gpu_trains_saves_and_resumes(shapes, tmp_path):
    folder = tmp_path / "run"
    learn(shapes, folder, 2)
    assert "resuming from" in learn(shapes, folder, 4)
    lines = [json.loads(line) for line in (folder / STEP_LOG).read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4]
    assert all(line["memory/peak_bytes"] > 0 for line in steps)
    weights = load_file(folder / "checkpoint-4" / "adapter_model.safetensors")
    assert weights
    assert all(bool(one.isfinite().all()) for one in weights.values())
