"""A pod's report: its exact bytes, its bounds, and reports from newer or broken pods."""

from __future__ import annotations

import json
import math
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stage2_api.pod.report import (
    LIMIT_BYTES,
    DatasetDigest,
    LearnerReport,
    PhaseShares,
    ReproducibilityRecord,
    SyncModes,
    SyncStatus,
    read_report,
    read_termination_message,
    termination_message,
)

RECORD = ReproducibilityRecord(
    model="/models/m",
    servers=["http://a:8000"],
    sync=SyncModes(
        requested="auto", effective="full", merge="server", merge_reason="it can be done there", transport="tcp"
    ),
    rollout_seed=17,
    config_sha256="0f",
    dataset=DatasetDigest(path="/data/train.jsonl", records=3, sha256="ff"),
    versions={"stage2": "0.1.0", "vllm": None},
)
SYNC = SyncStatus(
    requested_mode="auto",
    effective_mode="full",
    merge="server",
    merge_reason="it can be done there",
    transport="nccl",
    gigabytes_per_second=0.25,
    phases=PhaseShares(send=0.75, load=0.125),
).pushed(3, 0.5, ["http://a:8000"])
REPORT = LearnerReport(
    step=3,
    max_steps=9,
    resumed_step=1,
    phase="training",
    loss=1.5,
    tokens_per_second=80.0,
    best_step=2,
    best_score=0.75,
    sync=SYNC,
    reproducibility=RECORD.document(),
    message="",
)
GOLDEN_RECORD = (
    '{"model": "/models/m", "servers": ["http://a:8000"], "engines": [], "attention": "",'
    ' "sync": {"requested": "auto", "effective": "full", "merge": "server", "merge_reason": "it can be done there",'
    ' "transport": "tcp"},'
    ' "rollout_seed": 17, "config_sha256": "0f",'
    ' "dataset": {"path": "/data/train.jsonl", "records": 3, "sha256": "ff"},'
    ' "versions": {"stage2": "0.1.0", "vllm": null}}'
)
GOLDEN_REPORT = (
    '{"step": 3, "maxSteps": 9, "resumedStep": 1, "phase": "training", "loss": 1.5, "tokensPerSecond": 80.0,'
    ' "bestStep": 2, "bestScore": 0.75,'
    ' "sync": {"version": 3, "pushes": 0, "requestedMode": "auto", "effectiveMode": "full", "merge": "server",'
    ' "mergeReason": "it can be done there", "transport": "nccl", "gigabytesPerSecond": 0.25,'
    ' "phases": {"connect": 0.0, "begin": 0.0, "pack": 0.0, "send": 0.75, "load": 0.125, "finish": 0.0,'
    ' "prove": 0.0}, "seconds": 0.5,'
    ' "servers": [{"baseUrl": "http://a:8000", "version": 3}]},'
    f' "reproducibility": {GOLDEN_RECORD}, "restarts": 0, "message": ""}}'
)


def test_report_json_matches_golden_bytes() -> None:
    assert json.dumps(REPORT.document()) == GOLDEN_REPORT
    assert read_report(json.loads(GOLDEN_REPORT)) == REPORT


def test_report_of_starting_learner_has_every_key() -> None:
    assert json.dumps(LearnerReport(phase="loading").document()) == (
        '{"step": 0, "maxSteps": 0, "resumedStep": null, "phase": "loading", "loss": null, "tokensPerSecond": null,'
        ' "bestStep": null, "bestScore": null, "sync": null, "reproducibility": {}, "restarts": 0, "message": ""}'
    )


def test_reproducibility_record_json_matches_golden_bytes() -> None:
    assert json.dumps(RECORD.document()) == GOLDEN_RECORD
    assert ReproducibilityRecord.model_validate_json(GOLDEN_RECORD) == RECORD


MODES = {"requestedMode": "full", "effectiveMode": "full"}
WRONG_SYNCS: list[dict[str, object]] = [
    {"version": "one"},
    {"servers": {}},
    {"servers": ["http://x"]},
    {"servers": [{"baseUrl": "x", "version": 1}] * 65},
    {"servers": [{"baseUrl": "x" * 3000, "version": 1}]},
    {"mergeReason": "x" * 513},
    {"transport": "x" * 317},
    {"gigabytesPerSecond": math.nan},
    {"gigabytesPerSecond": -1.0},
    {"seconds": math.inf},
    {"phases": {"send": math.nan}},
    {"phases": {"send": 1.5}},
    {"phases": {"send": {}}},
    {"phases": ["send"]},
]
"""What no status may hold: the API server would refuse it again and again, for it knows no NaN and bounds each text."""


