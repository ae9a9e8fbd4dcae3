"""Creating a job is not creating any pod: each risky override, before the API server and before the controller."""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from stage2_api.errors import ConfigError
from stage2_controller.children.build import parse
from stage2_controller.job.settings import AdminPolicy, read_policy
from tests.unit.api.api_server import admitted
from tests.unit.charts.conftest import Manifests, Template
from tests.unit.controller import builders as b

pytestmark = pytest.mark.in_turns(3, apart=True)

POLICY = ("ValidatingAdmissionPolicy", "stage2-policy")


def of_pod(**fields: Any) -> dict[str, Any]:
    return {"spec": fields}


def with_container(name: str = "learner", **fields: Any) -> dict[str, Any]:
    return of_pod(containers=[{"name": name, **fields}])


def env_of(name: str, key: str) -> dict[str, Any]:
    return with_container(env=[{"name": "A", "valueFrom": {key: {"name": name}}}])


def security(**fields: Any) -> dict[str, Any]:
    return with_container(securityContext=fields)


def volume(**source: Any) -> dict[str, Any]:
    return of_pod(volumes=[{"name": "v", **source}])


def account(name: str, **source: Any) -> dict[str, Any]:
    """A template that runs as an account, with a volume."""
    return {"spec": {"serviceAccountName": name, **volume(**source)["spec"]}}


def token_for(audience: Any) -> dict[str, Any]:
    return {"sources": [{"serviceAccountToken": {"path": "t", **({"audience": audience} if audience else {})}}]}


