"""DeepSpeed and the training section of a learner agree, or the run says where they differ."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from stage2_api.errors import ConfigError
from stage2_trainer.model.deepspeed_compat import compile_nothing
from stage2_trainer.model.deepspeed_config import deepspeed_options
from tests.support.ports import free_port
from tests.unit.trainer.learner.configs import run_config
from tests.unit.trainer.learner.harness import build, only_first, read_log, two_boxes
from tests.unit.trainer.learner.processes import join, run_members

ZERO = {"zero_optimization": {"stage": 2}}
UNTESTED = {"zero_allow_untested_optimizer": True}


def member(rank, port, folder, paths, deepspeed):
    """A learner with training.bf16; writes the types of its weights, their copies and its inputs, or the refusal."""
    policy, encoder = join(rank, port, count=1)
    compile_nothing()
    given = deepspeed_options(run_config(deepspeed=deepspeed, training={"bf16": True}))
    options = {"max_steps": 1, "per_device_train_batch_size": 1, "bf16": True, "deepspeed": given}
    found = {}
    try:
        engine = build(Path(folder), policy, encoder, two_boxes(paths[:1]), answer=only_first, **options).learner.engine
        found["weights"] = sorted({str(one.dtype) for one in policy.parameters()})
        found["copies"] = sorted({str(one.dtype) for one in engine.wrapped.optimizer.single_partition_of_fp32_groups})
        found["inputs"] = str(engine._there(torch.ones(1)).dtype)
    except ConfigError as error:
        found["refused"] = str(error)
    (Path(folder) / "found.json").write_text(json.dumps(found), encoding="utf-8")


@pytest.fixture
def found(tmp_path, image_paths):
    """A function that returns what the member found."""
    pytest.importorskip("deepspeed")

    def run(deepspeed):
        run_members(member, tmp_path, free_port(), str(tmp_path), image_paths, deepspeed, count=1)
        return json.loads((tmp_path / "found.json").read_text(encoding="utf-8"))

    return run


@pytest.mark.parametrize("block", [{}, {"bf16": {}}], ids=["no block", "an empty block"])
def test_deepspeed_holds_weights_in_bfloat16_and_copies_in_float32(found, block):
    """Inputs were float32, and with an empty block the weights as well."""
    types = found(ZERO | block)
    assert types == {"weights": ["torch.bfloat16"], "copies": ["torch.float32"], "inputs": "torch.bfloat16"}


def test_precision_that_differs_from_training_section_is_refused(found):
    refused = found(ZERO | {"bf16": {"enabled": False}, "gradient_clipping": 0.5})["refused"]
    rule = "must agree with the training section, which has"
    assert f"deepspeed.bf16.enabled: false; {rule} bf16|bf16_full_eval=True; write auto for it" in refused
    assert f"deepspeed.gradient_clipping: 0.5; {rule} max_grad_norm=1.0; write auto for it" in refused


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "beta": [0.9, 0.95]}}}, "argument 'beta')"),
        ({"optimizer": {"type": "NAdam", "params": {"momentum_decay": -1}}, **UNTESTED}, "Invalid momentum_decay"),
        ({"optimizer": {"type": "NAdam"}}, '"zero_allow_untested_optimizer": true'),
        ({"scheduler": {"type": "OneCycle"}}, "arguments: 'cycle_min_lr' and 'cycle_max_lr')"),
    ],
    ids=["another parameter", "another value", "an untested optimizer", "missing parameters"],
)
def test_optimizer_and_schedule_that_deepspeed_cannot_build_are_refused(found, changes, words):
    """They ended the learner with exit code 1 and a traceback."""
    refused = found(ZERO | changes)["refused"]
    assert refused.startswith("deepspeed: DeepSpeed does not take it (")
    assert words in refused


def trained_member(rank, port, folder, paths, deepspeed):
    """A learner of two steps, whose rate falls to half of it for the second."""
    policy, encoder = join(rank, port, count=1)
    compile_nothing()
    options = {"max_steps": 2, "per_device_train_batch_size": 1, "lr_scheduler_type": "linear"}
    given = deepspeed_options(run_config(deepspeed=deepspeed))
    build(Path(folder), policy, encoder, two_boxes(paths[:1]), deepspeed=given, **options).learner.train()


def test_step_logs_its_own_rate_where_deepspeed_holds_the_schedule(tmp_path, image_paths):
    """DeepSpeed has stepped the schedule by then: the log had the rate of the next step."""
    pytest.importorskip("deepspeed")
    own = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True, "lr": 1e-3}}}
    run_members(trained_member, tmp_path, free_port(), str(tmp_path), image_paths, ZERO | own, count=1)
    assert [step["learning_rate"] for step in read_log(tmp_path, "step")] == pytest.approx([1e-3, 5e-4])
