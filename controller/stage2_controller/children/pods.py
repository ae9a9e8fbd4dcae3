"""The pods of a job: the rollout Deployment and the learner Job, each with one pod, on one node.

`PodInputs` holds everything that a pod is built from, so that each builder returns a finished manifest. A person's
template is merged over stage2's own pod; then containers that it adds get the security settings that they lack.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from stage2_api.errors import EXIT_CONFIG, EXIT_UNAVAILABLE
from stage2_api.job import LearnerSpec, RolloutMatchingJob, RolloutSpec
from stage2_api.pod import layout, report
from stage2_api.pod.layout import HEALTH_ROUTE
from stage2_controller.children import manifest
from stage2_controller.children.manifest import Manifest, Owner
from stage2_controller.job import kinds, names
from stage2_controller.job.containers import Container, Processes, is_elastic, wait_container
from stage2_controller.job.objects import merge_by, strategic_merge
from stage2_controller.place import node_fit
from stage2_controller.place.node_fit import HOSTNAME, Avoided

_PROBE_PERIOD_S = 5
_STUCK_LIMIT_S = 300  # a machine short of memory or cores may be silent for minutes, and recover
_START_LIMIT_S = 3600  # at least: a large model loads from a slow disk. The controller enforces a shorter deadline

_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# For containers that a person adds: what Pod Security "restricted" demands, and no more.
_ADDED_CONTAINER_SECURITY = {key: _CONTAINER_SECURITY[key] for key in ("allowPrivilegeEscalation", "capabilities")}
_POD_SECURITY = {
    "runAsNonRoot": True,
    "fsGroup": layout.GROUP,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
_TLS_MOUNT = {"name": layout.TLS_VOLUME, "mountPath": layout.TLS_FOLDER, "readOnly": True}
_MOUNTS = (
    {"name": layout.CONFIG_VOLUME, "mountPath": layout.CONFIG_FOLDER, "readOnly": True},
    {"name": layout.TOKEN_VOLUME, "mountPath": layout.TOKEN_FOLDER, "readOnly": True},
    {"name": layout.TMP_VOLUME, "mountPath": layout.TMP_FOLDER},
    {"name": layout.SHARED_MEMORY_VOLUME, "mountPath": layout.SHARED_MEMORY_FOLDER},
)
_MOUNT_FIELDS = {"name", "mount_path", "read_only", "sub_path"}
_FAIL_AT_ONCE = {
    "action": "FailJob",
    "onExitCodes": {"containerName": names.ROLE_LEARNER, "operator": "In", "values": [EXIT_CONFIG, EXIT_UNAVAILABLE]},
}
_IGNORE_DISRUPTION = {"action": "Ignore", "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}]}


@dataclass(frozen=True)
class Control:
    """What only a controller knows about a job's pods.

    job_uid and spec_hash mark each pod, because a job that is applied again, or corrected, has the name of the one
    before, whose pods may still exist. attempt: labels the servers' pods for their Service. node: the only node for all
    pods; None lets the scheduler choose, but the first pod takes none of the nodes `avoid`, and the hosts
    `avoid_if_possible` only if no other takes it.
    """

    job_uid: str
    spec_hash: str
    attempt: str | None = None
    node: str | None = None
    avoid: Avoided = ()
    avoid_if_possible: tuple[str, ...] = ()


@dataclass(frozen=True)
class PodInputs:
    """Everything that the pods of a job are built from.

    image: for containers whose job names none. additions: labels, annotations, nodeSelector and tolerations for the
    pods of each role, from Kueue's admission. control: None in static YAML.
    """

    job: RolloutMatchingJob
    processes: Processes
    image: str
    additions: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    control: Control | None = None


def templates(inputs: PodInputs) -> dict[str, Manifest]:
    """Return the pod template of each role that the job has."""
    servers = {names.ROLE_ROLLOUT: _rollout_template(inputs)} if inputs.processes.servers else {}
    return {**servers, names.ROLE_LEARNER: _learner_template(inputs)}


def deployment(owner: Owner, inputs: PodInputs) -> Manifest:
    """Return Deployment `<job>-rollout`: one pod with one container for each server.

    With one pod the scheduler places all servers on one node at once. With one container for each server the device
    plugin pins each to GPUs of its own, and a crashed server restarts alone.
    """
    spec = {
        "replicas": 1,
        # Two rollout pods would need twice the GPUs.
        "strategy": {"type": "Recreate"},
        "revisionHistoryLimit": 0,
        "progressDeadlineSeconds": _start_limit_s(inputs.job),
        "selector": {"matchLabels": manifest.selector(inputs.job.metadata.name, names.ROLE_ROLLOUT)},
        "template": _rollout_template(inputs),
    }
    return _child(kinds.DEPLOYMENT, owner, inputs, spec)


def learner_job(owner: Owner, inputs: PodInputs) -> Manifest:
    """Return Job `<job>-learner`.

    Where there are servers, its pod runs only on their node. It takes its place there while they load: its first
    container waits for them.
    """
    return _child(kinds.LEARNER_JOB, owner, inputs, learner_job_spec(inputs))


def learner_job_spec(inputs: PodInputs) -> Manifest:
    """Return the spec of the learner's Job."""
    return {
        "backoffLimit": inputs.job.spec.learner.backoff_limit,
        # Never two learners at once: both would write the same output folder.
        "podReplacementPolicy": "Failed",
        "podFailurePolicy": {"rules": [_FAIL_AT_ONCE, _IGNORE_DISRUPTION]},
        "template": _learner_template(inputs),
    }


