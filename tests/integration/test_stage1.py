"""Stage 1 by its command, with new rows in 16 bits: it learns, resumes bit for bit, and asks nobody."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.integration.runs import adapter, assert_resumes_alike, learn
from tests.support.shapes import make_shapes

pytestmark = pytest.mark.in_turns(2)
ROOT = Path(__file__).parents[2]
STEPS, MIDDLE = 6, 3
ROWS = "embed_tokens.token_adapter.trainable_tokens_delta"


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    return make_shapes(tmp_path_factory.mktemp("shapes"), train=12, held_out=2)


def configuration(shapes, output):
    return {
        "global_max_length": 512,
        "model": {"model": str(ROOT / "examples/tiny-qwen3-vl"), "torch_dtype": "bfloat16", "attn_impl": "auto"},
        "tuner": {"use_dora": True, "lora_dropout": 0.1, "train_coord_rows": True},
        "training": {
            "output_dir": str(output), "max_steps": STEPS, "per_device_train_batch_size": 2, "bf16": True,
            "effective_batch_size": 4, "learning_rate": 1e-3, "gradient_checkpointing": True, "packing": True,
            "logging_steps": 1, "save_strategy": "steps", "save_steps": MIDDLE, "eval_strategy": "no",
        },
        "custom": {
            "trainer_variant": "sft",
            "train_jsonl": str(shapes / "train.jsonl"),
            "user_prompt": "List the shapes.",
            "extra": {"rollout_matching": {"post_rollout_pack_scope": "step"}},
        },
    }  # fmt: skip


@pytest.fixture(scope="module")
def unbroken(shapes, tmp_path_factory):
    """The run from its start to its end: its folder and its steps."""
    output = tmp_path_factory.mktemp("unbroken")
    return output, learn(configuration(shapes, output))[0]


def test_only_adapters_and_coordinate_rows_are_saved_and_trained(unbroken):
    output, _ = unbroken
    first, last = adapter(output, MIDDLE), adapter(output, STEPS)
    assert {tensor.dtype for tensor in last.values()} == {torch.float32}
    (rows,) = [name for name in last if "lora_" not in name]
    assert rows.endswith(ROWS)
    assert len(last[rows]) == 1000
    assert not torch.equal(first[rows], last[rows])


def test_stage_1_generates_no_rollouts(unbroken):
    output, steps = unbroken
    assert [step["step"] for step in steps] == list(range(1, STEPS + 1))
    assert not [key for step in steps for key in step if key.startswith(("rollout/", "sync/"))]
    assert not (output / "rollouts.jsonl").read_text()


def test_resumed_run_ends_with_same_weights(unbroken, shapes, tmp_path):
    assert_resumes_alike(*unbroken, MIDDLE, configuration(shapes, tmp_path))
