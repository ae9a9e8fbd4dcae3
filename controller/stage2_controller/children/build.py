"""From a job as the API server holds it to its children: `parse` reads and checks the spec, `build` writes manifests.

What `parse` returns depends on the job and the controller's settings alone. `build` adds what changes from pass to
pass, such as the chosen node, and returns finished manifests. The controller, static YAML (`static_children`) and local
processes (`spec.containers`) use the same builders. Pure, but for the fresh credentials of static YAML.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pydantic import ValidationError

from stage2_api.errors import ConfigError
from stage2_api.job import Network, RolloutMatchingJob
from stage2_api.parsing import parse_job
from stage2_api.runconfig import named_elsewhere
from stage2_api.validation import size
from stage2_api.validation.size import require_shallow
from stage2_api.vllm import resolve_transport
from stage2_controller import conditions, reasons
from stage2_controller.children import manifest, network, pods
from stage2_controller.children.manifest import Manifest, Owner
from stage2_controller.children.network import network_policy
from stage2_controller.children.pods import Control, PodInputs
from stage2_controller.place import node_fit
from stage2_controller.place.node_fit import Avoided, Need
from stage2_controller.spec import credentials, names, objects, template_rules
from stage2_controller.spec.containers import Processes, containers
from stage2_controller.spec.settings import DEFAULT_IMAGE, Settings

Additions = Mapping[str, Mapping[str, Any]]
"""What Kueue's admission adds to the pods of each role: labels, annotations, nodeSelector, tolerations."""

_NO_ADDITIONS: Additions = {}
# The keys of a spec that its hash covers. Defaults are left out, so that a newer version with a new default changes no
# hash.
_HASHED_KEYS = {"rollout", "learner", "config", "volumes", "placement", "gpu_resource", "image", "tls"}
_KEPT_PROBLEMS = 100  # of one spec; a condition has room for some fifty
_QUICK = 16_384  # characters of a job that is parsed in some 20 ms


@dataclass(frozen=True)
class ParsedJob:
    """A valid job with everything that follows from its spec alone."""

    job: RolloutMatchingJob
    owner: Owner
    processes: Processes
    image: str  # for containers whose job names none
    need: Need  # of all pods together, without additions
    spec_hash: str

    def pod_inputs(self, additions: Additions = _NO_ADDITIONS) -> PodInputs:
        """Return what pods are built from, without a controller's part."""
        return PodInputs(self.job, self.processes, self.image, additions)

    def need_with(self, additions: Additions) -> Need:
        """Return what all pods with these additions need on one node."""
        if not additions:
            return self.need
        return node_fit.need_of(pods.templates(self.pod_inputs(additions)), gpu_resource=self.need.gpu_resource)


def parse(raw: Mapping[str, Any], settings: Settings) -> ParsedJob:
    """Return the job that the API server holds, parsed and checked.

    A job keeps what it was accepted with: bounds that were introduced or lowered later apply only to new jobs and to
    edits. Otherwise a running job would become invalid, and nobody would enforce its deadline.

    Raises:
        ConfigError: the spec breaks a rule, or exceeds the admin's policy.
    """
    accepted, metadata = parse_job(raw, bounded=not _accepted_before(raw)), raw["metadata"]
    owner = Owner(metadata["name"], metadata["namespace"], metadata["uid"])
    processes = _processes(accepted, owner)
    settings.policy.check(accepted)
    parsed = _parsed(accepted, owner, processes, settings)
    requested = objects.add_amounts((parsed.need.total, _claimed(accepted, processes)))
    settings.policy.check_size(owner.namespace, requested)
    return replace(parsed, job=settings.policy.shortened(accepted))


def build(
    parsed: ParsedJob,
    settings: Settings,
    *,
    additions: Additions = _NO_ADDITIONS,
    attempt: str | None = None,
    node: str | None = None,
    avoid: Avoided = (),
    avoid_if_possible: tuple[str, ...] = (),
) -> tuple[Manifest, ...]:
    """Return all children but the Secret, finished.

    attempt, node, avoid, avoid_if_possible: see `pods.Control`.
    """
    owner, processes, control = parsed.owner, parsed.processes, None
    if owner.uid is not None:
        control = Control(owner.uid, parsed.spec_hash, attempt, node, avoid, avoid_if_possible)
    spec_hash = control.spec_hash if control else None
    inputs = replace(parsed.pod_inputs(additions), control=control)
    children = [
        manifest.configmap(owner, processes.config_text, spec_hash=spec_hash),
        _network_policy(parsed, settings.namespace, spec_hash),
    ]
    if processes.servers:
        children.append(network.service(owner, processes.servers, attempt=attempt, spec_hash=spec_hash))
        children.append(pods.deployment(owner, inputs))
    return (*children, pods.learner_job(owner, inputs))


