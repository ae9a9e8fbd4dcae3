"""Rules of a person's pod template: it may hold what training needs, and change nothing that the job relies on.

First the shapes of mappings and lists are checked, because the rules, and later the merge, read them. A wrong shape
elsewhere is harmless until the API server refuses it. Pod Security "restricted" is part of the rules.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from types import MappingProxyType
from typing import Any

from stage2_api.errors import ConfigError, Problem
from stage2_api.job import RolloutMatchingJob
from stage2_api.pod import layout
from stage2_controller.job import names
from stage2_controller.job.objects import MERGE_KEYS

OF_METADATA = frozenset({"labels", "annotations"})
OF_POD = frozenset(
    {
        "containers", "dnsConfig", "dnsPolicy", "hostAliases", "imagePullSecrets", "initContainers", "nodeSelector",
        "priorityClassName", "resources", "runtimeClassName", "schedulerName", "securityContext", "serviceAccountName",
        "terminationGracePeriodSeconds", "tolerations", "topologySpreadConstraints", "volumes",
    }
)  # fmt: skip
OF_CONTAINER = frozenset(
    {
        "args", "command", "env", "envFrom", "image", "imagePullPolicy", "lifecycle", "livenessProbe", "name", "ports",
        "readinessProbe", "resources", "restartPolicy", "securityContext", "startupProbe", "volumeMounts", "workingDir",
    }
)  # fmt: skip
VOLUMES = frozenset(
    {
        "configMap", "downwardAPI", "emptyDir", "ephemeral", "hostPath", "name", "nfs", "persistentVolumeClaim",
        "projected", "secret",
    }
)  # fmt: skip
OF_NEW_CLAIM = frozenset({"accessModes", "resources", "storageClassName", "volumeMode"})
_SECURITY = frozenset(
    {"appArmorProfile", "runAsGroup", "runAsNonRoot", "runAsUser", "seLinuxOptions", "seccompProfile"}
)
OF_POD_SECURITY = _SECURITY | {"fsGroup", "fsGroupChangePolicy", "supplementalGroups", "supplementalGroupsPolicy"}
OF_CONTAINER_SECURITY = _SECURITY | {
    "allowPrivilegeEscalation",
    "capabilities",
    "privileged",
    "procMount",
    "readOnlyRootFilesystem",
}
_UNSAFE_ANNOTATIONS = ("container.apparmor.security.beta.kubernetes.io/", "seccomp.security.alpha.kubernetes.io/")

# The mappings and lists that are merged over stage2's own or read by the rules and by placement. A list has mappings.
_ANY: Mapping[str, Any] = {}
_CONTAINER_SHAPE: Mapping[str, Any] = {
    "resources": {"limits": {}, "requests": {}},
    "securityContext": {},
    "env": [{"valueFrom": {"configMapKeyRef": {}, "secretKeyRef": {}}}],
    "envFrom": [{"configMapRef": {}, "secretRef": {}}],
    **{key: [_ANY] for key in ("ports", "volumeMounts", "volumeDevices")},
}
_VOLUME_SHAPE: Mapping[str, Any] = {
    "projected": {"sources": [{"serviceAccountToken": {}, "configMap": {}, "secret": {}}]},
    "ephemeral": {"volumeClaimTemplate": {"metadata": {}, "spec": {}}},
    **dict.fromkeys(("configMap", "hostPath", "nfs", "persistentVolumeClaim", "secret"), _ANY),
}
_SHAPE: Mapping[str, Any] = {
    "metadata": {"labels": {}, "annotations": {}},
    "spec": {
        **dict.fromkeys(("nodeSelector", "overhead", "securityContext"), _ANY),
        **{key: [_CONTAINER_SHAPE] for key in ("containers", "initContainers")},
        "volumes": [_VOLUME_SHAPE],
        **{key: [_ANY] for key in ("imagePullSecrets", "hostAliases", "topologySpreadConstraints", "tolerations")},
    },
}

# Why a field is refused, by its name, and what to do instead.
_OF_OUR_CONTAINERS = {
    "command": "stage2 starts its own commands",
    "args": "stage2 starts its own commands",
    "ports": "servers and learner reach each other on stage2's ports",
}
_NO_CREDENTIALS = "pods hold no credentials but the tokens that their template asks for"
_ASK_FOR_A_TOKEN = "mount a projected serviceAccountToken with an audience, and name its serviceAccountName"
_REFUSED_OF_POD = {
    "restartPolicy": "Deployment and Job each need their own",
    "affinity": "the learner follows the servers",
    "automountServiceAccountToken": _NO_CREDENTIALS,
    "serviceAccount": "an old name of serviceAccountName",
    "hostPID": "a pod of a job sees no processes of its node",
    "hostIPC": "a pod of a job shares no memory with its node",
    "hostUsers": "the users of a pod are those of its image",
    "nodeName": "servers and learner share a node that is chosen for both",
    "hostNetwork": "the NetworkPolicy of the job would not hold, and two jobs on a node would share ports",
    "subdomain": "servers are reached through their Service",
    "resourceClaims": "each server and the learner has a claim of its own",
    "readinessGates": "the rollout pod is ready when its weights are",
}
_NEW_AND_EMPTY = dict.fromkeys(
    ("dataSource", "dataSourceRef", "metadata", "selector", "volumeName"), "an ephemeral volume is new and empty"
)
_NOT_NEEDED = "is no field that training needs"
_WAY_OUT = {
    "serviceAccount": "use serviceAccountName",
    "affinity": "use spec.placement.affinity",
    "nodeName": "use spec.placement.nodeSelector",
    "ports": "use spec.rollout.port",
    "resourceClaims": "use spec.rollout.resourceClaimTemplate and spec.learner.resourceClaimTemplate",
    "automountServiceAccountToken": _ASK_FOR_A_TOKEN,
}
_ROOTS = (layout.ROOT, layout.TMP_FOLDER, layout.SHARED_MEMORY_FOLDER)


class Misshapen(ConfigError):
    """A template has another shape than a pod: nothing can be built from it."""


def check(job: RolloutMatchingJob) -> None:
    """Raise ConfigError with everything that the two templates must not hold."""
    own, templates = _own_containers(job), _templates(job).items()
    misshapen = [one for role, template in templates for one in _misshapen(f"spec.{role}.template", template, _SHAPE)]
    if misshapen:
        raise Misshapen(misshapen)
    problems = [
        problem
        for role, template in templates
        for problem in _problems(f"spec.{role}.template", template, own[role], job.spec.gpu_resource)
    ]
    if problems:
        raise ConfigError(problems)


def adds_containers(job: RolloutMatchingJob) -> bool:
    """Return whether a valid template adds containers, such as one that downloads data."""
    own = _own_containers(job)
    for role, template in _templates(job).items():
        spec = template.get("spec") or {}
        found = {one["name"] for key in ("containers", "initContainers") for one in spec.get(key) or []}
        if found - own[role] - {names.WAIT_CONTAINER}:
            return True
    return False


def _templates(job: RolloutMatchingJob) -> dict[str, Mapping[str, Any]]:
    return {"rollout": job.spec.rollout.template, "learner": job.spec.learner.template}


def _own_containers(job: RolloutMatchingJob) -> dict[str, set[str]]:
    rollout = job.spec.rollout
    of_pod = rollout.servers_per_pod if job.spec.engine == names.JOBSET else rollout.servers
    return {
        "rollout": {"server", *(f"server-{index}" for index in range(of_pod))},
        "learner": {names.ROLE_LEARNER},
    }


def _problems(path: str, template: Mapping[str, Any], own: set[str], gpu: str) -> Iterator[Problem]:
    for key in sorted(set(template) - {"metadata", "spec"}):
        yield Problem(f"{path}.{key}", template[key], "a pod template holds metadata and spec", "move it under spec")
    yield from _removals(path, template)
    spec, path_of_spec = template.get("spec") or {}, f"{path}.spec"
    yield from _metadata(f"{path}.metadata", template.get("metadata") or {})
    yield from _unknown(path_of_spec, spec, OF_POD, _REFUSED_OF_POD)
    yield from _security(path_of_spec, spec, OF_POD_SECURITY)
    yield from _claims(path_of_spec, spec)
    yield from _volumes(path_of_spec, spec)
    for key, ours in (("containers", own), ("initContainers", {names.WAIT_CONTAINER})):
        for index, container in enumerate(spec.get(key) or []):
            yield from _container(f"{path_of_spec}.{key}[{index}]", container, ours, gpu)


def _removals(path: str, written: Any) -> Iterator[Problem]:
    """Refuse null, which would remove something of stage2's, and directives of `kubectl patch`."""
    if isinstance(written, Mapping):
        for key, value in written.items():
            if str(key).startswith("$"):
                yield Problem(
                    f"{path}.{key}", value, "templates are merged, and directives are not supported", "remove it"
                )
            elif value is None:
                yield Problem(
                    f"{path}.{key}", value, "a template can add and change fields, but not remove them", "remove it"
                )
            else:
                yield from _removals(f"{path}.{key}", value)
    elif isinstance(written, list):
        for index, item in enumerate(written):
            yield from _removals(f"{path}[{index}]", item)


