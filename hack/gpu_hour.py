"""The first hour on a GPU: what only a GPU can show, in the order of what it would teach. Takes the standard library.

    hack/gpu-hour                  on a fresh machine with one GPU of 141 GB, within 40 minutes
    hack/gpu-hour --rehearse       the same stages at tiny size on a CPU

Each stage is a process group with a time limit; one that fails does not stop the others. DIR/gpu/summary.md and a log
of each stage are written as the hour goes on. The next call goes on with what has not passed.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
GPU_VENV, CPU_VENV = ".venv-gpu", ".venv"
WORK = "out/gpu-hour-work"  # of models, which are too large to be results
BUDGET_S = 40 * 60
REHEARSAL_PATIENCE = 3  # a CPU takes so much longer, though its sizes are tiny
GRACE_S = 15.0
LAST_LINES = 15
PASSED, RUNNING = "passed", "runs"
EXIT_LEFT = 75  # EX_TEMPFAIL: another call goes on


@dataclass(frozen=True)
class Stage:
    """A command on a GPU, its rehearsal on a CPU, and the seconds that it may take on a GPU."""

    name: str
    teaches: str
    limit_s: float
    on_gpu: str
    rehearsal: str


def measured(command: str) -> tuple[str, str]:
    """Return a command of bench/gpu_hour.py on a GPU, and its rehearsal."""
    command = f"python -m bench.gpu_hour {command}"
    return command, f"{command} --tiny"


STAGES = (
    Stage(
        "setup", "Do package registries alone make an environment that sees the GPU?", 440,
        f'make setup VENV={GPU_VENV} BUILD=gpu && python -c "from bench import gpu; print(gpu.header())"',
        f"make setup VENV={CPU_VENV}",
    ),
    Stage(
        "test-gpu", "Are attention, merges, offload, NCCL and the learner right on CUDA?", 340,
        f"make test-gpu VENV={GPU_VENV} BUILD=gpu",
        f"make test-gpu VENV={CPU_VENV} && echo 'needs a GPU: not rehearsed, its tests were only imported'",
    ),
    Stage(
        "bench-gpu", "How fast are they, beside what the device can do and what others offer?", 300,
        "bench/run gpu", "pytest -q tests/unit/bench/test_gpu.py",
    ),
    Stage(
        "train-nccl", "Does a run of 4B shapes train, with weights that the learner merges, over NCCL?", 400,
        *measured(f"train {WORK} --transport nccl"),
    ),
    Stage(
        "train-tcp", "And with adapters that the server merges, over TCP?", 360,
        *measured(f"train {WORK} --transport tcp"),
    ),
    Stage(
        "speculation", "Are drafted answers the same, in how many steps, and how many a second?", 360,
        *measured("speculation"),
    ),
    Stage("memory", "Did the run take the memory that `stage2 doctor` predicts?", 95, *measured(f"memory {WORK}")),
)  # fmt: skip


@dataclass(frozen=True)
class Result:
    """How a stage ended, or that it runs."""

    verdict: str
    seconds: float = 0.0

    @property
    def passed(self) -> bool:
        """Whether nothing is left to do."""
        return self.verdict == PASSED


class Hour:
    """Stages, one after the other, with their results in a folder."""

    def __init__(self, stages: Sequence[Stage], folder: Path, *, rehearses: bool) -> None:
        self.stages, self.folder, self.rehearses = stages, folder, rehearses
        self.results: dict[str, Result] = {}
        folder.mkdir(parents=True, exist_ok=True)
        self._kept = folder / "results.json"
        if self._kept.is_file():
            self.results = {name: Result(**found) for name, found in json.loads(self._kept.read_text()).items()}

    def run(self, names: Sequence[str] = (), *, again: bool = False, until_s: float = float("inf")) -> int:
        """Run what has not passed; return the exit code.

        names: of the stages to run, all if empty. again: run those that passed too. until_s: start no stage whose limit
        does not fit into so many seconds of this call.
        """
        end = time.monotonic() + until_s
        for stage in self.stages:
            if (names and stage.name not in names) or (self._result(stage).passed and not again):
                continue
            if time.monotonic() + self.limit_s(stage) > end:
                return EXIT_LEFT
            print(f"{stage.name}: {stage.teaches} At most {self.limit_s(stage):.0f} s", flush=True)
            self._note(stage, Result(RUNNING))
            result = self._execute(stage)
            self._note(stage, result)
            print(f"{stage.name}: {result.verdict} after {result.seconds:.0f} s", flush=True)
        return 0 if all(self._result(stage).passed for stage in self.stages if not names or stage.name in names) else 1

    def limit_s(self, stage: Stage) -> float:
        """Return the seconds that a stage may take."""
        return stage.limit_s * (REHEARSAL_PATIENCE if self.rehearses else 1)

    def log(self, stage: Stage) -> Path:
        """Return the file of a stage's output."""
        return self.folder / f"{self.stages.index(stage):02}-{stage.name}.log"

    def _result(self, stage: Stage) -> Result:
        return self.results.get(stage.name, Result("not run"))

    def _note(self, stage: Stage, result: Result) -> None:
        self.results[stage.name] = result
        unfinished = self._kept.with_suffix(".unfinished")  # a machine that goes away leaves a whole file
        unfinished.write_text(json.dumps({name: asdict(one) for name, one in self.results.items()}, indent=1))
        unfinished.replace(self._kept)
        self.summary.write_text(self._summarised(), encoding="utf-8")

    def _execute(self, stage: Stage) -> Result:
        start, command = time.monotonic(), stage.rehearsal if self.rehearses else stage.on_gpu
        with self.log(stage).open("w") as log:
            print(f"$ {command}", file=log, flush=True)
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", command], cwd=ROOT, env=environment(os.environ, self.rehearses),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(self.limit_s(stage))
                verdict = PASSED if code == 0 else f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                verdict = "timed out"
            finally:
                end_group(process)
        return Result(verdict, time.monotonic() - start)

    @property
    def summary(self) -> Path:
        """The file that says how far the hour is."""
        return self.folder / "summary.md"

    def _summarised(self) -> str:
        passed = sum(self._result(stage).passed for stage in self.stages)
        parts = [
            f"# {'Rehearsal of the' if self.rehearses else 'The'} first GPU hour: {passed} of {len(self.stages)}\n"
        ]
        parts += ["| stage | what it teaches | verdict | s | limit s |", "| --- | --- | --- | ---: | ---: |"]
        for stage in self.stages:
            found = self._result(stage)
            amounts = f"{found.seconds:.0f} | {self.limit_s(stage):.0f}"
            parts.append(f"| {stage.name} | {stage.teaches} | {found.verdict} | {amounts} |")
        for stage in self.stages:
            if stage.name in self.results and self._result(stage).verdict != RUNNING:
                parts += [
                    f"\n## {stage.name}\n",
                    *figures(self.log(stage).read_text(errors="replace"), self._result(stage)),
                ]
        return "\n".join(parts) + "\n"


