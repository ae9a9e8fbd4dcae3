"""The children of a job on one node: which exist after this pass, and which go. Pure."""

from typing import Any

from stage2_controller.children import manifest, pods
from stage2_controller.children.build import build
from stage2_controller.children.manifest import Manifest
from stage2_controller.children.pods import Control
from stage2_controller.job import kinds, names
from stage2_controller.place import placement
from stage2_controller.place.placement import Place
from stage2_controller.plan import outcome
from stage2_controller.plan.job_pass import JobPass
from stage2_controller.plan.result import Manifests, NewCredentials, existing
from stage2_controller.queue import kueue, workload
from stage2_controller.queue.kueue import Admission
from stage2_controller.queue.workload import build_workload, pod_sets
from stage2_controller.state import conditions, ending, reasons
from stage2_controller.state.conditions import Condition
from stage2_controller.state.observed import ended, terminating


def choose_children(
    job: JobPass,
    *,
    blocked: Condition | None,
    admission: Admission,
    place: Place | None,
    new_credentials: NewCredentials,
    one_host: bool,
) -> tuple[Manifests, tuple[str, ...]]:
    """Return the children that may exist now, and the kinds that must not.

    one_host: the controller can tie pods to a node, so Kueue may be asked for a single host.
    """
    observed = job.observed
    children, deletions = _children_of_job(job, blocked=blocked, admission=admission, place=place)
    if children and observed.secret is None and admission.granted and not job.holds_secret:
        children = (new_secret(job, new_credentials), *children)
    needs_new_one = _needs_new_workload(job, admission=admission, place=place)
    if needs_new_one or kueue.is_abandoned(job.raw, observed.workload):
        deletions += existing(observed, "Workload")
    elif job.queue is not None and job.settings.kueue and not admission.lacks_class:
        # Before Kueue admits the job, its Workload is all that exists.
        children = (*(children if admission.granted else ()), _workload(job, job.queue, one_host=one_host))
    if secret_goes(job):
        deletions += existing(observed, "Secret")
    return () if blocked else children, deletions


def _children_of_job(
    job: JobPass, *, blocked: Condition | None, admission: Admission, place: Place | None
) -> tuple[Manifests, tuple[str, ...]]:
    """Return the children besides Secret and Workload that may exist now, and the kinds that must not.

    A job that waits for a node has no children. Then it gets servers and learner in one pass, so that together their
    pods hold all of its room; a learner waits only for the end of an old one. A running job whose spec changed was
    suspended, edited and resumed between two passes: it starts again. If the controller runs without Kueue, nothing
    starts, and what runs continues. While a foreign object has a child's name, only a learner that has begun continues:
    others might wait for ever.
    """
    observed, both = job.observed, existing(job.observed, "Job", "Deployment")
    if blocked and blocked.reason == reasons.NAME_TAKEN and not outcome.learner_begun(observed):
        return (), both
    if job.must_stop:
        return without(_build(job, admission=admission, place=place), *kinds.ROLE_OF_PODS), both
    if admission.condition and admission.condition.reason == reasons.KUEUE_DISABLED:
        return (), ()
    if _waits_for_node(job, place=place) or not admission.granted:
        return (), both
    servers_end = observed.deployment is None and _servers_end(job, place=place)
    waiting = {"Job": observed.old_learner(), "Deployment": servers_end}
    unwanted = (kind for kind, waits in waiting.items() if waits)
    return without(_build(job, admission=admission, place=place), *unwanted), ()


def _build(job: JobPass, *, admission: Admission, place: Place | None) -> Manifests:
    parsed = job.parsed
    control = Control(
        job_uid=str(parsed.owner.uid),
        spec_hash=parsed.spec_hash,
        attempt=_attempt(job, place=place),
        node=place.node if place and place.tied else None,
        avoid=place.avoid if place else (),
        avoid_if_possible=place.avoid_if_possible if place else (),
    )
    return build(parsed, job.settings, additions=admission.additions, control=control)


