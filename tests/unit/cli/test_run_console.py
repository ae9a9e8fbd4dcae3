"""The console of `stage2 run`: one line for each record of the learner's log, once it is complete."""

import pytest

from stage2_cli.run import Watcher, console, describe

STEP = {"event": "step", "step": 1, "loss": 2.0}
EVALUATION = {"event": "evaluation", "step": 3}


@pytest.mark.parametrize(
    ("record", "line"),
    [
        ({**STEP, "supervised/objects": 31.0}, "step 1: loss 2.000, 31 objects"),
        ({**STEP, "reward": 0.2}, "step 1: loss 2.000, mean reward 0.200"),
        (
            {**STEP, "rollout/matched_for_supervision": 2.0, "rollout/gt_objects": 5.0},
            "step 1: loss 2.000, matched 2 of 5 objects",
        ),
        ({**EVALUATION, "eval_reward": 0.625}, "evaluation at step 3: mean reward 0.625"),
        ({**EVALUATION, "eval_rollout_f1": 0.25}, "evaluation at step 3: F1 0.250"),
        (
            {**EVALUATION, "eval_rollout_f1": 0.25, "eval_rollout_f1_class_iou50": 0.125},
            "evaluation at step 3: F1 0.250, 0.125 with class at IoU 0.5",
        ),
        ({"event": "start"}, None),
    ],
)
def test_a_record_is_one_line(record, line):
    assert describe(record) == line


def test_only_complete_new_lines_of_the_log_are_shown(tmp_path, capsys):
    console.cache_clear()
    log = tmp_path / "learner.log"
    log.write_text('{"event": "step", "step": 1, "loss": 9.0, "reward": 0.5}\n')
    with Watcher(log) as watcher, log.open("a") as file:
        for piece in ('noise\n{"event": "step", "step": 2, ', '"loss": 1.0, "reward": 0.25}\n', ""):
            file.write(piece)
            file.flush()
            watcher.refresh()
    assert capsys.readouterr().out == "step 2: loss 1.000, mean reward 0.250\n"
    console.cache_clear()
