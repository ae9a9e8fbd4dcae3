"""The end of a learner: how long it may take, and its last report, within the bytes that Kubernetes keeps of it."""

from __future__ import annotations

import json

from pydantic_core import from_json

from stage2_api.pod.progress import LearnerReport, read_report

GRACE_S = 120
"""Seconds between SIGTERM and SIGKILL of a learner, which writes a checkpoint first."""

LIMIT_BYTES = 4096
"""Bytes that the kubelet reads of a termination log."""


def termination_message(report: LearnerReport) -> str:
    """Return the report as text; without its reproducibility and with a shorter message where that is too long."""
    text = json.dumps(report.document())
    if len(text.encode()) > LIMIT_BYTES:
        report = report.model_copy(update={"reproducibility": {}})
        text = json.dumps(report.document())
    while len(text.encode()) > LIMIT_BYTES and report.message:
        message = report.document()["message"]
        report = report.model_copy(update={"message": message[: len(message) // 2]})
        text = json.dumps(report.document())
    return text


def read_termination_message(text: str) -> LearnerReport | None:
    """Return the report in a termination message; None if a person or a traceback wrote it."""
    try:
        return read_report(from_json(text))  # it bounds depth, which json leaves to the stack
    except ValueError:
        return None
