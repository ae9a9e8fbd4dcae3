"""Both ends of what crosses a pod's edge: what the learner hands over is what the controller and the CLI read."""

from __future__ import annotations

import base64
import json
from pathlib import Path

import pytest

from stage2_api.pod.layout import TOKEN_KEY
from stage2_api.pod.report import EVENT, ReproducibilityRecord, SyncStatus, read_termination_message
from stage2_controller.cluster.progress import ProgressReader
from stage2_report.run_history import parse_record
from stage2_trainer.data.records import Fingerprint
from stage2_trainer.telemetry.progress import ProgressServer, Reporter
from stage2_trainer.telemetry.run_context import reproducibility_record
from stage2_trainer.telemetry.run_log import RunLog
from tests.unit.controller import builders
from tests.unit.trainer.learner.configs import run_config

SECRET = {"data": {TOKEN_KEY: base64.b64encode(b"t0ken").decode()}}
POD = {**builders.learner_pod(), "status": {**builders.learner_pod()["status"], "podIP": "127.0.0.1"}}


@pytest.fixture
def record() -> ReproducibilityRecord:
    sync = SyncStatus(requested_mode="auto", effective_mode="full", merge="server")
    return reproducibility_record(run_config(model={"model": "tiny"}), Fingerprint("train.jsonl", 3, "ff"), sync)


@pytest.fixture
def reporter(record: ReproducibilityRecord) -> Reporter:
    sync = SyncStatus(requested_mode="auto", effective_mode="full").pushed(3, 0.5, ["http://a:8000"])
    made = Reporter()
    made.update(step=3, max_steps=9, phase="training", loss=1.5, tokens_per_second=80.0, sync=sync)
    made.update(reproducibility=record.document())
    return made


async def test_controller_reads_report_served_by_learner(reporter: Reporter) -> None:
    with ProgressServer(reporter, host="127.0.0.1", port=0, token="t0ken") as server:
        reader = ProgressReader(port=server.port)
        try:
            assert await reader.read(POD, SECRET) == reporter.current
        finally:
            await reader.close()


def test_controller_reads_learner_report_from_termination_log(reporter: Reporter, tmp_path: Path) -> None:
    reporter.write_termination_log(tmp_path / "log")
    assert read_termination_message((tmp_path / "log").read_text()) == reporter.current


def test_cli_reads_reproducibility_record_logged_by_learner(
    record: ReproducibilityRecord, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    log = RunLog(tmp_path)
    log.write(EVENT, record.document())
    log.close()
    event = parse_record(capsys.readouterr().out.encode())
    assert event == {"event": "reproducibility", **record.document()}
    assert ReproducibilityRecord.model_validate_json(json.dumps(event)) == record
