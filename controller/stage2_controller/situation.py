"""The situation of an accepted job in one pass: what is known of it, found out step by step. Pure."""

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from stage2_api.job import RolloutMatchingJob
from stage2_controller import reasons
from stage2_controller.children import comparison, pods
from stage2_controller.children.build import ParsedJob
from stage2_controller.conditions import Condition
from stage2_controller.observed import Observed, ended, terminating
from stage2_controller.outcome import Outcome
from stage2_controller.place.placement import Place
from stage2_controller.queue import kueue
from stage2_controller.spec import credentials
from stage2_controller.spec.containers import Processes
from stage2_controller.spec.settings import Settings


@dataclass(frozen=True)
class Situation:
    """The job, what is observed of it, and the findings of the steps that the plan has taken."""

    raw: Mapping[str, Any]  # the job as the API server holds it
    parsed: ParsedJob
    observed: Observed
    settings: Settings
    now: datetime
    outcome: Outcome | None = None  # None: it goes on
    blocked: Condition | None = None  # ChildrenApplied, where what is not the job's keeps them from being written
    quota: Condition | None = None  # QuotaReserved, where the job names a queue of Kueue and is to run
    placement: Place | None = None  # None: nothing is to run, or there is nothing to say of the scheduler's choice

    @property
    def job(self) -> RolloutMatchingJob:
        """The job with the defaults of its spec."""
        return self.parsed.job

    @property
    def processes(self) -> Processes:
        """Its servers and its learner."""
        return self.parsed.processes

    @property
    def previous(self) -> Mapping[str, Any]:
        """The status that the last pass wrote."""
        return self.raw.get("status") or {}

    @property
    def server_names(self) -> tuple[str, ...]:
        """server-0, server-1, …"""
        return tuple(server.name for server in self.processes.servers)

    @property
    def queue(self) -> str | None:
        """The queue of Kueue that the job names; one whose label went meanwhile has the queue that gave it quota."""
        return kueue.queue_name(self.raw) or kueue.queue_of(self.observed.workload, None)

    @property
    def admitted(self) -> bool:
        """Whether no quota is missing."""
        return self.quota is None or self.quota.status == "True"

    @property
    def lacks_class(self) -> bool:
        """Whether the job names a WorkloadPriorityClass that does not exist."""
        return self.quota is not None and self.quota.reason == reasons.NO_PRIORITY_CLASS

    @property
    def idle(self) -> bool:
        """Whether the job is kept from having children and has none: it claims no place."""
        return self.blocked is not None and self.observed.deployment is None and self.observed.learner is None

    @property
    def returns_quota(self) -> bool:
        """Whether the job's quota goes back: Kueue turned the job away, or the host that it assigned is of no use.

        It was cordoned, is gone, or others took its room; Kueue itself looks again only at jobs without quota.
        """
        workload, choice = self.observed.workload, self.placement
        if kueue.gives_back(workload) or kueue.turned_away(workload):
            return True
        nowhere = choice is not None and choice.node is None and choice.waits
        return self.admitted and nowhere and kueue.in_vain(workload, self.now)

    @property
    def is_held(self) -> bool:
        """Whether others have deactivated the job's Workload, and so decide when it is active again.

        What an older controller deactivated because the job was suspended has no mark.
        """
        was_suspended = self.job.spec.suspend or self.previous.get("phase") == reasons.SUSPENDED
        return not was_suspended and kueue.deactivated_by_others(self.observed.workload)

    @property
    def asks_anew(self) -> bool:
        """Whether the job's Workload has to go before Kueue looks at the job again.

        It is one of a run that failed, before the spec was corrected, of a spec before this one, whose pods have ended,
        or was turned away, before the job was suspended.
        """
        workload = self.observed.workload
        if kueue.finished(workload) or (self.job.spec.suspend and kueue.turned_away(workload)):
            return True
        return self.asked_before and all(map(ended, self.observed.pods))

    @property
    def asked_before(self) -> bool:
        """Whether the job's Workload asks for what its spec was: it was suspended, edited and resumed at once.

        A learner of the present spec that stands beside one is an older controller's, and goes on.
        """
        if self.observed.learner is not None and not self.spec_changed:
            return False
        return kueue.of_another_spec(self.observed.workload, self.parsed.spec_hash)

    @property
    def spec_changed(self) -> bool:
        """Whether the learner that exists was made from another spec."""
        return comparison.spec_changed(self.observed, self.parsed.spec_hash)

    @property
    def must_stop(self) -> bool:
        """Whether no pod of the job may exist: it is suspended, its spec was edited under its learner, or its Secret
        has to be made anew."""
        return self.job.spec.suspend or self.spec_changed or self.renews_secret

    @property
    def renews_secret(self) -> bool:
        """Whether the job's Secret has to be made anew: its certificates end soon, or it has none and pods need them.

        Pods that were made before jobs had certificates go on without.
        """
        secret, learner = self.observed.secret, self.observed.learner
        if secret is None or credentials.fit(secret, tls=self.job.spec.tls.enabled, now=self.now):
            return False
        standing = learner is not None and not terminating(learner)
        return credentials.has_certificates(secret) or not standing or self._mounts_certificates

    @property
    def _mounts_certificates(self) -> bool:
        """Whether pods are made with certificates; a Deployment of before that was deleted came back with them."""
        made = (self.observed.learner, self.observed.deployment)
        return any(pods.mounts_certificates(one) for one in made if one is not None)
