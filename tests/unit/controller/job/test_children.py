"""The manifests of the children, one by one, and what the state, the requests and the chart's rights know of them."""

import base64
import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from stage2_controller.children import comparison
from stage2_controller.children.manifest import Manifest
from stage2_controller.job import kinds, names
from stage2_controller.job.kinds import ChildKind
from stage2_controller.plan.result import Plan
from stage2_controller.state import conditions, reasons
from stage2_controller.state.ending import OVERDUE_S
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.place.test_placement import planned


def test_restarted_server_is_not_ready_until_next_weight_push() -> None:
    def observed(*, restarts: int = 0, version: int = 4) -> Observed:
        baseline = b.report() if restarts else b.LOADING
        servers = [b.up("server-0"), b.up("server-1", restarts=restarts), b.up("server-2")]
        pods = (b.pod(names.ROLE_ROLLOUT, *servers), b.learner_pod())
        progress = b.report(held=(version,) * 3, pushed=version)
        return b.started(b.job(), pods=pods, progress=progress, baseline=baseline)

    raw = b.with_status(b.job(), b.planned(b.job(), observed()))
    first = b.planned(raw, observed(restarts=1))
    second = b.planned(b.with_status(raw, first), observed(restarts=1))
    for made in (first, second):
        assert made.status["servers"][1] | {"baseUrl": ""} == {
            "name": "server-1",
            "baseUrl": "",
            "ready": False,
            "restarts": 1,
            "pod": "pod-rollout",
        }
        assert b.condition(made, reasons.WEIGHTS_IN_SYNC) == ("False", reasons.SERVER_RESTARTED)
    pushed = b.planned(b.with_status(raw, second), observed(restarts=1, version=5))
    assert pushed.status["servers"][1]["ready"]


def wanted(kind: str, **spec: Any) -> Manifest:
    raw = b.job(**spec)
    return b.child(b.planned(raw), kind)


def in_queue() -> Manifest:
    """Return the Workload of a job that waits in a queue of Kueue."""
    raw = b.job()
    raw["metadata"]["labels"] = {"kueue.x-k8s.io/queue-name": "team"}
    return b.child(b.planned(raw), kinds.WORKLOAD.kind)


def pod_spec(kind: str, **spec: Any) -> dict[str, Any]:
    found: dict[str, Any] = wanted(kind, **spec)["spec"]["template"]["spec"]
    return found


BY_KIND = pytest.mark.parametrize("child", kinds.CHILDREN, ids=lambda child: child.kind)


@BY_KIND
def test_children_have_name_owner_and_labels(child: ChildKind) -> None:
    engine = {"engine": "JobSet"} if child is kinds.JOBSET else {}
    made = in_queue() if child.of_kueue else wanted(child.kind, **engine)
    metadata = made["metadata"]
    assert (made["apiVersion"], metadata["name"]) == (child.api_version, f"job-3v1-{child.role}")
    (owner,) = metadata["ownerReferences"]
    assert (owner["kind"], owner["name"], owner["uid"]) == (names.KIND, "job-3v1", "uid-of-job-3v1")
    assert owner["controller"]
    assert metadata["namespace"] == "team-a"
    assert metadata["labels"][names.LABEL_JOB] == "job-3v1"
    assert metadata["labels"][names.LABEL_MANAGED_BY] == names.MANAGED_BY


def test_single_pod_holds_all_servers_each_with_own_gpu_and_port() -> None:
    spec = wanted("Deployment")["spec"]
    assert (spec["replicas"], spec["strategy"]) == (1, {"type": "Recreate"})
    containers = spec["template"]["spec"]["containers"]
    assert [container["name"] for container in containers] == ["server-0", "server-1", "server-2"]
    for index, container in enumerate(containers):
        assert container["command"] == ["stage2", "serve", "/etc/stage2/config/config.yaml", "--server", str(index)]
        assert container["ports"] == [{"name": f"http-{index}", "containerPort": 8000 + index}]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": "1"}}
        assert container["readinessProbe"]["httpGet"]["port"] == 8000 + index


def test_liveness_probe_restarts_server_after_five_silent_minutes() -> None:
    for container in pod_spec("Deployment")["containers"]:
        probe = container["livenessProbe"]
        assert probe["httpGet"] == container["readinessProbe"]["httpGet"]
        assert probe["failureThreshold"] * probe["periodSeconds"] == 300


