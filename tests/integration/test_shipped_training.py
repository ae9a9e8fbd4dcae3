"""The shipped job's own model, tuner and training sections on the tiny model: bf16, checkpointing, DoRA, resume."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import yaml

from tests.integration.runs import adapter, assert_resumes_alike, learn
from tests.support.shapes import make_shapes

pytestmark = pytest.mark.in_turns(2, first=1)
ROOT = Path(__file__).parents[2]
SHIPPED = yaml.safe_load((ROOT / "examples/job-3v1.yaml").read_text())["spec"]["config"]
RECORDS, EPOCHS = 12, 2
# What fits a run of minutes; everything else is the file's own.
SMALLER = {"effective_batch_size": 4, "eval_steps": 3, "save_steps": 3}
STEPS = RECORDS // SMALLER["effective_batch_size"] * EPOCHS
MIDDLE = STEPS // 2


def configuration(shapes, output):
    # The file's layers and mergers, where the tiny model has them.
    regex = SHIPPED["tuner"]["target_regex"].replace("(0|1|2)", "0").replace("(2[8-9]|3[0-5])", "[23]")
    custom = SHIPPED["custom"]
    matching = {
        **custom["extra"]["rollout_matching"],
        "rollout_backend": "hf",
        "rollout_generate_batch_size": 4,
        "max_new_tokens": 60,
        "maskiou_gate": 0.0,
    }
    return {
        **SHIPPED,
        "global_max_length": 512,
        "model": {**SHIPPED["model"], "model": str(ROOT / "examples/tiny-qwen3-vl")},
        "template": {},
        "tuner": {**SHIPPED["tuner"], "target_regex": regex},
        "training": {**SHIPPED["training"], **SMALLER, "output_dir": str(output)},
        "custom": {
            **custom,
            "train_jsonl": str(shapes / "train.jsonl"),
            "val_jsonl": str(shapes / "held-out.jsonl"),
            "val_sample_limit": 2,
            "user_prompt": "List the shapes.",
            "extra": {"rollout_matching": matching},
        },
    }


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("shapes"), train=RECORDS, held_out=2)


@pytest.fixture(scope="module")
def unbroken(shapes, tmp_path_factory):
    """The run from its start to its end: its folder and its steps."""
    output = tmp_path_factory.mktemp("unbroken")
    return output, learn(configuration(shapes, output))[0]


def test_shipped_config_sections_have_expected_settings():
    training, model = SHIPPED["training"], SHIPPED["model"]
    assert (model["torch_dtype"], model["attn_impl"]) == ("bfloat16", "auto")
    assert [training[name] for name in ("bf16", "gradient_checkpointing", "packing")] == [True] * 3
    assert (SHIPPED["tuner"]["use_dora"], SHIPPED["tuner"]["freeze_aligner"]) == (True, False)


def test_shipped_training_completes_with_finite_losses(unbroken):
    _, steps = unbroken
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    for step in steps:
        assert math.isfinite(step["loss"])
        assert math.isfinite(step["grad_norm"])


def test_float32_adapters_on_bfloat16_base_are_all_trained(unbroken):
    output, _ = unbroken
    first, last = adapter(output, MIDDLE), adapter(output, STEPS)
    assert {tensor.dtype for tensor in last.values()} == {torch.float32}
    assert any("merger" in name for name in last)
    assert any("lora_magnitude_vector" in name for name in last)
    assert [name for name, tensor in last.items() if torch.equal(tensor, first[name])] == []


def test_aligner_has_its_own_learning_rate(unbroken):
    output, _ = unbroken
    names = adapter(output, STEPS)
    state = torch.load(output / f"checkpoint-{STEPS}" / "optimizer.pt", weights_only=True)
    counts: dict[float, int] = {}
    for group in state["param_groups"]:
        counts[group["initial_lr"]] = counts.get(group["initial_lr"], 0) + len(group["params"])
    of_aligner = sum("merger" in name for name in names)
    training = SHIPPED["training"]
    assert counts == {training["aligner_lr"]: of_aligner, training["learning_rate"]: len(names) - of_aligner}


def test_resumed_run_ends_with_same_weights(unbroken, shapes, tmp_path):
    assert_resumes_alike(*unbroken, MIDDLE, configuration(shapes, tmp_path))