def test_sync_with_only_two_modes_is_accepted() -> None:
    assert read_report({"phase": "training", "sync": MODES}) is not None


def test_sync_of_older_learner_is_accepted_without_newer_keys() -> None:
    sync = {"version": 3, "requestedMode": "auto", "effectiveMode": "full", "merge": None, "seconds": 0.5}
    report = read_report({"phase": "training", "sync": sync})
    assert report is not None
    assert report.reported()["sync"] == sync


@pytest.mark.parametrize("reason", ["x" * 512, "错" * 512])
def test_final_report_with_many_servers_fits_termination_log(reason: str) -> None:
    servers = [f"https://a-job-with-a-long-name-rollout.a-namespace.svc:{8000 + n}" for n in range(64)]
    sync = SYNC.model_copy(update={"merge_reason": reason}).pushed(40, 1.0, servers)
    message = "why it failed, " * 60
    text = termination_message(REPORT.model_copy(update={"sync": sync, "message": message}))
    assert len(text.encode()) <= LIMIT_BYTES
    read = read_termination_message(text)
    assert read is not None
    assert read.sync is not None
    assert (read.phase, read.sync.version) == ("training", 40)
    assert read.message == message[:1000]


def test_unknown_keys_and_phases_of_newer_learner_are_accepted() -> None:
    report = read_report({"phase": "dreaming", "mood": "good", "sync": {**json.loads(GOLDEN_REPORT)["sync"], "x": 1}})
    assert report is not None
    assert report.phase == "dreaming"
    assert report.reported() == {"phase": "dreaming", "sync": json.loads(GOLDEN_REPORT)["sync"]}


@pytest.mark.parametrize(
    "document",
    [
        None,
        [],
        "text",
        {},
        {"step": 1},
        {"phase": 3},
        {"phase": "training", "step": "1"},
        {"phase": "training", "step": True},
        {"phase": ["done"]},
        {"phase": "x" * 1000},
        {"phase": "training", "step": 7.5},
        {"phase": "training", "step": [7]},
        {"phase": "training", "loss": "low"},
        {"phase": "training", "restarts": -1},
        {"phase": "training", "message": {"a": 1}},
        {"phase": "training", "message": "x" * 32769},
        {"phase": "training", "reproducibility": {str(n): n for n in range(65)}},
        {"phase": "training", "sync": []},
        *({"phase": "training", "sync": {**MODES, **wrong}} for wrong in WRONG_SYNCS),
    ],
    ids=lambda document: repr(document)[:60],
)
def test_malformed_report_is_rejected(document: object) -> None:
    assert read_report(document) is None


def test_nan_loss_is_preserved() -> None:
    report = read_report(json.loads(json.dumps(LearnerReport(phase="training", loss=math.nan).document())))
    assert report is not None
    assert report.loss is not None
    assert math.isnan(report.loss)


@pytest.mark.parametrize("text", ["", "Traceback (most recent call last):", "3", "[" * 100_000, '{"step": 1}'])
def test_foreign_termination_message_is_not_report(text: str) -> None:
    assert read_termination_message(text) is None


def test_deeply_nested_message_does_not_crash_process() -> None:
    """The controller does: it must read whatever the API server stores."""
    code = (
        "import sys; sys.setrecursionlimit(100_000)\n"
        "from stage2_api.pod.report import read_termination_message\n"
        "print(read_termination_message('[' * 100_000))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "None\n"


@given(st.text(max_size=3000), st.integers(0, 5000))
def test_termination_message_round_trips_whatever_its_text(message: str, much: int) -> None:
    report = REPORT.model_copy(update={"message": message, "reproducibility": {"model": "m" * much}})
    text = termination_message(report)
    assert len(text.encode()) <= LIMIT_BYTES
    read = read_termination_message(text)
    assert read is not None
    assert (read.step, read.phase) == (3, "training")
    assert read.sync is not None
    assert (read.sync.version, read.sync.servers) == (3, SYNC.servers)
    assert message.startswith(read.message)
    assert read.reproducibility in ({}, report.reproducibility)


def test_chinese_message_is_cut_to_fit_termination_log() -> None:
    text = termination_message(LearnerReport(phase="failed", message="错" * 1000))
    read = read_termination_message(text)
    assert read is not None
    assert read.message == "错" * 500
