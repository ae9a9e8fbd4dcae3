"""From a job as the API server holds it to its children: `parse` reads and checks the spec, `build` writes manifests.

What `parse` returns depends on the job and the controller's settings alone. `build` adds what changes from pass to
pass, such as the chosen node, and returns finished manifests. The controller, static YAML (`static_children`) and local
processes (`job.containers`) use the same builders. Pure, but for the fresh credentials of static YAML.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from typing import Any

from pydantic.alias_generators import to_camel

from stage2_api.errors import ConfigError
from stage2_api.job import Network, RolloutMatchingJob
from stage2_api.parsing import parse_job
from stage2_api.runconfig import named_elsewhere
from stage2_api.validation import size
from stage2_api.validation.size import require_shallow
from stage2_api.validation.validate import form_of
from stage2_api.vllm import resolve_transport
from stage2_controller.children import manifest, network, pods
from stage2_controller.children.jobset import jobset, rollout_pods
from stage2_controller.children.manifest import Manifest, Owner
from stage2_controller.children.network import network_policy
from stage2_controller.children.pods import Control, PodInputs
from stage2_controller.job import authorship, credentials, names, objects, template_rules
from stage2_controller.job.containers import Processes, containers, is_elastic
from stage2_controller.job.objects import Amounts
from stage2_controller.job.settings import DEFAULT_IMAGE, Settings
from stage2_controller.job.template_rules import Misshapen
from stage2_controller.place import node_fit
from stage2_controller.place.node_fit import Need

Additions = Mapping[str, Mapping[str, Any]]
"""What Kueue's admission adds to the pods of each role: labels, annotations, nodeSelector, tolerations."""

_NO_ADDITIONS: Additions = {}
# The keys of a spec that its hashes cover.
_HASHED_KEYS = {"engine", "rollout", "learner", "config", "volumes", "placement", "gpu_resource", "image", "tls"}
_KEPT_PROBLEMS = 100  # of one spec; a condition has room for some fifty
_QUICK = 16_384  # characters of a job that is parsed in some 20 ms