LEARNER = "containers[0]"
SOURCE = "volumes[0].projected.sources[0]"
TOKEN = f"{SOURCE}.serviceAccountToken"
RISKY: list[tuple[dict[str, Any], str]] = [
    # a template of the learner, and the path that the controller names
    (of_pod(serviceAccount="admin"), "serviceAccount"),
    (of_pod(serviceAccountName="admin"), "serviceAccountName"),
    (of_pod(automountServiceAccountToken=True), "automountServiceAccountToken"),
    (volume(projected=token_for("vault")), TOKEN),
    (account("trainer", projected=token_for("")), TOKEN),
    (account("trainer", projected=token_for(["vault"])), TOKEN),
    (account("trainer", projected={"sources": [{"serviceAccountToken": {"path": "t", "audience": ""}}]}), TOKEN),
    (
        account("trainer", projected={"sources": [{"configMap": {"name": "c"}}, *token_for("")["sources"]]}),
        TOKEN.replace("sources[0]", "sources[1]"),
    ),
    (account("admin", projected=token_for("vault")), "serviceAccountName"),
    (
        account("trainer", projected={"sources": [{"podCertificate": {"signerName": "s"}}]}),
        f"{SOURCE}.podCertificate",
    ),
    (volume(projected={"sources": [{"secret": {"name": "s"}}]}), "volumes[0].projected.sources[0].secret.name"),
    (volume(secret={"secretName": "other-token"}), "volumes[0].secret.secretName"),
    (env_of("other", "secretKeyRef"), f"{LEARNER}.env[0].valueFrom.secretKeyRef.name"),
    (with_container(envFrom=[{"secretRef": {"name": "other"}}]), f"{LEARNER}.envFrom[0].secretRef.name"),
    (volume(hostPath={"path": "/"}), "volumes[0].hostPath.path"),
    (volume(hostPath={"path": "/data/../etc"}), "volumes[0].hostPath.path"),
    (volume(hostPath={"path": "/data/.."}), "volumes[0].hostPath.path"),
    (volume(hostPath={"path": "/database"}), "volumes[0].hostPath.path"),
    (volume(hostPath={"path": "/data/models/link"}), "volumes[0].hostPath.path"),
    (volume(nfs={"server": "files.example", "path": "/etc"}), "volumes[0].nfs"),
    (volume(persistentVolumeClaim={"claimName": "others"}), "volumes[0].persistentVolumeClaim.claimName"),
    (volume(configMap={"name": "others"}), "volumes[0].configMap.name"),
    (env_of("others", "configMapKeyRef"), f"{LEARNER}.env[0].valueFrom.configMapKeyRef.name"),
    (
        volume(ephemeral={"volumeClaimTemplate": {"spec": {"storageClassName": "fast", "volumeName": "of-others"}}}),
        "volumes[0].ephemeral.volumeClaimTemplate.spec.volumeName",
    ),
    (
        volume(ephemeral={"volumeClaimTemplate": {"spec": {}}}),
        "volumes[0].ephemeral.volumeClaimTemplate.spec.storageClassName",
    ),
    ({"spec": {"securityContext": {"fsGroup": 0}}}, "securityContext.fsGroup"),
    ({"spec": {"securityContext": {"supplementalGroups": [6]}}}, "securityContext.supplementalGroups"),
    (security(runAsGroup=0), f"{LEARNER}.securityContext.runAsGroup"),
    (volume(csi={"driver": "secrets-store.csi.k8s.io"}), "volumes[0].csi"),
    (volume(gitRepo={"repository": "x"}), "volumes[0].gitRepo"),
    (volume(image={"reference": "x"}), "volumes[0].image"),
    (volume(iscsi={"targetPortal": "x"}), "volumes[0].iscsi"),
    (of_pod(hostPID=True), "hostPID"),
    (of_pod(hostIPC=True), "hostIPC"),
    (of_pod(hostNetwork=True), "hostNetwork"),
    (of_pod(hostUsers=True), "hostUsers"),
    (of_pod(nodeName="control-plane"), "nodeName"),
    (of_pod(shareProcessNamespace=True), "shareProcessNamespace"),
    ({"spec": {"resourceClaims": [{"name": "c", "resourceClaimName": "others"}]}}, "resourceClaims"),
    ({"spec": {"ephemeralContainers": [{"name": "x"}]}}, "ephemeralContainers"),
    (of_pod(priority=2000000000), "priority"),
    (of_pod(hostname="x"), "hostname"),
    (of_pod(runtimeClassName="runc-privileged"), "runtimeClassName"),
    (security(privileged=True), f"{LEARNER}.securityContext.privileged"),
    (security(allowPrivilegeEscalation=True), f"{LEARNER}.securityContext.allowPrivilegeEscalation"),
    (security(capabilities={"add": ["SYS_ADMIN"]}), f"{LEARNER}.securityContext.capabilities"),
    (security(capabilities={"drop": []}), f"{LEARNER}.securityContext.capabilities"),
    (security(runAsUser=0), f"{LEARNER}.securityContext.runAsUser"),
    (security(runAsNonRoot=False), f"{LEARNER}.securityContext.runAsNonRoot"),
    (security(procMount="Unmasked"), f"{LEARNER}.securityContext.procMount"),
    (security(seccompProfile={"type": "Unconfined"}), f"{LEARNER}.securityContext.seccompProfile"),
    (security(appArmorProfile={"type": "Unconfined"}), f"{LEARNER}.securityContext.appArmorProfile"),
    (security(seLinuxOptions={"type": "spc_t"}), f"{LEARNER}.securityContext.seLinuxOptions"),
    (security(windowsOptions={"hostProcess": True}), f"{LEARNER}.securityContext.windowsOptions"),
    ({"spec": {"securityContext": {"sysctls": [{"name": "kernel.x"}]}}}, "securityContext.sysctls"),
    ({"spec": {"securityContext": {"runAsUser": 0}}}, "securityContext.runAsUser"),
    (
        {"spec": {"initContainers": [{"name": "i", "securityContext": {"privileged": True}}]}},
        "initContainers[0].securityContext.privileged",
    ),
    (with_container("side", ports=[{"containerPort": 1, "hostPort": 1}]), f"{LEARNER}.ports[0].hostPort"),
    (
        with_container("side", livenessProbe={"httpGet": {"port": 1, "host": "10.0.0.1"}}),
        f"{LEARNER}.livenessProbe",
    ),
    (with_container("side", lifecycle={"preStop": {"httpGet": {"host": "10.0.0.1"}}}), f"{LEARNER}.lifecycle"),
    (with_container("side", volumeDevices=[{"devicePath": "/dev/x"}]), LEARNER),
    (with_container("side", image="evil.example/x"), f"{LEARNER}.image"),
    (with_container("side", image="my/team-evil/x:v1"), f"{LEARNER}.image"),
    (of_pod(imagePullSecrets=[{"name": "registry"}, {"name": "others"}]), "imagePullSecrets[1].name"),
]
ALLOWED = (
    'policy.hostPaths=["/data"]',
    'policy.writableHostPaths=["/data/models"]',
    'policy.imageRegistries=["my/trainer", "my/x", "my/team"]',
    'policy.labels=["team", "of"]',
    'policy.annotations=["other"]',
    'policy.pullSecrets=["registry"]',
    'policy.serviceAccounts=["trainer"]',
    'policy.secrets=["hub-token"]',
    'policy.configMaps=["settings", "c"]',
    'policy.claims=["data", "c"]',
    'policy.nfs=["files.example:/export"]',
    'policy.storageClasses=["fast"]',
    "policy.groups=[5000]",
    'policy.resourceClaimTemplates=["one-gpu"]',
)
NEEDED: list[dict[str, Any]] = [
    {"metadata": {"labels": {"team": "a", "of": "a-b"}, "annotations": {"other": "a"}}},
    {"spec": {"tolerations": [{"key": "gpu", "operator": "Exists"}], "nodeSelector": {"gpu": "a100"}}},
    {"spec": {"topologySpreadConstraints": [{"topologyKey": "zone", "maxSkew": 1}], "priorityClassName": "low"}},
    {"spec": {"runtimeClassName": "nvidia", "terminationGracePeriodSeconds": 600}},
    {"spec": {"serviceAccountName": "trainer", "imagePullSecrets": [{"name": "registry"}]}},
    with_container(resources={"limits": {"memory": "64Gi"}}),
    with_container(env=[{"name": "HF_HOME", "value": "/data/hf"}]),
    with_container(startupProbe={"failureThreshold": 9}),
    env_of("hub-token", "secretKeyRef"),
    env_of("settings", "configMapKeyRef"),
    volume(hostPath={"path": "/data/models"}),
    volume(nfs={"server": "files.example", "path": "/export/a"}),
    volume(ephemeral={"volumeClaimTemplate": {"spec": {"storageClassName": "fast", "accessModes": ["ReadWriteOnce"]}}}),
    {"spec": {"securityContext": {"supplementalGroups": [5000], "fsGroup": 5000}}},
    volume(persistentVolumeClaim={"claimName": "c"}),
    volume(secret={"secretName": "hub-token"}),
    volume(projected={"sources": [{"configMap": {"name": "c"}}]}),
    account("trainer", projected=token_for("vault")),
    security(capabilities={"add": ["NET_BIND_SERVICE"]}, runAsUser=1234),
    {"spec": {"initContainers": [{"name": "fetch", "image": "my/x", "command": ["sh"], "restartPolicy": "Always"}]}},
]