@pytest.mark.parametrize(
    ("deadline_s", "limit_s", "threshold"), [(60, 3600, 720), (3600, 3600, 720), (7201, 7201, 1441)]
)
def test_startup_probe_lasts_at_least_until_start_deadline(deadline_s: int, limit_s: int, threshold: int) -> None:
    learner = {"gpus": 1, "startDeadlineSeconds": deadline_s}
    assert wanted("Deployment", learner=learner)["spec"]["progressDeadlineSeconds"] == limit_s
    for container in pod_spec("Deployment", learner=learner)["containers"]:
        probe = container["startupProbe"]
        assert probe["failureThreshold"] == threshold
        assert probe["failureThreshold"] * probe["periodSeconds"] >= deadline_s


def test_longest_start_deadline_fits_progress_deadline_field() -> None:
    longest = 2**31 - 1
    spec = wanted("Deployment", learner={"gpus": 1, "startDeadlineSeconds": longest})["spec"]
    assert spec["progressDeadlineSeconds"] == longest


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
@pytest.mark.parametrize(("resource", "asked"), [("", {}), ("amd.com/gpu", {"limits": {"amd.com/gpu": "1"}})])
def test_gpu_resource_name_is_requested_and_omitted_for_cpu_run(kind: str, resource: str, asked: Any) -> None:
    assert pod_spec(kind, gpuResource=resource)["containers"][0]["resources"] == asked


def test_service_has_stable_port_per_server() -> None:
    spec = wanted("Service")["spec"]
    assert [port["port"] for port in spec["ports"]] == [8000, 8001, 8002]


def attempt(made: Plan) -> str:
    """The label by which the Service of a plan selects the pods of its Deployment."""
    selected = b.child(made, "Service")["spec"]["selector"]
    labels = b.child(made, "Deployment")["spec"]["template"]["metadata"]["labels"]
    assert selected.items() <= labels.items()
    return str(selected[names.LABEL_ATTEMPT])


def test_service_selects_only_servers_of_current_attempt() -> None:
    """An earlier attempt may have left servers on a node that does not answer, whose addresses stay."""
    raw = b.job()
    there, elsewhere = (planned(raw, n.capacity(n.node(name))) for name in (b.NODE, "node-b"))
    again = planned({**raw, "metadata": {**raw["metadata"], "uid": "u"}}, n.capacity(n.node()))
    assert len({attempt(made) for made in (there, elsewhere, again)}) == 3
    assert attempt(b.planned(raw, b.created(there))) == attempt(there), "what stands keeps its label"


def test_new_servers_wait_for_old_ones_on_same_node_to_end() -> None:
    first = planned(b.job(), n.capacity(n.node()))
    ending = b.rollout_pod(True, True, True)
    ending["metadata"] |= {"deletionTimestamp": conditions.timestamp(b.NOW), "deletionGracePeriodSeconds": 30}
    for node, starts in ((b.NODE, False), ("node-b", True)):
        ending["metadata"]["labels"][names.LABEL_ATTEMPT] = attempt(first)
        made = planned(b.job(), n.capacity(n.node(node)), b.pods_alone(ending))
        assert ("Deployment" in b.kinds(made)) is starts
        assert "Job" in b.kinds(made)


@pytest.mark.parametrize(("after_s", "starts"), [(OVERDUE_S - 1, False), (OVERDUE_S, True)])
def test_overdue_old_servers_block_new_ones_only_for_limited_time(after_s: float, starts: bool) -> None:
    ending = b.rollout_pod(True, True, True)
    ending["metadata"] |= {"deletionTimestamp": conditions.timestamp(b.NOW), "deletionGracePeriodSeconds": 30}
    ending["metadata"]["labels"][names.LABEL_ATTEMPT] = attempt(planned(b.job(), n.capacity(n.node())))
    made = planned(b.job(), n.capacity(n.node()), b.pods_alone(ending), after_s=after_s)
    assert ("Deployment" in b.kinds(made)) is starts