def mounts_certificates(owner_of_pods: Mapping[str, Any]) -> bool:
    """Return whether the pods of a Deployment or Job mount TLS certificates."""
    volumes = owner_of_pods["spec"]["template"]["spec"].get("volumes") or ()
    return any(volume["name"] == layout.TLS_VOLUME for volume in volumes)


def _child(kind: kinds.ChildKind, owner: Owner, inputs: PodInputs, spec: Mapping[str, Any]) -> Manifest:
    control = inputs.control
    annotations = {names.ANNOTATION_NODE: control.node} if control and control.node else {}
    spec_hash = control.spec_hash if control else None
    return manifest.child(kind, owner, {"spec": spec}, annotations=annotations, spec_hash=spec_hash)


def _rollout_template(inputs: PodInputs) -> Manifest:
    role, job = names.ROLE_ROLLOUT, inputs.job
    containers = [{**_container(inputs, role, server), **_probes(job, server)} for server in inputs.processes.of_pod]
    if job.spec.engine != names.JOBSET:
        return _template(inputs, role, containers, {})
    label = names.LABEL_POD_INDEX if is_elastic(job) else names.LABEL_JOB_INDEX
    index = {"fieldRef": {"fieldPath": f"metadata.labels['{label}']"}}
    for container in containers:
        container["env"].append({"name": layout.POD_INDEX_VARIABLE, "valueFrom": index})
    return _template(inputs, role, containers, {"restartPolicy": "OnFailure"})


def _learner_template(inputs: PodInputs) -> Manifest:
    role, learner, limit = names.ROLE_LEARNER, inputs.processes.learner, inputs.job.spec.learner.backoff_limit
    if (
        limit and inputs.job.spec.learner.nodes == 1
    ):  # the learner restarts inside its pod, which keeps its GPUs; the Job only replaces lost pods
        learner = replace(learner, command=(*learner.command, f"--restarts={limit}"))
    extra: Manifest = {"restartPolicy": "Never", "terminationGracePeriodSeconds": report.GRACE_S}
    if inputs.processes.servers:
        waits = _container(inputs, role, wait_container(inputs.processes.learner))
        extra["initContainers"] = [{key: waits[key] for key in waits if key not in ("image", "imagePullPolicy")}]
    return _waiting_with_its_image(_template(inputs, role, [_container(inputs, role, learner)], extra))


def _waiting_with_its_image(made: Manifest) -> Manifest:
    """Give the container that waits for the servers the learner's image, which a template may have changed.

    Thus an image that cannot be pulled shows at once, not when the servers have loaded.
    """
    spec = made["spec"]
    learner = next(one for one in spec["containers"] if one["name"] == names.ROLE_LEARNER)
    for first in spec.get("initContainers") or ():
        if first["name"] == names.WAIT_CONTAINER and not first.get("image"):
            first |= {key: learner[key] for key in ("image", "imagePullPolicy")}
    return made


