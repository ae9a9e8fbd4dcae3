"""Learners whose saves are cut off again and again, each resuming from what the one before left.

    python -m tests.cut_off_saves [--cases 200] [--seed 16] [--processes 2] [--zero 2]

At a call to a file of a checkpoint, or to the log, that a seed draws the learner is killed, or the disk is full from
there on, or that call fails alone. In the end the weights must be those of a learner that nothing ever happened to.
--processes: of the learner, which torchrun starts; then the one that makes
the call is killed, or all of them are. --zero: a stage of DeepSpeed's ZeRO, so that each process writes its part.
"""

from __future__ import annotations

import argparse
import filecmp
import gc
import importlib
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stage2_trainer.process.checkpoints import PREFIX, UNFINISHED, newest_whole
from stage2_trainer.telemetry.run_log import STEP_LOG
from tests.file_calls import BROKEN, FLUSHES, FULL, KILL, KILL_ALL, TAKES_ROOM, Fault, FileCall, run_with_faults
from tests.fork_server import Copies
from tests.shapes import make_shapes

ROOT = Path(__file__).parents[1]
SAVES = 3  # a fault comes within so many, the last of which remove older checkpoints too
WEIGHTS = "adapter_model.safetensors"
KILLED, ALL_KILLED = "SIGKILL", "SIGKILL to all processes"
FULL_FROM_THERE, FULL_ONCE, UNFLUSHED = "disk full from there on", "disk full once", "I/O error"
FAULTS: Mapping[str, Fault] = {
    KILLED: KILL, ALL_KILLED: KILL_ALL, FULL_FROM_THERE: FULL, FULL_ONCE: FULL, UNFLUSHED: BROKEN
}  # fmt: skip
EXIT_RETRYABLE = 75
DEEPSPEED_AUTO = (
    "train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size", "gradient_clipping",
)  # fmt: skip
IMPORTS = (
    "stage2_trainer.learner.build",
    "deepspeed",
    "peft",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl.processing_qwen3_vl",
    "transformers.tokenization_mistral_common",
)

NUMBERED = {rf"^{PREFIX}\d+": "(its folder)", r"^global_step\d+": "(DeepSpeed's folder)", r"^\.tmp.*": ".tmp"}
"""Names of files and folders that are others at each step, and what stands for them."""

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
    run_with_faults(partial(learn, folder), watch)
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


class TinyRun(NamedTuple):
    """A run of the tiny model, which asks nobody. zero: the stage of DeepSpeed's, 0: none."""

    shapes: Path
    steps: int
    processes: int = 1
    zero: int = 0

    def learn(self, folder: Path) -> int:
        """Run `stage2 learn`, in this process or in processes that torchrun forks from it; return the exit code."""
        import torch

        from stage2_api.parsing import parse_run_config
        from stage2_trainer import main
        from stage2_trainer.process.torchrun import run_processes

        torch.set_num_threads(1)  # a fork has none of its parent's threads, and would wait for them
        output = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(output, 1)
        os.dup2(output, 2)
        if self.processes == 1:
            return main.learn(parse_run_config(self.configuration(folder)))
        written = folder.with_suffix(".yaml")
        written.write_text(json.dumps(self.configuration(folder)))
        return run_processes("stage2_cli", ["learn", str(written)], processes=self.processes)

    def configuration(self, folder: Path) -> dict[str, Any]:
        """Return its configuration in an output folder."""
        config: dict[str, Any] = {
            "global_max_length": 512,
            "model": {"model": str(ROOT / "examples/tiny-qwen3-vl"), "torch_dtype": "float32", "attn_impl": "sdpa"},
            "tuner": {"train_type": "lora", "lora_rank": 2, "lora_dropout": 0.1},
            "training": {
                "output_dir": str(folder), "max_steps": self.steps, "per_device_train_batch_size": 1, "packing": True,
                "effective_batch_size": self.processes, "learning_rate": 1e-3, "save_strategy": "steps",
                "save_steps": 1, "save_total_limit": 2, "eval_strategy": "no",
            },
            "custom": {
                "trainer_variant": "sft", "train_jsonl": str(self.shapes / "train.jsonl"), "user_prompt": "List them.",
            },
        }  # fmt: skip
        if self.zero:
            config["deepspeed"] = {"zero_optimization": {"stage": self.zero}, "zero_allow_untested_optimizer": True}
            config["deepspeed"] |= dict.fromkeys(DEEPSPEED_AUTO, "auto")
        return config

    def went_on(self, log: str) -> str:
        """Return how many starts went on from a checkpoint, by what they said; all processes name the same."""
        named = re.findall(r"resuming from (\S+)", log)
        starts = [set(named[at : at + self.processes]) for at in range(0, len(named), self.processes)]
        return f"{len(starts)} starts, {sum(len(one) > 1 for one in starts)} of them from several"


def table(found: Sequence[Outcome]) -> str:
    """Return how many cases there were of each fault and kind of call, and after how many a newer checkpoint stood."""
    lines = ["| fault | at | cases | newest checkpoint as before | a newer one |", "| --- | --- | ---: | ---: | ---: |"]
    for kind, call in sorted({(one.case.kind, one.case.place.call) for one in found}):
        some = [one for one in found if (one.case.kind, one.case.place.call) == (kind, call)]
        same = sum(one.after == one.before for one in some)
        lines.append(f"| {kind} | {call} | {len(some)} | {same} | {len(some) - same} |")
    return "\n".join(lines)


def _run(folder: Path, options: argparse.Namespace) -> None:
    shapes = make_shapes(folder / "shapes", train=4, held_out=1)
    several = options.processes > 1
    run = TinyRun(shapes, 10 * options.cases, options.processes, options.zero)
    cases = cases_of(folder / "first", run.learn, count=options.cases, seed=options.seed, several=several)
    found = []
    for one in cut_off(folder / "run", run.learn, cases, like=folder / "first", several=several):
        found.append(one)
        print(f"{len(found):4} {one.case}: exit code {one.code}, {one.before} -> {one.after}", flush=True)
    weights = folder / "run" / f"{PREFIX}{found[-1].after}" / WEIGHTS
    other = unharmed(folder / "whole", run.learn, step=found[-1].after) / WEIGHTS
    print(table(found))
    print(f"weights of step {found[-1].after} as without any fault: {filecmp.cmp(weights, other, shallow=False)}")
    print(f"went on from a checkpoint: {run.went_on((folder / 'run.log').read_text())}")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, and print a table of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--processes", type=int, default=1, help="of the learner")
    parser.add_argument("--zero", type=int, choices=(0, 1, 2), default=0, help="stage of DeepSpeed's ZeRO")
    options = parser.parse_args(arguments)
    subprocess.Popen = Copies  # type: ignore[misc]  # before torchrun is imported, whose processes are forked
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()  # each learner is a copy of this process

    folder = Path(tempfile.mkdtemp())  # no TemporaryDirectory: what is forked would remove it at its exit
    try:
        _run(folder, options)
    finally:
        shutil.rmtree(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())
