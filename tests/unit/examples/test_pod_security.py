"""The pods of every example keep Pod Security restricted, by the list of the standard."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from stage2_api.parsing import parse_job
from stage2_controller.children.build import static_children

EXAMPLES = Path(__file__).parents[3] / "examples"
JOBS = [
    path
    for path in sorted(EXAMPLES.glob("*.yaml"))
    if any((item or {}).get("kind") == "RolloutMatchingJob" for item in yaml.safe_load_all(path.read_text()))
]
RESTRICTED_VOLUMES = {
    "configMap",
    "csi",
    "downwardAPI",
    "emptyDir",
    "ephemeral",
    "persistentVolumeClaim",
    "projected",
    "secret",
}
FORBIDDEN = {"hostNetwork", "hostPID", "hostIPC"}


def violations(pod: dict[str, Any]) -> Iterator[str]:
    """The controls of Pod Security restricted that a pod breaks (Kubernetes documentation: Pod Security Standards)."""
    yield from (key for key in FORBIDDEN if pod.get(key))
    whole = pod.get("securityContext", {})
    for container in (*pod["containers"], *pod.get("initContainers", [])):
        own = container.get("securityContext", {})
        name, both = container["name"], {**whole, **own}
        capabilities = own.get("capabilities", {})
        broken = {
            "privileged": own.get("privileged"),
            "allowPrivilegeEscalation": own.get("allowPrivilegeEscalation") is not False,
            "capabilities": capabilities.get("drop") != ["ALL"]
            or set(capabilities.get("add", [])) - {"NET_BIND_SERVICE"},
            "runAsNonRoot": both.get("runAsNonRoot") is not True,
            "runAsUser": both.get("runAsUser") == 0,
            "seccompProfile": both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"),
            "hostPort": any(port.get("hostPort") for port in container.get("ports", [])),
        }
        yield from (f"{name}: {control}" for control, bad in broken.items() if bad)
    for volume in pod["volumes"]:
        yield from (f"volume {volume['name']}: {kind}" for kind in volume.keys() - RESTRICTED_VOLUMES - {"name"})


@pytest.mark.parametrize("path", JOBS, ids=lambda path: path.name)
def test_its_pods_keep_the_restricted_standard(path: Path) -> None:
    for document in yaml.safe_load_all(path.read_text()):
        if document["kind"] != "RolloutMatchingJob":
            continue
        made = static_children(parse_job(document))
        pods = [child["spec"]["template"]["spec"] for child in made if child["kind"] in ("Deployment", "Job")]
        assert pods
        assert [found for pod in pods for found in violations(pod)] == []