def _template(
    inputs: PodInputs, role: str, containers: Sequence[Mapping[str, Any]], extra: Mapping[str, Any]
) -> Manifest:
    """Return the pod template of one role: stage2's own, with the person's template merged over it."""
    job, control, added = inputs.job, inputs.control, inputs.additions.get(role, {})
    role_spec = _role_spec(job, role)
    name, placement, affinity = job.metadata.name, _placement(job), _affinity(inputs, role)
    secrets = [{"name": item.name} for item in job.spec.image_pull_secrets]
    annotations = {
        **(added.get("annotations") or {}),
        names.ANNOTATION_JOB: name,
        names.ANNOTATION_CONFIG_HASH: manifest.digest(inputs.processes.config_text),
    }
    of_attempt = (
        {names.LABEL_ATTEMPT: control.attempt} if control and control.attempt and role == names.ROLE_ROLLOUT else {}
    )
    if control:
        annotations |= {names.ANNOTATION_JOB_UID: control.job_uid, names.ANNOTATION_SPEC_HASH: control.spec_hash}
    node_selector = {**(added.get("nodeSelector") or {}), **placement.pop("nodeSelector", {})}
    own = {
        "metadata": {
            "labels": {**(added.get("labels") or {}), **manifest.labels(name, role), **of_attempt},
            "annotations": annotations,
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": _POD_SECURITY,
            "containers": containers,
            **_claims(role_spec, containers),
            "volumes": [*_own_volumes(job, role), *_volumes(job)],
            **({"nodeSelector": node_selector} if node_selector else {}),
            **placement,
            **({"imagePullSecrets": secrets} if secrets else {}),
            **extra,
            **({"affinity": affinity} if affinity else {}),
        },
    }
    merged = strategic_merge(own, _for_every_server(role_spec.template, [one["name"] for one in containers]))
    spec = merged["spec"]
    for key in ("containers", "initContainers"):
        for container in spec.get(key) or []:
            written = container.get("securityContext") or {}
            container["securityContext"] = strategic_merge(_ADDED_CONTAINER_SECURITY, written)
    tolerations = spec.get("tolerations") or []
    if more := [item for item in added.get("tolerations") or () if item not in tolerations]:
        spec["tolerations"] = [*tolerations, *more]
    return merged


