"""A run of stage 1 or 2 as people see it: `stage2 report --curve`, and a step of stage 1 on `stage2 run`'s console."""

import json

import pytest
from PIL import Image

from stage2_cli.run_console import describe
from stage2_report.tables import report_run

STEPS = [{"event": "step", "step": n, "loss": 4.0 / n} for n in (1, 2, 3)]
SCORES = {f"eval_rollout_{name}": 0.5 for name in ("precision", "recall", "matched_maskiou_mean", "f1_iou50")}
EVALUATIONS = [
    {"event": "evaluation", "step": n, "eval_rollout_f1": n / 3, "eval_rollout_recall_iou50": n / 4, **SCORES}
    for n in (0, 3)
]


def colours(path):
    with Image.open(path) as image:
        return {colour for _, colour in image.convert("RGB").getcolors(maxcolors=100_000)}


@pytest.mark.parametrize("evaluations", [EVALUATIONS, []])
def test_the_curve_has_the_loss_and_what_was_evaluated(tmp_path, evaluations):
    log = tmp_path / "stage2_log.jsonl"
    log.write_text("".join(f"{json.dumps(record)}\n" for record in [*STEPS, *evaluations]))
    report_run(log, picture=None, images=None, curve=tmp_path / "out" / "curve.png")
    found = colours(tmp_path / "out" / "curve.png")
    assert (153, 153, 153) in found  # the loss
    assert ((31, 119, 180) in found) == bool(evaluations)  # F1


def test_a_step_of_stage_1_is_told_without_matches():
    record = {"event": "step", "step": 1, "loss": 2.0, "supervised/objects": 31.0}
    assert describe(record) == "step 1: loss 2.000, 31 objects"