def _attempt(job: JobPass, *, place: Place | None) -> str | None:
    """Return the label of the servers' pods: that of those which stand (older controllers wrote none), or the next."""
    deployment = job.observed.deployment
    if deployment is not None and not terminating(deployment):
        label: str | None = deployment["spec"]["template"]["metadata"]["labels"].get(names.LABEL_ATTEMPT)
        return label
    return manifest.digest([job.parsed.owner.uid, job.parsed.spec_hash, place.node if place else None])


def _servers_end(job: JobPass, *, place: Place | None) -> bool:
    """Return whether servers of the last attempt still end on the same node: they would answer for the next ones."""
    leaving = [pod for pod in job.observed.pods if terminating(pod) and not ended(pod)]
    bound = [pod for pod in leaving if pod["spec"].get("nodeName") and not ending.overdue(pod, job.now)]
    return any(pod["metadata"]["labels"].get(names.LABEL_ATTEMPT) == _attempt(job, place=place) for pod in bound)


def _waits_for_node(job: JobPass, *, place: Place | None) -> bool:
    """Return whether no child may exist yet: there is no node, or waiting pods are to be tied to another one.

    Where the scheduler finds the node, children exist although the place names none.
    """
    observed = job.observed
    if place is None or not place.tied:
        return False
    bound = any(pod["spec"].get("nodeName") for pod in observed.pods)
    waits_untied = bool(placement.standing(observed)) and placement.tied_to(observed) is None and not bound
    return place.node is None or waits_untied


def _workload(job: JobPass, queue: str, *, one_host: bool) -> Manifest:
    """Return the Workload of a job that names a queue. A Workload that holds quota keeps its pod sets."""
    found, parsed = job.observed.workload, job.parsed
    wanted, spec_hash = kueue.reserved_pod_sets(found), kueue.spec_hash_of(found, parsed.spec_hash)
    if wanted is None:
        one_host = one_host and job.spec.placement.mode == "Reserve"
        wanted, spec_hash = pod_sets(pods.templates(parsed.pod_inputs()), one_host=one_host), parsed.spec_hash
    priority = kueue.priority(job.observed, job.observed.pod_priority_class)
    return build_workload(parsed.owner, wanted, kueue.queue_of(found, queue), priority=priority, spec_hash=spec_hash)


def _needs_new_workload(job: JobPass, *, admission: Admission, place: Place | None) -> bool:
    """Return whether the job's Workload must be deleted, once it covers no pod any more.

    It belongs to an earlier run or spec, the job is suspended, or the assigned host has no room: Kueue looks for
    another host only for a new Workload.
    """
    found = job.observed.workload
    nowhere = place is not None and (place.waits or place.failed)
    host_of_no_use = admission.granted and nowhere and kueue.host_overdue(found, job.now)
    outdated = job.spec.suspend or host_of_no_use or job.has_old_workload
    return kueue.finished(found) or (outdated and all(map(ended, job.observed.pods)))


def workload_patch(
    job: JobPass, *, end: Condition | None, admission: Admission, place: Place | None
) -> dict[str, Any] | None:
    """Return what the controller reports in the status of Kueue's Workload; None if there is nothing to report."""
    if job.queue is None or _needs_new_workload(job, admission=admission, place=place):
        return None
    return workload.status_patch(job.observed.workload, job.observed, end=end, at=conditions.timestamp(job.now))


def secret_goes(job: JobPass) -> bool:
    """Return whether the job's Secret is to be deleted now: it has to be replaced, and no pod has its content."""
    return job.renews_secret and not job.holds_secret


def new_secret(job: JobPass, new_credentials: NewCredentials) -> Manifest:
    """Return the job's Secret with new content."""
    owner, spec = job.parsed.owner, job.spec
    hosts = names.certificate_hosts(owner.name, owner.namespace, engine=spec.engine) if spec.tls.enabled else {}
    return manifest.secret(owner, new_credentials(hosts, job.now))


def without(manifests: Manifests, *unwanted: str) -> Manifests:
    """Return the manifests but those of the unwanted kinds."""
    return tuple(one for one in manifests if one["kind"] not in unwanted)