@pytest.fixture(scope="session")
def template(template: Template) -> Template:
    """The chart with a policy that lets jobs use the claim of `builders.job`."""

    def run(*values: str, **more: str) -> Manifests:
        return template('policy.claims=["data", "c"]', *values, **more)

    return run


@pytest.fixture(scope="module")
def manifests(template: Template) -> Mapping[tuple[str, str], Mapping[str, Any]]:
    return template(*ALLOWED)


@pytest.fixture(scope="module")
def policy(manifests: Mapping[tuple[str, str], Mapping[str, Any]]) -> AdminPolicy:
    return policy_of(manifests)


def policy_of(manifests: Mapping[tuple[str, str], Mapping[str, Any]]) -> AdminPolicy:
    (container,) = manifests["Deployment", "stage2"]["spec"]["template"]["spec"]["containers"]
    (text,) = [item["value"] for item in container["env"] if item["name"] == "STAGE2_POLICY"]
    return read_policy(text)


def refusals(job: Any, policy: AdminPolicy) -> str:
    try:
        parse(job, replace(b.SETTINGS, policy=policy))
    except ConfigError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("role", ["learner", "rollout"])
@pytest.mark.parametrize(("override", "path"), RISKY, ids=[str(case[0]["spec"])[:60] for case in RISKY])
def test_risky_pod_override_is_refused(
    manifests: Any, policy: AdminPolicy, override: dict[str, Any], path: str, role: str
) -> None:
    raw = b.job()
    raw["spec"][role]["template"] = override
    reported = refusals(raw, policy)
    assert f"spec.{role}.template.spec.{path}" in reported
    assert admitted(manifests[POLICY], raw)


@pytest.mark.parametrize("override", NEEDED, ids=[str(case)[:60] for case in NEEDED])
def test_pod_override_needed_for_training_is_accepted(
    manifests: Any, policy: AdminPolicy, override: dict[str, Any]
) -> None:
    raw = b.job(learner={"gpus": 1, "template": override})
    assert refusals(raw, policy) == ""
    assert admitted(manifests[POLICY], raw) == ""


