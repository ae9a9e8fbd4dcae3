"""Wherever a save is cut off or the disk gives out, the next start resumes from a whole checkpoint.

A seed chooses calls to a file of a checkpoint, or to the log. At each the learner is killed, or the disk is full from
there on, or that call alone fails. In the end the weights must be those of a learner that nothing ever happened to.
STAGE2_CUT_OFF_CASES sets how many cases there are (docs/testing.md).
"""

import filecmp
import gc
import importlib
import json
import os
import random
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from accelerate.state import AcceleratorState

from stage2_trainer.learner import loop
from stage2_trainer.model.checkpoints import PREFIX, UNFINISHED, newest_whole
from stage2_trainer.model.tensor_files import WAITING
from stage2_trainer.process.ranks import rank
from stage2_trainer.process.torchrun import joined_exit_code
from stage2_trainer.telemetry.run_log import STEP_LOG
from tests.support.forked import SAVING
from tests.support.ports import free_port
from tests.unit.trainer.learner.file_calls import (
    BROKEN,
    FLUSHES,
    FULL,
    KILL,
    KILL_ALL,
    TAKES_ROOM,
    Fault,
    FileCall,
    run_with_faults,
)
from tests.unit.trainer.learner.harness import box, build, record

pytestmark = pytest.mark.in_turns(2, apart=True)
CASES = int(os.environ.get("STAGE2_CUT_OFF_CASES", "12"))
CASES_TOGETHER, SEED = max(4, CASES // 5), 16
WEIGHTS = "model.safetensors"
SAVES = 3  # a fault comes within so many, the last of which remove older checkpoints too
KILLED, ALL_KILLED = "SIGKILL", "SIGKILL to all processes"
FULL_FROM_THERE, FULL_ONCE, UNFLUSHED = "disk full from there on", "disk full once", "I/O error"
FAULTS: Mapping[str, Fault] = {
    KILLED: KILL, ALL_KILLED: KILL_ALL, FULL_FROM_THERE: FULL, FULL_ONCE: FULL, UNFLUSHED: BROKEN
}  # fmt: skip
EXIT_RETRYABLE = 75
NUMBERED = {rf"^{PREFIX}\d+": "(its folder)", r"^global_step\d+": "(DeepSpeed's folder)", r"^\.tmp.*": ".tmp"}
"""Names of files and folders that are others at each step, and what stands for them."""

# At a process's first backward pass PyTorch makes threads for each device, the fake one of other tests too, and a copy
# of a process with such threads can make no pass. A first pass here, on the CPU, makes none.
torch.ones((), requires_grad=True).backward()

Learn = Callable[[Path], int]
"""Trains in an output folder, from the newest whole checkpoint there, and saves after each step."""


class Place(NamedTuple):
    """A kind of call and the file that it changes, of whichever checkpoint."""

    call: str
    file: str


@dataclass(frozen=True)
class Case:
    """A fault of a kind, at the call of this number to a place."""

    kind: str
    place: Place
    number: int


@dataclass
class Watch:
    """A view of the calls to checkpoints in an output folder, one of which fails as `case` says.

    published: the step of the newest checkpoint that got its name. struck: whether the fault has come. unflushed: what
    was not on disk when a checkpoint that holds it got its name, and the log where that did not tell of its step.
    recorded: bytes of the log that are on disk.
    """

    folder: Path
    case: Case | None = None
    last: int = sys.maxsize
    published: int = 0
    struck: bool = False
    calls: Counter[Place] = field(default_factory=Counter)
    flushed: set[Path] = field(default_factory=set)
    recorded: int = 0
    unflushed: list[Path] = field(default_factory=list)

    def __call__(self, call: FileCall) -> Fault:
        """Return what becomes of a call; after checkpoint `last` all processes are killed."""
        if not call.path.is_relative_to(self.folder):
            return None
        place = self._place(call)
        if place is None:  # of the run, and not looked at
            return self._later(call)
        if self.published >= self.last:
            return KILL_ALL
        number = self.calls[place]
        self.calls[place] += 1
        if self.case is not None and (place, number) == (self.case.place, self.case.number):
            self.struck = True
            return FAULTS[self.case.kind]
        if (fault := self._later(call)) is None:
            self._note(call)
        return fault

    def _note(self, call: FileCall) -> None:
        if call.name in FLUSHES:
            self.flushed.add(call.path)
            if call.path == self.folder / STEP_LOG:
                self.recorded = call.path.stat().st_size
        elif call.name in TAKES_ROOM | {"ftruncate"}:
            self.flushed.discard(call.path)
        elif call.name == "rename" and call.path.parent.name == UNFINISHED:
            self.published = max(self.published, _step(call.path))
            self.unflushed += {call.path, *call.path.rglob("*")} - self.flushed
            if _step(call.path) in self._unrecorded():
                self.unflushed.append(self.folder / STEP_LOG)

    def _unrecorded(self) -> set[int]:
        """Return the steps whose records are not on disk."""
        with (self.folder / STEP_LOG).open("rb") as log:
            log.seek(self.recorded)
            ended = [line for line in log if line.endswith(b"\n")]
        return {found["step"] for line in ended if (found := json.loads(line))["event"] == "step"}

    def _later(self, call: FileCall) -> Fault:
        full = self.struck and self.case is not None and self.case.kind == FULL_FROM_THERE
        return FULL if full and call.name in TAKES_ROOM else None

    def _place(self, call: FileCall) -> Place | None:
        inside = call.path.relative_to(self.folder).parts
        if inside == (STEP_LOG,) and call.name in {"write", "fsync"}:
            return Place(call.name, STEP_LOG)
        if inside and not inside[0].startswith((UNFINISHED, PREFIX)):
            return None
        if not inside and call.name not in FLUSHES:
            return None
        if call.name == "mkdir" and call.path.is_dir():  # it changes nothing, and nobody minds that it fails
            return None
        name = _name(inside[-1] if inside else "(output)")
        aside = inside[:1] == (UNFINISHED,)
        return Place(call.name, name if aside or not inside else f"{name} of an older one")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: what the learner ended with, and the newest whole checkpoint before and after it."""

    case: Case
    code: int
    before: int
    after: int


def cases_of(folder: Path, learn: Learn, *, count: int, seed: int, several: bool = False) -> list[Case]:
    """Draw cases, each place as likely as any other, once a learner in `folder` has shown where there are any.

    several: the learner has several processes, of which one is killed, or all.
    """
    watch = Watch(folder, last=SAVES)
    code = run_with_faults(partial(learn, folder), watch)
    assert code == -9, f"the learner ended by itself, with {code}"
    draws = random.Random(seed)
    places, killed = sorted(watch.calls), [KILLED, ALL_KILLED] if several else [KILLED]
    return [_case(draws, draws.choice(places), watch.calls, killed) for _ in range(count)]


def _case(draws: random.Random, place: Place, calls: Counter[Place], killed: Sequence[str]) -> Case:
    kinds = [*killed]
    # each process makes the folder, and asks no more where another one has
    if place.call in TAKES_ROOM and not (place.call == "mkdir" and ALL_KILLED in killed):
        kinds += [FULL_FROM_THERE, FULL_ONCE]
    if place.call in FLUSHES:
        kinds += [UNFLUSHED]
    return Case(draws.choice(kinds), place, draws.randrange(calls[place]))


def cut_off(
    folder: Path, learn: Learn, cases: Sequence[Case], *, like: Path, several: bool = False
) -> Iterator[Outcome]:
    """Yield what becomes of each case, in one output folder.

    like: the folder that cases were drawn in; checkpoints have the same files. several: see `cases_of`.

    Raises AssertionError where a checkpoint that had its name is not there any more, or is not whole.
    """
    for case in cases:
        before, watch = newest(folder), Watch(folder, case)
        code = run_with_faults(partial(learn, folder), watch)
        after = newest(folder)
        assert watch.struck, f"{case}: the learner ended by itself, with {code}"
        assert _is_expected(code, case, several=several), f"{case}: the learner ended with {code}"
        assert not watch.unflushed, f"{case}: named before they were on disk: {watch.unflushed}"
        assert after >= max(before, watch.published), f"{case}: {max(before, watch.published)} was there, now {after}"
        assert not after or parts(folder) == parts(like), f"{case}: other files than {sorted(parts(like))}"
        yield Outcome(case, code, before, after)


def _is_expected(code: int, case: Case, *, several: bool) -> bool:
    if case.kind == KILLED and several:  # by the others, which lose it
        return code > 0
    return code == (-9 if case.kind in (KILLED, ALL_KILLED) else EXIT_RETRYABLE)


def unharmed(folder: Path, learn: Learn, *, step: int) -> Path:
    """Return the checkpoint of this step of a learner that nothing happened to."""
    run_with_faults(partial(learn, folder), Watch(folder, last=step))
    return folder / f"{PREFIX}{step}"


def newest(folder: Path) -> int:
    """Return the step of the newest whole checkpoint; 0 where there is none."""
    found = newest_whole(folder)
    return _step(found) if found else 0


def parts(folder: Path) -> set[str]:
    """Return the names of the files of the newest whole checkpoint: each process has written its own."""
    found = newest_whole(folder)
    assert found is not None
    return {_name(file.name) for file in found.rglob("*")}


def _name(name: str) -> str:
    for one, put in NUMBERED.items():
        name = re.sub(one, put, name)
    return name


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


@pytest.fixture
def learn(model, encoder, image_paths, tmp_path, monkeypatch):
    """A function that trains in a copy of this process, from the newest checkpoint, and saves after each step.

    Each process writes a file of its own, as where segments wait; here none do.
    """
    monkeypatch.setattr(loop, "save_waiting", write_waiting)
    for name, one in model.named_parameters():  # an optimizer of few tensors makes few calls
        one.requires_grad_(name.endswith("language_model.norm.weight"))
    records = [record(path, i, object_1=box("red box", 0, 0, 100, 100)) for i, path in enumerate(image_paths[:2])]

    def learner_in(folder):
        options = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2, "per_device_train_batch_size": 1}
        backend = "gloo" if "RANK" in os.environ else None
        return build(
            folder, model, encoder, records, max_steps=10 * CASES, ddp_backend=backend, **options
        ).learner  # fmt: skip

    def run(folder):
        torch.set_num_threads(1)  # a fork has none of its parent's threads, and would wait for them
        learner = learner_in(folder)
        found = newest_whole(folder)
        with folder.with_suffix(f".{learner.engine.args.process_index}").open("a") as log:
            log.write(f"{found}\n")
        try:
            learner.train(found)
        except OSError:  # CheckpointError is one, and so is what the log meets
            return EXIT_RETRYABLE
        return 0

    learner_in(tmp_path / "imports")  # all that it loads is there in the copies
    importlib.import_module(SAVING)
    gc.freeze()  # for good: what tests/conftest.py has frozen would thaw with it
    return run


def write_waiting(folder, segments):
    """Write the segments that wait in this process, even if none do."""
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(list(segments), folder / f"{WAITING}{rank():05d}.pt")


def together(run, folder):
    """Train in two processes, each of which ends by itself, and return what their launcher would."""
    port = str(free_port())
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


def test_learner_with_interrupted_saves_reaches_same_weights(learn, tmp_path):
    cases = cases_of(tmp_path / "first", learn, count=CASES, seed=SEED)
    outcomes = list(cut_off(tmp_path / "run", learn, cases, like=tmp_path / "first"))
    assert len({one.case.place for one in outcomes}) > CASES // 2
    last = outcomes[-1].after
    assert last > 1
    assert_same_weights(tmp_path / "run", unharmed(tmp_path / "whole", learn, step=last))


def test_two_processes_with_interrupted_saves_resume_from_same_checkpoint(learn, tmp_path):
    run = partial(together, learn)
    cases = cases_of(tmp_path / "first", run, count=CASES_TOGETHER, seed=SEED, several=True)
    cases.append(Case(KILLED, Place("openat", f"{WAITING}00001.pt"), 1))  # the other process publishes
    outcomes = list(cut_off(tmp_path / "run", run, cases, like=tmp_path / "first", several=True))
    assert len({one.case.kind for one in outcomes}) > 2
    log = [(tmp_path / f"run.{rank}").read_text().splitlines() for rank in range(2)]
    steps = [str(tmp_path / f"run/checkpoint-{one.before}") if one.before else "None" for one in outcomes]
    assert log == [steps, steps]
    last = outcomes[-1].after
    assert last > 1
    assert_same_weights(tmp_path / "run", unharmed(tmp_path / "whole", run, step=last))
