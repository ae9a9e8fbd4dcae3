"""What a person sees who waits: `stage2 run` without a terminal, and the lines of commands on standard error."""

import json
import subprocess
import sys
import time
from contextlib import closing
from pathlib import Path

import pytest

from stage2_cli import run
from stage2_cli.run import Watcher, console
from stage2_trainer.process.activity import Activity
from tests.support.patience import Patience


@pytest.fixture(autouse=True)
def captured():
    """The console prints to where pytest looks."""
    console.cache_clear()
    yield
    console.cache_clear()


@pytest.fixture
def quick(monkeypatch):
    """The process's activity has lines in quick succession."""
    monkeypatch.setattr(run, "ACTIVITY", Activity(every_s=0.2))


def shown(capsys, report, *, lines=0):
    """Return what a person sees of a learner that gives this report: of one look, or until there are so many lines."""
    out, patience = "", Patience(60)
    with closing(Watcher(progress=lambda: report and json.dumps(report).encode())) as watcher:
        while True:
            watcher.refresh()
            out += capsys.readouterr().out
            if out.count("\n") >= lines:
                return out
            assert not patience.ended(), out
            time.sleep(0.02)


def test_loading_learner_is_shown_with_activity_repeatedly(quick, capsys):
    doing = "first evaluation, before training; generating: 37 of 200 answers"
    first, *again = shown(capsys, {"phase": "rollout", "message": f"{doing} (40 s)"}, lines=3).splitlines()
    assert first == f"learner: rollout: {doing}"
    assert {line.rpartition(" (")[0] for line in again} == {first}


def test_step_activity_is_shown_only_once_it_lasts(capsys):
    short = {"phase": "training", "step": 3, "maxSteps": 60}
    assert shown(capsys, short) == ""
    lasts = shown(capsys, {**short, "message": "step 4 of 60 (20 s)"})
    assert lasts == "learner: training, step 3 of 60: step 4 of 60\n"


def test_silent_learner_is_shown_as_not_reporting(quick, capsys):
    assert "learner: starting; it does not report (" in shown(capsys, None, lines=1)


def test_failure_reason_is_left_to_log(capsys):
    assert shown(capsys, {"phase": "failed", "message": "line\nof\nerror"}) == "learner: failed\n"


def test_long_command_reports_activity_on_stderr(tmp_path: Path) -> None:
    code = """
import sys, time
from pathlib import Path
import stage2_cli.main as main
from stage2_trainer.process.activity import ACTIVITY
main.FIRST_LINE_S = 0.2
def program():
    with ACTIVITY.doing("reading headers", 7, "images"):
        while not Path(sys.argv[1]).read_text():
            time.sleep(0.01)
    print("result")
main.call(program)
"""
    errors = tmp_path / "errors"
    with errors.open("w") as file:
        done = subprocess.run(
            [sys.executable, "-c", code, str(errors)], stdout=subprocess.PIPE, stderr=file, check=True
        )
    assert done.stdout == b"result\n"
    assert errors.read_text().startswith("reading headers: 0 of 7 images (")
