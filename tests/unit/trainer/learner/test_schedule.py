"""The order of a run, and when it reports, evaluates and saves: as transformers and accelerate have them."""

from __future__ import annotations

from itertools import product

import pytest
from accelerate.data_loader import BatchSamplerShard, SeedableRandomSampler
from transformers import DefaultFlowCallback, TrainerControl, TrainerState, TrainingArguments

from stage2_trainer.learner.schedule import EpochOrder, EvenBatchSampler, Schedule

RECORDS = 7


@pytest.fixture
def arguments(tmp_path):
    def of(**options):
        fixed = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 2, "dataloader_pin_memory": False}
        return TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **fixed, **options)

    return of


def flow(args, window, schedule):
    """What transformers' callback decides after a step."""
    callback, control = DefaultFlowCallback(), TrainerControl()
    state = TrainerState(global_step=window.step + 1, max_steps=schedule.max_steps, epoch=window.epoch_after)
    state.compute_steps(args, schedule.max_steps)
    callback.on_step_end(args, state, control)
    if window.ends_epoch or window.is_last:
        callback.on_epoch_end(args, state, control)
    return control.should_log, control.should_evaluate, control.should_save


@pytest.mark.parametrize(("strategy", "most"), list(product(("no", "steps", "epoch"), (-1, 6))))
def test_reports_evaluations_and_saves_come_at_same_steps_as_in_transformers(arguments, strategy, most):
    args = arguments(
        num_train_epochs=2, max_steps=most, logging_steps=3, logging_first_step=True,
        eval_strategy=strategy, eval_steps=2, save_strategy=strategy, save_steps=5,
    )  # fmt: skip
    schedule = Schedule(range(RECORDS), args)
    windows = list(schedule.windows(0))
    assert len(windows) == schedule.max_steps == (8 if most < 0 else most)
    for one in windows:
        found = schedule.reports(one), schedule.evaluates(one), schedule.saves(one)
        assert found == flow(args, one, schedule), one


def test_epoch_order_equals_seedable_random_sampler_of_accelerate():
    theirs, ours = SeedableRandomSampler(range(RECORDS), data_seed=5), EpochOrder(RECORDS, 5)
    for epoch in range(3):
        ours.epoch = epoch
        theirs.set_epoch(epoch)
        assert list(ours) == list(theirs)


def test_each_process_reads_its_own_batches_also_after_resume(arguments):
    args = arguments(num_train_epochs=2, seed=5)
    order = EpochOrder(RECORDS + 1, 5)
    batches = EvenBatchSampler(order, 1, processes=2, drop_last=False, window=4)
    for reader in range(2):
        schedule = Schedule(range(RECORDS + 1), args, readers=2, reader=reader)
        windows = list(schedule.windows(0))
        for epoch in range(2):
            order.epoch = epoch
            shard = list(BatchSamplerShard(batches, 2, reader, even_batches=False))
            assert [batch for one in windows[2 * epoch : 2 * epoch + 2] for batch in one.batches] == shard
        assert list(schedule.windows(3)) == windows[3:]