def static_children(
    job: RolloutMatchingJob,
    *,
    namespace: str | None = None,
    image: str = DEFAULT_IMAGE,
    content: Mapping[str, str] | None = None,
) -> list[Manifest]:
    """Return all children of a job for a cluster where no controller runs.

    The learner then waits for its servers by itself. content: of the Secret; new credentials without it.

    Raises:
        ConfigError: a pod template breaks what the job needs.
    """
    settings = Settings(image=image)
    owner = Owner(job.metadata.name, namespace or job.metadata.namespace or "default")
    hosts = names.certificate_hosts(owner.name, owner.namespace) if job.spec.tls.enabled else {}
    secret = manifest.secret(owner, content or credentials.new(hosts, datetime.now(UTC)))
    return [secret, *build(_parsed(job, owner, _processes(job, owner), settings), settings)]


def parse_or_error(raw: Mapping[str, Any], settings: Settings) -> ParsedJob | ConfigError:
    """Return the parsed job, or why its spec is invalid. Any thread may call it: it changes nothing."""
    try:
        return parse(raw, settings)
    except ConfigError as error:
        return error.first(_KEPT_PROBLEMS)


def is_large(raw: Mapping[str, Any]) -> bool:
    """Return whether parsing the job takes long enough to do it in a thread."""
    return size.characters(size.written_by_its_author(raw), most=_QUICK) > _QUICK


def _processes(job: RolloutMatchingJob, owner: Owner) -> Processes:
    host = names.service_host(owner.name, owner.namespace)
    return containers(job, host_for=lambda _: host, tls=job.spec.tls.enabled)


def _parsed(job: RolloutMatchingJob, owner: Owner, processes: Processes, settings: Settings) -> ParsedJob:
    templates = pods.templates(PodInputs(job, processes, settings.image))
    need = node_fit.need_of(templates, gpu_resource=job.spec.gpu_resource)
    return ParsedJob(job, owner, processes, settings.image, need, _spec_hash(job))


def _accepted_before(raw: Mapping[str, Any]) -> bool:
    """Return whether an earlier pass accepted the job with everything that its pods are built from.

    It did where nobody has edited the spec since, whatever a newer controller makes of it, and where an edit changed
    none of the hashed keys: suspending a job requests nothing more.
    """
    status = raw.get("status") or {}
    accepted: str | None = status.get("specHash")
    if accepted is None:
        return False
    verdict = conditions.find(status, reasons.ACCEPTED)
    was_valid = verdict is None or verdict["status"] == "True"  # a refusal, or a bug, leaves the previous spec's hash
    if was_valid and status.get("observedGeneration") == raw["metadata"].get("generation"):
        return True
    return _hash_without_rules(raw) == accepted


def _hash_without_rules(raw: Mapping[str, Any]) -> str | None:
    """Return the hash of a spec whose rules are not checked, which is quick for any size; None if its form is invalid.

    Raises:
        ConfigError: it is nested too deep.
    """
    require_shallow(raw)
    try:
        return _spec_hash(RolloutMatchingJob.model_validate(raw))
    except ValidationError:
        return None


def _spec_hash(job: RolloutMatchingJob) -> str:
    return manifest.digest(job.spec.model_dump(mode="json", include=_HASHED_KEYS, exclude_defaults=True))


def _network_policy(parsed: ParsedJob, controller_namespace: str | None, spec_hash: str | None) -> Manifest:
    spec = parsed.job.spec
    transport = spec.config.rollout_matching.vllm.sync.transport
    if spec_hash is not None and spec.network.egress != Network().egress:
        # Pods are not built from this key, so the spec's own hash leaves it out.
        spec_hash = manifest.digest([spec_hash, spec.network.egress])
    return network_policy(
        parsed.owner,
        parsed.processes,
        transport=resolve_transport(transport, on_cuda=bool(spec.gpu_resource)),
        controller_namespace=controller_namespace,
        closed=_closes_egress(parsed.job),
        spec_hash=spec_hash,
    )


def _closes_egress(job: RolloutMatchingJob) -> bool:
    """Return whether the job's pods may connect only to one another."""
    if job.spec.network.egress == "Auto":
        return not named_elsewhere(job.spec.config) and not template_rules.adds_containers(job)
    return job.spec.network.egress == "Closed"


def _claimed(job: RolloutMatchingJob, processes: Processes) -> dict[str, float]:
    """Return the GPUs that the job says its resource claims are for; its pods' requests do not name them."""
    if job.spec.learner.resource_claim_template is None:
        return {}
    return {job.spec.gpu_resource: sum(one.gpus for one in (*processes.servers, processes.learner))}
