"""The run's log: what the run was made of, each line on disk at once, its warnings, and how it ended."""

from __future__ import annotations

import json
import logging
import os

import pytest
from prometheus_client import CollectorRegistry

from stage2_api.pod.report import SyncStatus
from stage2_trainer.data.records import Fingerprint
from stage2_trainer.process.interrupt import Interrupted
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.prometheus import MeteredLog
from stage2_trainer.telemetry.run_context import config_sha256, reproducibility_record
from stage2_trainer.telemetry.run_log import JsonLines, RunLog, SilentLog, logged_end
from tests.unit.trainer.learner.configs import SERVER, run_config


def test_reproducibility_record_names_model_data_versions_and_sync():
    config = run_config(model={"model": "tiny"}, training={"seed": 17})
    sync = SyncStatus(requested_mode="auto", effective_mode="full", merge="server", merge_reason="why", transport="tcp")
    computing = {"engines": ["model runner V1"], "attention": "sdpa"}
    record = reproducibility_record(config, Fingerprint("train.jsonl", 3, "ff"), sync, **computing).document()
    assert {name: record[name] for name in computing} == computing
    assert (record["model"], record["servers"]) == ("tiny", [SERVER["servers"][0]["base_url"]])
    how = {"merge": "server", "merge_reason": "why", "transport": "tcp"}
    assert record["sync"] == {"requested": "auto", "effective": "full", **how}
    assert record["rollout_seed"] == 17
    assert record["dataset"] == {"path": "train.jsonl", "records": 3, "sha256": "ff"}
    assert set(record["versions"]) == {"stage2", "torch", "transformers", "peft", "vllm", "python"}


def test_config_hash_depends_on_values_not_on_order():
    assert config_sha256({"a": 1, "b": {"c": 2, "d": 3}}) == config_sha256({"b": {"d": 3, "c": 2}, "a": 1})
    assert config_sha256({"a": 1}) != config_sha256({"a": 2})


def test_log_lines_are_written_at_once_and_kept_by_second_run(tmp_path):
    path = tmp_path / "out" / "log.jsonl"
    first = JsonLines(path)
    first.write({"step": 1, "desc": "Käfer"})
    assert json.loads(path.read_text()) == {"step": 1, "desc": "Käfer"}
    first.close()
    second = JsonLines(path)
    second.write({"step": 2})
    second.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_flush_syncs_log_files_to_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr("os.fsync", lambda number: flushed.append(os.readlink(f"/proc/self/fd/{number}")))
    log = MeteredLog(RunLog(tmp_path), CollectorRegistry())
    rollouts = JsonLines(tmp_path / "rollouts.jsonl")
    for one in (log, rollouts, SilentLog()):
        one.flush()
    assert flushed == [str(tmp_path / "stage2_log.jsonl"), str(tmp_path / "rollouts.jsonl")]


def test_log_lines_go_to_file_and_stdout(tmp_path, capsys):
    log = RunLog(tmp_path)
    log.write("step", {"step": 1, "loss": 2.5})
    log.close()
    line = '{"event": "step", "step": 1, "loss": 2.5}\n'
    assert capsys.readouterr().out == line
    assert (tmp_path / "stage2_log.jsonl").read_text() == line


def test_new_line_is_not_appended_to_partial_line_after_crash(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"a": 1}\n{"b": 2, "te')
    JsonLines(path).write({"c": 3})
    JsonLines(path).write({"d": 4})
    assert path.read_text().splitlines() == ['{"a": 1}', '{"b": 2, "te', '{"c": 3}', '{"d": 4}']


logger = logging.getLogger("stage2_trainer.some")


def lines(folder):
    return [json.loads(line) for line in (folder / "stage2_log.jsonl").read_text().splitlines()]


@pytest.fixture
def log(tmp_path):
    log = RunLog(tmp_path)
    yield log
    log.close()


@pytest.mark.parametrize(
    ("error", "reported"),
    [
        (Interrupted("asked to stop (SIGTERM)"), ("stopped", "asked to stop (SIGTERM)")),
        (KeyboardInterrupt(), ("stopped", "KeyboardInterrupt")),
        (ValueError('{"event": "end"}\n\x1b[2J'), ("failed", '{"event": "end"}\\n\\x1b[2J')),
        (ValueError("x" * 5000), ("failed", "x" * 1000)),
    ],
)
def test_early_end_of_run_is_logged_with_reason(tmp_path, log, error, reported):
    with pytest.raises(type(error)) as met, logged_end(log, Reporter()):
        raise error
    assert met.value is error
    assert lines(tmp_path) == [{"event": "end", "step": 0, "outcome": reported[0], "message": reported[1]}]


def test_completed_run_is_logged_as_done(tmp_path, log):
    reporter = Reporter()
    with logged_end(log, reporter):
        reporter.update(step=7)
    assert lines(tmp_path) == [{"event": "end", "step": 7, "outcome": "done", "message": ""}]


def test_full_disk_does_not_hide_error_that_ended_run(tmp_path, caplog):
    (tmp_path / "stage2_log.jsonl").symlink_to("/dev/full")
    log = RunLog(tmp_path)
    with pytest.raises(ValueError, match="the reason"), logged_end(log, Reporter()):
        raise ValueError("the reason")
    assert "could not be logged" in caplog.text
    with pytest.raises(OSError, match="No space left"):
        log.close()


def test_warnings_go_to_log_file_and_not_to_stdout(tmp_path, log, capsys, caplog):
    with caplog.at_level(logging.INFO), log.keeping_warnings():
        logger.info("nothing")
        logger.warning("server %s is\nslow", "a")
        logger.error("lost")
    logger.warning("after the run")
    assert lines(tmp_path) == [
        {"event": "warning", "level": level, "logger": logger.name, "message": message}
        for level, message in (("WARNING", "server a is\\nslow"), ("ERROR", "lost"))
    ]
    assert capsys.readouterr().out == ""