@pytest.mark.parametrize(
    ("spec", "path"),
    [
        ({"image": "evil.example/x"}, "spec.image"),
        (
            {"volumes": [{"name": "v", "mountPath": "/v", "hostPath": {"path": "/etc"}}]},
            "spec.volumes[0].hostPath.path",
        ),
        ({"volumes": [{"name": "v", "mountPath": "/v", "secret": {"secretName": "x"}}]}, "spec.volumes[0].secret"),
        ({"imagePullSecrets": [{"name": "others"}]}, "spec.imagePullSecrets[0].name"),
    ],
)
def test_policy_applies_to_job_fields(manifests: Any, policy: AdminPolicy, spec: dict[str, Any], path: str) -> None:
    assert path in refusals(b.job(**spec), policy)
    assert admitted(manifests[POLICY], b.job(**spec))


def test_service_account_token_requires_account_in_same_template(manifests: Any, policy: AdminPolicy) -> None:
    names_it: dict[str, Any] = {"spec": {"serviceAccountName": "trainer"}}
    mounts_it = volume(projected=token_for("vault"))
    raw = b.job(rollout={"servers": 3, "template": names_it}, learner={"gpus": 1, "template": mounts_it})
    assert f"spec.learner.template.spec.{TOKEN}" in refusals(raw, policy)
    assert "name the serviceAccountName of that template" in admitted(manifests[POLICY], raw)


def test_refusal_names_allowed_values_and_policy_key(policy: AdminPolicy) -> None:
    reported = refusals(b.job(image="evil.example/x"), policy)
    assert reported == (
        "spec.image: 'evil.example/x'; this cluster lets jobs use as image registry only my/trainer, my/x, my/team; "
        "change or remove it, or ask the admin to add it to policy.imageRegistries of the chart"
    )


@pytest.mark.parametrize("role", ["learner", "rollout"])
def test_template_label_not_allowed_by_policy_is_refused(manifests: Any, policy: AdminPolicy, role: str) -> None:
    raw = b.job()
    raw["spec"][role]["template"] = {"metadata": {"labels": {"team": "a", "app": "payments"}}}
    assert refusals(raw, policy) == (
        f"spec.{role}.template.metadata.labels[app]: 'app'; this cluster lets jobs use as label of pods only team, of; "
        "change or remove it, or ask the admin to add it to policy.labels of the chart"
    )
    assert "labels in templates of jobs are team, of;" in admitted(manifests[POLICY], raw)


@pytest.mark.parametrize(
    ("entry", "image", "allowed"),
    [
        ("registry.example/team/", "registry.example/team/x:v1", True),
        ("registry.example/team/", "registry.example/team", False),
        ("registry.example/team", "registry.example/team", True),
        ("registry.example/team", "registry.example/team:v1@sha256:0", True),
        ("registry.example/team", "registry.example/team@sha256:0", True),
        ("registry.example/team", "registry.example/team/x/y:v1", True),
        ("registry.example/team", "registry.example/team-evil/x", False),
        ("registry.example/team", "registry.example/team.evil:v1", False),
        ("registry.example/team", "registry.example/other/x", False),
        ("registry.example", "registry.example:5000/x", False),
        ("registry.example", "registry.example.evil/x", False),
        ("registry.example:5000", "registry.example:5000/x:v1", True),
        ("registry.example/x:v1", "registry.example/x:v1", True),
        ("registry.example/x:v1", "registry.example/x:v10", False),
    ],
)
def test_image_registry_entry_matches_whole_path_segments(
    template: Template, entry: str, image: str, allowed: bool
) -> None:
    manifests = template(f"policy.imageRegistries={json.dumps([entry])}")
    raw = b.job(image=image)
    assert not refusals(raw, policy_of(manifests)) == (not admitted(manifests[POLICY], raw)) == allowed


