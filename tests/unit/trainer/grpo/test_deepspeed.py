"""DeepSpeed and the training section of a GRPO run agree, or the run says where they differ."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

import pytest

from stage2_api.errors import ConfigError
from stage2_trainer.model.deepspeed_compat import compile_nothing
from tests.support.ports import free_port
from tests.unit.trainer.grpo import harness
from tests.unit.trainer.learner.processes import join, run_members

DIFFERING = {"zero_optimization": {"stage": 2}, "gradient_clipping": 0.5, "train_micro_batch_size_per_gpu": 2}


def member(rank, port, folder):
    """A GRPO learner whose training section clips at 1.0, and whose micro-batch holds 4 answers."""
    model, encoder = join(rank, port, count=1)
    compile_nothing()
    run = harness.config(Path(folder), {"deepspeed": DIFFERING})
    source = harness.Scripted(encoder, harness.answers(encoder))
    with ExitStack() as stack:
        trainer = harness.build(Path(folder), run, model, encoder, source, stack)
        with pytest.raises(ConfigError) as refused:
            trainer.train()
    (Path(folder) / "refused").write_text(str(refused.value), encoding="utf-8")


def test_value_that_differs_from_training_section_is_refused(folder):
    """As the ValueError of transformers that it was, it was retried."""
    pytest.importorskip("deepspeed")
    run_members(member, folder, free_port(), str(folder), count=1)
    refused = (folder / "refused").read_text(encoding="utf-8")
    rule = "must agree with the training section, which has"
    assert f"deepspeed.gradient_clipping: 0.5; {rule} max_grad_norm=1.0; write auto for it" in refused
    assert f"deepspeed.train_micro_batch_size_per_gpu: 2; {rule} per_device_train_batch_size=4" in refused
