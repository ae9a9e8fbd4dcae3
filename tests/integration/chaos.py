"""A learner that strikes itself or one of its servers when it comes to a phase of a run; test_chaos starts it.

    python -m tests.integration.chaos [PHASE BLOW WHO] CONFIG

BLOW is the number of a signal. WHO is a process, or a negative group of processes; 0 = the learner itself. Where BLOW
is `clock`, the learner's clock jumps by WHO seconds instead, again at each call of the phase from then on.

Each moment goes into `moments.jsonl` beside CONFIG, by the clock that all processes of a machine share: the blow, and
each step that is on record.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from stage2_api.parsing import parse_run_config
from stage2_cli.processes import end_with_parent
from stage2_trainer import main
from stage2_trainer.learner.engine import AccelerateEngine
from stage2_trainer.learner.loop import Learner
from stage2_trainer.learner.step_log import StepLog
from stage2_trainer.rollouts import build
from stage2_trainer.rollouts.http import ServerBackend
from stage2_trainer.rollouts.rollout_source import ServerRollouts
from stage2_trainer.serve.stub import app
from stage2_trainer.sync.fleet.delivery import Packer
from stage2_trainer.sync.fleet.push import FullPush
from stage2_trainer.sync.vllm.server_merge import ServerMerge

STEP = 1  # steps that are whole before a phase comes
MOMENTS = "moments.jsonl"
CLOCK = "clock"
PHASES: dict[str, tuple[Any, str]] = {
    "start": (build, "check_identity"),  # every server has answered by now
    "sync": (Packer, "pack"),
    "ask": (ServerBackend, "_request"),
    "train": (AccelerateEngine, "row"),
    "save": (Learner, "_write"),
    "end": (FullPush, "close"),
}


def before(owner: Any, name: str, do: Callable[..., object]) -> None:
    """Do something before each call of a function of a class or a module."""
    real = getattr(owner, name)

    def call(*arguments: Any, **options: Any) -> Any:
        do(*arguments, **options)
        return real(*arguments, **options)

    setattr(owner, name, call)


def jump(seconds: int) -> None:
    """Let the clock of this process jump. That which counts seconds of a wait is another one."""
    told, told_ns = time.time, time.time_ns
    time.time = lambda: told() + seconds
    time.time_ns = lambda: told_ns() + seconds * 10**9


def arrange_the_blow(phase: str, blow: str, who: int, note: Callable[[str], None]) -> None:
    """Strike once, at the first call of the phase after the push of `STEP` has begun; in `start` at the first call."""
    ready, struck = [phase == "start"], []

    def pushes(rollouts: ServerRollouts, model: Any, global_step: int, *rest: Any) -> None:
        ready[0] = ready[0] or global_step == STEP

    def strike(*arguments: Any, **options: Any) -> None:
        if not ready[0] or struck:
            return
        if blow == CLOCK:
            jump(who)
        else:
            struck.append(True)
            note("blow")
            os.kill(who or os.getpid(), int(blow))

    before(ServerRollouts, "_push_once", pushes)
    before(*PHASES[phase], strike)


def noting(file: Path) -> Callable[[str], None]:
    """Return a function that notes that something happens now."""

    def note(what: str) -> None:
        with file.open("a") as lines:
            lines.write(json.dumps({"what": what, "at": time.monotonic()}) + "\n")

    return note


def run(*blow: str, config: Path) -> int:
    """Train; return the exit code."""
    note = noting(config.with_name(MOMENTS))
    if blow:
        arrange_the_blow(blow[0], blow[1], int(blow[2]), note)
    before(StepLog, "_write", lambda *_: note("step"))
    return main.learn(parse_run_config(yaml.safe_load(config.read_text())))


def serve_untimely(seconds: int, arguments: list[str]) -> None:
    """Be the stub, with a clock that jumps at each push."""
    before(ServerMerge, "update", lambda *_, **__: jump(seconds))
    sys.argv = ["stub", *arguments]
    app.main()


if __name__ == "__main__":
    end_with_parent()
    sys.exit(run(*sys.argv[1:-1], config=Path(sys.argv[-1])))
