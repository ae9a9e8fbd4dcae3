"""The newest checkpoint that a proof vouches for stays, and a contradiction sets the newer ones aside."""

import copy

import pytest

from stage2_trainer.model.checkpoints import MANIFEST, list_checkpoints, newest_whole, proved_step_of, step_of
from stage2_trainer.telemetry.run_log import remove_run
from tests.unit.trainer.learner.harness import before_step, box, build, record

PROVED, LAST = 2, 4


@pytest.fixture(scope="module")
def records(image_paths):
    return [record(image_paths[0], 0, object_1=box("red box", 0, 0, 100, 100))]


@pytest.fixture(scope="module")
def start(loaded_model, encoder, records):
    """A function that trains in a folder as one start does, and returns its learner."""

    def train(folder, *, last, proved_at=None, kept=None, named=None):
        saves = {"save_steps": 1, "save_strategy": "steps", "save_total_limit": kept}
        checkpoint = named or newest_whole(folder)
        proved = proved_step_of(checkpoint) if checkpoint and not named else None
        model = copy.deepcopy(loaded_model)
        harness = build(folder, model, encoder, records, max_steps=last, earlier_proof=proved, **saves)
        if proved_at is not None:
            before_step(harness.learner, proved_at, lambda: setattr(harness.proved, "step", proved_at))
        harness.learner.train(checkpoint)
        return harness.learner

    return train


@pytest.fixture
def earlier(tmp_path, start):
    """The folder of a start that has proved one step, and then trained on without a proof."""
    start(tmp_path / "run", last=LAST, proved_at=PROVED)
    return tmp_path / "run"


def steps(folder):
    return [step_of(one) for one in list_checkpoints(folder)]


@pytest.mark.parametrize(
    ("proved_at", "kept"), [(1, [1, 5]), (2, [2, 5]), (4, [4, 5]), (9, [5])], ids=["1", "2", "4", "never"]
)
def test_failed_proof_sets_aside_checkpoints_newer_than_last_proof(tmp_path, start, proved_at, kept, caplog):
    folder = tmp_path / "run"
    learner = start(folder, last=5, proved_at=proved_at, kept=1)
    assert steps(folder) == kept
    learner.set_unproved_aside()
    assert steps(folder) == kept[:-1]
    assert [one.name for one in folder.glob("unproved-*")] == ["unproved-checkpoint-5"]
    assert str(folder / "unproved-checkpoint-5") in caplog.text
    remove_run(folder)
    assert not list(folder.glob("*checkpoint-*"))


def test_failed_first_proof_of_restart_sets_aside_unproved_earlier_checkpoints(earlier, start):
    start(earlier, last=LAST + 1).set_unproved_aside()
    assert steps(earlier) == [1, PROVED]
    start(earlier, last=LAST).set_unproved_aside()
    assert steps(earlier) == [1, PROVED], "what was proved is never doubted"


def test_passed_first_proof_of_restart_proves_resumed_checkpoint(earlier, start):
    start(earlier, last=LAST + 2, proved_at=LAST).set_unproved_aside()
    assert steps(earlier) == [1, PROVED, LAST - 1, LAST]


def test_proved_checkpoint_of_earlier_start_is_kept_until_newer_proof(earlier, start):
    start(earlier, last=LAST + 2, kept=1)
    assert steps(earlier) == [PROVED, LAST + 2]
    start(earlier, last=LAST + 4, kept=1, proved_at=LAST + 3)
    assert steps(earlier) == [LAST + 3, LAST + 4]


def test_failed_proof_keeps_explicitly_named_checkpoint_and_removes_newer_ones(earlier, start):
    named = earlier / f"checkpoint-{LAST - 1}"
    start(earlier, last=LAST, named=named).set_unproved_aside()
    assert steps(earlier) == [1, PROVED, LAST - 1]


@pytest.mark.parametrize(
    "written", ["", "[1]", "{}", '{"proved_step": "x"}', '{"proved_step": -3}', '{"proved_step": true}', "[" * 100_000]
)
def test_unreadable_manifest_has_no_proved_step(tmp_path, written):
    (tmp_path / MANIFEST).write_text(written)
    assert proved_step_of(tmp_path) is None