def _misshapen(path: str, written: Mapping[str, Any], shape: Mapping[str, Any]) -> Iterator[Problem]:
    """Yield every part of the template that has another shape than Kubernetes gives it; null counts as absent."""
    for key, inner in shape.items():
        value, where = written.get(key), f"{path}.{key}"
        if value is None:
            continue
        if isinstance(inner, list):
            yield from _misshapen_list(where, key, value, inner[0])
        elif isinstance(value, Mapping):
            yield from _misshapen(where, value, inner)
        else:
            yield Problem(where, value, "must be a mapping", "write its fields as `key: value` under it")


def _misshapen_list(path: str, key: str, value: Any, shape: Mapping[str, Any]) -> Iterator[Problem]:
    merge_key = MERGE_KEYS.get(key)
    way_out = f"begin each item with `- {merge_key}:`" if merge_key else "write each item as `- key: value`"
    if not isinstance(value, list):
        yield Problem(path, value, "must be a list", way_out)
        return
    for index, item in enumerate(value):
        where = f"{path}[{index}]"
        if not isinstance(item, Mapping):
            yield Problem(where, item, "must be a mapping", way_out)
            continue
        if merge_key and not _is_merge_key(item.get(merge_key), number=key == "ports"):
            rule = f"must be {'a number' if key == 'ports' else 'text'}"
            yield Problem(f"{where}.{merge_key}", item.get(merge_key), rule, way_out)
        yield from _misshapen(where, item, shape)


