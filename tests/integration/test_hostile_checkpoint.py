"""A run with DeepSpeed goes on from a checkpoint of its own; one that somebody tampered with runs nothing."""

import json
import os
import shutil

import pytest
import yaml

from stage2_api.errors import EXIT_CONFIG
from stage2_trainer.telemetry.run_log import STEP_LOG
from tests.support import forked
from tests.support.hostile_checkpoints import plant
from tests.support.ports import free_port
from tests.support.shapes import make_shapes, supervised_config

pytest.importorskip("deepspeed")
STEPS = 2


def start(config, path):
    """Learn alone, as torchrun would start one process; DeepSpeed asks MPI otherwise."""
    port = str(free_port())
    alone = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    path.write_text(yaml.safe_dump(config))
    environment = {**os.environ, **alone, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return forked.run(
        [forked.STAGE2, "learn", path], imports=(*forked.LEARNER, "deepspeed"), env=environment | {
            "STAGE2_TERMINATION_LOG": str(path.with_suffix(".report"))
        }
    )  # fmt: skip


@pytest.mark.in_turns(3)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_zero_checkpoint_is_resumed_and_one_with_code_is_refused(tmp_path, stage):
    shapes = make_shapes(tmp_path / "shapes", train=4, held_out=1)
    path = tmp_path / "config.yaml"
    config = supervised_config(shapes, tmp_path / "run", steps=STEPS, zero=stage)
    config["training"] |= {"save_total_limit": STEPS, "resume": "allow-changes"}
    assert start(config, path).returncode == 0
    config["training"]["max_steps"] = STEPS + 1
    gone_on = start(config, path)
    assert gone_on.returncode == 0, gone_on.stderr[-4000:]
    assert f"resuming from {tmp_path / 'run' / f'checkpoint-{STEPS}'}" in gone_on.stderr

    config["training"]["max_steps"] = STEPS + 2
    (file,) = (tmp_path / "run" / f"checkpoint-{STEPS + 1}").glob("global_step*/*optim_states.pt")
    plant(file, tmp_path / "made")
    refused = start(config, path)
    assert not (tmp_path / "made").exists()
    assert refused.returncode == EXIT_CONFIG, refused.stderr[-4000:]
    message = json.loads(path.with_suffix(".report").read_text())["message"]
    assert f"{file.name} must hold tensors and settings only" in message
    assert "it names posix.mkdir" in message


@pytest.mark.in_turns(3)
def test_zero_3_run_that_saves_shards_of_weights_alone_resumes_as_if_never_stopped(tmp_path):
    """Weights and optimizer are in the same state, which such a checkpoint keeps."""
    shapes = make_shapes(tmp_path / "shapes", train=4, held_out=1)
    config = supervised_config(shapes, tmp_path / "whole", steps=STEPS + 1, zero=3)
    config["training"] |= {"save_only_model": True, "save_total_limit": STEPS + 1}
    config["tuner"] = {"train_type": "full", "freeze_vit": True}  # adapters would be gathered
    assert start(config, tmp_path / "whole.yaml").returncode == 0
    checkpoint = tmp_path / "resumed" / "checkpoint-1"
    shutil.copytree(tmp_path / "whole" / checkpoint.name, checkpoint)
    assert not list(checkpoint.glob("*.safetensors")), "weights are in shards alone"

    config["training"]["output_dir"] = str(checkpoint.parent)
    gone_on = start(config, tmp_path / "resumed.yaml")
    assert gone_on.returncode == 0, gone_on.stderr[-4000:]
    assert f"resuming from {checkpoint}" in gone_on.stderr
    assert figures(tmp_path / "resumed") == figures(tmp_path / "whole")[1:]


def figures(folder):
    """Loss, gradient norm and rate of each step of a run."""
    lines = [json.loads(line) for line in (folder / STEP_LOG).read_text().splitlines()]
    steps = [line for line in lines if line["event"] == "step"]
    return [[step[name] for name in ("loss", "grad_norm", "learning_rate")] for step in steps]
