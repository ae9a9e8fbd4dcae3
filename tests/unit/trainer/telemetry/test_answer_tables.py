"""Held-out answers in the trackers' own storage: each real library writes, without a network, what its page shows."""

from __future__ import annotations

import hashlib
import json
import sqlite3
import sys
from dataclasses import replace

import pytest
from PIL import Image

from stage2_trainer.learner.listeners import log_held_out_rollouts
from stage2_trainer.telemetry import answer_tables as module
from stage2_trainer.telemetry.answer_tables import MOST_ROWS, HeldOutAnswer, answer_tables
from stage2_trainer.telemetry.run_log import JsonLines, SilentLog
from tests.unit.trainer.learner.configs import run_config
from tests.unit.trainer.learner.harness import build, only_first, two_boxes


def of_wandb(folder):
    """The rows of each table; they and the pictures are staged as they will be uploaded, under other names."""
    import wandb

    wandb.finish()  # else it goes on copying what is printed into its log
    wandb.teardown()
    files = [one for one in (folder / "artifacts").rglob("tmp*") if one.is_file()]  # before 0.23 a folder is named tmp
    staged = {hashlib.sha256(one.read_bytes()).hexdigest(): one for one in files}
    texts = (one.read_bytes() for one in staged.values())
    tables = [json.loads(text) for text in texts if text.startswith(b'{"_type": "table"')]
    for one in sorted(tables, key=lambda table: table["data"][0]):
        rows = [dict(zip(one["columns"], row, strict=True)) for row in one["data"]]
        yield [row | {"picture": staged[row["picture"]["sha256"]]} for row in rows]


def of_trackio(folder):
    (database,) = (folder / "trackio").glob("*.db")
    with sqlite3.connect(database) as connection:
        lines = [json.loads(one) for (one,) in connection.execute("select metrics from metrics order by id")]
    for line in lines:
        if "held_out_answers" in line:
            rows = line["held_out_answers"]["_value"]
            yield [row | {"picture": folder / "trackio" / "media" / row["picture"]["file_path"]} for row in rows]


def of_mlflow(folder):
    (table,) = folder.rglob("held_out_answers.json")
    found = json.loads(table.read_text())
    rows = [dict(zip(found["columns"], row, strict=True)) for row in found["data"]]
    for step in dict.fromkeys(row["step"] for row in rows):
        yield [row | {"picture": table.parent / row["picture"]["filepath"]} for row in rows if row["step"] == step]


@pytest.mark.parametrize(("tracker", "read"), [("wandb", of_wandb), ("trackio", of_trackio), ("mlflow", of_mlflow)])
def test_run_logs_table_of_pictures_at_each_evaluation(
    tmp_path, monkeypatch, model, encoder, image_paths, tracker, read
):
    pytest.importorskip(tracker)
    folders = {name: str(tmp_path) for name in ("WANDB_DIR", "WANDB_DATA_DIR", "WANDB_CACHE_DIR")}
    folders |= {"TRACKIO_DIR": f"{tmp_path}/trackio", "MLFLOW_TRACKING_URI": f"sqlite:///{tmp_path}/mlflow.db"}
    for name, value in {"WANDB_MODE": "offline", **folders}.items():
        monkeypatch.setenv(name, value)
    for name in [one for one in sys.modules if one.startswith("trackio")]:  # it reads its folder when it is imported
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.chdir(tmp_path)
    *records, last = two_boxes(image_paths)
    records.append(replace(last, objects=()))
    config = run_config(training={"report_to": [tracker]})
    harness = build(
        tmp_path / "run", model, encoder, records, answer=only_first, report_to=[tracker], eval_on_start=True,
        eval_strategy="steps", eval_steps=1,
    )  # fmt: skip
    listener = log_held_out_rollouts(SilentLog(), JsonLines(tmp_path / "rollouts.jsonl"), answer_tables(config))
    object.__setattr__(harness.learner.evaluation, "on_matched", listener)
    harness.train()
    tables = list(read(tmp_path))
    assert [[row["step"] for row in table] for table in tables] == [[0] * len(records), [1] * len(records)]
    for row, record in zip(tables[-1], records, strict=True):
        assert (row["sample"], row["answer"]) == (record.sample_id, only_first(record))
        assert row["F1"] == (pytest.approx(2 / 3) if record.objects else None)
        with Image.open(row["picture"]) as picture:
            assert picture.width > 2 * 288


@pytest.fixture
def written(monkeypatch):
    """The tables that a tracker was given."""
    tables = []
    monkeypatch.setitem(module._WRITERS, "mlflow", lambda tracker, table: tables.append(table))
    monkeypatch.setattr(module, "import_module", lambda name: None)
    return tables


def answers(image_paths, count):
    (record, *_) = two_boxes(image_paths)
    return [HeldOutAnswer(record, only_first(record), "stop", {"reward": float(place)}) for place in range(count)]


def test_answer_table_has_only_first_answers_with_grpo_rewards(image_paths, written):
    answer_tables(run_config(training={"report_to": ["tensorboard", "mlflow"]}))(3, answers(image_paths, 20))
    (table,) = written
    assert [row["reward"] for row in table] == [float(place) for place in range(MOST_ROWS)]
    assert "F1" not in table[0]


def test_only_rank_0_writes_answer_tables(image_paths, written, monkeypatch):
    monkeypatch.setattr(module, "rank", lambda: 1)
    answer_tables(run_config(training={"report_to": ["mlflow"]}))(3, answers(image_paths, 2))
    assert written == []


def test_failing_tracker_logs_warning_and_run_continues(image_paths, written, monkeypatch, caplog):
    def refuse(tracker, table):
        raise ConnectionError("no such host")

    monkeypatch.setitem(module._WRITERS, "mlflow", refuse)
    answer_tables(run_config(training={"report_to": ["mlflow"]}))(3, answers(image_paths, 2))
    assert "mlflow did not accept the table of answers of step 3: no such host" in caplog.text