def _is_merge_key(value: Any, *, number: bool) -> bool:
    return isinstance(value, int) if number else isinstance(value, str) and value != ""


def _unknown(
    path: str, written: Mapping[str, Any], allowed: Set[str], reasons: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Problem]:
    """Refuse every field that is not allowed, with the reason where there is one."""
    for key in sorted(map(str, written.keys() - allowed)):
        yield Problem(f"{path}.{key}", written.get(key), reasons.get(key, _NOT_NEEDED), _WAY_OUT.get(key, "remove it"))


def _metadata(path: str, metadata: Mapping[str, Any]) -> Iterator[Problem]:
    yield from _unknown(path, metadata, OF_METADATA)
    for key in metadata.get("annotations") or {}:
        if str(key).startswith(_UNSAFE_ANNOTATIONS):
            rule = "an old name of a field of securityContext"
            yield Problem(f"{path}.annotations[{key}]", metadata["annotations"][key], rule, "use securityContext")
    for part in ("labels", "annotations"):
        for key, value in (metadata.get(part) or {}).items():
            if str(key).startswith((f"{names.GROUP}/", "app.kubernetes.io/")):
                rule = "stage2 finds its pods by the keys of stage2.dev and app.kubernetes.io"
                yield Problem(f"{path}.{part}[{key}]", value, rule, "choose another key")


