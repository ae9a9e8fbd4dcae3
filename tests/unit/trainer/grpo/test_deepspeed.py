"""DeepSpeed and the training section of a GRPO run agree, or the run says where they differ."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.model.deepspeed_compat import compile_nothing
from tests.support.ports import free_port
from tests.unit.trainer.grpo import harness
from tests.unit.trainer.learner.harness import read_log
from tests.unit.trainer.learner.processes import join, run_members

ZERO = {"zero_optimization": {"stage": 2}}
DIFFERING = ZERO | {"gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 2, "train_batch_size": 4}


def member(rank, port, folder, deepspeed, beta, training):
    """A GRPO learner that clips at 1.0, with 4 answers in a micro-batch; writes how it ended."""
    model, encoder = join(rank, port, count=1)
    compile_nothing()
    run = harness.config(Path(folder), {"deepspeed": deepspeed, "rlhf": {"beta": beta}, "training": training})
    source = harness.Scripted(encoder, harness.answers(encoder))
    with ExitStack() as stack:
        try:
            trainer = harness.build(Path(folder), run, model, encoder, source, stack)
            trainer.train()
            end = f"trained for {trainer.state.global_step} steps"
        except ConfigError as error:
            end = str(error)
    (Path(folder) / "end").write_text(end, encoding="utf-8")


def end_of(folder, deepspeed, beta=0.0, **training):
    """Return how the member ended. beta: above 0 it has a reference model, with which TRL starts DeepSpeed."""
    pytest.importorskip("deepspeed")
    run_members(member, folder, free_port(), str(folder), deepspeed, beta, training, count=1)
    return (folder / "end").read_text(encoding="utf-8")


@pytest.mark.parametrize("beta", [0.0, 0.04])
def test_value_that_differs_from_training_section_is_refused(folder, beta):
    """As the ValueError of transformers that it was, it was retried; beside a reference model, as an AssertionError."""
    refused = end_of(folder, DIFFERING, beta)
    rule = "must agree with the training section, which has"
    assert f"deepspeed.gradient_clipping: 0.5; {rule} max_grad_norm=1.0; write auto for it" in refused
    assert f"deepspeed.train_micro_batch_size_per_gpu: 2; {rule} per_device_train_batch_size=4" in refused


def test_optimizer_that_deepspeed_cannot_build_is_refused(folder):
    refused = end_of(folder, ZERO | {"optimizer": {"type": "SGD", "params": {"momentums": 0.9}}})
    assert refused.startswith("deepspeed: DeepSpeed does not take it (TypeError: ")
    assert "'momentums'" in refused


def test_optimizer_and_schedule_of_deepspeed_train(folder):
    """It ended in an AttributeError: only an optimizer of the training section has groups before DeepSpeed starts."""
    own = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}, "scheduler": {"type": "WarmupDecayLR"}}
    assert end_of(folder, ZERO | own) == "trained for 1 steps"


def test_step_logs_its_own_rate_where_deepspeed_holds_the_schedule(folder):
    """DeepSpeed has stepped the schedule by then: the log had the rate of the next step."""
    own = {"optimizer": {"type": "AdamW", "params": {"torch_adam": True}}}
    assert end_of(folder, ZERO | own, max_steps=2, lr_scheduler_type="linear") == "trained for 2 steps"
    assert [step["learning_rate"] for step in read_log(folder, "step")] == pytest.approx([1e-3, 5e-4])
