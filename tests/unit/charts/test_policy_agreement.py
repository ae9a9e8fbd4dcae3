"""Admission and controller judge a job alike: each document goes through the chart's CEL and through the controller.

They are compared by the values of the chart that their refusals name, so that neither may refuse for another reason.
"""

import copy
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from stage2_api.errors import ConfigError
from stage2_api.parsing import parse_job
from stage2_controller.job import template_rules
from stage2_controller.job.settings import AdminPolicy, read_policy
from tests.unit.api.api_server import admitted
from tests.unit.charts.conftest import Template
from tests.unit.charts.test_policy import (
    POLICY,
    account,
    env_of,
    of_pod,
    policy_of,
    security,
    token_for,
    volume,
    with_container,
)
from tests.unit.controller import builders as b

LISTED = (
    'policy.hostPaths=["/data", "/slashed/"]',
    'policy.writableHostPaths=["/data/out", "/data/out/listed-below"]',
    'policy.imageRegistries=["my/trainer"]',
    'policy.labels=["team"]',
    'policy.annotations=["team.example/cost-centre"]',
    'policy.pullSecrets=["registry"]',
    'policy.serviceAccounts=["trainer"]',
    'policy.secrets=["hub-token"]',
    'policy.configMaps=["settings"]',
    'policy.claims=["data"]',
    'policy.nfs=["files.example:/export", "open.example:/"]',
    'policy.storageClasses=["fast"]',
    "policy.groups=[5000]",
    'policy.resourceClaimTemplates=["one-gpu"]',
)
HARD = "a rule that no value lifts"
NONE: set[str] = set()


def claim(**spec: Any) -> dict[str, Any]:
    return volume(ephemeral={"volumeClaimTemplate": {"spec": {"storageClassName": "fast", **spec}}})


def nfs(server: Any, path: Any) -> dict[str, Any]:
    return volume(nfs={"server": server, "path": path})


def annotated(**annotations: str) -> dict[str, Any]:
    return {"metadata": {"annotations": {key.replace("__", "/"): value for key, value in annotations.items()}}}


def mounts(source: Mapping[str, Any], *of_container: Mapping[str, Any], container: str = "learner") -> dict[str, Any]:
    template = with_container(container, image="my/trainer", volumeMounts=list(of_container))
    return {"spec": {**template["spec"], "volumes": [{"name": "v", **source}]}}


def of_job(*mounted: Mapping[str, Any], **template: Any) -> dict[str, Any]:
    """A whole spec with volumes of the job itself."""
    named = [{"name": f"v{index}", "mountPath": f"/v{index}", **one} for index, one in enumerate(mounted)]
    return {"volumes": named, "learner": {"gpus": 1, "template": template}}


def folder(path: Any, **more: Any) -> dict[str, Any]:
    return {"hostPath": {"path": path}, **more}


def remounted(**mount: Any) -> dict[str, Any]:
    return with_container(volumeMounts=[{"mountPath": "/v0", **mount}])


