"""`stage2 report` and the lines of `stage2 run`, for a GRPO run: rewards in place of objects."""

import json

import pytest
from PIL import Image

from stage2_cli.run_console import describe
from stage2_report.tables import report_run

STEP = {"event": "step", "loss": -0.02, "reward_std": 0.25, "completions/mean_length": 40.0, "sync/seconds": 0.1}
EVALUATION = {"event": "evaluation", "step": 3, "eval_reward": 0.625, "eval_rewards/summary.format/mean": 1.0}


def steps():
    return [
        {
            **STEP,
            "step": n,
            "reward": 0.2 * n,
            "rewards/summary.format/mean": 0.25 * n,
            "rewards/summary.format/std": 0.1,
        }
        for n in (1, 2, 3)
    ]


@pytest.fixture
def log(tmp_path):
    path = tmp_path / "stage2_log.jsonl"
    path.write_text("".join(f"{json.dumps(record)}\n" for record in [*steps(), EVALUATION]))
    return path


def test_the_table_has_the_mean_of_each_reward(log, capsys):
    report_run(log, picture=None, images=None)
    printed = capsys.readouterr().out
    assert "format" in printed
    assert "0.600" in printed
    assert "0.75" in printed
    assert "0.625" in printed
    assert "matched" not in printed


def test_the_picture_is_the_curve_of_the_rewards(log, tmp_path):
    report_run(log, picture=tmp_path / "out" / "curve.png", images=None)
    with Image.open(tmp_path / "out" / "curve.png") as image:
        assert len(image.convert("RGB").getcolors(maxcolors=100_000)) > 10


def test_a_step_and_an_evaluation_are_told_by_their_mean_reward():
    assert describe(steps()[0]) == "step 1: loss -0.020, mean reward 0.200"
    assert describe(EVALUATION) == "evaluation at step 3: mean reward 0.625"
