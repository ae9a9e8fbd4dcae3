"""The end of a learner: how long it may take, and its last report, within the bytes that Kubernetes keeps of it."""

from __future__ import annotations

import json

from pydantic_core import from_json

from stage2_api.pod.progress import MESSAGE_CHARACTERS, LearnerReport, read_report

GRACE_S = 120
"""Seconds between SIGTERM and SIGKILL of a learner, which writes a checkpoint first."""

LIMIT_BYTES = 4096
"""Bytes that the kubelet reads of a termination log."""


def termination_message(report: LearnerReport) -> str:
    """Return the report as text; where that is too long, without what the log has as well."""
    for shorter in (_whole, _without_reproducibility, _without_details_of_sync, _without_many_servers):
        report = shorter(report)
        if _bytes(report) <= LIMIT_BYTES:
            break
    while _bytes(report) > LIMIT_BYTES and report.message:
        message = report.document()["message"]
        report = report.model_copy(update={"message": message[: len(message) // 2]})
    return json.dumps(report.document())


def _bytes(report: LearnerReport) -> int:
    return len(json.dumps(report.document()).encode())


def _whole(report: LearnerReport) -> LearnerReport:
    return report


def _without_reproducibility(report: LearnerReport) -> LearnerReport:
    return report.model_copy(update={"reproducibility": {}})


def _without_details_of_sync(report: LearnerReport) -> LearnerReport:
    if report.sync is None:
        return report
    less = report.sync.model_copy(update={"merge_reason": None, "phases": None})
    return report.model_copy(update={"sync": less})


def _without_many_servers(report: LearnerReport) -> LearnerReport:
    """Leave out the list of servers where it would not leave the message its room."""
    if report.sync is None or _bytes(report.model_copy(update={"message": ""})) <= LIMIT_BYTES - MESSAGE_CHARACTERS:
        return report
    return report.model_copy(update={"sync": report.sync.model_copy(update={"servers": []})})


def read_termination_message(text: str) -> LearnerReport | None:
    """Return the report in a termination message; None if a person or a traceback wrote it."""
    try:
        return read_report(from_json(text))  # it bounds depth, which json leaves to the stack
    except ValueError:
        return None
