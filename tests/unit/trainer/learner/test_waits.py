"""What a learner logs and reports while it loads, evaluates, trains and saves; lines come in quick succession here."""

import logging
import re

from stage2_trainer import main
from stage2_trainer.process.activity import ACTIVITY
from stage2_trainer.telemetry.progress import Reporter
from tests.unit.trainer.learner.configs import run_config, write_box_records

EVERY_S = 0.02


class Recording(Reporter):
    """Keeps every message."""

    def __init__(self, **options):
        super().__init__(**options)
        self.messages = []

    def update(self, **changes):
        super().update(**changes)
        self.messages.append(self.current.message)


def test_long_phases_are_named_in_log_and_status(
    tmp_path, model_path, image_paths, termination_log, monkeypatch, caplog
):
    monkeypatch.setattr(ACTIVITY, "_every_s", EVERY_S)
    made = []
    monkeypatch.setattr(main, "Reporter", lambda **options: made.append(Recording(**options)) or made[-1])
    images = [image_paths[0]] * 6
    config = run_config(
        matching={"rollout_backend": "hf", "max_new_tokens": 8, "rollout_generate_batch_size": 2},
        training={
            "output_dir": str(tmp_path / "out"), "max_steps": 2, "per_device_train_batch_size": 2, "save_steps": 1,
            "gradient_checkpointing": False, "eval_strategy": "steps", "eval_steps": 2,
        },
        model={"model": str(model_path)},
        train_jsonl=write_box_records(tmp_path / "train.jsonl", *images),
    )  # fmt: skip
    with caplog.at_level(logging.INFO):
        assert main.learn(config) == 0
    lines, reporter = caplog.messages, made[0]
    for pattern in (
        r"importing PyTorch and transformers \(\d+ s\)|loading the tokenizer of .* \(\d+ s\)",
        r"loading the model .* \(\d+ s\)",
        r"starting to train; first evaluation, before training; generating: 2 of 6 answers \(\d+ s\)",
        r"step 1 of 2; generating: 0 of 2 answers \(\d+ s\)",
        r"step 2 of 2.*saving checkpoint-2 \(\d+ s\)",
        r"step 2 of 2; evaluation at step 2; generating: 4 of 6 answers \(\d+ s\)",
    ):
        assert any(re.fullmatch(pattern, line) for line in lines), (pattern, lines)
        assert any(re.fullmatch(pattern, message) for message in reporter.messages), pattern
    # a step that is logged, and the end, withdraw what was reported
    assert "" in reporter.messages[reporter.messages.index(next(filter(None, reporter.messages))) :]
    assert reporter.current.message == ""


def test_only_rank_0_reports_activity(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    reporter = Reporter()
    main._to_log_and_report(reporter)("loading")
    assert reporter.current.message == ""
