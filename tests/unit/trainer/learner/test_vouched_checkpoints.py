"""The checkpoints that proofs vouch for stay, and what is newer is set aside: of one start, and of those before it."""

import copy
import json
import shutil

import pytest
from transformers import TrainerCallback

from stage2_trainer.process.checkpoints import MARK, checkpoints_of, newest_whole, step_of
from stage2_trainer.telemetry.earlier_run import remove_run
from tests.unit.trainer.learner.harness import box, build, record

PROVED, LAST = 2, 4


@pytest.fixture(scope="module")
def records(image_paths):
    return [record(image_paths[0], 0, object_1=box("red box", 0, 0, 100, 100))]


class ProvedAt(TrainerCallback):
    """A callback that proves the sync of a step, at which training goes on."""

    def __init__(self, proved, step):
        self._proved, self._step = proved, step

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self._step:
            self._proved.step = self._step


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("proved_at", "kept"), [(1, {1, 5}), (2, {2, 5}), (4, {4, 5}), (9, {5})], ids=["1", "2", "4", "never"]
)
def test_the_newest_proved_checkpoint_stays_and_a_contradiction_sets_aside_what_is_newer(
    tmp_path, model, encoder, records, behind, proved_at, kept, caplog
):
    folder = tmp_path / "run"
    harness = build(
        folder, model, encoder, records, max_steps=5, save_steps=1, save_total_limit=1, save_strategy="steps"
    )
    harness.trainer.async_save = behind
    harness.trainer.add_callback(ProvedAt(harness.trainer.vouched.proved, proved_at))
    harness.trainer.train()
    assert {int(one.name.removeprefix("checkpoint-")) for one in folder.glob("checkpoint-*")} == kept
    harness.trainer.set_unproved_aside()
    left = newest_whole(folder)
    assert left == (None if proved_at == 9 else folder / f"checkpoint-{proved_at}")
    assert [one.name for one in folder.glob("unproved-*")] == ["unproved-checkpoint-5"]
    assert str(folder / "unproved-checkpoint-5") in caplog.text
    remove_run(folder)
    assert not list(folder.glob("*checkpoint-*"))


@pytest.fixture(scope="module")
def start(loaded_model, encoder, records):
    """A function that trains in a folder as one start does, and returns its trainer."""

    def train(folder, *, last, proved_at=None, lasting=True, kept=None, named=None):
        saves = {"save_steps": 1, "save_strategy": "steps", "save_total_limit": kept}
        trainer = build(folder, copy.deepcopy(loaded_model), encoder, records, max_steps=last, **saves).trainer
        trainer.vouched.lasting, trainer.vouched.named = lasting, named
        trainer.add_callback(ProvedAt(trainer.vouched.proved, proved_at))
        trainer.train(resume_from_checkpoint=str(found) if (found := named or newest_whole(folder)) else None)
        return trainer

    return train


@pytest.fixture
def earlier(tmp_path, start):
    """The folder of a start that has proved one step, and then trained on without a proof."""
    start(tmp_path / "run", last=LAST, proved_at=PROVED)
    return tmp_path / "run"


def steps(folder):
    return [step_of(one) for one in checkpoints_of(folder)]


def test_a_start_whose_first_proof_contradicts_doubts_what_the_one_before_it_did_not_prove(earlier, start):
    trainer = start(earlier, last=LAST + 1)
    trainer.set_unproved_aside()
    assert steps(earlier) == [1, PROVED]
    trainer = start(earlier, last=LAST)
    trainer.set_unproved_aside()
    assert steps(earlier) == [1, PROVED], "what was proved is never doubted"


def test_a_start_that_proves_its_first_sync_vouches_for_what_it_went_on_from(earlier, start):
    start(earlier, last=LAST + 2, proved_at=LAST).set_unproved_aside()
    assert steps(earlier) == [1, PROVED, LAST - 1, LAST]
    start(earlier, last=LAST + 1).set_unproved_aside()
    assert steps(earlier) == [1, PROVED, LAST - 1, LAST], "and says so to the next"


def test_what_an_earlier_start_proved_is_not_removed_before_there_is_a_newer_proof(earlier, start):
    start(earlier, last=LAST + 2, kept=1)
    assert steps(earlier) == [PROVED, LAST + 2]
    start(earlier, last=LAST + 4, kept=1, proved_at=LAST + 3)
    assert steps(earlier) == [LAST + 3, LAST + 4]


def test_a_start_from_an_older_checkpoint_takes_no_more_for_proved_than_it_goes_on_from(earlier, start):
    for one in checkpoints_of(earlier)[1:]:
        one.rename(one.with_name(f"elsewhere-{one.name}"))
    start(earlier, last=LAST).set_unproved_aside()
    assert steps(earlier) == [1]
    assert json.loads((earlier / MARK).read_text()) == {"step": 1}


def test_where_only_the_first_sync_is_proved_a_start_answers_for_itself_alone(earlier, start):
    start(earlier, last=LAST + 1, lasting=False).set_unproved_aside()
    assert steps(earlier) == [1, PROVED, LAST - 1, LAST]
    start(earlier, last=LAST + 1).set_unproved_aside()
    assert steps(earlier) == [1, PROVED, LAST - 1, LAST], "and leaves no old proof to a start that asks for more"


def test_a_checkpoint_that_a_person_names_stays_and_newer_ones_of_before_do_not(earlier, start):
    named = earlier / f"checkpoint-{LAST - 1}"
    start(earlier, last=LAST, named=named).set_unproved_aside()
    assert steps(earlier) == [1, PROVED, LAST - 1]


def test_a_checkpoint_from_elsewhere_has_nothing_of_this_folders_proofs(earlier, start, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "checkpoint-1"
    shutil.copytree(earlier / "checkpoint-1", elsewhere)
    trainer = start(earlier, last=PROVED, named=elsewhere)
    assert trainer.vouched.newest is None
    trainer.set_unproved_aside()
    assert steps(earlier) == [1, LAST - 1, LAST], "its own alone"
    assert not (earlier / MARK).exists()


@pytest.mark.parametrize(
    "written", ["", "{}", "[1]", '{"step": "x"}', '{"step": -3}', '{"step": true}', '{"step": 1e999}', "[" * 100_000]
)
def test_a_mark_that_cannot_be_read_vouches_for_nothing(earlier, start, written, caplog):
    (earlier / MARK).write_text(written)
    start(earlier, last=LAST + 1).set_unproved_aside()
    assert steps(earlier) == [1, PROVED, LAST - 1, LAST]
    assert "is passed over" in caplog.text


def test_starting_anew_forgets_what_was_proved(earlier):
    assert (earlier / MARK).exists()
    remove_run(earlier)
    assert not (earlier / MARK).exists()