def figures(log: str, result: Result) -> list[str]:
    """Return the key figures of a log: its tables, or else its last line; of a failed stage its last lines too."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    tables = [f"\n#{line}\n" if line.startswith("## ") else line for line in lines if line.startswith(("| ", "## "))]
    if result.passed:
        return tables or lines[-1:]
    return [*tables, "\n```", *lines[-LAST_LINES:], "```"]


def environment(base: Mapping[str, str], rehearses: bool) -> dict[str, str]:
    """Return the environment of a stage: the commands of its virtual environment first; no GPU in a rehearsal."""
    venv = ROOT / (CPU_VENV if rehearses else GPU_VENV)
    fixed = {"PATH": f"{venv / 'bin'}:{base['PATH']}", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    return {**base, **fixed, **({"CUDA_VISIBLE_DEVICES": ""} if rehearses else {})}


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a stage's processes, servers that outlive their stage among them."""
    with suppress(ProcessLookupError):  # the whole group has ended
        os.killpg(process.pid, signal.SIGTERM)
        deadline = time.monotonic() + GRACE_S
        while time.monotonic() < deadline:
            process.poll()
            os.killpg(process.pid, 0)
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the hour, and print its summary; return the exit code."""
    parser = argparse.ArgumentParser(prog="hack/gpu-hour", description=(__doc__ or "").partition("\n")[0])
    names = [stage.name for stage in STAGES]
    parser.add_argument("names", nargs="*", metavar="STAGE", help=f"which: {', '.join(names)}; all by default")
    parser.add_argument(
        "--rehearse", action="store_true", help="tiny sizes on a CPU, with the environment of `make setup`"
    )
    parser.add_argument("--again", action="store_true", help="run stages that passed before too")
    parser.add_argument(
        "--until",
        type=float,
        default=float("inf"),
        metavar="SECONDS",
        help="start no stage whose limit ends later; exit code 75 if some are left",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path(os.environ.get("OUT", "out/gpu-hour")),
        metavar="DIR",
        help="where results are kept; $OUT, else out/gpu-hour",
    )
    options = parser.parse_args(arguments)
    if unknown := set(options.names) - set(names):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    hour = Hour(STAGES, options.out / ("rehearsal" if options.rehearse else "gpu"), rehearses=options.rehearse)
    code = hour.run(options.names, again=options.again, until_s=options.until)
    print(f"\n{hour.summary}:\n\n{hour.summary.read_text(encoding='utf-8')}")
    return code


if __name__ == "__main__":
    sys.exit(main())
