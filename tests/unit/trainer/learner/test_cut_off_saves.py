"""Wherever a save is cut off or the disk gives out, the next start goes on from a whole checkpoint.

A few cases of those that `python -m tests.cut_off_saves` draws (docs/testing.md).
"""

import filecmp
import gc
import os
import socket
from functools import partial

import pytest
import torch
from accelerate.state import AcceleratorState

from stage2_trainer.process.checkpoints import newest_whole
from stage2_trainer.process.torchrun import joined_exit_code
from tests.cut_off_saves import EXIT_RETRYABLE, KILLED, Case, Place, cases_of, cut_off, unharmed
from tests.unit.trainer.learner.harness import box, build, record

CASES, CASES_TOGETHER, SEED = 12, 4, 16
WEIGHTS = "model.safetensors"


@pytest.fixture
def learn(model, encoder, image_paths, tmp_path):
    """A function that trains in a copy of this process, from the newest checkpoint, and saves after each step."""
    for name, one in model.named_parameters():  # an optimizer of few tensors makes few calls
        one.requires_grad_(name.endswith("language_model.norm.weight"))
    records = [record(path, i, object_1=box("red box", 0, 0, 100, 100)) for i, path in enumerate(image_paths[:2])]

    def trainer_in(folder):
        options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "per_device_train_batch_size": 1}
        backend = "gloo" if "RANK" in os.environ else None
        return build(
            folder, model, encoder, records, max_steps=10 * CASES, ddp_backend=backend, **options
        ).trainer  # fmt: skip

    def run(folder):
        torch.set_num_threads(1)  # a fork has none of its parent's threads, and would wait for them
        trainer = trainer_in(folder)
        found = newest_whole(folder)
        with folder.with_suffix(f".{trainer.args.process_index}").open("a") as told:
            told.write(f"{found}\n")
        try:
            trainer.train(resume_from_checkpoint=str(found) if found else None)
        except OSError:  # CheckpointError is one, and so is what the log meets
            return EXIT_RETRYABLE
        return 0

    trainer_in(tmp_path / "imports")  # all that it loads is there in the copies
    gc.freeze()
    yield run
    gc.unfreeze()


def together(run, folder):
    """Train in two processes, each of which ends by itself, and return what their launcher would."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    pids = [os.fork() or member(run, folder, rank, port) for rank in "01"]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return joined_exit_code(codes) if any(codes) else 0


def member(run, folder, rank, port):
    code = 1
    try:
        os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        os.environ |= {"MASTER_PORT": port}
        AcceleratorState._reset_state(reset_partial_state=True)  # what it was copied from is alone
        code = run(folder)
    finally:
        os._exit(code)


def assert_same_weights(folder, other):
    assert filecmp.cmp(folder / other.name / WEIGHTS, other / WEIGHTS, shallow=False)


def test_a_learner_whose_saves_are_cut_off_goes_on_to_the_same_weights(learn, tmp_path):
    cases = cases_of(tmp_path / "first", learn, count=CASES, seed=SEED)
    outcomes = list(cut_off(tmp_path / "run", learn, cases, like=tmp_path / "first"))
    assert len({one.case.place for one in outcomes}) > CASES // 2
    last = outcomes[-1].after
    assert last > 1
    assert_same_weights(tmp_path / "run", unharmed(tmp_path / "whole", learn, step=last))


def test_two_processes_whose_saves_are_cut_off_go_on_from_the_same_checkpoint(learn, tmp_path):
    run = partial(together, learn)
    cases = cases_of(tmp_path / "first", run, count=CASES_TOGETHER, seed=SEED, several=True)
    cases.append(Case(KILLED, Place("openat", "rng_state_1.pth"), 1))  # the other process publishes
    outcomes = list(cut_off(tmp_path / "run", run, cases, like=tmp_path / "first", several=True))
    assert len({one.case.kind for one in outcomes}) > 2
    told = [(tmp_path / f"run.{rank}").read_text().splitlines() for rank in range(2)]
    steps = [str(tmp_path / f"run/checkpoint-{one.before}") if one.before else "None" for one in outcomes]
    assert told == [steps, steps]
    last = outcomes[-1].after
    assert last > 1
    assert_same_weights(tmp_path / "run", unharmed(tmp_path / "whole", run, step=last))
