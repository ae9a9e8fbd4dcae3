"""The reproducibility record says what a run was made of; JSON lines are on disk at once."""

from __future__ import annotations

import json
import os

from prometheus_client import CollectorRegistry

from stage2_api.pod.report import SyncStatus
from stage2_trainer.data.records import Fingerprint
from stage2_trainer.telemetry.prometheus import MeteredLog
from stage2_trainer.telemetry.run_context import config_sha256, reproducibility_record
from stage2_trainer.telemetry.run_log import JsonLines, RunLog, SilentLog
from tests.unit.trainer.learner.configs import SERVER, run_config


def test_the_record_names_all_that_a_run_is_made_of():
    config = run_config(model={"model": "tiny"}, training={"seed": 17})
    sync = SyncStatus(requested_mode="auto", effective_mode="full", merge="server", merge_reason="why", transport="tcp")
    record = reproducibility_record(config, Fingerprint("train.jsonl", 3, "ff"), sync).document()
    assert (record["model"], record["servers"]) == ("tiny", [SERVER["servers"][0]["base_url"]])
    how = {"merge": "server", "merge_reason": "why", "transport": "tcp"}
    assert record["sync"] == {"requested": "auto", "effective": "full", **how}
    assert record["rollout_seed"] == 17
    assert record["dataset"] == {"path": "train.jsonl", "records": 3, "sha256": "ff"}
    assert set(record["versions"]) == {"stage2", "torch", "transformers", "peft", "vllm", "python"}


def test_the_configs_hash_depends_on_values_and_not_on_order():
    assert config_sha256({"a": 1, "b": {"c": 2, "d": 3}}) == config_sha256({"b": {"d": 3, "c": 2}, "a": 1})
    assert config_sha256({"a": 1}) != config_sha256({"a": 2})


def test_lines_are_on_disk_at_once_and_survive_a_second_run(tmp_path):
    path = tmp_path / "out" / "log.jsonl"
    first = JsonLines(path)
    first.write({"step": 1, "desc": "Käfer"})
    assert json.loads(path.read_text()) == {"step": 1, "desc": "Käfer"}
    first.close()
    second = JsonLines(path)
    second.write({"step": 2})
    second.close()
    assert [json.loads(line)["step"] for line in path.read_text().splitlines()] == [1, 2]


def test_what_a_run_says_is_on_disk_once_it_was_flushed(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr("os.fsync", lambda number: flushed.append(os.readlink(f"/proc/self/fd/{number}")))
    log = MeteredLog(RunLog(tmp_path), CollectorRegistry())
    rollouts = JsonLines(tmp_path / "rollouts.jsonl")
    for one in (log, rollouts, SilentLog()):
        one.flush()
    assert flushed == [str(tmp_path / "stage2_log.jsonl"), str(tmp_path / "rollouts.jsonl")]


def test_what_a_run_says_is_in_its_log_and_on_stdout(tmp_path, capsys):
    log = RunLog(tmp_path)
    log.write("step", {"step": 1, "loss": 2.5})
    log.close()
    line = '{"event": "step", "step": 1, "loss": 2.5}\n'
    assert capsys.readouterr().out == line
    assert (tmp_path / "stage2_log.jsonl").read_text() == line


def test_nothing_is_glued_to_a_half_line_that_a_crash_left(tmp_path):
    path = tmp_path / "rollouts.jsonl"
    path.write_text('{"a": 1}\n{"b": 2, "te')
    JsonLines(path).write({"c": 3})
    JsonLines(path).write({"d": 4})
    assert path.read_text().splitlines() == ['{"a": 1}', '{"b": 2, "te', '{"c": 3}', '{"d": 4}']
