"""The first hour on a GPU: its stages fit, and what they found is kept as it goes, whatever becomes of them."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from pathlib import Path

import pytest
from hack import gpu_hour
from hack.gpu_hour import STAGES, Hour, Stage

from tests.support.patience import crowding

SUMMARY = "rehearsal/summary.md"


def stage(name: str, command: str, limit_s: float = 60.0) -> Stage:
    return Stage(name, "nothing", limit_s, "exit 9", command)


def hour(stages: Sequence[Stage], folder: Path) -> Hour:
    return Hour(stages, folder / "rehearsal", rehearses=True)


def verdicts(folder: Path) -> dict[str, str]:
    found = json.loads((folder / "rehearsal/results.json").read_text())
    return {name: one["verdict"] for name, one in found.items()}


def test_stages_have_unique_names_and_fit_time_budget():
    assert len({one.name for one in STAGES}) == len(STAGES)
    assert sum(one.limit_s + gpu_hour.GRACE_S for one in STAGES) <= gpu_hour.BUDGET_S


def test_failed_or_timed_out_stage_does_not_stop_others(tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_hour, "REHEARSAL_PATIENCE", 1)  # by the clock: a factor
    stages = [
        stage("fails", "echo why; exit 3"),
        stage("hangs", f"sleep 321 & echo $! > {tmp_path}/pid; wait", limit_s=2.0 * crowding()),
        stage("looks", f"cat {tmp_path / SUMMARY}; echo '## Speed'; echo '| fast | 7 |'; echo done"),
    ]
    assert hour(stages, tmp_path).run() == 1
    assert verdicts(tmp_path) == {"fails": "failed with exit code 3", "hangs": "timed out", "looks": "passed"}
    seen = (tmp_path / "rehearsal/02-looks.log").read_text()
    assert "| fails | nothing | failed with exit code 3 |" in seen
    assert "| looks | nothing | runs |" in seen
    summary = (tmp_path / SUMMARY).read_text()
    assert "why\n```" in summary, "the last lines of what failed"
    assert "### Speed\n\n| fast | 7 |" in summary, "the tables of what passed"
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


def test_next_run_continues_with_stages_not_yet_passed(tmp_path):
    counted = [
        stage("good", f"echo >> {tmp_path}/good"),
        stage("mended", f"echo >> {tmp_path}/mended; test -e {tmp_path}/there"),
        stage("late", f"echo >> {tmp_path}/late"),
    ]

    def counts() -> list[int]:
        files = [tmp_path / one.name for one in counted]
        return [file.read_text().count("\n") if file.exists() else 0 for file in files]

    assert hour(counted, tmp_path).run(until_s=1.0) == gpu_hour.EXIT_LEFT, "no limit fits"
    assert hour(counted, tmp_path).run(["good", "mended"]) == 1
    (tmp_path / "there").touch()
    assert hour(counted, tmp_path).run() == 0
    assert counts() == [1, 2, 1]
    assert hour(counted, tmp_path).run(again=True) == 0
    assert counts() == [2, 3, 2]


def test_unknown_stage_is_refused_with_known_names(capsys):
    with pytest.raises(SystemExit):
        gpu_hour.main(["speed"])
    assert ", ".join(one.name for one in STAGES) in capsys.readouterr().err
