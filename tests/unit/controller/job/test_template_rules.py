"""Pod templates that would break the job's contract are refused with path, value, rule and way out."""

from typing import Any

import pytest

from stage2_controller import reasons
from stage2_controller.spec import template_rules
from tests.unit.controller import builders as b

WRONG: list[tuple[str, dict[str, Any], str]] = [
    (
        "a command",
        {"spec": {"containers": [{"name": "learner", "command": ["x"]}]}},
        "template.spec.containers[0].command",
    ),
    (
        "a command of what waits for servers",
        {"spec": {"initContainers": [{"name": "wait-for-servers", "command": ["true"]}]}},
        "template.spec.initContainers[0].command",
    ),
    ("a nameless container", {"spec": {"containers": [{"image": "x"}]}}, "template.spec.containers[0]"),
    ("a restart policy", {"spec": {"restartPolicy": "Always"}}, "template.spec.restartPolicy"),
    ("another account", {"spec": {"serviceAccountName": "admin"}}, "template.spec.serviceAccountName"),
    ("another account by its old name", {"spec": {"serviceAccount": "admin"}}, "template.spec.serviceAccount"),
    (
        "a projected token",
        {"spec": {"volumes": [{"name": "t", "projected": {"sources": [{"serviceAccountToken": {"path": "t"}}]}}]}},
        "template.spec.volumes[0].projected.sources[0].serviceAccountToken",
    ),
    ("the node's processes", {"spec": {"hostPID": True}}, "template.spec.hostPID"),
    ("the node's shared memory", {"spec": {"hostIPC": True}}, "template.spec.hostIPC"),
    ("the node's users", {"spec": {"hostUsers": True}}, "template.spec.hostUsers"),
    ("a node", {"spec": {"nodeName": "a"}}, "template.spec.nodeName"),
    ("the node's network", {"spec": {"hostNetwork": True}}, "template.spec.hostNetwork"),
    (
        "a label that finds pods",
        {"metadata": {"labels": {"stage2.dev/role": "x"}}},
        "template.metadata.labels[stage2.dev/role]",
    ),
    ("a volume of ours", {"spec": {"volumes": [{"name": "shm", "emptyDir": {}}]}}, "template.spec.volumes[0].name"),
    ("a removal", {"spec": {"containers": None}}, "template.spec.containers"),
    ("a deep removal", {"spec": {"containers": [{"name": "learner", "env": None}]}}, "template.spec.containers[0].env"),
    ("a directive", {"spec": {"$patch": "replace"}}, "template.spec.$patch"),
    (
        "a mount over the token",
        {
            "spec": {
                "containers": [{"name": "learner", "volumeMounts": [{"name": "x", "mountPath": "/etc/stage2/token"}]}]
            }
        },
        "template.spec.containers[0].volumeMounts[0].mountPath",
    ),
    (
        "a variable of ours",
        {"spec": {"containers": [{"name": "learner", "env": [{"name": "STAGE2_TOKEN_FILE", "value": "/x"}]}]}},
        "template.spec.containers[0].env[0].name",
    ),
    (
        "more GPUs than the job counts",
        {"spec": {"containers": [{"name": "learner", "resources": {"limits": {"nvidia.com/gpu": 2}}}]}},
        "template.spec.containers[0].resources.limits[nvidia.com/gpu]",
    ),
    ("a field beside spec", {"containers": []}, "template.containers"),
    (
        "a container whose name is a list",
        {"spec": {"containers": [{"name": ["learner"]}]}},
        "template.spec.containers[0]",
    ),
]


def of_learner(**fields: Any) -> dict[str, Any]:
    return {"spec": {"containers": [{"name": "learner", **fields}]}}


def projecting(sources: Any) -> dict[str, Any]:
    volume = {"name": "v", "projected": {"sources": sources}}
    return {"spec": {"serviceAccountName": "trainer", "volumes": [volume]}}