def _security(path: str, holder: Mapping[str, Any], allowed: Set[str]) -> Iterator[Problem]:
    context = holder.get("securityContext") or {}
    yield from _unknown(f"{path}.securityContext", context, allowed)
    for key, (is_valid, rule) in _SECURITY_RULES.items():
        if key in allowed and key in context and not is_valid(context[key]):
            yield Problem(f"{path}.securityContext.{key}", context[key], rule, "change it, or remove it")


def _is_profile(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") in _PROFILES


def _is_selinux(value: Any) -> bool:
    allowed = isinstance(value, Mapping) and value.get("type", "") in _SELINUX_TYPES
    return allowed and not value.get("user") and not value.get("role")


def _are_capabilities(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    added = value.get("add", [])
    allowed = isinstance(added, list) and all(one == "NET_BIND_SERVICE" for one in added)
    return allowed and value.get("drop", ["ALL"]) == ["ALL"]


def _is_id(value: Any) -> bool:
    """Return whether a value is a whole number above 0; an API server stores 5000.0 as 5000."""
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0 and value % 1 == 0


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_id, value))


_PROFILES = ("RuntimeDefault", "Localhost")
_SELINUX_TYPES = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_SECURITY_RULES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "allowPrivilegeEscalation": (lambda value: value is False, "must be false"),
    "privileged": (lambda value: value is False, "no container of a job is privileged"),
    "procMount": (lambda value: value == "Default", "must be Default"),
    "runAsNonRoot": (lambda value: value is True, "must be true"),
    "runAsUser": (_is_id, "must be a user other than root, above 0"),
    "runAsGroup": (_is_id, "must be a group other than root's, above 0"),
    "fsGroup": (_is_id, "must be a group other than root's, above 0"),
    "supplementalGroups": (_are_ids, "must be a list of groups other than root's, above 0"),
    "seccompProfile": (_is_profile, f"its type must be {' or '.join(_PROFILES)}"),
    "appArmorProfile": (_is_profile, f"its type must be {' or '.join(_PROFILES)}"),
    "seLinuxOptions": (_is_selinux, "must have a type of containers, and neither user nor role"),
    "capabilities": (_are_capabilities, "every capability is dropped, and only NET_BIND_SERVICE may be added"),
}


