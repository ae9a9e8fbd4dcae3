"""Evaluations as people see them: with the class where the log has it, and older logs as they are."""

import io

from rich.console import Console

from stage2_cli.run_console import describe
from stage2_report.tables import EvaluationRows

OLD = {
    f"eval_rollout_{name}": 0.25
    for name in ("precision", "recall", "f1", "matched_maskiou_mean", "recall_iou50", "f1_iou50")
}
OLD = {"event": "evaluation", "step": 3, **OLD}
NEW = {**OLD, "eval_rollout_f1_class_iou50": 0.125, "eval_rollout_ap": 0.0625}


def shown(evaluations):
    console = Console(width=100, file=io.StringIO())
    rows = EvaluationRows()
    for one in evaluations:
        rows.note(one)
    console.print(rows.table())
    return console.file.getvalue()


def test_the_class_is_shown_where_it_is_known():
    assert "with class" in (text := shown([NEW, NEW]))
    assert "0.125" in text
    assert "0.062" in text
    assert "with class" not in shown([OLD])


def test_the_console_says_both():
    assert describe(NEW) == "evaluation at step 3: F1 0.250, 0.125 with class at IoU 0.5"
    assert describe(OLD) == "evaluation at step 3: F1 0.250"
