"""The desired state of a job: what follows from its spec alone, the same in every pass until somebody edits it. Pure.

Reading a spec, checking its rules and writing its manifests is most of a pass's work; `DesiredCache` remembers it.
"""

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import ValidationError

from stage2_api.elsewhere import named_elsewhere
from stage2_api.errors import ConfigError
from stage2_api.job import Network, RolloutMatchingJob
from stage2_api.parsing import parse_job
from stage2_api.runconfig import RunConfig
from stage2_api.validation import size
from stage2_api.validation.nesting import require_shallow
from stage2_api.vllm import resolve_transport
from stage2_controller import conditions, reasons
from stage2_controller.children import configmap, deployment, learner_job, meta, networkpolicy, pod, service
from stage2_controller.place import node_fit, pod_requests
from stage2_controller.place.node_fit import Avoided, Need
from stage2_controller.spec import kinds, names, template_rules
from stage2_controller.spec.containers import Processes, containers
from stage2_controller.spec.key import Key
from stage2_controller.spec.settings import Settings

# What the spec's hash is made of. Defaults are left out: a newer definition that adds one does not make it another job.
_PODS_ARE_MADE_FROM = {"rollout", "learner", "config", "volumes", "placement", "gpu_resource", "image", "tls"}
_REMEMBERED = 1024  # desired states; one takes about 70 kB
_KEPT_PROBLEMS = 100  # of one spec; a condition has room for some fifty
_QUICK = 16_384  # characters of a job that is read in some 20 ms


@dataclass(frozen=True)
class Desired:
    """A valid job, its processes, and the manifests of its children (all but the Secret), without a node."""

    job: RolloutMatchingJob
    processes: Processes
    children: tuple[meta.Manifest, ...]
    need: Need  # what all its pods ask of one node
    spec_hash: str
    # By the last node and the last nodes to leave alone.
    _pinned: dict[tuple[str | None, Avoided, pod.Hosts], tuple[meta.Manifest, ...]] = field(default_factory=dict)
    _added: dict[str, "Desired"] = field(default_factory=dict)  # by the digest of the last additions

    def on(self, node: str | None, avoid: Avoided = (), shun: pod.Hosts = ()) -> tuple[meta.Manifest, ...]:
        """Return the children as a controller writes them: with a readiness gate and hashes, the pods on this node.

        avoid: nodes that pods without one must leave alone; shun: hosts that they take last.
        """
        key = node, avoid, shun
        if key not in self._pinned:
            self._pinned.clear()
            self._pinned[key] = tuple(self._controlled(child, node, avoid, shun) for child in self.children)
        return self._pinned[key]

    def _controlled(self, child: meta.Manifest, node: str | None, avoid: Avoided, shun: pod.Hosts) -> meta.Manifest:
        leads = kinds.DEPLOYMENT if self.processes.servers else kinds.LEARNER_JOB  # the learner follows its servers
        others = (avoid, shun) if child["kind"] == leads.kind else ((), ())
        return meta.stamped(_controlled(child, node, *others, spec_hash=self.spec_hash), self._hash_of(child))

    def _hash_of(self, child: meta.Manifest) -> str:
        """Return the hash of the part of the spec that a child is made from: pods do not notice their policy."""
        egress = self.job.spec.network.egress
        if child["kind"] != kinds.NETWORK_POLICY.kind or egress == Network().egress:
            return self.spec_hash
        return meta.digest([self.spec_hash, egress])

    def adding(self, additions: Mapping[str, Any]) -> "Desired":
        """Return it with these additions to its pods' templates, by role; what the template says itself stays."""
        if not additions:
            return self
        key = meta.digest(additions)
        if key not in self._added:
            made = tuple(pod.adding(child, additions) for child in self.children)
            need = node_fit.need_of(made, gpu_resource=self.need.gpu_resource)
            self._added.clear()
            self._added[key] = replace(self, children=made, need=need, _pinned={}, _added={})
        return self._added[key]


