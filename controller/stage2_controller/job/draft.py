"""The draft of a job: what follows from its spec alone, the same in every pass until somebody edits it. Pure.

Reading a spec, checking its rules and writing its manifests is most of a pass's work; `Drafts` remembers it.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

from stage2_api.job import RolloutMatchingJob, parse_job
from stage2_controller.job import names, siting
from stage2_controller.job.children import configmap, deployment, job, meta, networkpolicy, pod, service
from stage2_controller.job.containers import Workload, containers
from stage2_controller.job.key import Key
from stage2_controller.job.placement import Need

# Of a job that names no image, where no chart says another.
DEFAULT_IMAGE = f"stage2/trainer:{version('stage2')}"

# What the spec's hash is made of. Defaults are left out: a newer definition that adds one does not make it another job.
_PODS_ARE_MADE_FROM = {"rollout", "learner", "config", "volumes", "placement", "gpu_resource", "image"}
_REMEMBERED = 1024  # drafts; one takes about 70 kB


@dataclass(frozen=True)
class Settings:
    """What the controller's own configuration adds to a job."""

    image: str = DEFAULT_IMAGE
    namespace: str | None = None  # where the controller's own pod runs; None: outside the cluster
    progress_s: float = 10.0  # how often the learner of a running job is asked for its progress
    kueue: bool = False  # write Workloads for jobs that name a queue; needs Kueue's definitions


@dataclass(frozen=True)
class Draft:
    """A valid job, its processes, and the manifests of its children (all but the Secret), without a node."""

    job: RolloutMatchingJob
    workload: Workload
    children: tuple[meta.Manifest, ...]
    need: Need  # what all its pods ask of one node
    spec_hash: str
    _pinned: dict[str | None, tuple[meta.Manifest, ...]] = field(default_factory=dict)  # by the last node
    _added: dict[str, "Draft"] = field(default_factory=dict)  # by the digest of the last additions

    def on(self, node: str | None) -> tuple[meta.Manifest, ...]:
        """The children as a controller writes them: with a readiness gate and hashes, the pods on this node."""
        if node not in self._pinned:
            self._pinned.clear()
            self._pinned[node] = tuple(
                meta.stamped(_controlled(child, node), self.spec_hash) for child in self.children
            )
        return self._pinned[node]

    def adding(self, additions: Mapping[str, Any]) -> "Draft":
        """The draft with these additions to its pods' templates, by role; what the template says itself stays."""
        if not additions:
            return self
        key = meta.digest(additions)
        if key not in self._added:
            made = tuple(pod.adding(child, additions) for child in self.children)
            need = siting.need(made, gpu_resource=self.need.gpu_resource)
            self._added.clear()
            self._added[key] = replace(self, children=made, need=need, _pinned={}, _added={})
        return self._added[key]


def draft(raw: Mapping[str, Any], settings: Settings) -> Draft:
    """The draft of a job, as the API server holds that. Raises ConfigError if its spec breaks a rule."""
    accepted = parse_job(raw)
    host = names.service_host(accepted.metadata.name, namespace_of(accepted))
    workload = containers(accepted, host_for=lambda _: host)
    hashed = accepted.spec.model_dump(mode="json", include=_PODS_ARE_MADE_FROM, exclude_defaults=True)
    made = tuple(children(accepted, raw["metadata"], workload, settings))
    return Draft(
        job=accepted,
        workload=workload,
        children=made,
        need=siting.need(made, gpu_resource=accepted.spec.gpu_resource),
        spec_hash=meta.digest(hashed),
    )


class Drafts:
    """Remembers the drafts of the jobs that it saw last, each for as long as uid and generation stay the same."""

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._made: OrderedDict[Key, tuple[tuple[str, int], Draft]] = OrderedDict()

    def of(self, raw: Mapping[str, Any]) -> Draft:
        """The job's draft. Raises ConfigError if its spec breaks a rule."""
        metadata = raw["metadata"]
        key, spec = Key(metadata["namespace"], metadata["name"]), (metadata["uid"], metadata["generation"])
        known = self._made.get(key)
        made = known[1] if known and known[0] == spec else draft(raw, self._settings)
        self._made[key] = spec, made
        self._made.move_to_end(key)
        if len(self._made) > _REMEMBERED:
            self._made.popitem(last=False)
        return made

    def forget(self, key: Key) -> None:
        """The job is gone."""
        self._made.pop(key, None)


def children(
    accepted: RolloutMatchingJob, owner: Mapping[str, Any], workload: Workload, settings: Settings
) -> list[meta.Manifest]:
    """All children but the Secret, in the order of their creation."""
    config_text, servers, image = workload.config_text, workload.servers, settings.image
    made = [
        configmap.configmap(owner, config_text),
        networkpolicy.networkpolicy(owner, servers, controller_namespace=settings.namespace),
    ]
    if servers:
        made.append(service.service(owner, servers))
        made.append(deployment.deployment(accepted, owner, servers, config_text=config_text, image=image))
    learner = job.job(accepted, owner, workload.learner, config_text=config_text, image=image, follows=bool(servers))
    return [*made, learner]


def namespace_of(accepted: RolloutMatchingJob) -> str:
    """The job's namespace; a file may leave it to kubectl."""
    return accepted.metadata.namespace or "default"


def _controlled(child: meta.Manifest, node: str | None) -> meta.Manifest:
    """What only a controller can add to a child: its readiness, the job's uid, and its node."""
    if child["kind"] == "Deployment":
        child = deployment.gated(child)
    if child["kind"] not in ("Deployment", "Job"):
        return child
    child = _marked(child)
    return child if node is None else pod.pinned(child, node)


def _marked(child: meta.Manifest) -> meta.Manifest:
    """Its pods say which job they are of: one that is applied again has the name of the one before."""
    (owner,) = child["metadata"]["ownerReferences"]
    spec = child["spec"]
    metadata = spec["template"]["metadata"]
    annotations = {**metadata["annotations"], names.ANNOTATION_JOB_UID: owner["uid"]}
    template = {**spec["template"], "metadata": {**metadata, "annotations": annotations}}
    return {**child, "spec": {**spec, "template": template}}