def _container(inputs: PodInputs, role: str, process: Container) -> Manifest:
    """Return the pod's container for one process of the job."""
    job = inputs.job
    return {
        "name": process.name,
        "image": job.spec.image or inputs.image,
        "imagePullPolicy": job.spec.image_pull_policy,
        "command": list(process.command),
        "env": [{"name": key, "value": value} for key, value in process.env.items()],
        "ports": [{"name": key, "containerPort": port} for key, port in process.ports.items()],
        "resources": _resources(job, _role_spec(job, role), process),
        "volumeMounts": [*_MOUNTS, *([_TLS_MOUNT] if job.spec.tls.enabled else []), *_volume_mounts(job)],
        "securityContext": _CONTAINER_SECURITY,
        # The end of the log explains the end of a container that left no message of its own.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }


def _probes(job: RolloutMatchingJob, server: Container) -> Manifest:
    """Return the probes, which restart a server that fails them, or does not respond, for minutes.

    A dead engine ends its process, and one that is busy with long rollouts still responds. The startup probe ends a
    server, so it waits for as long as the job may: the job's own deadline began earlier.
    """
    health = {
        "httpGet": {"path": HEALTH_ROUTE, "port": server.port, "scheme": "HTTPS" if job.spec.tls.enabled else "HTTP"},
        "periodSeconds": _PROBE_PERIOD_S,
        "timeoutSeconds": 5,
    }
    return {
        "startupProbe": {**health, "failureThreshold": math.ceil(_start_limit_s(job) / _PROBE_PERIOD_S)},
        "readinessProbe": {**health, "failureThreshold": 3},
        "livenessProbe": {**health, "failureThreshold": _STUCK_LIMIT_S // _PROBE_PERIOD_S},
    }


def _start_limit_s(job: RolloutMatchingJob) -> int:
    return max(_START_LIMIT_S, job.spec.learner.start_deadline_seconds)


def _affinity(inputs: PodInputs, role: str) -> Manifest:
    """Return the affinity of one role's pod: the job's own, narrowed to what the controller chose for it.

    Without a chosen node, the learner follows the rollout pod, and what to avoid counts for the pod that leads.
    """
    affinity, control = inputs.job.spec.placement.affinity, inputs.control
    written = affinity.model_dump(mode="json", by_alias=True, exclude_defaults=True) if affinity else {}
    nodes: Mapping[str, Any] = written.get("nodeAffinity") or {}
    if inputs.job.spec.engine == names.JOBSET:
        return {**({"nodeAffinity": nodes} if nodes else {}), **_in_one_domain(inputs.job, role)}
    if control and control.node is not None:
        here = {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [control.node]}]}
        return {"nodeAffinity": node_fit.narrowed_affinity(nodes, here)}
    if role == names.ROLE_LEARNER and inputs.processes.servers:
        beside_servers = {"podAffinity": _with_rollout_pod(inputs.job.metadata.name)}
        return {**({"nodeAffinity": nodes} if nodes else {}), **beside_servers}
    if control and control.avoid_if_possible:
        preference = {"weight": 100, "preference": _none_of((HOSTNAME, host) for host in control.avoid_if_possible)}
        nodes = {**nodes, node_fit.PREFERRED: [*(nodes.get(node_fit.PREFERRED) or ()), preference]}
    if control and control.avoid:  # in terms that an autoscaler of nodes understands
        nodes = node_fit.narrowed_affinity(nodes, _none_of(control.avoid))
    return {"nodeAffinity": nodes} if nodes else {}


def _none_of(avoided: Iterable[tuple[str, str]]) -> Manifest:
    values: dict[str, list[str]] = {}
    for key, value in avoided:
        values.setdefault(key, []).append(value)
    return {"matchExpressions": [{"key": key, "operator": "NotIn", "values": those} for key, those in values.items()]}


def _with_rollout_pod(job: str) -> Manifest:
    term = {"topologyKey": HOSTNAME, "labelSelector": {"matchLabels": manifest.selector(job, names.ROLE_ROLLOUT)}}
    return {node_fit.REQUIRED: [term]}


def _in_one_domain(job: RolloutMatchingJob, role: str) -> Manifest:
    """Return the affinity that keeps pods of a JobSet in one network domain, if the job names the domain's label.

    `Exclusive` of rollout pods is JobSet's own. It lets the learner's further pods follow the first, and refuses them
    while a first one that failed is still there beside its successor; a Job keeps it. So the learner's pods have the
    same rule as affinities of their own: away from pods of their priority that another Job of a JobSet has. Pods of a
    lower priority are no obstacle: preemption frees only one node, and a learner kept away from several would wait for
    ever. JobSet before 0.11 labels only exclusive pods with their priority. Kubernetes ignores the key of a label that
    a pod lacks, and the learner then keeps away from all.
    """
    key = job.spec.placement.topology_key
    if key is None:
        return {}
    if job.spec.placement.topology == "Preferred":
        mates = {"matchLabels": {names.LABEL_JOB: names.short_name(job.metadata.name)}}
        term = {"weight": 100, "podAffinityTerm": {"topologyKey": key, "labelSelector": mates}}
        return {"podAffinity": {node_fit.PREFERRED: [term]}}
    if role != names.ROLE_LEARNER:
        return {}
    mates = {"matchLabels": manifest.selector(job.metadata.name, role)}
    others = {"matchExpressions": [{"key": names.LABEL_JOB_KEY, "operator": "Exists"}]}
    keys = {"matchLabelKeys": [names.LABEL_POD_PRIORITY], "mismatchLabelKeys": [names.LABEL_JOB_KEY]}
    away = {"labelSelector": others, **keys, "namespaceSelector": {}}
    return {
        "podAffinity": {node_fit.REQUIRED: [{"topologyKey": key, "labelSelector": mates}]},
        "podAntiAffinity": {node_fit.REQUIRED: [{"topologyKey": key, **away}]},
    }


