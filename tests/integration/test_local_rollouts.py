"""Learners that make their own rollouts, as real processes: one, several, with DeepSpeed, stopped and gone on with."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from safetensors.torch import load_file

ROOT = Path(__file__).parents[2]
BIN = Path(sys.executable).parent
STEPS = 4
ROUNDING = 1e-4  # float32, other orders of additions over several steps

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shapes")
    command = [sys.executable, ROOT / "examples/make_shapes.py", folder, "--train", "12", "--held-out", "4"]
    subprocess.run(command, check=True, capture_output=True)
    return folder


def configuration(shapes, output, *, training=None, matching=None, **top):
    return {
        "global_max_length": 512,
        "model": {"model": str(ROOT / "examples/tiny-qwen3-vl"), "torch_dtype": "float32", "attn_impl": "sdpa"},
        "tuner": {"train_type": "lora", "use_dora": True, "lora_rank": 4, "lora_dropout": 0.0, "freeze_vit": True},
        "training": {
            "output_dir": str(output),
            "max_steps": STEPS,
            "per_device_train_batch_size": 1,
            "per_device_eval_batch_size": 4,
            "effective_batch_size": 2,
            "learning_rate": 1e-2,
            "adam_epsilon": 1e-2,  # a step in proportion to the gradient: rounding of a tiny one cannot turn it around
            "gradient_checkpointing": False,
            "seed": 17,
            "save_steps": 2,
            "packing": True,
            "packing_min_fill_ratio": 0.01,
            **(training or {}),
        },
        "custom": {
            "train_jsonl": str(shapes / "train.jsonl"),
            "val_jsonl": str(shapes / "held-out.jsonl"),
            "user_prompt": "List the shapes.",
            "extra": {
                "rollout_matching": {
                    "rollout_backend": "hf",
                    "rollout_generate_batch_size": 4,
                    "max_new_tokens": 100,
                    "maskiou_gate": 0.0,
                    **(matching or {}),
                }
            },
        },
        **top,
    }


def learn(config, *, processes=1):
    """Run the learner to its end; return its step records and what it said."""
    output = Path(config["training"]["output_dir"])
    output.mkdir(parents=True, exist_ok=True)
    path = output / "config.yaml"
    path.write_text(yaml.safe_dump(config))
    command = [BIN / "stage2", "learn", path, f"--processes={processes}"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr[-4000:]
    lines = (output / "stage2_log.jsonl").read_text().splitlines()
    return [found for line in lines if (found := json.loads(line))["event"] == "step"], done.stderr


def losses(steps):
    return [step["loss"] for step in steps]


def adapter(output, step=STEPS):
    return load_file(output / f"checkpoint-{step}" / "adapter_model.safetensors")


def assert_same_weights(one, other, tolerance):
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert (tensor - other[name]).abs().max() <= tolerance, name


@pytest.fixture(scope="module")
def alone(shapes, tmp_path_factory):
    """One process on four steps, with evaluations: the run that the others are compared with."""
    output = tmp_path_factory.mktemp("alone")
    best = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "eval_rollout_f1"}
    steps, _ = learn(configuration(shapes, output, training={**best, "load_best_model_at_end": True}))
    return output, steps


def test_the_best_checkpoint_is_the_one_with_the_best_f1(alone):
    output, _ = alone
    state = json.loads((output / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())
    found = {one["step"]: one["eval_rollout_f1"] for one in state["log_history"] if "eval_rollout_f1" in one}
    saved = {step: f1 for step, f1 in found.items() if step > 0}
    assert state["best_metric"] == max(saved.values())
    assert Path(state["best_model_checkpoint"]).name == f"checkpoint-{max(saved, key=saved.get)}"


def test_a_resumed_run_goes_on_with_the_same_losses(alone, shapes, tmp_path):
    output, steps = alone
    shutil.copytree(output / "checkpoint-2", tmp_path / "checkpoint-2")
    resumed, said = learn(configuration(shapes, tmp_path))
    assert "going on from" in said
    assert [step["step"] for step in resumed] == [3, 4]
    assert losses(resumed) == losses(steps)[2:]
    assert_same_weights(adapter(output), adapter(tmp_path), 0.0)


def test_two_processes_learn_what_one_does(alone, shapes, tmp_path):
    output, steps = alone
    together, _ = learn(configuration(shapes, tmp_path), processes=2)
    assert losses(together) == pytest.approx(losses(steps), rel=ROUNDING)
    assert [step["rollout/gt_objects"] for step in together] == [step["rollout/gt_objects"] for step in steps]
    assert_same_weights(adapter(output), adapter(tmp_path), ROUNDING)


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_learns_what_plain_processes_do(alone, shapes, tmp_path, stage):
    pytest.importorskip("deepspeed")
    _, steps = alone
    zero = {
        "zero_optimization": {"stage": stage, "overlap_comm": False, "contiguous_gradients": True},
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "train_batch_size": "auto",
        "gradient_clipping": "auto",
    }
    together, _ = learn(configuration(shapes, tmp_path, deepspeed=zero), processes=2)
    assert losses(together) == pytest.approx(losses(steps), rel=ROUNDING)


COLOCATE = {
    "mode": "colocate",
    "max_model_len": 512,
    "max_num_seqs": 8,
    "enforce_eager": True,
    "limit_mm_per_prompt": {"image": 1, "video": 0},
    "mm_encoder_tp_mode": "data",
    "sync": {"verify_every": 1},
}


@pytest.mark.vllm
@pytest.mark.parametrize(("processes", "tensor_parallel"), [(1, 1), (2, 2), (2, 1)])
def test_a_colocated_engine_holds_the_weights_of_every_step(shapes, tmp_path, processes, tensor_parallel):
    matching = {"rollout_backend": "vllm", "vllm": {**COLOCATE, "tensor_parallel_size": tensor_parallel}}
    steps, said = learn(configuration(shapes, tmp_path, matching=matching), processes=processes)
    # each sync is proved: log-probabilities of a prompt with an image, against the learner's own
    assert said.count("proved: the engine gives a prompt the learner's log-probabilities") == STEPS * processes
    assert [step["sync/version"] for step in steps] == list(range(STEPS))
    assert steps[0]["sync/bytes"] > steps[1]["sync/bytes"] > 0, "later syncs carry what trains"


@pytest.mark.vllm
def test_a_colocated_engine_answers_as_the_learner_itself(alone, shapes, tmp_path):
    _, steps = alone
    matching = {"rollout_backend": "vllm", "vllm": COLOCATE}
    colocated, _ = learn(configuration(shapes, tmp_path, matching=matching, training={"max_steps": 1}))
    assert colocated[0]["loss"] == pytest.approx(steps[0]["loss"], rel=ROUNDING)


@pytest.mark.vllm
def test_an_engine_that_does_not_start_names_the_switch_to_hf(shapes, tmp_path):
    vllm = {**COLOCATE, "mm_encoder_tp_mode": "weights", "max_num_batched_tokens": 1}
    config = configuration(shapes, tmp_path, matching={"rollout_backend": "vllm", "vllm": vllm})
    with pytest.raises(AssertionError, match="rollout_backend: hf"):
        learn(config)
