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
from stage2_trainer.activity import Activity


@pytest.fixture
def activity(monkeypatch):
    """The process's activity, with lines in quick succession."""
    quick = Activity(every_s=0.2)
    monkeypatch.setattr(run, "ACTIVITY", quick)
    console.cache_clear()
    yield quick
    console.cache_clear()


def watched(report, *, for_s):
    """Watch a learner that gives this report for so long."""
    with closing(Watcher(progress=lambda: report and json.dumps(report).encode())) as watcher:
        end = time.monotonic() + for_s
        while time.monotonic() < end:
            watcher.refresh()
            time.sleep(0.02)


def test_a_learner_that_loads_is_shown_with_what_it_does_and_again_while_it_does_it(activity, capsys):
    doing = "first evaluation, before training; generating: 37 of 200 answers"
    watched({"phase": "rollout", "message": f"{doing} (40 s)"}, for_s=0.9)
    first, *again = capsys.readouterr().out.splitlines()
    assert first == f"learner: rollout: {doing}"
    assert 2 <= len(again) <= 4
    assert {line.rpartition(" (")[0] for line in again} == {first}


def test_a_phase_of_a_step_is_shown_only_once_it_lasts(activity, capsys):
    watched({"phase": "training", "step": 3, "maxSteps": 60}, for_s=0.1)
    assert capsys.readouterr().out == ""
    watched({"phase": "training", "step": 3, "maxSteps": 60, "message": "step 4 of 60 (20 s)"}, for_s=0.1)
    assert capsys.readouterr().out == "learner: training, step 3 of 60: step 4 of 60\n"


def test_a_learner_that_does_not_report_is_said_not_to(activity, capsys):
    watched(None, for_s=0.5)
    assert "learner: starting; it does not report (" in capsys.readouterr().out


def test_the_reason_of_a_failure_is_left_to_the_log(activity, capsys):
    watched({"phase": "failed", "message": "line\nof\nerror"}, for_s=0.1)
    assert capsys.readouterr().out == "learner: failed\n"


def test_a_command_that_takes_long_says_what_it_does_on_standard_error(tmp_path: Path) -> None:
    code = """
import sys, time
import stage2_cli.main as main
from stage2_trainer.activity import ACTIVITY
main.FIRST_LINE_S = 0.2
def program():
    with ACTIVITY.doing("reading headers", 7, "images"):
        time.sleep(3)
    print("result")
main.call(program)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "result\n"
    assert done.stderr.startswith("reading headers: 0 of 7 images (")