@pytest.mark.parametrize(("servers", "learner"), [("one-gpu", "all-gpus"), ("all-gpus", "one-gpu")])
def test_claim_template_not_in_policy_is_refused(
    manifests: Any, policy: AdminPolicy, servers: str, learner: str
) -> None:
    def claiming(servers: str, learner: str) -> Any:
        rollout = {"servers": 3, "resourceClaimTemplate": servers}
        wanted = {"gpus": 1, "resourceClaimTemplate": learner}
        return b.job(rollout=rollout, learner=wanted, placement={"mode": "Scheduler"})

    raw = claiming(servers, learner)
    assert "resourceClaimTemplate: 'all-gpus'; this cluster lets jobs use as" in refusals(raw, policy)
    assert "ResourceClaimTemplates of jobs are one-gpu" in admitted(manifests[POLICY], raw)
    taken = claiming("one-gpu", "one-gpu")
    assert refusals(taken, policy) == admitted(manifests[POLICY], taken) == ""


@pytest.mark.parametrize("entry", ["a: b", "a #b", "it's", 'a"b', "{{ x }}", "- a", "*a", "a\\b"])
def test_policy_list_entries_with_special_characters_stay_text(template: Template, entry: str) -> None:
    keys = ("labels", "pullSecrets", "serviceAccounts", "secrets", "runtimeClasses", "resourceClaimTemplates")
    manifests = template(*(f"policy.{key}={json.dumps([entry])}" for key in ("imageRegistries", *keys)))
    reported = {one.get("message", "") for one in manifests[POLICY]["spec"]["validations"]}
    way_out = "change or remove it, or ask the admin to add it to"
    assert f"images of jobs come from {entry}; {way_out} policy.imageRegistries" in reported
    assert f"service accounts of jobs are {entry}; {way_out} policy.serviceAccounts" in reported
    assert f"Secrets of jobs are {entry}; {way_out} policy.secrets" in reported
    assert f"image pull secrets of jobs are {entry}; {way_out} policy.pullSecrets" in reported
    assert f"labels in templates of jobs are {entry}; {way_out} policy.labels" in reported
    assert f"runtime classes of jobs are {entry}; {way_out} policy.runtimeClasses" in reported
    assert f"ResourceClaimTemplates of jobs are {entry}; {way_out} policy.resourceClaimTemplates" in reported
    taken, refused = (b.job(image=f"{image}/x") for image in (entry, "other"))
    assert (refusals(taken, policy_of(manifests)), admitted(manifests[POLICY], taken)) == ("", "")
    assert refusals(refused, policy_of(manifests))
    assert admitted(manifests[POLICY], refused)


def test_job_refused_by_new_policy_can_still_be_suspended_and_ended(manifests: Any) -> None:
    raw = b.job(volumes=[{"name": "x", "mountPath": "/x", "hostPath": {"path": "/etc"}}])
    policy = manifests[POLICY]
    for change in ({"suspend": True}, {"activeDeadlineSeconds": 60}, {"ttlSecondsAfterFinished": 1}):
        assert admitted(policy, b.edited(raw, **change), raw) == ""
    for change in (
        {"image": "my/x:1"},
        {"imagePullSecrets": [{"name": "registry"}]},
        {"gpuResource": "amd.com/gpu"},
        {"rollout": {"servers": 1}},
    ):
        assert "hostPath" in admitted(policy, b.edited(raw, **change), raw)


def test_star_in_policy_allows_everything_in_chart_and_controller(template: Template) -> None:
    keys = ("hostPaths", "imageRegistries", "labels", "pullSecrets", "serviceAccounts", "secrets", "runtimeClasses")
    manifests = template(*(f'policy.{key}=["*"]' for key in (*keys, "resourceClaimTemplates")))
    account = {"serviceAccountName": "x", "runtimeClassName": "y", "imagePullSecrets": [{"name": "z"}]}
    of_others = {"metadata": {"labels": {"app": "x"}}}
    for override in ({"spec": account}, of_others, volume(hostPath={"path": "/x"})):
        raw = b.job(learner={"gpus": 1, "template": override})
        assert refusals(raw, policy_of(manifests)) == ""
        assert admitted(manifests[POLICY], raw) == ""


def test_policy_is_bound_to_namespaces_of_release(template: Template) -> None:
    manifests = template('controller.namespaces=["team-a"]')
    name = "stage2-system.stage2-policy"
    (chosen,) = manifests["ValidatingAdmissionPolicyBinding", name]["spec"]["matchResources"]["namespaceSelector"][
        "matchExpressions"
    ]
    assert (chosen["key"], chosen["values"]) == ("kubernetes.io/metadata.name", ["team-a"])
    assert ("ValidatingAdmissionPolicy", name) not in template("policy.admission=false")