def desired(raw: Mapping[str, Any], settings: Settings) -> Desired:
    """Return the desired state of a job, as the API server holds that.

    Raise ConfigError if its spec breaks a rule, or asks for more than the admin's policy allows. What a job was
    accepted with it keeps: a bound that came later would leave it running without anybody to end it.
    """
    is_new = not _accepted_before(raw)
    accepted = parse_job(raw, bounded=is_new)
    host = names.service_host(accepted.metadata.name, namespace_of(accepted))
    processes = containers(accepted, host_for=lambda _: host, tls=accepted.spec.tls.enabled)
    settings.policy.check(accepted, is_new=is_new)
    made = tuple(children(accepted, raw["metadata"], processes, settings))
    need = node_fit.need_of(made, gpu_resource=accepted.spec.gpu_resource)
    settings.policy.check_size(namespace_of(accepted), pod_requests.added((need.total, _claimed(accepted, processes))))
    return Desired(
        job=settings.policy.shortened(accepted),
        processes=processes,
        children=made,
        need=need,
        spec_hash=_spec_hash(accepted),
    )


def _accepted_before(raw: Mapping[str, Any]) -> bool:
    """Whether a pass accepted the job with all that its pods are made from, as it is now.

    It did where nobody has edited the spec since, however a newer controller reads that; and where an edit left those
    keys alone: who suspends a job asks for nothing more.
    """
    status = raw.get("status") or {}
    accepted: str | None = status.get("specHash")
    if accepted is None:
        return False
    told = conditions.find(status, reasons.ACCEPTED)
    judged_well = told is None or told["status"] == "True"  # a refusal, or a bug, leaves the hash of the spec before
    if judged_well and status.get("observedGeneration") == raw["metadata"].get("generation"):
        return True
    return _hash_as_written(raw) == accepted


def _hash_as_written(raw: Mapping[str, Any]) -> str | None:
    """Return the hash of a spec that no rule was asked of; None if it has no form. Quick, whatever its size.

    Raise ConfigError where it is nested too deep.
    """
    require_shallow(raw)
    try:
        return _spec_hash(RolloutMatchingJob.model_validate(raw))
    except ValidationError:
        return None


def _spec_hash(job: RolloutMatchingJob) -> str:
    """Return the hash of what a job's pods are made from."""
    return meta.digest(job.spec.model_dump(mode="json", include=_PODS_ARE_MADE_FROM, exclude_defaults=True))


class DesiredCache:
    """The desired states of the jobs that were asked for last, each as long as uid and generation stay the same.

    Of a spec that breaks a rule the error is remembered: whoever writes one pays for one reading of it.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._made: OrderedDict[Key, tuple[tuple[str, int], Desired | ConfigError]] = OrderedDict()

    def of(self, raw: Mapping[str, Any]) -> Desired:
        """Return the job's desired state. Raise ConfigError if its spec breaks a rule."""
        made = self.known(raw)
        return _without_error(self.keep(raw, read(raw, self._settings)) if made is None else made)

    def known(self, raw: Mapping[str, Any]) -> "Desired | ConfigError | None":
        """Return what is remembered of the job's spec as it is now, if anything is."""
        key, spec = _identity(raw)
        known = self._made.get(key)
        return known[1] if known and known[0] == spec else None

    def keep(self, raw: Mapping[str, Any], made: "Desired | ConfigError") -> "Desired | ConfigError":
        """Remember what was read of a job, and return it."""
        key, spec = _identity(raw)
        self._made[key] = spec, made
        self._made.move_to_end(key)
        if len(self._made) > _REMEMBERED:
            self._made.popitem(last=False)
        return made

    def forget(self, key: Key) -> None:
        """Drop the desired state of a job that is gone."""
        self._made.pop(key, None)


def is_large(raw: Mapping[str, Any]) -> bool:
    """Whether to read the job takes a while: its spec, or what its author wrote beside that."""
    return size.characters(size.written_by_its_author(raw), most=_QUICK) > _QUICK


