"""Wherever a save is cut off or the disk gives out, the next start goes on from a whole checkpoint.

A dozen cases of those that `python -m tests.cut_off_saves` draws (docs/testing.md).
"""

import filecmp
import gc

import pytest
import torch

from stage2_trainer.process.checkpoints import newest_whole
from stage2_trainer.process.save_behind import SaveBehind
from tests.cut_off_saves import EXIT_RETRYABLE, cases_of, cut_off, unharmed
from tests.unit.trainer.learner.harness import box, build, record

CASES, SEED = 12, 16
WEIGHTS = "model.safetensors"


@pytest.fixture(params=[False, True], ids=["waited for", "written behind"])
def learn(request, model, encoder, image_paths, tmp_path):
    """A function that trains in a copy of this process, from the newest checkpoint, and saves after each step."""
    for name, one in model.named_parameters():  # an optimizer of few tensors makes few calls
        one.requires_grad_(name.endswith("language_model.norm.weight"))
    records = [record(image_paths[0], 0, object_1=box("red box", 0, 0, 100, 100))]

    def trainer_in(folder):
        options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
        return build(folder, model, encoder, records, max_steps=10 * CASES, **options).trainer

    def run(folder):
        torch.set_num_threads(1)  # a fork has none of its parent's threads, and would wait for them
        trainer = trainer_in(folder)
        trainer.async_save = request.param
        found = newest_whole(folder)
        try:
            trainer.train(resume_from_checkpoint=str(found) if found else None)
        except OSError:  # CheckpointError is one, and so is what the log meets
            return EXIT_RETRYABLE
        return 0

    trainer_in(tmp_path / "imports")  # all that it loads is there in the copies
    gc.freeze()
    yield run
    gc.unfreeze()
    for folder in tmp_path.iterdir():
        SaveBehind(folder).forget()  # of those that were killed


def test_a_learner_whose_saves_are_cut_off_goes_on_to_the_same_weights(learn, tmp_path):
    cases = cases_of(tmp_path / "first", learn, count=CASES, seed=SEED)
    outcomes = list(cut_off(tmp_path / "run", learn, cases))
    assert len({one.case.place for one in outcomes}) > CASES // 2
    last = outcomes[-1].after
    assert last > 1
    other = unharmed(tmp_path / "whole", learn, step=last)
    assert filecmp.cmp(tmp_path / "run" / other.name / WEIGHTS, other / WEIGHTS, shallow=False)
