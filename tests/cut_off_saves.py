"""Learners whose saves are cut off again and again, each going on from what the one before left.

    python -m tests.cut_off_saves [--cases 200] [--seed 16] [--behind]

At a call to a file of a checkpoint, or to the log, that a seed draws the learner is killed, or the disk is full from
there on, or that call fails alone. In the end the weights must be those of a learner that nothing ever happened to.
--behind: saves are written behind training.
"""

from __future__ import annotations

import argparse
import filecmp
import gc
import importlib
import os
import random
import re
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from stage2_trainer.process.checkpoints import PREFIX, UNFINISHED, newest_whole
from stage2_trainer.process.save_behind import SaveBehind
from stage2_trainer.telemetry.run_log import STEP_LOG
from tests.file_calls import BROKEN, FLUSHES, FULL, KILL, TAKES_ROOM, Fault, FileCall, run_with_faults

ROOT = Path(__file__).parents[1]
SAVES = 3  # a fault comes within so many, the last of which remove older checkpoints too
WEIGHTS = "adapter_model.safetensors"
KILLED, FULL_FROM_THERE, FULL_ONCE, UNFLUSHED = "SIGKILL", "disk full from there on", "disk full once", "I/O error"
ERRORS = {FULL_FROM_THERE: FULL, FULL_ONCE: FULL, UNFLUSHED: BROKEN}
EXIT_RETRYABLE = 75
IMPORTS = (
    "stage2_trainer.learner.build",
    "deepspeed",
    "peft",
    "transformers.models.qwen3_vl.modeling_qwen3_vl",
    "transformers.models.qwen3_vl.processing_qwen3_vl",
    "transformers.tokenization_mistral_common",
)

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
    was not on disk when a checkpoint that holds it got its name.
    """

    folder: Path
    case: Case | None = None
    last: int = sys.maxsize
    published: int = 0
    struck: bool = False
    calls: Counter[Place] = field(default_factory=Counter)
    flushed: set[Path] = field(default_factory=set)
    unflushed: list[Path] = field(default_factory=list)

    def __call__(self, call: FileCall) -> Fault:
        """Return what becomes of a call; after checkpoint `last` the learner is killed."""
        if not call.path.is_relative_to(self.folder):
            return None
        place = self._place(call)
        if place is None:  # of the run, and not looked at
            return self._later(call)
        if self.published >= self.last:
            return KILL
        number = self.calls[place]
        self.calls[place] += 1
        if self.case is not None and (place, number) == (self.case.place, self.case.number):
            self.struck = True
            return ERRORS.get(self.case.kind, KILL)
        if (fault := self._later(call)) is None:
            self._note(call)
        return fault

    def _note(self, call: FileCall) -> None:
        if call.name in FLUSHES:
            self.flushed.add(call.path)
        elif call.name in TAKES_ROOM | {"ftruncate"}:
            self.flushed.discard(call.path)
        elif call.name == "rename" and call.path.parent.name == UNFINISHED:
            self.published = max(self.published, _step(call.path))
            self.unflushed += {call.path, *call.path.rglob("*")} - self.flushed

    def _later(self, call: FileCall) -> Fault:
        full = self.struck and self.case is not None and self.case.kind == FULL_FROM_THERE
        return FULL if full and call.name in TAKES_ROOM else None

    def _place(self, call: FileCall) -> Place | None:
        parts = call.path.relative_to(self.folder).parts
        if parts == (STEP_LOG,) and call.name == "write":
            return Place(call.name, STEP_LOG)
        if parts and not parts[0].startswith((UNFINISHED, PREFIX)):
            return None
        if not parts and call.name not in FLUSHES:
            return None
        name = re.sub(r"^\.tmp.*", ".tmp", re.sub(rf"^{PREFIX}\d+", "(its folder)", parts[-1] if parts else "(output)"))
        aside = parts[:1] == (UNFINISHED,)
        return Place(call.name, name if aside or not parts else f"{name} of an older one")


@dataclass(frozen=True)
class Outcome:
    """The outcome of a case: what the learner ended with, and the newest whole checkpoint before and after it."""

    case: Case
    code: int
    before: int
    after: int


def cases_of(folder: Path, learn: Learn, *, count: int, seed: int) -> list[Case]:
    """Draw cases, each place as likely as any other, once a learner in `folder` has shown where there are any."""
    watch = Watch(folder, last=SAVES)
    run_with_faults(partial(learn, folder), watch)
    draws = random.Random(seed)
    places = sorted(watch.calls)
    return [_case(draws, draws.choice(places), watch.calls) for _ in range(count)]


def _case(draws: random.Random, place: Place, calls: Counter[Place]) -> Case:
    kinds = [KILLED]
    if place.call in TAKES_ROOM:
        kinds += [FULL_FROM_THERE, FULL_ONCE]
    if place.call in FLUSHES:
        kinds += [UNFLUSHED]
    return Case(draws.choice(kinds), place, draws.randrange(calls[place]))


def cut_off(folder: Path, learn: Learn, cases: Sequence[Case]) -> Iterator[Outcome]:
    """Yield what becomes of each case, in one output folder.

    Raises AssertionError where a checkpoint that had its name is not there any more, or is not whole.
    """
    for case in cases:
        before, watch = newest(folder), Watch(folder, case)
        code = run_with_faults(partial(learn, folder), watch)
        after = newest(folder)
        assert watch.struck, f"{case}: the learner ended by itself, with {code}"
        assert code == (-9 if case.kind == KILLED else EXIT_RETRYABLE), f"{case}: the learner ended with {code}"
        assert not watch.unflushed, f"{case}: named before they were on disk: {watch.unflushed}"
        assert after >= max(before, watch.published), f"{case}: {max(before, watch.published)} was there, now {after}"
        yield Outcome(case, code, before, after)


def unharmed(folder: Path, learn: Learn, *, step: int) -> Path:
    """Return the checkpoint of this step of a learner that nothing happened to."""
    run_with_faults(partial(learn, folder), Watch(folder, last=step))
    return folder / f"{PREFIX}{step}"


def newest(folder: Path) -> int:
    """Return the step of the newest whole checkpoint; 0 where there is none."""
    found = newest_whole(folder)
    return _step(found) if found else 0


def _step(checkpoint: Path) -> int:
    return int(checkpoint.name.removeprefix(PREFIX))


def learn_tiny(shapes: Path, steps: int, folder: Path, *, behind: bool) -> int:
    """Run `stage2 learn` of the tiny model, which asks nobody, in this process."""
    import torch

    from stage2_api.parsing import parse_run_config
    from stage2_trainer import main

    torch.set_num_threads(1)  # a fork has none of its parent's threads, and would wait for them
    said = os.open(folder.with_suffix(".log"), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(said, 1)
    os.dup2(said, 2)
    return main.learn(parse_run_config(configuration(shapes, steps, folder, behind=behind)))


def configuration(shapes: Path, steps: int, folder: Path, *, behind: bool) -> dict[str, Any]:
    """Return the configuration of such a learner."""
    return {
        "global_max_length": 512,
        "model": {"model": str(ROOT / "examples/tiny-qwen3-vl"), "torch_dtype": "float32", "attn_impl": "sdpa"},
        "tuner": {"train_type": "lora", "lora_rank": 2, "lora_dropout": 0.1},
        "training": {
            "output_dir": str(folder), "max_steps": steps, "per_device_train_batch_size": 1, "packing": True,
            "effective_batch_size": 1, "learning_rate": 1e-3, "save_strategy": "steps", "save_steps": 1,
            "save_total_limit": 2, "eval_strategy": "no", "async_save": behind,
        },
        "custom": {"trainer_variant": "sft", "train_jsonl": str(shapes / "train.jsonl"), "user_prompt": "List them."},
    }  # fmt: skip


def table(found: Sequence[Outcome]) -> str:
    """Return how many cases there were of each fault and kind of call, and after how many a newer checkpoint stood."""
    lines = ["| fault | at | cases | newest checkpoint as before | a newer one |", "| --- | --- | ---: | ---: | ---: |"]
    for kind, call in sorted({(one.case.kind, one.case.place.call) for one in found}):
        some = [one for one in found if (one.case.kind, one.case.place.call) == (kind, call)]
        same = sum(one.after == one.before for one in some)
        lines.append(f"| {kind} | {call} | {len(some)} | {same} | {len(some) - same} |")
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the cases, and print a table of them."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=200)
    parser.add_argument("--seed", type=int, default=16)
    parser.add_argument("--behind", action="store_true", help="saves are written behind training")
    options = parser.parse_args(arguments)
    for name in IMPORTS:
        importlib.import_module(name)
    gc.freeze()  # each learner is a copy of this process

    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        command = [sys.executable, ROOT / "examples/make_shapes.py", folder / "shapes", "--train", "4"]
        subprocess.run([*command, "--held-out", "1"], check=True, capture_output=True)
        learn = partial(learn_tiny, folder / "shapes", 10 * options.cases, behind=options.behind)
        cases = cases_of(folder / "first", learn, count=options.cases, seed=options.seed)
        found = []
        for one in cut_off(folder / "run", learn, cases):
            found.append(one)
            print(f"{len(found):4} {one.case}: exit code {one.code}, {one.before} -> {one.after}", flush=True)
        weights = folder / "run" / f"{PREFIX}{found[-1].after}" / WEIGHTS
        other = unharmed(folder / "whole", learn, step=found[-1].after) / WEIGHTS
        print(table(found))
        print(f"weights of step {found[-1].after} as without any fault: {filecmp.cmp(weights, other, shallow=False)}")
        for one in ("first", "run", "whole"):
            SaveBehind(folder / one).forget()
        went_on = (folder / "run.log").read_text().count("going on from")
        print(f"went on from a checkpoint: {went_on} of {len(found)} starts")
    return 0


if __name__ == "__main__":
    sys.exit(main())
