"""The common parts of both pods: security, files, scratch space, placement, and the person's template over them."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from stage2_api.job import LearnerSpec, RolloutMatchingJob, RolloutSpec
from stage2_api.pod import files
from stage2_controller.children import meta
from stage2_controller.place import node_terms
from stage2_controller.place.node_fit import HOSTNAME, Avoided
from stage2_controller.spec import kinds, names, strategic_merge
from stage2_controller.spec.containers import Container

Hosts = tuple[str, ...]
"""Nodes, by their label kubernetes.io/hostname."""

# The group that owns the files of mounted volumes; the images run as user and group 10001.
FS_GROUP = 10001

_CONTAINER_SECURITY = {
    "allowPrivilegeEscalation": False,
    "readOnlyRootFilesystem": True,
    "capabilities": {"drop": ["ALL"]},
}
# Of containers that the person adds: what Pod Security restricted demands, and no more.
_ADDED_CONTAINER_SECURITY = {key: _CONTAINER_SECURITY[key] for key in ("allowPrivilegeEscalation", "capabilities")}
_POD_SECURITY = {
    "runAsNonRoot": True,
    "fsGroup": FS_GROUP,
    "fsGroupChangePolicy": "OnRootMismatch",
    "seccompProfile": {"type": "RuntimeDefault"},
}
_TLS_MOUNT = {"name": files.TLS_VOLUME, "mountPath": files.TLS_FOLDER, "readOnly": True}
_MOUNTS = (
    {"name": files.CONFIG_VOLUME, "mountPath": files.CONFIG_FOLDER, "readOnly": True},
    {"name": files.TOKEN_VOLUME, "mountPath": files.TOKEN_FOLDER, "readOnly": True},
    {"name": files.TMP_VOLUME, "mountPath": files.TMP_FOLDER},
    {"name": files.SHARED_MEMORY_VOLUME, "mountPath": files.SHARED_MEMORY_FOLDER},
)

_MOUNT_FIELDS = {"name", "mount_path", "read_only", "sub_path"}


def container(job: RolloutMatchingJob, process: Container, *, image: str, extra: Mapping[str, Any]) -> dict[str, Any]:
    """Return the pod's container for one process of the job; `extra` holds what only its role has, such as probes."""
    return {
        "name": process.name,
        "image": job.spec.image or image,
        "imagePullPolicy": job.spec.image_pull_policy,
        "command": list(process.command),
        "env": [{"name": key, "value": value} for key, value in process.env.items()],
        "ports": [{"name": key, "containerPort": port} for key, port in process.ports.items()],
        "resources": _resources(job, process),
        "volumeMounts": [*_MOUNTS, *([_TLS_MOUNT] if job.spec.tls.enabled else []), *_volume_mounts(job)],
        "securityContext": _CONTAINER_SECURITY,
        # A container that dies without a message of its own is told by the end of its log.
        "terminationMessagePolicy": "FallbackToLogsOnError",
        **extra,
    }


def template(
    job: RolloutMatchingJob,
    *,
    role: str,
    containers: Sequence[Mapping[str, Any]],
    config_text: str,
    extra: Mapping[str, Any],
    override: Mapping[str, Any],
) -> dict[str, Any]:
    """Return the pod template of one role: `extra` is what only its role has, `override` is the person's template."""
    name, placement = job.metadata.name, _placement(job)
    affinity = {**placement.get("affinity", {}), **extra.get("affinity", {})}
    ours = {
        "metadata": {
            "labels": meta.labels(name, role),
            "annotations": {names.ANNOTATION_JOB: name, names.ANNOTATION_CONFIG_HASH: meta.digest(config_text)},
        },
        "spec": {
            "automountServiceAccountToken": False,
            "enableServiceLinks": False,
            "securityContext": _POD_SECURITY,
            "containers": [dict(item) for item in containers],
            **_claims(job, containers),
            "volumes": [*_own_volumes(job, role), *_volumes(job)],
            **placement,
            **_pull_secrets(job),
            **extra,
            **({"affinity": affinity} if affinity else {}),
        },
    }
    made = strategic_merge.strategic_merge(ours, _for_every_server(override, [item["name"] for item in containers]))
    for key in ("containers", "initContainers"):
        for added in made["spec"].get(key) or []:
            written = added.get("securityContext") or {}
            added["securityContext"] = strategic_merge.strategic_merge(_ADDED_CONTAINER_SECURITY, written)
    return made


