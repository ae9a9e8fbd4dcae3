"""What a pass knows of a valid job before it decides anything. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from stage2_api.errors import ConfigError
from stage2_api.job import JobSpec
from stage2_controller.children import comparison, manifest, pods
from stage2_controller.children.build import ParsedJob, with_servers
from stage2_controller.children.jobset import allowed_pods, rollout_pods
from stage2_controller.job import credentials
from stage2_controller.job.containers import is_elastic
from stage2_controller.job.settings import Settings
from stage2_controller.plan import evictions, outcome
from stage2_controller.plan.evictions import Evictions
from stage2_controller.queue import kueue
from stage2_controller.state import conditions, jobset, reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import Observed, terminating


@dataclass(frozen=True)
class JobPass:
    """The inputs of one pass, and what follows from them alone. No step of the plan changes it."""

    raw: Mapping[str, Any]  # the job as the API server holds it, without a failure that no longer counts
    parsed: ParsedJob
    observed: Observed  # a JobSet in the form of a job on one node
    settings: Settings
    now: datetime
    evictions: Evictions
    quota_of_jobset: Condition | None  # QuotaReserved, where Kueue itself admits the job's JobSet

    @property
    def spec(self) -> JobSpec:
        """The job's spec with its defaults."""
        return self.parsed.job.spec

    @property
    def namespace(self) -> str:
        """The job's namespace."""
        return str(self.raw["metadata"]["namespace"])

    @property
    def previous(self) -> Mapping[str, Any]:
        """The status that the last pass wrote."""
        return self.raw.get("status") or {}

    @property
    def server_names(self) -> tuple[str, ...]:
        """server-0, server-1, …"""
        return tuple(server.name for server in self.parsed.processes.servers)

    @property
    def queue(self) -> str | None:
        """The queue of Kueue that the job names. If its label was removed, the queue that gave it quota."""
        return kueue.queue_name(self.raw) or kueue.queue_of(self.observed.workload, None)

    @property
    def refused_start(self) -> ConfigError | None:
        """Why the job may not start, although it was accepted earlier; None if it may, runs, or is not to start."""
        starts = not self.stands or self.spec_changed
        waits = starts and not (self.spec.suspend or outcome.final(self.previous))
        return self.parsed.refused if waits else None

    @property
    def stands(self) -> bool:
        """Whether a child with pods exists."""
        return self.observed.deployment is not None or self.observed.learner is not None

    @property
    def has_old_workload(self) -> bool:
        """Whether the job's Workload is of an earlier spec: the job was suspended, edited and resumed at once.

        A learner of the present spec beside such a Workload comes from an older controller, and continues.
        """
        if self.observed.learner is not None and not self.spec_changed:
            return False
        return kueue.spec_hash_of(self.observed.workload, self.parsed.spec_hash) != self.parsed.spec_hash

    @property
    def spec_changed(self) -> bool:
        """Whether the existing learner was built from another spec."""
        learner = self.observed.learner
        return learner is not None and comparison.spec_hash_of(learner) != self.parsed.spec_hash

    @property
    def must_stop(self) -> bool:
        """Whether no pod may exist: the job is suspended, its spec was edited, or its Secret has to be replaced."""
        return self.spec.suspend or self.spec_changed or self.renews_secret

    @property
    def holds_secret(self) -> bool:
        """Whether pods of the job have the content of its Secret, or may get it any moment.

        One that has ended counts until it is gone: its kubelet keeps an immutable Secret until then, and would mount
        that content into every new pod that names the Secret.
        """
        return self.stands or bool(self.observed.pods or self.observed.of_jobset)

    @property
    def renews_secret(self) -> bool:
        """Whether the job's Secret has to be replaced: its certificates expire soon, or pods need some and it has none.

        The same holds where somebody deleted it while pods have its content: others could not speak with them. Pods
        that were created before jobs had certificates continue without.
        """
        secret, learner = self.observed.secret, self.observed.learner
        if secret is None:
            return self.holds_secret
        standing = learner is not None and not terminating(learner)
        if credentials.is_usable(secret, tls=self.spec.tls.enabled, now=self.now):
            return not standing and not credentials.serve_links(secret)
        if credentials.has_certificates(secret) or not standing:
            return True
        return any(pods.mounts_certificates(child) for child in (learner, self.observed.deployment) if child)


