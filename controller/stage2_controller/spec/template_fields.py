"""The fields that a person's pod template may hold: those that training needs, and no more."""

from collections.abc import Callable, Mapping
from typing import Any

OF_METADATA = frozenset({"labels", "annotations"})
OF_POD = frozenset(
    {
        "containers",
        "dnsConfig",
        "dnsPolicy",
        "hostAliases",
        "imagePullSecrets",
        "initContainers",
        "nodeSelector",
        "priorityClassName",
        "resources",
        "runtimeClassName",
        "schedulerName",
        "securityContext",
        "serviceAccountName",
        "terminationGracePeriodSeconds",
        "tolerations",
        "topologySpreadConstraints",
        "volumes",
    }
)
OF_CONTAINER = frozenset(
    {
        "args",
        "command",
        "env",
        "envFrom",
        "image",
        "imagePullPolicy",
        "lifecycle",
        "livenessProbe",
        "name",
        "ports",
        "readinessProbe",
        "resources",
        "restartPolicy",
        "securityContext",
        "startupProbe",
        "volumeMounts",
        "workingDir",
    }
)
VOLUMES = frozenset(
    {
        "configMap",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "hostPath",
        "name",
        "nfs",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
)
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

_PROFILES = ("RuntimeDefault", "Localhost")
_SELINUX = ("", "container_t", "container_init_t", "container_kvm_t", "container_engine_t")


def _profile(value: Any) -> bool:
    return isinstance(value, Mapping) and value.get("type") in _PROFILES


def _selinux(value: Any) -> bool:
    """Restricted: a type of containers, and neither user nor role."""
    allowed = isinstance(value, Mapping) and value.get("type", "") in _SELINUX
    return allowed and not value.get("user") and not value.get("role")


def _capabilities(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    added = value.get("add", [])
    allowed = isinstance(added, list) and all(one == "NET_BIND_SERVICE" for one in added)
    return allowed and value.get("drop", ["ALL"]) == ["ALL"]


SECURITY_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "allowPrivilegeEscalation": (lambda value: value is False, "must be false"),
    "privileged": (lambda value: value is False, "no container of a job is privileged"),
    "procMount": (lambda value: value == "Default", "must be Default"),
    "runAsNonRoot": (lambda value: value is True, "must be true"),
    "runAsUser": (lambda value: isinstance(value, int) and value > 0, "must be a user other than root, above 0"),
    "seccompProfile": (_profile, f"its type must be {' or '.join(_PROFILES)}"),
    "appArmorProfile": (_profile, f"its type must be {' or '.join(_PROFILES)}"),
    "seLinuxOptions": (_selinux, "must have a type of containers, and neither user nor role"),
    "capabilities": (_capabilities, "every capability is dropped, and only NET_BIND_SERVICE may be added"),
}
"""Rules of Pod Security restricted, by key of a securityContext."""

UNSAFE_ANNOTATIONS = ("container.apparmor.security.beta.kubernetes.io/", "seccomp.security.alpha.kubernetes.io/")
"""Old names of fields above."""