def pinned(manifest: meta.Manifest, node: str) -> meta.Manifest:
    """Return the Deployment or Job whose pods run on this node and no other; the scheduler still binds them."""
    made = _narrowed(manifest, {"matchFields": [{"key": "metadata.name", "operator": "In", "values": [node]}]})
    annotations = {**made["metadata"]["annotations"], names.ANNOTATION_NODE: node}
    return {**made, "metadata": {**made["metadata"], "annotations": annotations}}


def answers_over_tls(manifest: Mapping[str, Any]) -> bool:
    """Return whether the pods of a Deployment or Job have certificates."""
    volumes = manifest["spec"]["template"]["spec"].get("volumes") or ()
    return any(volume["name"] == files.TLS_VOLUME for volume in volumes)


def avoiding(manifest: meta.Manifest, avoided: Avoided) -> meta.Manifest:
    """Return the Deployment whose pod runs on none of these nodes, in words that an autoscaler of nodes understands."""
    return _narrowed(manifest, _none_of(avoided))


def shunning(manifest: meta.Manifest, hosts: Hosts) -> meta.Manifest:
    """Return the Deployment whose pod runs on these hosts only where no other takes it."""
    own = node_terms.of(manifest["spec"]["template"]["spec"])
    return _with_node_affinity(manifest, node_terms.preferring(own, _none_of([(HOSTNAME, host) for host in hosts])))


def _none_of(avoided: Iterable[tuple[str, str]]) -> dict[str, Any]:
    values: dict[str, list[str]] = {}
    for key, value in avoided:
        values.setdefault(key, []).append(value)
    return {"matchExpressions": [{"key": key, "operator": "NotIn", "values": those} for key, those in values.items()]}


def _narrowed(manifest: meta.Manifest, term: Mapping[str, Any]) -> meta.Manifest:
    """Return the manifest whose pods run only where its own affinity and this term let them; on one node together."""
    return _with_node_affinity(manifest, node_terms.narrowed(node_terms.of(manifest["spec"]["template"]["spec"]), term))


def _with_node_affinity(manifest: meta.Manifest, affinity: Mapping[str, Any]) -> meta.Manifest:
    spec = manifest["spec"]
    pod_spec = {**spec["template"]["spec"], "affinity": {"nodeAffinity": affinity}}
    return {**manifest, "spec": {**spec, "template": {**spec["template"], "spec": pod_spec}}}


def adding(manifest: meta.Manifest, additions: Mapping[str, Any]) -> meta.Manifest:
    """Return the manifest with additions to its role's pods: labels, annotations, nodeSelector, tolerations."""
    added = additions.get(kinds.ROLE_OF_PODS.get(manifest["kind"], ""))
    if not added:
        return manifest
    template = manifest["spec"]["template"]
    metadata, spec = dict(template["metadata"]), dict(template["spec"])
    for key, where in (("labels", metadata), ("annotations", metadata), ("nodeSelector", spec)):
        if added.get(key):
            where[key] = {**added[key], **(where.get(key) or {})}
    own = spec.get("tolerations") or []
    if more := [item for item in added.get("tolerations") or () if item not in own]:
        spec["tolerations"] = [*own, *more]
    return {**manifest, "spec": {**manifest["spec"], "template": {"metadata": metadata, "spec": spec}}}