def job_pass(
    raw: Mapping[str, Any], parsed: ParsedJob, observed: Observed, *, settings: Settings, now: datetime
) -> JobPass:
    """Return the inputs of a pass over the job `raw`, whose spec is valid.

    A JobSet is shown in the form of a Deployment and a Job on one node; evictions are counted in all of its pods.
    """
    allowed, quota = _with_allowed_servers(raw, parsed, observed) if parsed.of_jobset else (parsed, None)
    shown = _on_one_node(allowed, observed) if parsed.of_jobset else observed
    known = replace(allowed, spec_hash=_known_hash(raw, allowed, shown))
    current = outcome.without_old_failure(raw, known.job, spec_hash=known.spec_hash)
    return JobPass(
        raw=current,
        parsed=known,
        observed=shown,
        settings=settings,
        now=now,
        evictions=_evictions_of(current, observed),
        quota_of_jobset=quota,
    )


def _on_one_node(parsed: ParsedJob, observed: Observed) -> Observed:
    per_pod, learners = parsed.processes.per_pod, parsed.job.spec.learner.nodes
    return jobset.on_one_node(observed, pods=rollout_pods(parsed.job), per_pod=per_pod, learners=learners)


def _evictions_of(raw: Mapping[str, Any], observed: Observed) -> Evictions:
    status = raw.get("status") or {}
    ended = outcome.final(status) is not None
    return evictions.of_job(status, observed, suspended=raw["spec"].get("suspend") is True, ended=ended)


def _with_allowed_servers(
    raw: Mapping[str, Any], parsed: ParsedJob, observed: Observed
) -> tuple[ParsedJob, Condition | None]:
    """Return the job with as many servers as quota and policy allow now, and the condition QuotaReserved.

    Further servers are not listed, because a learner that starts again waits for each listed one.
    """
    wanted = rollout_pods(parsed.job)
    allowed = allowed_pods(observed.jobset, wanted)
    found = jobset.quota(raw, observed.jobset, wanted, allowed)
    if not is_elastic(parsed.job) or outcome.final(raw.get("status") or {}):
        return parsed, found
    if parsed.refused and observed.rollout_job:
        allowed = observed.rollout_job["spec"]["parallelism"]
    return with_servers(parsed, allowed * parsed.processes.per_pod) if allowed != wanted else parsed, found


def _known_hash(raw: Mapping[str, Any], parsed: ParsedJob, observed: Observed) -> str:
    """Return the hash by which the job's children know its spec; after an edit of its pods, the present spec's."""
    status: Mapping[str, Any] = raw.get("status") or {}
    known = status.get("specHash") or comparison.spec_hash_of(observed.learner)  # older controllers reported none
    edited = status.get("observedGeneration") != raw["metadata"].get("generation")
    if edited and parsed.of_jobset and _corrected_in_number(status, len(parsed.processes.servers)):
        return manifest.digest([parsed.current_hash, known, len(parsed.processes.servers)])
    return known if known and _is_as_written(raw, parsed) else parsed.current_hash


def _is_as_written(raw: Mapping[str, Any], parsed: ParsedJob) -> bool:
    """Return whether what the job's pods are made from was not edited since a controller reported on the job.

    The generation counts the edits. After one, what was written decides (`status.writtenHash`), since all other hashes
    depend on the defaults of the version that computed them. Two of one version are equal where a default was written
    out (`status.currentHash`).
    """
    status: Mapping[str, Any] = raw.get("status") or {}
    edits = raw["metadata"].get("generation", 0) - status.get("observedGeneration", 0)
    accepted = (conditions.find(status, reasons.ACCEPTED) or {}).get("status") == "True"
    if (not edits and accepted) or status.get("currentHash") == parsed.current_hash:
        return True
    if "writtenHash" in status:
        return bool(status["writtenHash"] == parsed.written_hash)
    if not edits:  # a controller from before `currentHash` refuses what a new definition has added, for a minute
        return "currentHash" not in status
    # Nor did older controllers report what was written. The API server lets nobody edit it while pods run: that takes
    # one write that suspends the job, and one that resumes it.
    had_pods = status.get("phase") in (reasons.PENDING, reasons.STARTING, reasons.RUNNING)
    return edits == 1 and had_pods and raw["spec"].get("suspend") is not True


def _corrected_in_number(status: Mapping[str, Any], servers: int) -> bool:
    """Return whether a failed job had another number of servers, which its hash does not cover."""
    return status.get("phase") == reasons.FAILED and len(status.get("servers") or ()) not in (0, servers)
