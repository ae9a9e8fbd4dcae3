"""Checkpoints are whole or not there, the best one is kept, and what is wrong with one or with the disk is reported.

Saves that are cut off: test_cut_off_saves.
"""

from __future__ import annotations

import copy
import json
import os
import random
import resource
import shutil
import time

import pytest

from stage2_api.errors import ConfigError
from stage2_api.runconfig import BEST_METRIC
from stage2_trainer.checks.preflight import checked_records
from stage2_trainer.model import checkpoints
from stage2_trainer.model.checkpoints import UNFINISHED, CheckpointError, ends_training, flaw_of, newest_whole
from tests.unit.trainer.learner.configs import run_config
from tests.unit.trainer.learner.harness import box, build, only_first, perfect, record, two_boxes

LIMITS = 12


@pytest.fixture
def records(image_paths):
    return [record(image_paths[0], 0, object_1=box("red box", 0, 0, 100, 100))]


@pytest.fixture(scope="module")
def first_step(tmp_path_factory, loaded_model, encoder, image_paths):
    """A folder with the checkpoint of a first step, which nobody may change."""
    folder = tmp_path_factory.mktemp("first-step")
    one = record(image_paths[0], 0, object_1=box("red box", 0, 0, 100, 100))
    harness = build(folder, copy.deepcopy(loaded_model), encoder, [one], max_steps=1)
    harness.learner.train()
    harness.learner.save_progress()
    return folder


@pytest.fixture
def folder(first_step, tmp_path):
    """A folder with that checkpoint."""
    return shutil.copytree(first_step, tmp_path / "run")


@pytest.fixture
def saved(folder, model, encoder, records):
    """A learner after its second step, and the folder with the checkpoint of its first one."""
    again = build(folder, model, encoder, records, max_steps=2, save_total_limit=1)
    again.learner.train(folder / "checkpoint-1")
    assert [one.name for one in folder.glob("checkpoint-*")] == ["checkpoint-1"]
    return again.learner, folder


def test_full_disk_during_save_is_reported_and_previous_checkpoint_kept(saved):
    learner, folder = saved
    sizes = sorted(file.stat().st_size for file in (folder / "checkpoint-1").iterdir())
    seeds, hard = random.Random(3), resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    for size in [*(one - 1 for one in sizes), *(seeds.randrange(sizes[-1]) for _ in range(LIMITS))]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))  # a write beyond it fails: Python ignores SIGXFSZ
        try:
            with pytest.raises(CheckpointError, match=r"(?s)no checkpoint could be written.*save_total_limit"):
                learner.save_progress()
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
        assert newest_whole(folder).name == "checkpoint-1"
        assert not (folder / UNFINISHED).exists()


def test_truncated_checkpoint_is_skipped_with_warning(folder, caplog):
    newer = shutil.copytree(folder / "checkpoint-1", folder / "checkpoint-7")
    (newer / "optimizer.pt").write_bytes((newer / "optimizer.pt").read_bytes()[:-100])
    assert newest_whole(folder).name == "checkpoint-1"
    assert "checkpoint-7" in caplog.text
    assert "looking for an older checkpoint" in caplog.text
    assert "optimizer.pt" in caplog.text


def test_run_resumed_from_older_checkpoint_keeps_its_own_new_checkpoint(folder, model, encoder, records):
    shutil.copytree(folder / "checkpoint-1", folder / "checkpoint-9")
    os.utime(folder / "checkpoint-9", (1, 1))  # it was there before
    again = build(folder, model, encoder, records, max_steps=2, save_total_limit=1)
    again.learner.train(folder / "checkpoint-1")
    again.learner.save_progress()
    assert [one.name for one in folder.glob("checkpoint-*")] == ["checkpoint-2"]


def test_clock_set_back_removes_older_checkpoint_not_new_one(folder, model, encoder, records):
    tomorrow = time.time() + 86_400
    os.utime(folder / "checkpoint-1", (tomorrow, tomorrow))
    again = build(folder, model, encoder, records, max_steps=2, save_total_limit=1)
    again.learner.train(folder / "checkpoint-1")
    again.learner.save_progress()
    assert [one.name for one in folder.glob("checkpoint-*")] == ["checkpoint-2"]


@pytest.mark.parametrize("name", ["optimizer.pt", "model.safetensors", "trainer_state.json", "scheduler.pt"])
@pytest.mark.parametrize("listed", [True, False])
def test_truncated_checkpoint_file_is_detected_with_and_without_manifest(folder, name, listed):
    checkpoint = folder / "checkpoint-1"
    assert flaw_of(checkpoint) is None
    if not listed:
        (checkpoint / checkpoints.MANIFEST).unlink()
        assert flaw_of(checkpoint) is None, "one of transformers alone"
    (checkpoint / name).write_bytes((checkpoint / name).read_bytes()[:-20])
    assert flaw_of(checkpoint) is not None


def test_missing_checkpoint_file_is_detected(folder):
    (folder / "checkpoint-1" / "scheduler.pt").unlink()
    assert "scheduler.pt" in flaw_of(folder / "checkpoint-1")


def test_saved_step_is_not_written_again(saved):
    learner, folder = saved
    learner.save_progress()
    first = (folder / "checkpoint-2").stat().st_mtime_ns
    learner.save_progress()
    assert (folder / "checkpoint-2").stat().st_mtime_ns == first


