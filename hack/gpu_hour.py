"""The first hour on a GPU: what only a GPU can show, in the order of what it would teach. Takes the standard library.

    hack/gpu-hour                  on a fresh machine with one GPU of 141 GB, within an hour
    hack/gpu-hour --without-vllm   the stages that need no vLLM, within half an hour
    hack/gpu-hour --rehearse       the same stages at tiny size on a CPU
    hack/gpu-hour --carry FOLDER   write those without vLLM into a folder for a machine without network

Each stage is a process group with a time limit; one that fails does not stop the others. A stage's output goes to
DIR/gpu/log.txt as it is written, so a stage that is cut off keeps its figures; DIR/gpu/summary.md has the tables of
all. The next call goes on with what has not passed.
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

import gpu_carry

ROOT = Path(__file__).parents[1]
GPU_VENV, CPU_VENV = ".venv-gpu", ".venv"
WORK = "out/gpu-hour-work"  # of models, which are too large to be results
BUDGET_S = 60 * 60
WITHOUT_VLLM_S = 30 * 60
LONGEST_S = 9 * 60  # machines are lent for ten minutes a command
GRACE_S = 15.0
LAST_LINES, LONGEST_LINE = 15, 300  # of a failed stage, in the summary
HEADING = "#### stage "  # in the log
PASSED, RUNNING, CUT_OFF = "passed", "runs", "cut off"
EXIT_LEFT = 75  # EX_TEMPFAIL: another call goes on


@dataclass(frozen=True)
class Stage:
    """A command on a GPU, its rehearsal on a CPU, and the seconds that either may take.

    on_a_gpu: what the rehearsal cannot show.
    """

    name: str
    teaches: str
    on_a_gpu: str
    limit_s: float
    command: str
    rehearsal: str
    needs_vllm: bool = False


def measured(command: str) -> tuple[str, str]:
    """Return a command of `bench` on a GPU, and its rehearsal."""
    command = f"python -m bench.{command}"
    return command, f"{command} --tiny"


STAGES = (
    Stage(
        "setup", "Do package registries alone make an environment that sees the GPU?",
        "that PyTorch's and vLLM's builds for GPUs install and find the driver",
        420, f'make setup VENV={GPU_VENV} BUILD=gpu', f"make setup VENV={CPU_VENV}", needs_vllm=True,
    ),
    Stage(
        "look", "What is this machine, and has it what Triton and NCCL need?",
        "driver, memory and capability of the GPU, and which kernel the learner's attention calls",
        60, *measured("gpu look"),
    ),
    Stage(
        "kernels", "Do the kernels of frame drafts draft what their reference drafts, and in what time?",
        "drafts by compiled kernels instead of Triton's interpreter, and microseconds a step",
        210, "python -m bench.frame_kernels 2000 1 --device cuda --timed",
        "TRITON_INTERPRET=1 python -m bench.frame_kernels 40 1 --timed",
    ),
    Stage(
        "test-gpu", "Are attention, merges, offload, NCCL and the learner right on CUDA?",
        "PyTorch's flash kernel, bits of merges on CUDA, freed memory, NCCL, the learner in mixed precision",
        300, "python -m pytest -q tests/gpu", "STAGE2_REHEARSE=1 python -m pytest -q tests/gpu",
    ),
    Stage(
        "move", "How fast are merges, buckets and offload, beside a copy of as many bytes?",
        "GB/s of the GPU's memory and of its link to main memory",
        120, *measured("gpu merge pack offload"),
    ),
    Stage(
        "nccl", "Do weights arrive over NCCL, with both ends on this machine, and how fast?",
        "NCCL itself: the rehearsal pushes over TCP alone",
        120, *measured("gpu push"),
    ),
    Stage(
        "step", "What does a learner's step of an 8B take, in seconds and in memory, and did `doctor` predict it?",
        "seconds, tokens a second, and the peak of PyTorch's allocator beside the prediction",
        240, *measured("learner_step step"),
    ),
    Stage(
        "early-rows", "What do rows cost that train before a step's last answer, and are their gradients the same?",
        "seconds of the second backward pass, the memory of the second gradients, and the rounding of bfloat16",
        200, *measured("learner_step early"),
    ),
    Stage(
        "loss", "What does the loss in chunks take, beside other forms?",
        "time and memory of all forms at 16,384 tokens, with Liger and cut-cross-entropy where they are installed",
        180, *measured("gpu loss"),
    ),
    Stage(
        "train-nccl", "Does a run of 4B shapes train, with weights that the learner merges, over NCCL?",
        "vLLM's GPU worker, NCCL between server and learner, and proofs of bfloat16 weights",
        370, *measured(f"gpu_hour train {WORK} --transport nccl"), needs_vllm=True,
    ),
    Stage(
        "train-tcp", "And with adapters that the server merges, over TCP?",
        "the server's merge on CUDA, and copies between page-locked memory and the GPU",
        310, *measured(f"gpu_hour train {WORK} --transport tcp"), needs_vllm=True,
    ),
    Stage(
        "memory", "Did the run take the memory that `stage2 doctor` predicts?",
        "peaks by PyTorch and by nvidia-smi",
        90, *measured(f"gpu_hour memory {WORK}"), needs_vllm=True,
    ),
    Stage(
        "draft-answers", "Are greedy answers with drafts those without, but for ties?",
        "answers of model runner V2, which calls the speculator only on a GPU",
        240, "python -m bench.draft_equality", "python -m bench.draft_equality --cpu", needs_vllm=True,
    ),
    Stage(
        "speculation", "Which drafts pay for an 8B, at 11, 32 and 64 answers at once?",
        "milliseconds of a step that verifies drafts, by method and length",
        525, *measured("synthetic_drafts"), needs_vllm=True,
    ),
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
        for name, found in self.results.items():
            if found.verdict == RUNNING:  # the hour that ran it was killed
                self.results[name] = Result(CUT_OFF)
        self._summarise()

    def run(self, names: Sequence[str] = (), *, again: bool = False, until_s: float = float("inf")) -> int:
        """Run what has not passed; return the exit code.

        names: of the stages to run, all if empty. again: run those that passed too. until_s: start no stage whose limit
        does not fit into so many seconds of this call.
        """
        end = time.monotonic() + until_s
        for stage in self.stages:
            if (names and stage.name not in names) or (self._result(stage).passed and not again):
                continue
            if time.monotonic() + stage.limit_s > end:
                return EXIT_LEFT
            print(f"{stage.name}: {stage.teaches} At most {stage.limit_s:.0f} s", flush=True)
            self._note(stage, Result(RUNNING))
            try:
                result = self._execute(stage)
            except KeyboardInterrupt:
                self._note(stage, Result(CUT_OFF))
                raise
            self._note(stage, result)
            print(f"{stage.name}: {result.verdict} after {result.seconds:.0f} s", flush=True)
        return 0 if all(self._result(stage).passed for stage in self.stages if not names or stage.name in names) else 1

    @property
    def log(self) -> Path:
        """The file with the output of all stages, which they write themselves."""
        return self.folder / "log.txt"

    @property
    def summary(self) -> Path:
        """The file that says how far the hour is."""
        return self.folder / "summary.md"

    def _result(self, stage: Stage) -> Result:
        return self.results.get(stage.name, Result("not run"))

    def _note(self, stage: Stage, result: Result) -> None:
        self.results[stage.name] = result
        unfinished = self._kept.with_suffix(".unfinished")  # a machine that goes away leaves a whole file
        unfinished.write_text(json.dumps({name: asdict(one) for name, one in self.results.items()}, indent=1))
        unfinished.replace(self._kept)
        self._summarise()

    def _execute(self, stage: Stage) -> Result:
        start, command = time.monotonic(), stage.rehearsal if self.rehearses else stage.command
        with self.log.open("a") as log:
            print(f"\n{_heading(stage)}\n$ {command}", file=log, flush=True)
            process = subprocess.Popen(
                ["bash", "-euo", "pipefail", "-c", command], cwd=ROOT, env=environment(os.environ, self.rehearses),
                stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, start_new_session=True,
            )  # fmt: skip
            try:
                code = process.wait(stage.limit_s)
                verdict = PASSED if code == 0 else f"failed with exit code {code}"
            except subprocess.TimeoutExpired:
                verdict = "timed out"
            finally:
                end_group(process)
        return Result(verdict, time.monotonic() - start)

    def _output(self, stage: Stage) -> str:
        """Return what a stage wrote the last time that it ran."""
        log = self.log.read_text(encoding="utf-8", errors="replace") if self.log.exists() else ""
        return log.rpartition(f"\n{_heading(stage)}\n")[2].partition(f"\n{HEADING}")[0]

    def _summarise(self) -> None:
        passed = sum(self._result(stage).passed for stage in self.stages)
        parts = [
            f"# {'Rehearsal of the' if self.rehearses else 'The'} first GPU hour: {passed} of {len(self.stages)}\n"
        ]
        parts += ["| stage | what it teaches | verdict | s | limit s |", "| --- | --- | --- | ---: | ---: |"]
        for stage in self.stages:
            found = self._result(stage)
            amounts = f"{found.seconds:.0f} | {stage.limit_s:.0f}"
            parts.append(f"| {stage.name} | {stage.teaches} | {found.verdict} | {amounts} |")
        for stage in self.stages:
            if stage.name in self.results and self._result(stage).verdict != RUNNING:
                parts += [f"\n## {stage.name}\n", *figures(self._output(stage), self._result(stage))]
                parts += [f"\nOnly a GPU shows {stage.on_a_gpu}."] if self.rehearses else []
        self.summary.write_text("\n".join(parts) + "\n", encoding="utf-8")


def _heading(stage: Stage) -> str:
    return f"{HEADING}{stage.name}"


def figures(log: str, result: Result) -> list[str]:
    """Return the key figures of a log: its tables, or else its last line; of a failed stage its last lines too."""
    lines = [line.rstrip() for line in log.splitlines() if line.strip()]
    tables = [f"\n#{line}\n" if line.startswith("## ") else line for line in lines if line.startswith(("| ", "## "))]
    if result.passed:
        return tables or lines[-1:]
    return [*tables, "\n```", *map(_cut, lines[-LAST_LINES:]), "```"]


def _cut(line: str) -> str:
    return line if len(line) <= LONGEST_LINE else f"{line[: LONGEST_LINE - 1]}…"


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
    parser.add_argument("--without-vllm", action="store_true", help="leave out the stages that need vLLM")
    parser.add_argument(
        "--carry", type=Path, metavar="FOLDER",
        help="run nothing; write the stages without vLLM, with their packages, into a new folder for such a machine",
    )  # fmt: skip
    options = parser.parse_args(arguments)
    if options.carry:
        return gpu_carry.carry(options.carry)
    if unknown := set(options.names) - set(names):
        parser.error(f"no such stage: {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    stages = [one for one in STAGES if not (options.without_vllm and one.needs_vllm)]
    hour = Hour(stages, options.out / ("rehearsal" if options.rehearse else "gpu"), rehearses=options.rehearse)
    code = hour.run(options.names, again=options.again, until_s=options.until)
    print(f"\n{hour.summary}:\n\n{hour.summary.read_text(encoding='utf-8')}")
    return code


if __name__ == "__main__":
    sys.exit(main())
