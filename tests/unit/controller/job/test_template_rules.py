"""Pod templates that would break the job's contract are refused with path, value, rule and way out."""

from typing import Any

import pytest

from stage2_controller.job import template_rules
from stage2_controller.state import reasons
from tests.unit.controller import builders as b


def of_pod(**fields: Any) -> dict[str, Any]:
    return {"spec": fields}


def of_learner(**fields: Any) -> dict[str, Any]:
    return of_pod(containers=[{"name": "learner", **fields}])


def projecting(sources: Any) -> dict[str, Any]:
    return of_pod(serviceAccountName="trainer", volumes=[{"name": "v", "projected": {"sources": sources}}])


CONTAINER = "spec.containers[0]"
PROJECTED = "spec.volumes[0].projected"
A_TOKEN = {"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}
OUR_MOUNT = {"name": "x", "mountPath": "/etc/stage2/token"}
OUR_VARIABLE = {"name": "STAGE2_TOKEN_FILE", "value": "/x"}
WRONG: list[tuple[dict[str, Any], str]] = [
    (of_learner(command=["x"]), f"{CONTAINER}.command"),
    (of_pod(initContainers=[{"name": "wait-for-servers", "command": ["true"]}]), "spec.initContainers[0].command"),
    (of_pod(containers=[{"image": "x"}]), f"{CONTAINER}.name"),
    (of_pod(restartPolicy="Always"), "spec.restartPolicy"),
    (of_pod(serviceAccountName="admin"), "spec.serviceAccountName"),
    (of_pod(serviceAccount="admin"), "spec.serviceAccount"),
    (of_pod(volumes=[A_TOKEN]), f"{PROJECTED}.sources[0].serviceAccountToken"),
    (of_pod(hostPID=True), "spec.hostPID"),
    (of_pod(hostIPC=True), "spec.hostIPC"),
    (of_pod(hostUsers=True), "spec.hostUsers"),
    (of_pod(nodeName="a"), "spec.nodeName"),
    (of_pod(hostNetwork=True), "spec.hostNetwork"),
    ({"metadata": {"labels": {"stage2.dev/role": "x"}}}, "metadata.labels[stage2.dev/role]"),
    (of_pod(volumes=[{"name": "shm", "emptyDir": {}}]), "spec.volumes[0].name"),
    (of_pod(containers=None), "spec.containers"),
    (of_learner(env=None), f"{CONTAINER}.env"),
    (of_pod(**{"$patch": "replace"}), "spec.$patch"),
    (of_learner(volumeMounts=[OUR_MOUNT]), f"{CONTAINER}.volumeMounts[0].mountPath"),
    (of_learner(env=[OUR_VARIABLE]), f"{CONTAINER}.env[0].name"),
    (of_learner(resources={"limits": {"nvidia.com/gpu": 2}}), f"{CONTAINER}.resources.limits[nvidia.com/gpu]"),
    ({"containers": []}, "containers"),
    (of_pod(containers=[{"name": ["learner"]}]), f"{CONTAINER}.name"),
]


MISSHAPEN: list[tuple[dict[str, Any], str]] = [
    ({"metadata": ["a"]}, "metadata"),
    ({"metadata": []}, "metadata"),
    ({"metadata": {"labels": ["a"]}}, "metadata.labels"),
    ({"metadata": {"annotations": "a"}}, "metadata.annotations"),
    ({"spec": ["a"]}, "spec"),
    (of_pod(containers={"name": "learner"}), "spec.containers"),
    (of_pod(containers=["learner"]), CONTAINER),
    (of_pod(initContainers={"a": {}}), "spec.initContainers"),
    (of_pod(initContainers=[{"name": "a", "resources": ["x"]}]), "spec.initContainers[0].resources"),
    (of_pod(volumes=["x"]), "spec.volumes[0]"),
    (of_pod(volumes={"x": {}}), "spec.volumes"),
    (of_pod(volumes=[{"emptyDir": {}}]), "spec.volumes[0].name"),
    (of_pod(volumes=[{"name": ["x"]}]), "spec.volumes[0].name"),
    (projecting(["x"]), f"{PROJECTED}.sources[0]"),
    (projecting([[1]]), f"{PROJECTED}.sources[0]"),
    (projecting("x"), f"{PROJECTED}.sources"),
    (projecting([{"serviceAccountToken": "t"}]), f"{PROJECTED}.sources[0].serviceAccountToken"),
    (projecting([{"serviceAccountToken": []}]), f"{PROJECTED}.sources[0].serviceAccountToken"),
    (projecting([None]), f"{PROJECTED}.sources[0]"),
    (of_pod(volumes=[{"name": "v", "projected": ["x"]}]), PROJECTED),
    (of_pod(nodeSelector=["a=b"]), "spec.nodeSelector"),
    (of_pod(tolerations=["a"]), "spec.tolerations[0]"),
    (of_pod(overhead="1"), "spec.overhead"),
    (of_learner(env={"A": "b"}), f"{CONTAINER}.env"),
    (of_learner(env={}), f"{CONTAINER}.env"),
    (of_learner(env=["A=b"]), f"{CONTAINER}.env[0]"),
    (of_learner(env=[{"A": "b"}]), f"{CONTAINER}.env[0].name"),
    (of_learner(volumeMounts=["x"]), f"{CONTAINER}.volumeMounts[0]"),
    (of_learner(volumeMounts=[{"name": "x"}]), f"{CONTAINER}.volumeMounts[0].mountPath"),
    (of_learner(ports=[{"containerPort": "http"}]), f"{CONTAINER}.ports[0].containerPort"),
    (of_learner(resources=["cpu"]), f"{CONTAINER}.resources"),
    (of_learner(resources={"limits": "1"}), f"{CONTAINER}.resources.limits"),
    (of_learner(resources={"limits": None}), f"{CONTAINER}.resources.limits"),
]


@pytest.mark.parametrize(
    ("template", "path"), [*WRONG, *MISSHAPEN], ids=[str(case[0]) for case in [*WRONG, *MISSHAPEN]]
)
def test_template_that_breaks_contract_is_refused_with_its_path(template: dict[str, Any], path: str) -> None:
    made = b.planned(b.job(learner={"gpus": 1, "template": template}))
    assert b.condition(made, reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)
    assert f"spec.learner.template.{path}: " in b.message(made, reasons.ACCEPTED)


@pytest.mark.parametrize(
    "written", [None, {}, {"add": ["NET_BIND_SERVICE"]}, {"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]}]
)
def test_added_container_is_restricted_like_built_in_ones(written: dict[str, Any] | None) -> None:
    added = {"image": "x", **({} if written is None else {"securityContext": {"capabilities": written}})}
    template = of_pod(containers=[{"name": "logs", **added}], initContainers=[{"name": "i", **added}])
    made = b.planned(b.job(rollout={"servers": 3, "template": template}))
    pod = b.child(made, "Deployment")["spec"]["template"]["spec"]
    for container in [*pod["containers"], *pod["initContainers"]]:
        added_here = (written or {}) if container["name"] in ("logs", "i") else {}
        assert container["securityContext"]["capabilities"] == {**added_here, "drop": ["ALL"]}
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("add", [[{}], [["NET_BIND_SERVICE"]], 1, True, "NET_BIND_SERVICE", {"NET_BIND_SERVICE": 1}])
def test_invalid_capabilities_are_refused_with_path_and_advice(add: Any) -> None:
    written = {"add": add}
    made = b.planned(b.job(learner={"gpus": 1, "template": of_learner(securityContext={"capabilities": written})}))
    assert b.condition(made, reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)
    found = str(written).replace("True", "true")
    assert b.message(made, reasons.ACCEPTED) == (
        f"spec.learner.template.{CONTAINER}.securityContext.capabilities: {found}; every capability is dropped, "
        "and only NET_BIND_SERVICE may be added; change it, or remove it"
    )


OURS_IN_OTHER_WORDS = [
    *("/etc//stage2/config", "//etc/stage2", "/etc/./stage2/config/", "/etc/stage2//", "/x/../etc/stage2/config"),
    *("etc/stage2/config", "../etc/stage2", "/dev//shm", "/./tmp/x", "//", "/.", "/etc/.."),
]


@pytest.mark.parametrize("path", OURS_IN_OTHER_WORDS)
def test_reserved_mount_path_is_refused_however_spelled(path: str) -> None:
    template = of_learner(volumeMounts=[{"name": "data", "mountPath": path}])
    made = b.planned(b.job(learner={"gpus": 1, "template": template}))
    where = f"spec.learner.template.{CONTAINER}.volumeMounts[0].mountPath"
    reported = f"{where}: {path!r}; the paths /etc/stage2, /tmp, /dev/shm belong to stage2"
    assert reported in b.message(made, reasons.ACCEPTED)


@pytest.mark.parametrize("path", ["/etc/stage2x", "/data//tmp", "/etc/stage2/../data", "/tmpfs", "/x/etc/stage2"])
def test_mount_path_that_only_resembles_reserved_one_is_accepted(path: str) -> None:
    template = of_learner(volumeMounts=[{"name": "data", "mountPath": path}])
    assert b.planned(b.job(learner={"gpus": 1, "template": template})).children


def test_refused_template_fields_are_not_in_allowed_list() -> None:
    assert not template_rules._REFUSED_OF_POD.keys() & template_rules.OF_POD


def test_env_written_as_mapping_is_refused_with_correct_form() -> None:
    made = b.planned(b.job(learner={"gpus": 1, "template": of_learner(env={"A": "b"})}))
    text = "spec.learner.template.spec.containers[0].env: {'A': 'b'}; must be a list; begin each item with `- name:`"
    assert text in b.message(made, reasons.ACCEPTED)


def test_sidecar_may_set_command() -> None:
    template = of_pod(containers=[{"name": "logs", "image": "x", "command": ["tail"]}])
    assert b.planned(b.job(learner={"gpus": 1, "template": template})).children
