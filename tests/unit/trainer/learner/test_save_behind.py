"""Checkpoints that are written behind training are those that training would have waited for.

Saves that are cut off: test_cut_off_saves.
"""

import copy
import json
import shutil
import threading

import pytest
from transformers import TrainerCallback

from stage2_trainer.process import checkpoints, host_memory, save_behind, whole_checkpoints
from stage2_trainer.process.checkpoints import CheckpointError, newest_whole
from stage2_trainer.process.save_behind import SaveBehind
from stage2_trainer.process.writing import LOCK_VARIABLE, is_writing
from tests.unit.trainer.learner.harness import box, build, record

EACH = {"save_strategy": "steps", "save_steps": 1}
WITH_TIMES = {"trainer_state.json", "stage2_checkpoint.json"}  # the second says how long the first is


@pytest.fixture
def run(tmp_path, model, encoder, image_paths):
    """A function that makes a trainer of the same model in the same folder, whose saves are written behind training."""
    records = [record(image_paths[0], 0, object_1=box("red box", 0, 0, 100, 100))]

    def make(*, behind=True, **options):
        folder = tmp_path / "run"
        trainer = build(folder, copy.deepcopy(model), encoder, records, **{"max_steps": 2, **EACH, **options}).trainer
        trainer.async_save = behind
        return trainer, folder

    yield make
    assert not left_in_memory(tmp_path / "run")


def left_in_memory(folder):
    return list(host_memory.SHARED_MEMORY.glob(f"{SaveBehind(folder)._prefix}*"))


@pytest.fixture
def held(monkeypatch):
    """Events: that a checkpoint is about to be published, and that it may be."""
    there, go = threading.Event(), threading.Event()
    real = save_behind.publish

    def publish(*arguments):
        there.set()
        assert go.wait(60)
        return real(*arguments)

    monkeypatch.setattr(save_behind, "publish", publish)
    yield there, go
    go.set()


class At(TrainerCallback):
    """A callback that does something at the beginning of a step, by its number."""

    def __init__(self, **steps):
        self.steps = steps

    def on_step_begin(self, args, state, control, **kwargs):
        self.steps.get(f"step{state.global_step}", lambda: None)()


def test_its_files_are_those_of_a_save_that_is_waited_for_bit_for_bit(run, tmp_path):
    for behind, name in ((False, "waited"), (True, "behind")):
        trainer, folder = run(behind=behind)
        trainer.train()
        shutil.move(folder, tmp_path / name)
    waited, behind = (sorted((tmp_path / name).glob("checkpoint-*/*")) for name in ("waited", "behind"))
    assert len({one.parent for one in behind}) == 2
    assert [(one.parent.name, one.name) for one in waited] == [(one.parent.name, one.name) for one in behind]
    for one, other in zip(waited, behind, strict=True):
        assert one.stat().st_mode == other.stat().st_mode
        if one.name not in WITH_TIMES:
            assert one.read_bytes() == other.read_bytes(), one.name


def test_training_goes_on_while_one_is_written_and_the_next_save_waits_for_it(run, held):
    there, go = held
    trainer, folder = run(save_steps=2, max_steps=4)
    seen = []

    def look():
        assert there.wait(60)
        seen.append(newest_whole(folder))

    trainer.add_callback(At(step3=lambda: look() or go.set()))
    trainer.train()
    assert seen == [None], "step 3 began before the checkpoint of step 2 had its name"
    assert sorted(one.name for one in folder.glob("checkpoint-*")) == ["checkpoint-2", "checkpoint-4"]


def test_a_run_that_ends_by_an_error_ends_when_the_checkpoint_is_on_disk(run, held):
    there, go = held

    def strike():
        assert there.wait(60)
        threading.Timer(0.5, go.set).start()
        raise ZeroDivisionError("struck")

    trainer, folder = run()
    trainer.add_callback(At(step1=strike))
    with pytest.raises(ZeroDivisionError):
        trainer.train()
    assert newest_whole(folder).name == "checkpoint-1"