def _for_every_server(override: Mapping[str, Any], container_names: Sequence[str]) -> Manifest:
    """Return the person's template with `server` spread over every server; an exact name overrides that."""
    spec = dict(override.get("spec") or {})
    spread: list[Mapping[str, Any]] = []
    exact: list[Mapping[str, Any]] = []
    servers = [name for name in container_names if name.startswith("server-")]
    for item in spec.get("containers") or []:
        if item["name"] == "server":
            spread += [{**item, "name": name} for name in servers]
        else:
            exact.append(item)
    if spread or exact:
        spec["containers"] = merge_by("name", spread, exact)
    return {**override, "spec": spec}


def _own_volumes(job: RolloutMatchingJob, role: str) -> list[Manifest]:
    """Return stage2's own volumes; of the Secret, only what the pods of this role need."""
    name = job.metadata.name
    volumes: list[Manifest] = [
        {"name": layout.CONFIG_VOLUME, "configMap": {"name": names.child_name(name, names.ROLE_CONFIG)}},
        _from_secret(name, layout.TOKEN_VOLUME, {layout.TOKEN_KEY: layout.TOKEN_PATH}),
        {"name": layout.TMP_VOLUME, "emptyDir": {}},
        {"name": layout.SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory"}},
    ]
    if job.spec.tls.enabled:
        own = {layout.certificate_key(role): layout.CERT_PATH, layout.private_key_key(role): layout.KEY_PATH}
        volumes.append(_from_secret(name, layout.TLS_VOLUME, {layout.CA_KEY: layout.CA_PATH, **own}))
    return volumes


def _from_secret(job: str, volume: str, paths: Mapping[str, str]) -> Manifest:
    items = [{"key": key, "path": path.rpartition("/")[2]} for key, path in paths.items()]
    secret = {"secretName": names.child_name(job, names.ROLE_TOKEN), "defaultMode": 0o440, "items": items}
    return {"name": volume, "secret": secret}


def _placement(job: RolloutMatchingJob) -> Manifest:
    """Return the person's own fields of the pod, but for affinity; without empty ones, which the API server drops."""
    return job.spec.placement.model_dump(
        mode="json",
        by_alias=True,
        exclude_defaults=True,
        exclude={"mode", "affinity", "topology_key", "topology"},
    )


def _resources(job: RolloutMatchingJob, role: RolloutSpec | LearnerSpec, process: Container) -> Manifest:
    """Return the person's resources plus the GPUs; the request of an extended resource follows its limit."""
    written = role.resources.model_dump(mode="json", by_alias=True, exclude_none=True) if role.resources else {}
    if role.resource_claim_template and process.gpus:
        return {**written, "claims": [{"name": process.name}]}
    if job.spec.gpu_resource and process.gpus:
        return strategic_merge(written, {"limits": {job.spec.gpu_resource: str(process.gpus)}})
    return written


def _claims(role: RolloutSpec | LearnerSpec, containers: Sequence[Mapping[str, Any]]) -> Manifest:
    """Return the pod's resource claims: one for each container that has one, under the container's name."""
    claims = [
        {"name": container["name"], "resourceClaimTemplateName": role.resource_claim_template}
        for container in containers
        if container["resources"].get("claims")
    ]
    return {"resourceClaims": claims} if claims else {}


def _role_spec(job: RolloutMatchingJob, role: str) -> RolloutSpec | LearnerSpec:
    return job.spec.rollout if role == names.ROLE_ROLLOUT else job.spec.learner


def _volumes(job: RolloutMatchingJob) -> list[Manifest]:
    return [
        {"name": volume.name, **{kind: _set(source) for kind, source in volume.source.items()}}
        for volume in job.spec.volumes
    ]


def _set(fields: Mapping[str, Any]) -> Manifest:
    """Return the fields without false and empty ones, which the API server drops."""
    return {key: value for key, value in fields.items() if value}


def _volume_mounts(job: RolloutMatchingJob) -> list[Manifest]:
    mounts = (volume.model_dump(by_alias=True, include=_MOUNT_FIELDS) for volume in job.spec.volumes)
    return [_set(mount) for mount in mounts]
