"""`stage2 report` of a long run: the log is taken record by record, and what is kept is what is shown."""

import json
import random
import tracemalloc
from math import fsum
from statistics import fmean

import pytest
from PIL import Image

from stage2_report.picture import EndSamples
from stage2_report.tables import StepRows, TimeMeans, report_run
from stage2_trainer.telemetry.step_time import PARTS, StepTime
from tests.unit.cli.test_report_time import step

STEPS = 10_000
LONG = {"event": "evaluation_sample", "step": 1, "text": "x" * 200_000}


def write_log(path, records):
    with path.open("w") as file:
        for record in records:
            file.write(json.dumps(record) + "\n")
    return path


def long_run():
    for number in range(1, STEPS + 1):
        yield step(number, 4.0, generate=3.0, forward=1.0)
        if number % 100 == 0:
            yield LONG


def test_a_long_run_is_not_kept_in_memory(tmp_path, capsys):
    log = write_log(tmp_path / "stage2_log.jsonl", long_run())
    report_run(log, picture=None, images=None)  # what is loaded once is loaded
    tracemalloc.start()
    try:
        report_run(log, picture=None, images=None)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert log.stat().st_size > 20_000_000
    assert peak < 3_000_000
    lines = [" ".join(line.replace("│", " ").split()) for line in capsys.readouterr().out.splitlines()]
    shown = [line.partition(" ")[0] for line in lines if line.endswith("1.000") or line.startswith("…")]
    numbers = [*range(1, 21), "…", *range(STEPS - 19, STEPS + 1)]
    assert shown == [str(one) for one in numbers] * 2
    assert lines.count("generate 3.00 75%") == 2


@pytest.mark.parametrize("count", [1, 20, 21, 40, 41, 60])
def test_the_first_and_the_last_twenty_steps_are_shown(count):
    rows = StepRows()
    for number in range(1, count + 1):
        rows.note({"event": "step", "step": number, "loss": 1.0})
    shown = [*rows.table().columns[0].cells]
    every = [str(number) for number in range(1, count + 1)]
    assert shown == (every if count <= 40 else [*every[:20], "…", *every[-20:]])


def test_means_are_those_of_all_numbers_at_once():
    values = [random.Random(7).uniform(-1, 1) * 10.0 ** random.Random(n).randint(-12, 12) for n in range(2000)]
    means = TimeMeans()
    for value in values:
        parts = {**dict.fromkeys(PARTS, 0.0), "generate": value}
        means.note({"step": 1, **StepTime(1e15, parts, ()).figures()})
    assert means._steps["step/generate_s"].value == fmean(values)
    assert sum(values) != fsum(values), "a plain sum would tell them apart"


def test_steps_of_grpo_have_times_without_servers(tmp_path, capsys):
    times = StepTime(4.0, {**dict.fromkeys(PARTS, 0.0), "generate": 3.0}, ()).figures()
    line = {"event": "step", "step": 1, "loss": 0.1, "reward": 0.5, "reward_std": 0.25, **times}
    report_run(write_log(tmp_path / "log", [line]), picture=None, images=None)
    assert "generate" in capsys.readouterr().out


def test_of_evaluations_the_first_and_the_last_are_kept_for_the_picture(tmp_path):
    Image.new("RGB", (10, 10)).save(tmp_path / "a.png")
    samples = EndSamples()
    for number in (5, 3, 9, 7, 3, 9):
        for name in "ab":
            sample = {"sample_id": name, "image": "a.png", "ground_truth": [], "predictions": []}
            samples.note({"event": "evaluation_sample", "step": number, **sample})
    assert sorted(samples._evaluations) == [3, 9]
    samples.write(tmp_path / "out.png", images=tmp_path)
    with Image.open(tmp_path / "out.png") as image:
        assert image.width > image.height