@pytest.mark.parametrize(("max_steps", "epochs", "step"), [(1, 3.0, 1), (2, 3.0, None), (-1, 1.0, 1), (-1, 2.0, None)])
def test_finished_run_is_recognised_by_its_last_checkpoint(folder, max_steps, epochs, step):
    assert ends_training(folder / "checkpoint-1", max_steps=max_steps, epochs=epochs) == step


MOMENTS = {
    "rows": (lambda learner: (learner, "_train_rows"), "checkpoint-1"),
    "check": (lambda learner: (learner.finite, "check"), None),
    "optimizer": (lambda learner: (learner.engine.optimizer.optimizer, "step"), None),
    "schedule": (lambda learner: (learner.engine.schedule, "step"), None),
    "log": (lambda learner: (learner.log, "finish"), "checkpoint-2"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_progress_is_saved_only_for_whole_steps(tmp_path, model, encoder, records, moment):
    harness = build(tmp_path, model, encoder, records, max_steps=2)
    place, name = MOMENTS[moment]
    owner, method = place(harness.learner)
    real, calls = getattr(owner, method), []

    def struck(*args, **kwargs):
        calls.append(1)
        if len(calls) == 2:
            raise ZeroDivisionError("struck")
        return real(*args, **kwargs)

    setattr(owner, method, struck)
    with pytest.raises(ZeroDivisionError):
        harness.learner.train()
    harness.learner.save_progress()
    found = newest_whole(tmp_path)
    assert (found and found.name) == name


def test_progress_is_not_saved_once_deepspeed_steps_in_backward(tmp_path, model, encoder, records, monkeypatch):
    """Its last backward pass has changed weights before the loop's own step of the optimizer."""
    learner = build(tmp_path, model, encoder, records, max_steps=2).learner
    accelerator, backward = learner.engine.accelerator, learner.engine.accelerator.backward
    monkeypatch.setattr(type(learner.engine), "steps_in_backward", True)

    def struck(loss, **_):
        backward(loss)
        if learner.state.global_step == 1 and accelerator.sync_gradients:
            raise ZeroDivisionError("struck")

    monkeypatch.setattr(accelerator, "backward", struck)
    with pytest.raises(ZeroDivisionError):
        learner.train()
    learner.save_progress()
    assert newest_whole(tmp_path) is None


@pytest.fixture
def run(tmp_path, model, encoder, records):
    """A function that trains in a folder, saving after each step, and returns the folder."""

    def train(**options):
        saves = {"save_strategy": "steps", "save_steps": 1, **options}
        build(tmp_path, model, encoder, records, **saves).learner.train()
        return tmp_path

    return train


@pytest.mark.parametrize(("saves", "left"), [({"save_strategy": "best"}, [1]), ({"save_steps": 1}, [1, 3])])
def test_best_and_newest_checkpoints_are_kept(run, saves, left):
    folder = run(
        **saves, max_steps=3, eval_strategy="steps", eval_steps=1, metric_for_best_model="eval_rollout_f1",
        greater_is_better=True, save_total_limit=1,
    )  # fmt: skip
    assert sorted(one.name for one in folder.glob("checkpoint-*")) == [f"checkpoint-{step}" for step in left]
    state = json.loads((folder / f"checkpoint-{left[-1]}" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(folder / "checkpoint-1")


BY_STEP = {1: only_first, 2: perfect, 3: only_first, 4: only_first}


@pytest.fixture
def evaluated(tmp_path, model, encoder, image_paths):
    """Four steps, an evaluation after each, of which the second is the best; step 4 is the only one to be saved."""
    harness = build(
        tmp_path, model, encoder, two_boxes(image_paths),
        answer=lambda one: BY_STEP[max(1, harness.learner.state.global_step)](one),
        max_steps=4, eval_strategy="steps", eval_steps=1, save_strategy="steps", save_steps=4, save_total_limit=1,
        metric_for_best_model="eval_rollout_f1",
    )  # fmt: skip
    harness.learner.train()
    return harness


def test_best_checkpoint_is_kept_beside_last_one(evaluated, tmp_path):
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]
    state = json.loads((tmp_path / "checkpoint-4" / "trainer_state.json").read_text())
    assert state["best_global_step"] == 2
    assert state["best_model_checkpoint"] == str(tmp_path / "checkpoint-2")


def test_log_and_status_name_best_checkpoint(evaluated):
    best = evaluated.lines("best_checkpoint")
    assert [line["step"] for line in best] == [1, 2]
    assert best[-1] == {"event": "best_checkpoint", "step": 2, "metric": "eval_rollout_f1", "score": 1.0}
    current = evaluated.reporter.current
    assert (current.best_step, current.best_score) == (2, 1.0)


def test_newest_checkpoint_is_best_while_no_answer_is_correct(tmp_path, model, encoder, records):
    harness = build(
        tmp_path, model, encoder, records, answer=lambda one: "{}", max_steps=2, eval_strategy="steps", eval_steps=1,
        save_strategy="steps", save_steps=1, metric_for_best_model=BEST_METRIC,
    )  # fmt: skip
    harness.learner.train()
    assert harness.lines("best_checkpoint") == []
    assert checkpoints.best_whole(tmp_path) == tmp_path / "checkpoint-2"


def test_unknown_best_model_metric_is_refused_before_start(tmp_path):
    config = run_config(training={"metric_for_best_model": "eval_rollout_f1_clas", "eval_strategy": "steps"})
    with pytest.raises(ConfigError, match=r"training\.metric_for_best_model.*did you mean eval_rollout_f1"):
        checked_records(config, world_size=1)