def read(raw: Mapping[str, Any], settings: Settings) -> Desired | ConfigError:
    """Return the job's desired state, or why it has none. Touches nothing: any thread may call it."""
    try:
        return desired(raw, settings)
    except ConfigError as error:
        return error.first(_KEPT_PROBLEMS)


def _without_error(made: Desired | ConfigError) -> Desired:
    if isinstance(made, ConfigError):
        raise made.with_traceback(None)
    return made


def _identity(raw: Mapping[str, Any]) -> tuple[Key, tuple[str, int]]:
    metadata = raw["metadata"]
    return Key(metadata["namespace"], metadata["name"]), (metadata["uid"], metadata["generation"])


def children(
    accepted: RolloutMatchingJob, owner: Mapping[str, Any], processes: Processes, settings: Settings
) -> list[meta.Manifest]:
    """Return all children but the Secret, in the order of their creation."""
    config_text, servers, image = processes.config_text, processes.servers, settings.image
    made = [
        configmap.configmap(owner, config_text),
        networkpolicy.networkpolicy(
            owner,
            processes,
            transport=resolve_transport(
                processes.config.rollout_matching.vllm.sync.transport, on_cuda=bool(accepted.spec.gpu_resource)
            ),
            controller_namespace=settings.namespace,
            closed=_stays_inside(accepted, processes.config),
        ),
    ]
    if servers:
        made.append(service.service(owner, servers))
        made.append(deployment.deployment(accepted, owner, servers, config_text=config_text, image=image))
    learner = learner_job.learner_job(
        accepted, owner, processes.learner, config_text=config_text, image=image, follows=bool(servers)
    )
    return [*made, learner]


def _claimed(accepted: RolloutMatchingJob, processes: Processes) -> dict[str, float]:
    """Return the GPUs that a job says that its claims are for: its pods' requests do not name them."""
    if accepted.spec.learner.resource_claim_template is None:
        return {}
    return {accepted.spec.gpu_resource: sum(one.gpus for one in (*processes.servers, processes.learner))}


def _stays_inside(accepted: RolloutMatchingJob, config: RunConfig) -> bool:
    """Whether the job's pods may connect to one another alone."""
    egress = accepted.spec.network.egress
    if egress == "Auto":
        return not named_elsewhere(config) and not template_rules.adds_containers(accepted)
    return egress == "Closed"


def namespace_of(accepted: RolloutMatchingJob) -> str:
    """Return the job's namespace; a file may leave it to kubectl."""
    return accepted.metadata.namespace or "default"


def _controlled(
    child: meta.Manifest, node: str | None, avoid: Avoided, shun: pod.Hosts, *, spec_hash: str
) -> meta.Manifest:
    """Return the child with what only a controller can add: its readiness, its addresses, the job's uid, its node."""
    if child["kind"] == kinds.DEPLOYMENT.kind:
        child = deployment.gated(child)
    if child["kind"] == kinds.SERVICE.kind:
        return service.choosing_nobody(child)
    if child["kind"] not in kinds.ROLE_OF_PODS:
        return child
    child = _marked(child, spec_hash)
    if node is not None:
        return pod.pinned(child, node)
    if shun:
        child = pod.shunning(child, shun)
    return pod.avoiding(child, avoid) if avoid else child


def _marked(child: meta.Manifest, spec_hash: str) -> meta.Manifest:
    """Mark the pods with the uid of their job, and the hash of its spec.

    A job that is applied again, or corrected, has the name of the one before, whose pods may still be there.
    """
    (owner,) = child["metadata"]["ownerReferences"]
    spec = child["spec"]
    metadata = spec["template"]["metadata"]
    marks = {names.ANNOTATION_JOB_UID: owner["uid"], names.ANNOTATION_SPEC_HASH: spec_hash}
    annotations = {**metadata["annotations"], **marks}
    template = {**spec["template"], "metadata": {**metadata, "annotations": annotations}}
    return {**child, "spec": {**spec, "template": template}}