CONTAINER = "template.spec.containers[0]"
PROJECTED = "template.spec.volumes[0].projected"
MISSHAPEN: list[tuple[dict[str, Any], str]] = [
    ({"metadata": ["a"]}, "template.metadata"),
    ({"metadata": []}, "template.metadata"),
    ({"metadata": {"labels": ["a"]}}, "template.metadata.labels"),
    ({"metadata": {"annotations": "a"}}, "template.metadata.annotations"),
    ({"spec": ["a"]}, "template.spec"),
    ({"spec": {"containers": {"name": "learner"}}}, "template.spec.containers"),
    ({"spec": {"containers": ["learner"]}}, CONTAINER),
    ({"spec": {"initContainers": {"a": {}}}}, "template.spec.initContainers"),
    ({"spec": {"initContainers": [{"name": "a", "resources": ["x"]}]}}, "template.spec.initContainers[0].resources"),
    ({"spec": {"volumes": ["x"]}}, "template.spec.volumes[0]"),
    ({"spec": {"volumes": {"x": {}}}}, "template.spec.volumes"),
    ({"spec": {"volumes": [{"emptyDir": {}}]}}, "template.spec.volumes[0].name"),
    ({"spec": {"volumes": [{"name": ["x"]}]}}, "template.spec.volumes[0].name"),
    (projecting(["x"]), f"{PROJECTED}.sources[0]"),
    (projecting([[1]]), f"{PROJECTED}.sources[0]"),
    (projecting("x"), f"{PROJECTED}.sources"),
    (projecting([{"serviceAccountToken": "t"}]), f"{PROJECTED}.sources[0].serviceAccountToken"),
    (projecting([{"serviceAccountToken": []}]), f"{PROJECTED}.sources[0].serviceAccountToken"),
    (projecting([None]), f"{PROJECTED}.sources[0]"),
    ({"spec": {"volumes": [{"name": "v", "projected": ["x"]}]}}, PROJECTED),
    ({"spec": {"nodeSelector": ["a=b"]}}, "template.spec.nodeSelector"),
    ({"spec": {"tolerations": ["a"]}}, "template.spec.tolerations[0]"),
    ({"spec": {"overhead": "1"}}, "template.spec.overhead"),
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


@pytest.mark.parametrize(("template", "path"), [case[1:] for case in WRONG], ids=[case[0] for case in WRONG])
def test_it_is_refused(template: dict[str, Any], path: str) -> None:
    made = b.planned(b.job(learner={"gpus": 1, "template": template}))
    assert b.condition(made, reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)
    assert f"spec.learner.{path}: " in b.message(made, reasons.ACCEPTED)


def test_a_container_that_the_person_adds_is_as_restricted_as_ours() -> None:
    template = {
        "spec": {"containers": [{"name": "logs", "image": "x"}], "initContainers": [{"name": "i", "image": "x"}]}
    }
    made = b.planned(b.job(rollout={"servers": 3, "template": template}))
    pod = b.child(made, "Deployment")["spec"]["template"]["spec"]
    for container in [*pod["containers"], *pod["initContainers"]]:
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["securityContext"]["capabilities"] == {"drop": ["ALL"]}


@pytest.mark.parametrize("written", [{}, {"add": ["NET_BIND_SERVICE"]}, {"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]}])
def test_it_drops_every_capability_whatever_it_says_of_capabilities(written: dict[str, Any]) -> None:
    added = {"image": "x", "securityContext": {"capabilities": written}}
    template = {"spec": {"containers": [{"name": "logs", **added}], "initContainers": [{"name": "i", **added}]}}
    made = b.planned(b.job(rollout={"servers": 3, "template": template}))
    pod = b.child(made, "Deployment")["spec"]["template"]["spec"]
    for container in [*pod["containers"], *pod["initContainers"]]:
        expected = {**written, "drop": ["ALL"]} if container["name"] in ("logs", "i") else {"drop": ["ALL"]}
        assert container["securityContext"]["capabilities"] == expected
        assert container["securityContext"]["allowPrivilegeEscalation"] is False


@pytest.mark.parametrize("add", [[{}], [["NET_BIND_SERVICE"]], 1, True, "NET_BIND_SERVICE", {"NET_BIND_SERVICE": 1}])
def test_capabilities_of_another_shape_are_refused_with_path_value_rule_and_way_out(add: Any) -> None:
    written = {"add": add}
    made = b.planned(b.job(learner={"gpus": 1, "template": of_learner(securityContext={"capabilities": written})}))
    assert b.condition(made, reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)
    assert b.message(made, reasons.ACCEPTED) == (
        f"spec.learner.{CONTAINER}.securityContext.capabilities: {written}; every capability is dropped, and only "
        "NET_BIND_SERVICE may be added; change it, or remove it"
    )


OURS_IN_OTHER_WORDS = [
    *("/etc//stage2/config", "//etc/stage2", "/etc/./stage2/config/", "/etc/stage2//", "/x/../etc/stage2/config"),
    *("etc/stage2/config", "../etc/stage2", "/dev//shm", "/./tmp/x", "//", "/.", "/etc/.."),
]


@pytest.mark.parametrize("path", OURS_IN_OTHER_WORDS)
def test_a_path_of_ours_is_refused_however_it_is_written(path: str) -> None:
    template = of_learner(volumeMounts=[{"name": "data", "mountPath": path}])
    made = b.planned(b.job(learner={"gpus": 1, "template": template}))
    where = f"spec.learner.{CONTAINER}.volumeMounts[0].mountPath"
    reported = f"{where}: {path!r}; the paths /etc/stage2, /tmp, /dev/shm belong to stage2"
    assert reported in b.message(made, reasons.ACCEPTED)


@pytest.mark.parametrize("path", ["/etc/stage2x", "/data//tmp", "/etc/stage2/../data", "/tmpfs", "/x/etc/stage2"])
def test_a_path_that_only_looks_like_one_of_ours_is_taken(path: str) -> None:
    template = of_learner(volumeMounts=[{"name": "data", "mountPath": path}])
    assert b.planned(b.job(learner={"gpus": 1, "template": template})).children


def test_every_field_that_is_refused_by_name_is_outside_of_what_is_allowed() -> None:
    assert not template_rules._REFUSED_OF_POD.keys() & template_rules.OF_POD


@pytest.mark.parametrize(("template", "path"), MISSHAPEN, ids=[str(case[0]) for case in MISSHAPEN])
def test_a_part_of_another_shape_is_refused_with_its_path(template: dict[str, Any], path: str) -> None:
    made = b.planned(b.job(learner={"gpus": 1, "template": template}))
    assert b.condition(made, reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)
    assert f"spec.learner.{path}: " in b.message(made, reasons.ACCEPTED)


def test_variables_written_as_a_mapping_are_answered_with_how_to_write_them() -> None:
    made = b.planned(b.job(learner={"gpus": 1, "template": of_learner(env={"A": "b"})}))
    text = "spec.learner.template.spec.containers[0].env: {'A': 'b'}; must be a list; begin each item with `- name:`"
    assert text in b.message(made, reasons.ACCEPTED)


def test_a_sidecar_may_have_a_command() -> None:
    template = {"spec": {"containers": [{"name": "logs", "image": "x", "command": ["tail"]}]}}
    assert b.planned(b.job(learner={"gpus": 1, "template": template})).children
