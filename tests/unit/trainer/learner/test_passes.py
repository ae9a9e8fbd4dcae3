"""The passes of a row: what is divided, and what is noted of them."""

from contextlib import nullcontext

import torch

from stage2_trainer.telemetry.timeline import Stopwatch
from tests.unit.trainer.learner.harness import only_first


def test_loss_of_pass_is_divided_once(make, records):
    learner = make(answer=only_first, per_device_train_batch_size=1, gradient_accumulation_steps=3).learner
    passes, losses = learner.passes, []
    passes.engine.run_pass = lambda *, last: nullcontext()
    passes.engine.backward = losses.append
    learner.step.set_batches([[one] for one in records], global_step=0, uses=1)
    passes.begin(0, passes.record, divisor=3.0)
    (group, *_) = learner.step.rows(Stopwatch())
    with torch.no_grad():
        parts = passes.train_rows(group, passes.lay_out(group), last=False)
    assert [float(one) for one in losses] == [float(parts.total / 3.0)]