@pytest.mark.parametrize("behind", [False, True])
def test_the_launcher_of_several_processes_sees_that_a_checkpoint_gets_its_name(run, tmp_path, monkeypatch, behind):
    lock, seen = tmp_path / "lock", []
    lock.touch()
    monkeypatch.setenv(LOCK_VARIABLE, str(lock))

    def publish(*arguments):
        seen.append(is_writing(lock))
        return checkpoints.publish(*arguments)

    for module in (whole_checkpoints, save_behind):
        monkeypatch.setattr(module, "publish", publish)
    trainer, _ = run(behind=behind)
    trainer.train()
    assert seen == [True, True]
    assert not is_writing(lock)


def test_one_that_cannot_be_written_ends_the_run_at_the_next_step(run, monkeypatch):
    trainer, folder = run(save_steps=2, max_steps=10)
    written = []

    def publish(*arguments):
        written.append(trainer._behind._writing)
        raise OSError(28, "No space left on device")

    def wait():
        while not (written and written[0].done()):
            threading.Event().wait(0.05)

    monkeypatch.setattr(save_behind, "publish", publish)
    trainer.add_callback(At(step2=wait))
    with pytest.raises(CheckpointError, match=r"no checkpoint could be written.*No space left"):
        trainer.train()
    assert trainer.state.global_step == 3
    assert newest_whole(folder) is None
    assert not (folder / ".unfinished").exists()


def test_the_best_checkpoint_and_the_newest_are_kept_and_named(run):
    trainer, folder = run(
        max_steps=3, eval_strategy="steps", eval_steps=1, metric_for_best_model="eval_rollout_f1",
        greater_is_better=True, save_total_limit=1, load_best_model_at_end=True,
    )  # fmt: skip
    trainer.train()
    assert sorted(one.name for one in folder.glob("checkpoint-*")) == ["checkpoint-1", "checkpoint-3"]
    state = json.loads((folder / "checkpoint-3" / "trainer_state.json").read_text())
    assert state["best_model_checkpoint"] == str(folder / "checkpoint-1")


def test_where_memory_has_no_room_training_waits_for_the_disk(run, monkeypatch, caplog, held):
    _, go = held  # nothing would be published behind training
    monkeypatch.setattr(save_behind, "memory_left", lambda: 1000)
    trainer, folder = run(max_steps=1)
    trainer.train()
    assert "training waits until it is on disk" in caplog.text
    assert newest_whole(folder).name == "checkpoint-1"
    assert not go.is_set()


def test_what_a_killed_learner_left_in_memory_is_removed_by_the_next_start(run, tmp_path):
    killed, other = SaveBehind(tmp_path / "run").begin(), SaveBehind(tmp_path / "another run").begin()
    trainer, _ = run(behind=False, save_strategy="no", max_steps=1)
    trainer.train()
    assert not killed.exists()
    assert other.exists(), "of another run"
    SaveBehind(tmp_path / "another run").forget()


def test_one_that_ctrl_c_stops_waiting_for_is_still_on_its_way(tmp_path, held, monkeypatch):
    there, go = held
    behind = SaveBehind(tmp_path)
    staged = behind.begin() / "checkpoint-5"
    staged.mkdir()
    (staged / "weights").write_text("whole")
    behind.hand_over(staged, lambda: None)
    assert there.wait(60)

    def pressed(_futures):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(save_behind, "wait", pressed)
        with pytest.raises(KeyboardInterrupt):
            behind.settle()
    behind.forget()  # leaves what is on its way
    assert left_in_memory(tmp_path)
    go.set()
    behind.settle()
    assert (tmp_path / "checkpoint-5" / "weights").read_text() == "whole"
    assert not left_in_memory(tmp_path)


def test_the_first_ones_room_counts_all_that_is_saved(run):
    trainer, _ = run()
    model = trainer.model
    assert not hasattr(model, "peft_config")
    everything = sum(one.numel() * one.element_size() for one in model.parameters())
    for one in model.parameters():
        one.requires_grad_(False)
    assert trainer._room() >= everything


def test_one_that_memory_has_no_room_for_leaves_nothing_there_and_names_the_place(run, monkeypatch):
    trainer, folder = run()
    monkeypatch.setattr(trainer, "save_beside", lambda _: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    with pytest.raises(CheckpointError, match=r"No space left on device .* free then in /dev/shm"):
        trainer.train()
    assert not left_in_memory(folder)