def test_service_keeps_selecting_servers_labelled_by_older_controller() -> None:
    """It wrote their addresses itself, behind a Service that selected nobody."""
    made = planned(b.job(), n.capacity(n.node()))
    deployment, service = b.child(made, "Deployment"), b.child(made, "Service")
    del deployment["spec"]["template"]["metadata"]["labels"][names.LABEL_ATTEMPT]
    annotations = {**service["metadata"]["annotations"], names.ANNOTATION_MANIFEST_HASH: "of another version"}
    old = {**service, "metadata": {**service["metadata"], "annotations": annotations}}
    old["spec"] = {**service["spec"], "selector": {}}
    seen = b.created(made, deployment=deployment, service=old)
    (write,) = [one for one in comparison.writes(b.planned(b.job(), seen).children, seen) if one.verb == "apply"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert write.manifest["spec"]["selector"] == {key: labels[key] for key in (names.LABEL_JOB, names.LABEL_ROLE)}


def test_learner_has_pod_affinity_to_servers() -> None:
    (term,) = pod_spec("Job")["affinity"]["podAffinity"]["requiredDuringSchedulingIgnoredDuringExecution"]
    assert term["topologyKey"] == "kubernetes.io/hostname"
    assert term["labelSelector"]["matchLabels"] == wanted("Deployment")["spec"]["selector"]["matchLabels"]


def test_learner_waits_in_init_container_and_restarts_inside_its_pod() -> None:
    spec = pod_spec("Job", learner={"gpus": 1, "backoffLimit": 2, "resources": {"requests": {"cpu": "8"}}})
    (first,), (learner,) = spec["initContainers"], spec["containers"]
    assert (first["name"], first["command"][:2]) == (names.WAIT_CONTAINER, ["stage2", "wait"])
    assert first["resources"] == {"requests": {"cpu": "8"}}  # a quota asks it of every container
    assert learner["resources"]["limits"] == {"nvidia.com/gpu": "1"}
    assert learner["command"][-1] == "--restarts=2"
    once = pod_spec("Job", learner={"gpus": 1, "backoffLimit": 0})
    assert "--restarts" not in " ".join(once["containers"][0]["command"])


def test_configuration_error_fails_learner_job_and_disruption_is_ignored() -> None:
    spec = wanted("Job")["spec"]
    fail, ignore = spec["podFailurePolicy"]["rules"]
    assert (fail["action"], fail["onExitCodes"]["values"]) == ("FailJob", [64, 69])
    assert (ignore["action"], ignore["onPodConditions"][0]["type"]) == ("Ignore", "DisruptionTarget")
    assert (spec["backoffLimit"], spec["template"]["spec"]["restartPolicy"]) == (3, "Never")


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_pods_satisfy_the_restricted_pod_security_standard(kind: str) -> None:
    spec = pod_spec(kind)
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_pods_hold_no_api_credentials(kind: str) -> None:
    spec = pod_spec(kind)
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False


@pytest.mark.parametrize("kind", ["Deployment", "Job"])
def test_caches_and_tmp_survive_container_restart(kind: str) -> None:
    """vLLM, Triton and PyTorch keep it below the home directory and /tmp."""
    spec = pod_spec(kind)
    volumes = {volume["name"]: volume for volume in spec["volumes"]}
    for container in spec["containers"]:
        (scratch,) = (mount["name"] for mount in container["volumeMounts"] if mount["mountPath"] == "/tmp")
        assert volumes[scratch] == {"name": scratch, "emptyDir": {}}
        assert {"name": "HOME", "value": "/tmp"} in container["env"]


@pytest.mark.parametrize(("kind", "role"), [("Deployment", "rollout"), ("Job", "learner")])
def test_pod_mounts_only_its_own_certificate_and_key(kind: str, role: str) -> None:
    volumes = {volume["name"]: volume.get("secret", {}) for volume in pod_spec(kind)["volumes"]}
    keys = {name: {item["key"]: item["path"] for item in volumes[name]["items"]} for name in volumes if volumes[name]}
    assert keys == {
        "stage2-token": {"token": "token"},
        "stage2-tls": {"ca.crt": "ca.crt", f"{role}.crt": "tls.crt", f"{role}.key": "tls.key"},
    }
    for container in pod_spec(kind)["containers"] + pod_spec(kind).get("initContainers", []):
        mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
        assert mounts["stage2-tls"] == {"name": "stage2-tls", "mountPath": "/etc/stage2/tls", "readOnly": True}
        assert {"name": "STAGE2_TLS_CA_FILE", "value": "/etc/stage2/tls/ca.crt"} in container["env"]


def test_without_tls_pods_have_no_certificates_and_use_http() -> None:
    for kind in ("Deployment", "Job"):
        spec = pod_spec(kind, tls={"enabled": False})
        assert "tls" not in repr([spec["volumes"], spec["containers"]])
    (config,) = wanted("ConfigMap", tls={"enabled": False})["data"].values()
    assert "http://job-3v1-rollout" in config
    assert "https" not in config
    server, *_ = pod_spec("Deployment", tls={"enabled": False})["containers"]
    assert server["livenessProbe"]["httpGet"]["scheme"] == "HTTP"


def test_token_is_stored_only_in_secret() -> None:
    raw = b.job()
    made = b.planned(raw)
    written = base64.b64encode(b"t0ken").decode()
    holders = [item["kind"] for item in made.children if "t0ken" in repr(item) or written in repr(item)]
    assert holders == ["Secret"]


def test_placement_applies_to_both_pods() -> None:
    placement = {
        "nodeSelector": {"pool": "gpu"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "priorityClassName": "high",
    }
    for kind in ("Deployment", "Job"):
        spec = pod_spec(kind, placement=placement)
        assert {key: spec[key] for key in placement} == placement


def test_pod_template_for_server_applies_to_every_server() -> None:
    template = {
        "metadata": {"annotations": {"team": "vision"}},
        "spec": {
            "runtimeClassName": "nvidia",
            "containers": [
                {"name": "server", "env": [{"name": "A", "value": "1"}]},
                {"name": "server-1", "env": [{"name": "A", "value": "2"}]},
            ],
        },
    }
    rollout = {"servers": 2, "gpusPerServer": 1, "port": 8000, "template": template}
    manifest = wanted("Deployment", rollout=rollout)["spec"]["template"]
    assert manifest["metadata"]["annotations"]["team"] == "vision"
    assert manifest["spec"]["runtimeClassName"] == "nvidia"
    values = [
        {item["name"]: item["value"] for item in container["env"]}["A"] for container in manifest["spec"]["containers"]
    ]
    assert values == ["1", "2"]
    assert [container["name"] for container in manifest["spec"]["containers"]] == ["server-0", "server-1"]


def test_image_of_spec_overrides_default() -> None:
    assert pod_spec("Job")["containers"][0]["image"] == "my/trainer:1"
    assert pod_spec("Job", image=None)["containers"][0]["image"] == "stage2/trainer:test"


RULES = Path(__file__).parents[4] / "charts" / "stage2" / "templates" / "_helpers.tpl"
RULE = re.compile(r'- apiGroups: \["?([^"\]]*)"?\]\n  resources: \[([^\]]*)\].*\n  verbs: \[([^\]]*)\]')


def granted() -> dict[tuple[str, str], set[str]]:
    """Return the verbs that the chart allows, by API group and resource."""
    found = RULE.findall(RULES.read_text(encoding="utf-8"))
    return {(group, name): set(verbs.split(", ")) for group, names, verbs in found for name in names.split(", ")}


@BY_KIND
def test_chart_grants_exactly_verbs_used_per_kind(child: ChildKind) -> None:
    needed = {"get", "create"}
    needed |= {"list", "watch"} if child.watched else set()
    scaled = child is kinds.LEARNER_JOB  # the same kind as the Job of a JobSet's servers
    needed |= set() if child.create_once and not scaled else {"patch"}
    needed |= {"delete"} if child.has_pods or child.of_kueue or child is kinds.SECRET else set()
    group = child.api_version.rpartition("/")[0]
    assert granted()[group, child.plural] == needed


@BY_KIND
def test_observed_state_has_field_for_each_child_kind(child: ChildKind) -> None:
    assert child.field in {field.name for field in dataclasses.fields(Observed)}
    there = {"metadata": {"name": "x"}}
    assert dataclasses.replace(b.NOTHING, **{child.field: there}).child(child.kind) == there


def test_workloads_are_watched_only_where_kueue_is_served() -> None:
    assert set(kinds.watched(kueue=True)) - set(kinds.watched(kueue=False)) == {kinds.WORKLOAD}
    assert not {"ConfigMap", "Secret"} & {resource.kind for resource in kinds.watched(kueue=True)}