def _claims(path: str, holder: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse claims: an added container would share the GPUs of a server or of the learner."""
    resources = holder.get("resources")
    if isinstance(resources, Mapping) and "claims" in resources:
        rule = "the claims of a pod are its servers' and its learner's"
        yield Problem(f"{path}.resources.claims", resources["claims"], rule, _WAY_OUT["resourceClaims"])


def _volumes(path: str, spec: Mapping[str, Any]) -> Iterator[Problem]:
    for index, volume in enumerate(spec.get("volumes") or []):
        if volume["name"] in layout.VOLUMES:
            rule = f"the names {', '.join(layout.VOLUMES)} belong to stage2"
            yield Problem(f"{path}.volumes[{index}].name", volume["name"], rule, "choose another name")
        yield from _unknown(f"{path}.volumes[{index}]", volume, VOLUMES)
        yield from _credentials(f"{path}.volumes[{index}].projected", volume.get("projected"), spec)
        yield from _new_claim(f"{path}.volumes[{index}].ephemeral", volume.get("ephemeral") or {})


def _new_claim(path: str, ephemeral: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse what binds the claim of an ephemeral volume to data that exist, or chooses its class in another way."""
    template = ephemeral.get("volumeClaimTemplate") or {}
    yield from _unknown(path, ephemeral, {"volumeClaimTemplate"})
    yield from _unknown(f"{path}.volumeClaimTemplate", template, {"spec"}, _NEW_AND_EMPTY)
    yield from _unknown(f"{path}.volumeClaimTemplate.spec", template.get("spec") or {}, OF_NEW_CLAIM, _NEW_AND_EMPTY)


def _credentials(path: str, projected: Mapping[str, Any] | None, spec: Mapping[str, Any]) -> Iterator[Problem]:
    """Refuse certificates, and tokens for which the template names no account or no audience."""
    for index, source in enumerate((projected or {}).get("sources") or ()):
        where = f"{path}.sources[{index}]"
        if "podCertificate" in source:
            yield Problem(f"{where}.podCertificate", source["podCertificate"], _NO_CREDENTIALS, "remove it")
        token = source.get("serviceAccountToken")
        audience = (token or {}).get("audience")
        if token is not None and not (spec.get("serviceAccountName") and isinstance(audience, str) and audience):
            rule = "a token is of an account that the template names, for an audience that it names"
            yield Problem(f"{where}.serviceAccountToken", token, rule, _ASK_FOR_A_TOKEN)


def _container(path: str, container: Mapping[str, Any], own: Set[str], gpu: str) -> Iterator[Problem]:
    """Refuse what no container may have, and what one of stage2's own, named in `own`, may not have either."""
    yield from _unknown(path, container, OF_CONTAINER)
    yield from _claims(path, container)
    yield from _security(path, container, OF_CONTAINER_SECURITY)
    for key in ("livenessProbe", "readinessProbe", "startupProbe", "lifecycle"):
        if _names_a_host(container.get(key)):
            rule = "a probe of another host would be made by the node"
            yield Problem(f"{path}.{key}", container[key], rule, "take host out")
    for index, port in enumerate(container.get("ports") or []):
        if port.keys() & {"hostPort", "hostIP"}:
            rule = "a port of the node is not the job's"
            yield Problem(f"{path}.ports[{index}].hostPort", port.get("hostPort"), rule, "remove it")
    if container["name"] in own:
        yield from _own_container(path, container, gpu)


def _names_a_host(hook: Any) -> bool:
    """Return whether a probe, or a hook of the lifecycle, is about another host."""
    if not isinstance(hook, Mapping):
        return False
    return any(key == "host" or (key != "exec" and _names_a_host(value)) for key, value in hook.items())


def _own_container(path: str, container: Mapping[str, Any], gpu: str) -> Iterator[Problem]:
    for key in sorted(_OF_OUR_CONTAINERS.keys() & container.keys()):
        yield Problem(f"{path}.{key}", container[key], _OF_OUR_CONTAINERS[key], _WAY_OUT.get(key, "remove it"))
    yield from _mounts(path, container.get("volumeMounts") or [])
    for index, variable in enumerate(container.get("env") or []):
        if variable["name"].startswith("STAGE2_"):
            rule = "variables that begin with STAGE2_ are set by stage2"
            yield Problem(f"{path}.env[{index}].name", variable["name"], rule, "remove it")
    for part, amounts in (container.get("resources") or {}).items() if gpu else ():
        if part in ("limits", "requests") and gpu in (amounts or {}):
            way_out = "use spec.rollout.gpusPerServer or spec.learner.gpus"
            yield Problem(f"{path}.resources.{part}[{gpu}]", amounts[gpu], "GPUs are counted by the job", way_out)


def _mounts(path: str, mounts: Sequence[Mapping[str, Any]]) -> Iterator[Problem]:
    for index, mount in enumerate(mounts):
        written = mount["mountPath"]
        where = layout.cleaned(written)
        if where == "/" or any(where == root or where.startswith(f"{root}/") for root in _ROOTS):
            rule = f"the paths {', '.join(_ROOTS)} belong to stage2"
            yield Problem(
                f"{path}.volumeMounts[{index}].mountPath", written, rule, "choose another path, such as /data"
            )