def _for_every_server(override: Mapping[str, Any], container_names: Sequence[str]) -> dict[str, Any]:
    """Return the person's template with `server` spread over every server; an exact name goes on top."""
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
        spec["containers"] = strategic_merge.merge_by("name", spread, exact)
    return {**override, "spec": spec}


def _own_volumes(job: RolloutMatchingJob, role: str) -> list[dict[str, Any]]:
    """Return the volumes of stage2's own; of the Secret, what the pods of this role need."""
    name = job.metadata.name
    made = [
        {"name": files.CONFIG_VOLUME, "configMap": {"name": names.child_name(name, names.ROLE_CONFIG)}},
        _from_secret(name, files.TOKEN_VOLUME, {files.TOKEN_KEY: files.TOKEN_PATH}),
        {"name": files.TMP_VOLUME, "emptyDir": {}},
        {"name": files.SHARED_MEMORY_VOLUME, "emptyDir": {"medium": "Memory"}},
    ]
    if job.spec.tls.enabled:
        own = {files.certificate_key(role): files.CERT_PATH, files.private_key_key(role): files.KEY_PATH}
        made.append(_from_secret(name, files.TLS_VOLUME, {files.CA_KEY: files.CA_PATH, **own}))
    return made


def _from_secret(job: str, volume: str, paths: Mapping[str, str]) -> dict[str, Any]:
    items = [{"key": key, "path": path.rpartition("/")[2]} for key, path in paths.items()]
    secret = {"secretName": names.child_name(job, names.ROLE_TOKEN), "defaultMode": 0o440, "items": items}
    return {"name": volume, "secret": secret}


def _placement(job: RolloutMatchingJob) -> dict[str, Any]:
    """Return what the person says of the node; empty lists and mappings are left out, as the API server leaves them."""
    return job.spec.placement.model_dump(mode="json", by_alias=True, exclude_defaults=True, exclude={"mode"})


def _pull_secrets(job: RolloutMatchingJob) -> dict[str, Any]:
    secrets = [{"name": item.name} for item in job.spec.image_pull_secrets]
    return {"imagePullSecrets": secrets} if secrets else {}


def _resources(job: RolloutMatchingJob, process: Container) -> dict[str, Any]:
    """Return what the person asks for plus the GPUs; the request of an extended resource follows its limit."""
    role = _role_of(job, process.name)
    written = role.resources.model_dump(mode="json", by_alias=True, exclude_none=True) if role.resources else {}
    if role.resource_claim_template and process.gpus:
        return {**written, "claims": [{"name": process.name}]}
    if job.spec.gpu_resource and process.gpus:
        gpus = {"limits": {job.spec.gpu_resource: str(process.gpus)}}
        return strategic_merge.strategic_merge(written, gpus)
    return written


def _claims(job: RolloutMatchingJob, containers: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the pod's resource claims: one for each container that asks for one, under the container's name."""
    asking = [item["name"] for item in containers if item["resources"].get("claims")]
    claims = [
        {"name": name, "resourceClaimTemplateName": _role_of(job, name).resource_claim_template} for name in asking
    ]
    return {"resourceClaims": claims} if claims else {}


def _role_of(job: RolloutMatchingJob, container_name: str) -> RolloutSpec | LearnerSpec:
    return job.spec.rollout if container_name.startswith("server-") else job.spec.learner


def _volumes(job: RolloutMatchingJob) -> list[dict[str, Any]]:
    return [
        {"name": volume.name, **{kind: _set(source) for kind, source in volume.source.items()}}
        for volume in job.spec.volumes
    ]


def _set(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that say something: the API server drops false and empty ones."""
    return {key: value for key, value in fields.items() if value}


def _volume_mounts(job: RolloutMatchingJob) -> list[dict[str, Any]]:
    mounts = (volume.model_dump(by_alias=True, include=_MOUNT_FIELDS) for volume in job.spec.volumes)
    return [_set(mount) for mount in mounts]