def test_misspelled_policy_key_stops_controller_start() -> None:
    with pytest.raises(ValueError, match="hostpaths"):
        read_policy(json.dumps({"hostpaths": []}))


NODES = {"engine": "JobSet", "rollout": {"servers": 0}, "learner": {"nodes": 2, "gpus": 4}, "config": b.COLOCATE}
PAIRS = {"custom": {"extra": {"rollout_matching": {"vllm": {"tensor_parallel_size": 2}}}}}


@pytest.mark.parametrize(
    ("namespace", "spec", "refused"),
    [
        ("team-a", {"rollout": {"servers": 7}}, ""),
        ("team-a", {"rollout": {"servers": 8}}, "have 8 GPUs"),
        ("team-a", {"rollout": {"servers": 4, "gpusPerServer": 2}, "config": PAIRS}, "have 8 GPUs"),
        ("team-a", {"rollout": {"servers": 0}, "learner": {"gpus": 8}, "config": b.COLOCATE}, ""),
        ("team-a", {"rollout": {"servers": 0}, "learner": {"gpus": 9}, "config": b.COLOCATE}, "have 8 GPUs"),
        ("team-a", NODES, ""),
        ("team-b", NODES, "have 4 GPUs"),
        ("team-b", {"rollout": {"servers": 3}}, ""),
        ("team-b", {"rollout": {"servers": 4}}, "have 4 GPUs"),
        ("team-b", {"rollout": {"servers": 16}, "gpuResource": ""}, ""),
        ("idle", {"rollout": {"servers": 3}}, "have 0 GPUs"),
    ],
)
def test_largest_job_policy_limits_gpus_per_namespace(
    template: Template, namespace: str, spec: dict[str, Any], refused: str
) -> None:
    manifests = template('policy.largestJob={"team-a": 8, "*": 4, "idle": 0}')
    raw = b.job(**spec)
    raw["metadata"]["namespace"] = namespace
    reported = refusals(raw, policy_of(manifests)), admitted(manifests[POLICY], raw)
    if not refused:
        assert reported == ("", "")
    for message in reported:
        assert re.search(refused, message), message


def test_job_size_is_unlimited_without_largest_job_policy(template: Template) -> None:
    raw = b.job(rollout={"servers": 16})
    for value in ("policy.largestJob={}", 'policy.largestJob={"team-b": 1}'):
        manifests = template(value)
        assert refusals(raw, policy_of(manifests)) == admitted(manifests[POLICY], raw) == ""


@pytest.mark.parametrize(
    ("value", "asked_s", "has_s"), [(0, 2**31 - 1, 2**31 - 1), (60, 61, 60), (60, 3600, 60), (60, 59, 59)]
)
def test_start_deadline_is_capped_by_policy(template: Template, value: int, asked_s: int, has_s: int) -> None:
    manifests = template(f"policy.longestStartSeconds={value}")
    policy, raw = policy_of(manifests), b.job(learner={"gpus": 1, "startDeadlineSeconds": asked_s})
    assert (refusals(raw, policy), admitted(manifests[POLICY], raw)) == ("", "")
    made = parse(raw, replace(b.SETTINGS, policy=policy))
    assert made.job.spec.learner.start_deadline_seconds == has_s
    assert made.spec_hash == parse(raw, b.SETTINGS).spec_hash, "a policy makes it no other job"


FIVE = {"limits": {"nvidia.com/gpu": 5}}


@pytest.mark.parametrize(
    "spec",
    [
        {"gpuResource": "", "learner": {"gpus": 0, "resources": FIVE}},
        {"learner": {"gpus": 1, "template": {"spec": {"containers": [{"name": "mine", "resources": FIVE}]}}}},
        {"learner": {"gpus": 1, "template": {"spec": {"initContainers": [{"name": "mine", "resources": FIVE}]}}}},
        {"learner": {"gpus": 1, "resources": {"limits": {"nvidia.com/mig-1g.10gb": 5}}}},
        {"rollout": {"servers": 3, "resources": {"requests": {"amd.com/gpu": 2}}}},
    ],
    ids=["in its resources", "a container of its own", "one that runs first", "parts of GPUs", "of another maker"],
)
def test_devices_of_any_name_and_container_count_for_largest_job(template: Template, spec: dict[str, Any]) -> None:
    policy = policy_of(template('policy.largestJob={"*": 4}'))
    assert re.search("have 4 GPUs, or other devices of one kind", refusals(b.job(**spec), policy))