READ_ONLY, OUT = folder("/data", readOnly=True), folder("/data/out")
SPECS: list[tuple[dict[str, Any], set[str]]] = [
    # the spec of a job, and the values of the chart that keep it out
    (of_job(READ_ONLY), set()),
    (of_job(folder("/data/models/", readOnly=True)), set()),
    (of_job(folder("/slashed", readOnly=True), folder("/slashed/x", readOnly=True)), set()),
    (of_job(folder("/slashed-not", readOnly=True)), {"hostPaths"}),
    (of_job(folder("/data")), {"writableHostPaths"}),
    (of_job(folder("/data", readOnly=False)), {"writableHostPaths"}),
    (of_job(OUT), set()),
    (of_job(folder("/data/out/")), set()),
    (of_job(folder("/data/output")), {"writableHostPaths"}),
    (of_job(folder("/data/out/link", readOnly=True)), {"writableHostPaths"}),
    (of_job(folder("/data/out/listed-below", readOnly=True)), {"writableHostPaths"}),
    *(
        (of_job(folder(path, readOnly=True)), {"hostPaths"})
        for path in (
            *("/data//out/link", "/data/./out/link", "/data/x/../out/link", "/./data", "//data", "/data/.", "/data//"),
            *("/data/..", "/database", "/", "data", "/dat"),
        )
    ),
    (of_job({"persistentVolumeClaim": {"claimName": "data"}}), set()),
    (of_job({"persistentVolumeClaim": {"claimName": "others"}}), {"claims"}),
    (of_job({"configMap": {"name": "settings"}}), set()),
    (of_job({"configMap": {"name": "others-config"}}), {"configMaps"}),
    (of_job({"secret": {"secretName": "hub-token"}}), set()),
    (of_job({"secret": {"secretName": "others"}}), {"secrets"}),
    (of_job({"nfs": {"server": "files.example", "path": "/export/a"}}), set()),
    (of_job({"nfs": {"server": "files.example", "path": "/exports"}}), {"nfs"}),
    (of_job({"emptyDir": {}}), set()),
    # a template mounts a volume of the job once more, or changes the folder behind it
    (of_job(READ_ONLY, **remounted(name="v0", readOnly=True)), set()),
    (of_job(READ_ONLY, **remounted(name="v0")), {"writableHostPaths"}),
    (of_job(READ_ONLY, **remounted(name="v0", readOnly=False)), {"writableHostPaths"}),
    (of_job(READ_ONLY, **remounted(readOnly=False)), {"writableHostPaths"}),
    (of_job(READ_ONLY, **remounted(subPath="x")), set()),
    (of_job(READ_ONLY, OUT, **remounted(name="v1", readOnly=False)), set()),
    (of_job(OUT, **of_pod(volumes=[{"name": "v0", "hostPath": {"path": "/data"}}])), {"writableHostPaths"}),
    (of_job(READ_ONLY, **of_pod(volumes=[{"name": "v0", "hostPath": {"type": ""}}])), {"hostPaths"}),
    ({"image": "my/trainer:1"}, set()),
    ({"image": "evil/x"}, {"imageRegistries"}),
    ({"imagePullSecrets": [{"name": "others"}]}, {"pullSecrets"}),
]
TEMPLATES: list[tuple[dict[str, Any], set[str]]] = [
    # a template of servers or learner, and the values of the chart that keep it out
    (annotated(team_cost="1") | annotated(**{"team.example__cost-centre": "1"}), set()),
    *(
        (annotated(**{key: "x"}), {"annotations"})
        for key in (
            *("k8s.v1.cni.cncf.io__networks", "iam.amazonaws.com__role", "vault.hashicorp.com__agent-inject"),
            *("team.example__cost-centres", "team.example"),
        )
    ),
    ({"metadata": {"labels": {"app": "payments"}}}, {"labels"}),
    (nfs("files.example", "/export"), set()),
    (nfs("files.example", "/export/"), set()),
    (nfs("files.example", "/export/a"), set()),
    (nfs("open.example", "/a"), set()),
    (nfs("files.example", "/export/../etc"), {"nfs"}),
    (nfs("files.example", "/exported"), {"nfs"}),
    (nfs("files.example", "/"), {"nfs"}),
    (nfs("files.example.evil", "/export"), {"nfs"}),
    (nfs("10.0.0.1", "/export"), {"nfs"}),
    *((nfs(f"files.example:/export{more}", "/x"), {"nfs"}) for more in ("", "/a", "/..")),  # the server ends at :/
    (nfs("open.example:", "/a"), {"nfs"}),
    (nfs("open.example", "/"), set()),
    (nfs("open.example", ""), {"nfs"}),
    (nfs("", "/export"), {"nfs"}),
    (volume(nfs={"server": "open.example"}), {"nfs"}),
    (volume(nfs={}), {"nfs"}),
    (volume(persistentVolumeClaim={"claimName": "data"}), set()),
    (volume(persistentVolumeClaim={"claimName": "others"}), {"claims"}),
    (volume(persistentVolumeClaim={"readOnly": False}), {"claims"}),
    (volume(configMap={"name": "settings"}), set()),
    (volume(configMap={"name": "others"}), {"configMaps"}),
    (volume(configMap={"optional": True}), {"configMaps"}),
    (volume(projected={"sources": [{"configMap": {"name": "settings"}}]}), set()),
    (volume(projected={"sources": [{"downwardAPI": {}}, {"configMap": {"name": "others"}}]}), {"configMaps"}),
    (volume(projected={"sources": [{"configMap": {}}]}), {"configMaps"}),
    (volume(projected={"sources": [{"secret": {}}]}), {"secrets"}),
    (volume(secret={"defaultMode": 256}), {"secrets"}),
    (env_of("settings", "configMapKeyRef"), set()),
    (env_of("others", "configMapKeyRef"), {"configMaps"}),
    (env_of("others", "secretKeyRef"), {"secrets"}),
    (with_container(env=[{"name": "A", "valueFrom": {"secretKeyRef": {"key": "k"}}}]), {"secrets"}),
    (with_container(env=[{"name": "A", "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}}}]), set()),
    (with_container(envFrom=[{"configMapRef": {"name": "settings"}}]), set()),
    (with_container(envFrom=[{"configMapRef": {"name": "others"}}]), {"configMaps"}),
    (with_container(envFrom=[{"configMapRef": {}}]), {"configMaps"}),
    (with_container(envFrom=[{"secretRef": {}}]), {"secrets"}),
    (claim(), set()),
    (claim(accessModes=["ReadWriteOnce"], resources={"requests": {"storage": "1Gi"}}, volumeMode="Filesystem"), set()),
    (claim(storageClassName="slow"), {"storageClasses"}),
    (claim(storageClassName=""), {"storageClasses"}),
    (volume(ephemeral={"volumeClaimTemplate": {"spec": {"accessModes": ["ReadWriteOnce"]}}}), {"storageClasses"}),
    (volume(ephemeral={}), {"storageClasses"}),
    (claim(volumeName="pv-of-others"), {HARD}),
    (claim(selector={"matchLabels": {"a": "b"}}), {HARD}),
    (claim(dataSource={"kind": "PersistentVolumeClaim", "name": "others"}), {HARD}),
    (claim(dataSourceRef={"kind": "PersistentVolumeClaim", "name": "others", "namespace": "others"}), {HARD}),
    (
        volume(
            ephemeral={
                "volumeClaimTemplate": {
                    "metadata": {"annotations": {"volume.beta.kubernetes.io/storage-class": "x"}},
                    "spec": {"storageClassName": "fast"},
                }
            }
        ),
        {HARD},
    ),
    *((of_pod(securityContext={key: 5000}), set()) for key in ("runAsGroup", "fsGroup")),
    *((of_pod(securityContext={key: 10001}), set()) for key in ("runAsGroup", "fsGroup")),
    *((of_pod(securityContext={key: 6000}), {"groups"}) for key in ("runAsGroup", "fsGroup")),
    *((of_pod(securityContext={key: 0}), {"groups", HARD}) for key in ("runAsGroup", "fsGroup")),
    (of_pod(securityContext={"supplementalGroups": [5000, 10001]}), set()),
    (of_pod(securityContext={"supplementalGroups": [5000, 44]}), {"groups"}),
    (of_pod(securityContext={"supplementalGroups": [0]}), {"groups", HARD}),
    (with_container(securityContext={"runAsGroup": 5000}), set()),
    (with_container(securityContext={"runAsGroup": 6000}), {"groups"}),
    (with_container(securityContext={"runAsGroup": 0}), {"groups", HARD}),
    (with_container("side", image="my/trainer", securityContext={"runAsGroup": 0}), {"groups", HARD}),
    ({"spec": {"initContainers": [{"name": "i", "image": "my/trainer", "securityContext": {"runAsGroup": 0}}]}},
     {"groups", HARD}),
    # fields that training does not need
    *(
        (volume(**{kind: source}), {HARD})
        for kind, source in (
            ("csi", {"driver": "secrets-store.csi.k8s.io"}),
            ("image", {"reference": "x"}),
            ("gitRepo", {"repository": "x"}),
            ("iscsi", {"targetPortal": "x"}),
        )
    ),
    *(
        ({"metadata": {key: value}}, {HARD})
        for key, value in (
            ("finalizers", ["a.example/b"]), ("namespace", "kube-system"), ("name", "x"), ("generateName", "x"),
            ("ownerReferences", [{"kind": "Node"}]),
        )
    ),
    ({"status": {}}, {HARD}),
    *(
        (of_pod(**{key: value}), {HARD})
        for key, value in (
            ("shareProcessNamespace", True), ("hostname", "x"), ("priority", 1), ("affinity", {}),
            ("ephemeralContainers", [{"name": "x"}]), ("restartPolicy", "Always"), ("hostPID", False),
            ("nodeName", "x"), ("overhead", {"cpu": 1}),
            ("resourceClaims", [{"name": "c"}]), ("resources", {"claims": [{"name": "c"}]}),
        )
    ),
    *(
        (with_container(name, image="my/trainer", **{key: value}), {HARD})
        for name in ("learner", "side")
        for key, value in (
            ("restartPolicyRules", [{"action": "Restart"}]), ("volumeDevices", [{"devicePath": "/dev/x", "name": "v"}]),
            ("resources", {"claims": [{"name": "c"}]}), ("tty", True),
            *(("lifecycle", {hook: {"httpGet": {"host": "10.0.0.1"}}}) for hook in ("preStop", "postStart")),
            ("lifecycle", {"preStop": {"tcpSocket": {"host": "10.0.0.1", "port": 1}}}),
            *((f"{one}Probe", {"httpGet": {"host": "10.0.0.1"}}) for one in ("liveness", "readiness", "startup")),
            ("livenessProbe", {"tcpSocket": {"host": "10.0.0.1"}}),
        )
    ),
    *(
        (with_container("side", image="my/trainer", ports=[{"containerPort": 1, key: 1}]), {HARD})
        for key in ("hostPort", "hostIP")
    ),
    *(
        (with_container("side", image="my/trainer", **{key: value}), set())
        for key, value in (
            ("lifecycle", {"preStop": {"exec": {"command": ["host"]}}}),
            ("livenessProbe", {"httpGet": {"port": 1, "httpHeaders": [{"name": "host", "value": "a"}]}}),
            ("livenessProbe", {"grpc": {"port": 1}, "periodSeconds": 1}),
            ("ports", [{"containerPort": 1}]),
            ("restartPolicy", "Always"),
        )
    ),
    # numbers of users and groups are whole; an API server stores 5000.0 as 5000
    *(
        (of_pod(securityContext={key: value}), values)
        for key in ("runAsGroup", "fsGroup")
        for value, values in ((5000.0, NONE), (10001.0, NONE), (6000.0, {"groups"}), (0.0, {"groups", HARD}))
    ),
    (of_pod(securityContext={"fsGroup": 5000.5}), {"groups", HARD}),
    (of_pod(securityContext={"supplementalGroups": [5000.0]}), set()),
    (of_pod(securityContext={"supplementalGroups": [5000, 0.5]}), {"groups", HARD}),
    *((security(runAsUser=user), {HARD}) for user in (0, 1000.5, -1)),
    (security(runAsUser=1000.0), set()),
    (security(runAsUser=1000), set()),
    *(
        (security(**{key: value}), {HARD})
        for key, value in (
            ("runAsNonRoot", False), ("procMount", "Unmasked"), ("windowsOptions", {"hostProcess": True}),
            ("privileged", True), ("allowPrivilegeEscalation", True),
            *((profile, {"type": "Unconfined"}) for profile in ("seccompProfile", "appArmorProfile")),
            ("seccompProfile", {}),
            *(("seLinuxOptions", wrong) for wrong in ({"type": "spc_t"}, {"user": "u"}, {"role": "r"})),
            *(("capabilities", wrong) for wrong in ({"add": ["SYS_ADMIN"]}, {"drop": []}, {"drop": ["NET_RAW"]})),
        )
    ),
    *(
        (security(**{key: value}), set())
        for key, value in (
            ("runAsNonRoot", True), ("procMount", "Default"), ("privileged", False), ("readOnlyRootFilesystem", False),
            ("seccompProfile", {"type": "Localhost", "localhostProfile": "a"}),
            ("seLinuxOptions", {"type": "container_t", "level": "s0"}),
            ("capabilities", {"add": ["NET_BIND_SERVICE"], "drop": ["ALL"]}), ("capabilities", {}),
        )
    ),
    (of_pod(securityContext={"sysctls": [{"name": "kernel.x", "value": "1"}]}), {HARD}),
    (of_pod(securityContext={"privileged": False}), {HARD}),
    (of_pod(securityContext={"fsGroupChangePolicy": "Always", "supplementalGroupsPolicy": "Strict"}), set()),
    (mounts(folder("/data"), {"name": "v", "mountPath": "/v", "readOnly": True}), set()),
    (mounts(folder("/data"), {"name": "v", "mountPath": "/v"}), {"writableHostPaths"}),
    (mounts(folder("/data"), {"name": ["v"], "mountPath": "/v"}), set()),  # no pod can have it
    (mounts(folder("/data"), {"name": "v", "mountPath": "/v"}, container="side"), {"writableHostPaths"}),
    (mounts(folder("/data/out"), {"name": "v", "mountPath": "/v"}), set()),
    (mounts(folder("/data/out/x"), {"name": "v", "mountPath": "/v", "readOnly": True}), {"writableHostPaths"}),
    (mounts(folder("/etc"), {"name": "v", "mountPath": "/v", "readOnly": True}), {"hostPaths"}),
    (
        {
            "spec": {
                "initContainers": [
                    {"name": "i", "image": "my/trainer", "volumeMounts": [{"name": "v", "mountPath": "/v"}]}
                ],
                "volumes": [{"name": "v", "hostPath": {"path": "/data"}}],
            }
        },
        {"writableHostPaths"},
    ),
    (volume(hostPath={}), {"hostPaths"}),
    (with_container("side", image=""), {"imageRegistries"}),
    (with_container("side", image="my/trainer"), set()),
    (with_container("learner"), set()),
    (of_pod(serviceAccountName=""), set()),
    (of_pod(serviceAccountName="admin"), {"serviceAccounts"}),
    (of_pod(runtimeClassName=""), set()),
    (of_pod(runtimeClassName="kata"), {"runtimeClasses"}),
    (of_pod(imagePullSecrets=[{"name": "others"}]), {"pullSecrets"}),
    (account("trainer", projected=token_for("vault")), set()),
]  # fmt: skip
EVERYTHING = tuple(
    f'policy.{key}=["*"]'
    for key in (
        *("hostPaths", "writableHostPaths", "imageRegistries", "labels", "annotations", "pullSecrets", "secrets"),
        *("serviceAccounts", "configMaps", "claims", "nfs", "storageClasses", "groups", "runtimeClasses"),
        "resourceClaimTemplates",
    )
)


def named_by_controller(raw: Mapping[str, Any], policy: AdminPolicy) -> set[str]:
    """The values that the controller's refusals name."""
    job, reported = parse_job(raw), set()
    try:
        template_rules.check(job)
    except ConfigError:
        reported.add(HARD)
    try:
        policy.check(job)
    except ConfigError as error:
        for problem in error.problems:
            reported |= set(re.findall(r"policy\.(\w+)", problem.way_out)) or {HARD}
    return reported


def named_by_admission(manifest: Mapping[str, Any], raw: Mapping[str, Any], old: Any = None) -> set[str]:
    """The same of the API server's refusals, one on each line. old: the job that an edit changes."""
    lines = admitted(manifest, raw, old).splitlines()
    return {name for line in lines for name in re.findall(r"policy\.(\w+)", line) or [HARD]}


def documents() -> list[tuple[dict[str, Any], set[str]]]:
    for_both = [
        ({role: {**({"servers": 3} if role == "rollout" else {"gpus": 1}), "template": template}}, values)
        for template, values in TEMPLATES
        for role in ("rollout", "learner")
        if role == "learner" or "'name': 'learner'" not in str(template)
    ]
    written = [*SPECS, *for_both]
    return [(b.job(**{"image": "my/trainer", "volumes": [], **spec}), values) for spec, values in written]


def test_admission_policy_and_controller_refuse_same_documents(template: Template) -> None:
    manifests = template(*LISTED)
    policy = policy_of(manifests)
    judged = {
        json.dumps(raw["spec"]): (named_by_controller(raw, policy), named_by_admission(manifests[POLICY], raw), values)
        for raw, values in documents()
    }
    assert len(judged) > 150
    assert {spec: one for spec, one in judged.items() if not one[0] == one[1] == one[2]} == {}


def test_admission_policy_and_controller_allow_same_fields(template: Template) -> None:
    (listed,) = [one for one in template()[POLICY]["spec"]["variables"] if one["name"] == "unknownFields"]
    written = [set(re.findall("'([^']*)'", one)) for one in re.findall(r"k in (\[.*?\])", listed["expression"])]
    assert written == [
        {"metadata", "spec"},
        template_rules.OF_METADATA,
        template_rules.OF_POD,
        template_rules.OF_POD_SECURITY,
        template_rules.VOLUMES,
        template_rules.OF_CONTAINER,
        template_rules.OF_CONTAINER_SECURITY,
    ]


def test_admission_refusal_names_fields(template: Template) -> None:
    raw = b.job(learner={"gpus": 1, "template": of_pod(hostPID=True, volumes=[{"name": "v", "csi": {"driver": "x"}}])})
    assert "hostPID, csi: no field that training needs" in admitted(template()[POLICY], raw)


def test_star_in_policy_lifts_every_liftable_rule(template: Template) -> None:
    manifests = template(*EVERYTHING)
    policy = policy_of(manifests)
    for raw, values in documents():
        lifted = values & {HARD}
        judged = named_by_controller(raw, policy), named_by_admission(manifests[POLICY], raw)
        assert judged == (lifted, lifted), raw["spec"]


def test_default_policy_allows_only_objects_of_job(template: Template) -> None:
    manifests = template('policy.imageRegistries=["my/trainer"]')
    policy = policy_of(manifests)
    for spec, value in (
        (of_job({"persistentVolumeClaim": {"claimName": "data"}}), "claims"),
        (of_job({"configMap": {"name": "settings"}}), "configMaps"),
        (of_job({"nfs": {"server": "files.example", "path": "/export"}}), "nfs"),
        (of_job(READ_ONLY), "hostPaths"),
        (of_job(**claim()), "storageClasses"),
        (of_job(**of_pod(securityContext={"fsGroup": 5000})), "groups"),
        (of_job(**annotated(a="b")), "annotations"),
    ):
        raw = b.job(image="my/trainer", **spec)
        found = named_by_controller(raw, policy), named_by_admission(manifests[POLICY], raw)
        assert all(value in one for one in found), (value, found)
        assert f"ask the admin to add it to policy.{value}" in admitted(manifests[POLICY], raw)


@pytest.mark.parametrize("allowed", [False, True])
def test_jobs_may_carry_reward_files_only_if_chart_value_allows_it(template: Template, allowed: bool) -> None:
    manifests = template(*EVERYTHING, f"policy.rewardFiles={json.dumps(allowed)}")
    raw = yaml.safe_load((Path(b.__file__).parents[3] / "examples" / "job-grpo-objects.yaml").read_text())
    rlhf = raw["spec"]["config"]["rlhf"]
    rlhf["reward_funcs"][0] = "mine.py:small"
    rlhf["reward_files"] = {"mine.py": "def small(sample):\n    return 1.0\n"}
    named = NONE if allowed else {"rewardFiles"}
    judged = named_by_controller(raw, policy_of(manifests)), named_by_admission(manifests[POLICY], raw)
    assert judged == (named, named)
    if not allowed:
        without = copy.deepcopy(raw)
        rlhf["reward_files"] = {"mine.py": "def small(sample):\n    return 2.0\n"}
        assert named_by_admission(manifests[POLICY], raw, without) == named, "an edit brings new code"
        assert named_by_admission(manifests[POLICY], raw, raw) == NONE, "a job that runs is suspended"


def test_default_policy_allows_any_registry_and_nvidia_runtime_class(template: Template) -> None:
    assert policy_of(template()) == AdminPolicy(
        host_paths=(),
        writable_host_paths=(),
        nfs=(),
        claims=(),
        storage_classes=(),
        config_maps=(),
        image_registries=("*",),
        labels=(),
        annotations=(),
        groups=(),
        pull_secrets=(),
        service_accounts=(),
        secrets=(),
        runtime_classes=("nvidia",),
        resource_claim_templates=(),
        reward_files=False,
        longest_start_seconds=86_400,
    )


def test_writable_star_allows_listed_host_paths_but_not_their_subfolders(template: Template) -> None:
    """But what is below may be a link that a job has written, and leads anywhere."""
    manifests = template('policy.hostPaths=["/data"]', 'policy.writableHostPaths=["*"]')
    policy = policy_of(manifests)
    for path, values in (
        ("/data", set()),
        ("/data/link", {"writableHostPaths"}),
        ("/etc", {"hostPaths", "writableHostPaths"}),
    ):
        raw = b.job(**of_job(folder(path)))
        judged = named_by_controller(raw, policy), named_by_admission(manifests[POLICY], raw)
        assert judged == (values, values), path


@pytest.mark.parametrize(
    "override",
    [
        volume(hostPath="/data"),
        volume(nfs="files.example:/export"),
        volume(configMap="settings"),
        volume(secret=["hub-token"]),
        volume(persistentVolumeClaim="data"),
        volume(ephemeral="x"),
        volume(ephemeral={"volumeClaimTemplate": {"spec": "x"}}),
        volume(projected={"sources": [{"configMap": "settings"}]}),
        volume(hostPath={"path": 5}),
        volume(nfs={"server": 5, "path": "/export"}),
        with_container(env=[{"name": "A", "valueFrom": "hub-token"}]),
        with_container(env=[{"name": "A", "valueFrom": {"secretKeyRef": "hub-token"}}]),
        with_container(envFrom=[{"configMapRef": "settings"}]),
        of_pod(securityContext={"supplementalGroups": 5000}),
        of_pod(securityContext={"supplementalGroups": ["5000"]}),
        of_pod(securityContext={"fsGroup": "5000"}),
        of_pod(securityContext={"fsGroup": True}),
        of_pod(securityContext={"runAsGroup": -1}),
    ],
    ids=str,
)
def test_template_part_of_wrong_type_is_refused_by_both(template: Template, override: dict[str, Any]) -> None:
    """Where a rule of admission ends in an error, the API server refuses the job."""
    manifests = template(*LISTED)
    raw = b.job(image="my/trainer", volumes=[], learner={"gpus": 1, "template": override})
    assert named_by_controller(raw, policy_of(manifests))
    try:
        reported = admitted(manifests[POLICY], raw)
    except AssertionError as error:
        reported = str(error)
    assert reported


SCALED = {"team-a": 8, "*": 4}


@pytest.mark.parametrize(
    ("namespace", "servers", "refused"),
    [("team-a", 7, False), ("team-a", 8, True), ("team-b", 3, False), ("team-b", 4, True), ("team-b", 0, False)],
)
def test_scaling_respects_largest_job_policy(template: Template, namespace: str, servers: int, refused: bool) -> None:
    """At `/scale` the API server shows only the number of servers: each has at least one GPU, and the learner one."""
    manifest = template(f"policy.largestJob={json.dumps(SCALED)}")[POLICY]
    (rule,) = manifest["spec"]["matchConstraints"]["resourceRules"]
    assert rule["resources"] == ["rolloutmatchingjobs", "rolloutmatchingjobs/scale"]
    replicas = {"replicas": servers} if servers else {}  # the API server leaves a zero out
    scale = {"metadata": {"name": "a", "namespace": namespace}, "spec": replicas}
    before = {**scale, "spec": {"replicas": 2}}
    reported = admitted(manifest, scale, before, subresource="scale")
    assert bool(reported) is refused
    if refused:
        assert f"{servers + 1}; ask for fewer, or ask the admin to raise policy.largestJob" in reported
    raw = b.job(rollout={"servers": servers or 1}, volumes=[])
    raw["metadata"]["namespace"] = namespace
    assert bool(admitted(manifest, raw)) is refused, "the job itself, with one GPU for each"


EXAMPLES = sorted((Path(__file__).parents[3] / "examples").glob("job-*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_need_only_policy_value_named_in_their_comment(template: Template, path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    (raw,) = yaml.safe_load_all(text)
    named = set(re.findall(r"policy\.claims", text))
    manifests = template()
    judged = named_by_controller(raw, policy_of(manifests)), named_by_admission(manifests[POLICY], raw)
    assert judged == ((wanted := {key.removeprefix("policy.") for key in named}), wanted)
    manifests = template('policy.claims=["models", "data", "output"]')
    assert (named_by_controller(raw, policy_of(manifests)), admitted(manifests[POLICY], raw)) == (set(), "")


def test_policy_path_may_end_in_slash() -> None:
    policy = read_policy('{"hostPaths": ["/data/"], "writableHostPaths": ["/data/out/"], "nfs": ["a.example:/"]}')
    assert (policy.host_paths, policy.writable_host_paths, policy.nfs) == (("/data",), ("/data/out",), ("a.example:",))
