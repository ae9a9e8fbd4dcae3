"""A run resumes from the files of transformers' trainer: weights, optimizer, schedule and step."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import Trainer, TrainingArguments

from stage2_trainer.learner.run_state import read_run
from tests.unit.trainer.learner.harness import build, only_first, two_boxes

OPTIONS = {
    "per_device_train_batch_size": 1, "weight_decay": 0.1, "lr_scheduler_type": "cosine", "warmup_steps": 2,
    "save_strategy": "steps", "save_steps": 2, "seed": 7, "use_cpu": True, "report_to": "none", "learning_rate": 1e-3,
}  # fmt: skip


@pytest.fixture
def theirs(tmp_path, model, encoder):
    """A trainer of transformers after two of four steps on text, and its checkpoint."""
    ids = encoder.tokenizer("a red box", return_tensors="pt").input_ids[0]
    rows = [{"input_ids": ids, "labels": ids}] * 4
    args = TrainingArguments(output_dir=str(tmp_path / "theirs"), max_steps=2, disable_tqdm=True, **OPTIONS)
    trainer = Trainer(model=copy.deepcopy(model), args=args, train_dataset=rows)
    trainer.train()
    return trainer, tmp_path / "theirs" / "checkpoint-2"


def test_run_resumes_from_checkpoint_of_transformers_trainer(tmp_path, model, encoder, image_paths, theirs):
    trainer, checkpoint = theirs
    records = two_boxes(image_paths)
    learner = build(tmp_path / "ours", model, encoder, records, answer=only_first, max_steps=4, **OPTIONS).learner
    state = read_run(checkpoint, learner.engine)
    assert state.global_step == 2
    for (name, own), (_, other) in zip(model.named_parameters(), trainer.model.named_parameters(), strict=True):
        assert torch.equal(own, other), name
    own, other = learner.engine.optimizer.state_dict(), trainer.optimizer.state_dict()
    assert own["param_groups"] == other["param_groups"]
    for place, moments in other["state"].items():
        assert all(torch.equal(moments[name], own["state"][place][name]) for name in moments), place
    assert learner.engine.schedule.last_epoch == trainer.lr_scheduler.last_epoch == 2
    learner.train(checkpoint)
    assert learner.state.global_step == 4