@dataclass(frozen=True)
class ParsedJob:
    """A job with everything that follows from its spec alone."""

    job: RolloutMatchingJob
    owner: Owner
    processes: Processes
    image: str  # for containers whose job names none
    need: Need  # of all pods together, without additions; of no pod where another controller places them
    requested: Amounts  # by all pods
    spec_hash: str  # by which the children know the spec: that of the version that made them
    current_hash: str  # as this version computes it, without defaults, so that a new key with a default changes nothing
    written_hash: str  # of the same keys as they were written, but for defaults: the same for all versions
    refused: ConfigError | None = None  # why a new start would be refused, although the job was accepted
    ignored: tuple[str, ...] = ()  # paths of keys that this version does not know, and that no author wrote

    @property
    def of_jobset(self) -> bool:
        """Whether a JobSet has the job's pods, and this controller places and queues none of them."""
        return self.job.spec.engine == names.JOBSET

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

    A job that a pass accepted earlier may break a rule of today, or exceed today's policy. `refused` then has the
    problems, and what breaks the form is left out: its deadlines, its suspension and its end still have to be managed.
    Unknown keys that no author wrote are left out, too (`ignored`), and refused in no job.

    Raises:
        ConfigError: the spec breaks a rule or exceeds the admin's policy, and no pass has accepted the job.
    """
    try:
        job = parse_job(raw)
        template_rules.check(job)
        settings.policy.check(job)
        parsed = _parsed(job, raw, settings)
        settings.policy.check_size(parsed.owner.namespace, parsed.requested)
    except ConfigError as error:
        known, ignored = authorship.without_filled_in(raw)
        if ignored:
            parsed = parse(known, settings)
            return replace(parsed, ignored=ignored, written_hash=_written_hash(raw["spec"], parsed.job))
        status: Mapping[str, Any] = raw.get("status") or {}
        if isinstance(error, Misshapen) or not (status.get("specHash") or status.get("startTime")):
            raise
        require_shallow(raw)
        repaired, _ = form_of(RolloutMatchingJob, raw)
        if repaired is None:
            raise
        return replace(_parsed(repaired, raw, settings), refused=error.first(_KEPT_PROBLEMS))
    return parsed


def build(
    parsed: ParsedJob,
    settings: Settings,
    *,
    additions: Additions = _NO_ADDITIONS,
    control: Control | None = None,
) -> tuple[Manifest, ...]:
    """Return all children but the Secret, finished. control: None without a controller."""
    owner, processes = parsed.owner, parsed.processes
    attempt, spec_hash = (control.attempt, control.spec_hash) if control else (None, None)
    inputs = replace(parsed.pod_inputs(additions), control=control)
    # Files and ports follow the number of servers.
    of_files = manifest.digest([spec_hash, len(processes.servers)]) if spec_hash and parsed.of_jobset else spec_hash
    children = [
        manifest.configmap(owner, processes.config_text, spec_hash=of_files),
        _network_policy(parsed, settings.namespace, of_files),
    ]
    if parsed.of_jobset:
        return (*children, jobset(owner, inputs))
    if processes.servers:
        children.append(network.service(owner, processes.servers, attempt=attempt, spec_hash=spec_hash))
        children.append(pods.deployment(owner, inputs))
    return (*children, pods.learner_job(owner, inputs))


def with_servers(parsed: ParsedJob, servers: int) -> ParsedJob:
    """Return the job with another number of servers; its hashes stay."""
    spec = parsed.job.spec
    rollout = spec.rollout.model_copy(update={"servers": servers})
    job = parsed.job.model_copy(update={"spec": spec.model_copy(update={"rollout": rollout})})
    made = _with_processes(job, parsed.owner, parsed.image, parsed.spec_hash)
    return replace(parsed, job=job, processes=made.processes, requested=made.requested)


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
    template_rules.check(job)
    owner = Owner(job.metadata.name, namespace or job.metadata.namespace or "default")
    hosts = names.certificate_hosts(owner.name, owner.namespace, engine=job.spec.engine) if job.spec.tls.enabled else {}
    secret = manifest.secret(owner, content or credentials.new(hosts, datetime.now(UTC)))
    return [secret, *build(_with_processes(job, owner, image, ""), Settings(image=image))]


def pod_templates(job: RolloutMatchingJob) -> dict[str, Manifest]:
    """Return the pod template of each role of a valid job; DEFAULT_IMAGE stands where the job names no image."""
    owner = Owner(job.metadata.name, job.metadata.namespace or "default")
    return pods.templates(_with_processes(job, owner, DEFAULT_IMAGE, "").pod_inputs())


def parse_or_error(raw: Mapping[str, Any], settings: Settings) -> ParsedJob | ConfigError:
    """Return the parsed job, or why its spec is invalid. Any thread may call it: it changes nothing."""
    try:
        return parse(raw, settings)
    except ConfigError as error:
        return error.first(_KEPT_PROBLEMS)


def is_large(raw: Mapping[str, Any]) -> bool:
    """Return whether parsing the job takes long enough to do it in a thread."""
    return size.characters(size.written_by_its_author(raw), most=_QUICK) > _QUICK


def _parsed(job: RolloutMatchingJob, raw: Mapping[str, Any], settings: Settings) -> ParsedJob:
    metadata = raw["metadata"]
    owner = Owner(metadata["name"], metadata["namespace"], metadata["uid"])
    # The number of servers of a JobSet may change while its pods stay.
    scaled = {"rollout": {"servers"}} if is_elastic(job) else None
    hashed = job.spec.model_dump(mode="json", include=_HASHED_KEYS, exclude=scaled, exclude_defaults=True)
    made = _with_processes(settings.policy.shortened(job), owner, settings.image, manifest.digest(hashed))
    return replace(made, written_hash=_written_hash(raw["spec"], job))


def _written_hash(spec: Mapping[str, Any], job: RolloutMatchingJob) -> str:
    """Return the hash of what the pods are made from as its author wrote it, but for defaults written out."""
    written = {key: spec[key] for key in map(to_camel, sorted(_HASHED_KEYS)) if key in spec}
    written = authorship.without_defaults(written, job.spec)
    if is_elastic(job):
        written["rollout"] = {key: value for key, value in written["rollout"].items() if key != "servers"}
    return manifest.digest(written)


def _with_processes(job: RolloutMatchingJob, owner: Owner, image: str, spec_hash: str) -> ParsedJob:
    of_one_node = job.spec.engine != names.JOBSET
    processes = (_of_one_node if of_one_node else _of_jobset)(job, owner)
    templates = pods.templates(PodInputs(job, processes, image))
    copies = {names.ROLE_ROLLOUT: 1 if of_one_node else rollout_pods(job), names.ROLE_LEARNER: job.spec.learner.nodes}
    of_pods = (objects.pod_requests(one["spec"]) for role, one in templates.items() for _ in range(copies[role]))
    requested = objects.add_amounts((*of_pods, _claimed(job)))
    need = node_fit.need_of(templates, gpu_resource=job.spec.gpu_resource) if of_one_node else Need(())
    return ParsedJob(job, owner, processes, image, need, requested, spec_hash, spec_hash, spec_hash)


def _of_one_node(job: RolloutMatchingJob, owner: Owner) -> Processes:
    host = names.service_host(owner.name, owner.namespace)
    return containers(job, host_for=lambda _: host, tls=job.spec.tls.enabled)


def _of_jobset(job: RolloutMatchingJob, owner: Owner) -> Processes:
    rollout = job.spec.rollout

    def host_for(server: int) -> str:
        pod = server // rollout.servers_per_pod
        place = (0, pod) if is_elastic(job) else (pod, 0)
        return names.jobset_host(owner.name, owner.namespace, names.ROLE_ROLLOUT, *place)

    meeting = names.jobset_host(owner.name, owner.namespace, names.ROLE_LEARNER, 0, 0)
    return containers(job, host_for=host_for, tls=job.spec.tls.enabled, meeting=meeting)


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
        several_learners=spec.learner.nodes > 1,
        spec_hash=spec_hash,
    )


def _closes_egress(job: RolloutMatchingJob) -> bool:
    """Return whether the job's pods may connect only to one another."""
    if job.spec.network.egress == "Auto":
        return not named_elsewhere(job.spec.config) and not template_rules.adds_containers(job)
    return job.spec.network.egress == "Closed"


def _claimed(job: RolloutMatchingJob) -> dict[str, float]:
    """Return the GPUs that the job declares for its resource claims: requests of its pods do not name them."""
    if job.spec.learner.resource_claim_template is None:
        return {}
    rollout, learner = job.spec.rollout, job.spec.learner
    return {job.spec.gpu_resource: rollout.servers * rollout.gpus_per_server + learner.nodes * learner.gpus}
