"""The table of where the time went: each part, the learner's idle share, and each server."""

from __future__ import annotations

import json

from stage2_report.tables import report_run
from stage2_trainer.telemetry.step_time import PARTS, ServerTime, StepTime


def step(number, wall, **parts):
    servers = [ServerTime("http://127.0.0.1:8000", 0.75, 10.5)]
    time = StepTime(wall, {**dict.fromkeys(PARTS, 0.0), **parts}, servers)
    told = [{"server": one.server, "busy_share": one.busy_share, "in_flight": one.in_flight} for one in servers]
    return {"event": "step", "step": number, "loss": 1.0, **time.figures(), "servers": told}


def test_the_time_of_a_run_is_told_as_a_mean_step(tmp_path, capsys):
    log = tmp_path / "stage2_log.jsonl"
    steps = [step(1, 4.0, generate=3.0, forward=1.0), step(2, 6.0, generate=1.0, backward=5.0)]
    log.write_text("".join(json.dumps(one) + "\n" for one in steps))
    report_run(log, picture=None, images=None)
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    assert "generate 2.00 40%" in lines
    assert "backward 2.50 50%" in lines
    assert "whole step 5.00 100%" in lines
    assert not any(line.startswith("cpu") for line in lines)
    assert "learner idle 46%" in lines
    assert "http://127.0.0.1:8000 busy, 10.5 requests at once 75%" in lines


def test_a_log_without_times_gets_no_such_table(tmp_path, capsys):
    log = tmp_path / "stage2_log.jsonl"
    log.write_text(json.dumps({"event": "step", "step": 1, "loss": 1.0}) + "\n")
    report_run(log, picture=None, images=None)
    assert "Where the time went" not in capsys.readouterr().out
