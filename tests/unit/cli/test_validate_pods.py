"""`stage2 validate` sees what the pods of a job would: where they write, what they read, what nodes refuse."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from stage2_cli.validate import validate_files
from tests.unit.api.wrong_jobs import merge_patch

ROOT = Path(__file__).parents[3]
OUTPUT = "spec.config.training.output_dir"


def example(name: str = "job-3v1") -> dict[str, Any]:
    loaded: dict[str, Any] = yaml.safe_load((ROOT / "examples" / f"{name}.yaml").read_text(encoding="utf-8"))
    return loaded


def configured(**config: Any) -> dict[str, Any]:
    return {"config": config}


def writes_to(folder: str, **spec: Any) -> dict[str, Any]:
    return merge_patch(configured(training={"output_dir": folder}), spec)


def volumes(**output: Any) -> dict[str, Any]:
    """The volumes of the example, with another one for the output."""
    models, data, _ = example()["spec"]["volumes"]
    return {"volumes": [models, data, {"name": "output", "mountPath": "/output", **output}]}


def of_role(role: str, *containers: dict[str, Any], **pod: Any) -> dict[str, Any]:
    return {role: {"template": {"spec": {**({"containers": list(containers)} if containers else {}), **pod}}}}


def resources(role: str, requests: dict[str, Any], limits: dict[str, Any]) -> dict[str, Any]:
    return {role: {"resources": {"requests": requests, "limits": limits}}}


def mounting(mount: dict[str, Any]) -> dict[str, Any]:
    return of_role("learner", {"name": "learner", "volumeMounts": [mount]})


def limits(**amounts: Any) -> dict[str, Any]:
    """Resources of a container or a pod, with `__` for a slash."""
    return {"resources": {"limits": {key.replace("__", "/").replace("_", "."): one for key, one in amounts.items()}}}


NIC = "a.example/nic"
MORE = {"name": "more", "persistentVolumeClaim": {"claimName": "more"}}
AT_MORE = {"name": "more", "mountPath": "/more"}
LEARNER = "spec.learner.template.spec"
CLAIM = {"persistentVolumeClaim": {"claimName": "output"}}
WRONG: list[tuple[dict[str, Any], str, str]] = [
    # a change of job-3v1, the path that is named, and words of the rule or of the way out
    (writes_to("/srv/output"), OUTPUT, "in no volume"),
    (writes_to("/outputs/run"), OUTPUT, "in no volume"),
    (writes_to("/output/../var/run"), OUTPUT, "in no volume"),
    (writes_to("/"), OUTPUT, "in no volume"),
    (writes_to("/models/run"), OUTPUT, "read-only"),
    (writes_to("/data/../models"), OUTPUT, "read-only"),
    (writes_to("/etc/stage2/config/run"), OUTPUT, "read-only"),
    (writes_to("/dev/shm/run"), OUTPUT, "memory"),
    (volumes(**CLAIM, readOnly=True), OUTPUT, "read-only"),
    (volumes(persistentVolumeClaim={"claimName": "output", "readOnly": True}), OUTPUT, "read-only"),
    (volumes(nfs={"server": "a.example", "path": "/x", "readOnly": True}), OUTPUT, "read-only"),
    (volumes(configMap={"name": "c"}), OUTPUT, "read-only"),
    (volumes(secret={"secretName": "s"}), OUTPUT, "read-only"),
    (
        mounting({"mountPath": "/output", "name": "output", "readOnly": True}),
        OUTPUT,
        "read-only",
    ),
    (
        mounting({"mountPath": "/output/job-3v1", "name": "data", "readOnly": True}),
        OUTPUT,
        "read-only",
    ),
    (configured(model={"model": "/srv/model"}), "spec.config.model.model", "in no volume"),
    (configured(model={"model": "/modelsx/m"}), "spec.config.model.model", "in no volume"),
    (configured(model={"model": "/dev/shm/model"}), "spec.config.model.model", "empty"),
    (configured(custom={"train_jsonl": "/srv/train.jsonl"}), "spec.config.custom.train_jsonl", "in no volume"),
    (configured(custom={"train_jsonl": "/tmp/train.jsonl"}), "spec.config.custom.train_jsonl", "empty"),
    (configured(custom={"val_jsonl": "/srv/val.jsonl"}), "spec.config.custom.val_jsonl", "in no volume"),
    (configured(custom={"image_roots": ["/data/a", "/srv/b"]}), "spec.config.custom.image_roots[1]", "in no volume"),
    (configured(custom={"val_jsonl": "val.jsonl"}), "spec.config.custom.val_jsonl", "empty"),
    (resources("learner", {"memory": "64Gi"}, {"memory": "8Gi"}), "spec.learner.resources.limits[memory]", "at least"),
    (resources("rollout", {"cpu": 4}, {"cpu": "500m"}), "spec.rollout.resources.limits[cpu]", "at least"),
    (resources("learner", {NIC: 1}, {NIC: 2}), f"spec.learner.resources.limits[{NIC}]", "equal"),
    (resources("learner", {NIC: 1}, {}), f"spec.learner.resources.limits[{NIC}]", "equal"),
    (
        of_role("learner", {"name": "learner", "resources": {"limits": {"memory": "8Gi"}}}),
        "spec.learner.template.spec.containers[learner].resources.limits[memory]",
        "at least",
    ),
    (
        of_role("rollout", {"name": "server-1", "resources": {"limits": {"memory": "1Gi"}}}),
        "spec.rollout.template.spec.containers[server-1].resources.limits[memory]",
        "at least",
    ),
    (
        of_role("rollout", {"name": "logs", "image": "x", "resources": {"requests": {"cpu": 2}, "limits": {"cpu": 1}}}),
        "spec.rollout.template.spec.containers[logs].resources.limits[cpu]",
        "at least",
    ),
    (
        of_role("learner", {"name": "learner", "resources": {"requests": {"memory": "64 GB"}}}),
        "spec.learner.template.spec.containers[learner].resources.requests[memory]",
        "amount",
    ),
    *(
        (resources("learner", {"memory": one}, {"memory": "60Gi"}), "spec.learner.resources.limits[memory]", "at least")
        for one in ("67108864Ki", "68e9", "68E9", "68719476736000m", "68.8G", 68719476736, "0.1Ti")
    ),
    (resources("learner", {}, {NIC: "1500m"}), f"spec.learner.resources.limits[{NIC}]", "whole"),
    *(
        (resources("learner", {}, {"memory": wrong}), "spec.learner.resources.limits.memory", "of the form")
        for wrong in ("64ki", "64mi", "64K", "6.4.1Gi", "1e3Gi", "64 Gi", "64GB", ".")
    ),
    (volumes(emptyDir={"sizeLimit": "5ki"}), "spec.volumes[2].emptyDir.sizeLimit", "of the form"),
    (
        of_role("learner", volumes=[{"name": "q", "emptyDir": {"sizeLimit": "5 GB"}}]),
        "spec.learner.template.spec.volumes[q].emptyDir.sizeLimit",
        "amount",
    ),
    (
        of_role(
            "rollout",
            volumes=[
                {
                    "name": "q",
                    "ephemeral": {"volumeClaimTemplate": {"spec": {"resources": {"requests": {"storage": "-1Gi"}}}}},
                }
            ],
        ),
        "spec.rollout.template.spec.volumes[q].ephemeral.volumeClaimTemplate.spec.resources.requests[storage]",
        "amount",
    ),
    (resources("learner", {"memory": "16Mi"}, {"memory": "64Mi"}), "spec.learner.resources.limits[memory]", "/dev/shm"),
    (
        {
            **configured(model={"model": "/more/model"}),
            **of_role("learner", {"name": "learner", "volumeMounts": [AT_MORE]}, volumes=[MORE]),
        },
        "spec.config.model.model",
        "server-0",
    ),
    (
        {
            **configured(model={"model": "/more/model"}),
            **of_role("learner", {"name": "learner", "volumeMounts": [AT_MORE]}, volumes=[MORE]),
            **of_role("rollout", {"name": "server-0", "volumeMounts": [AT_MORE]}, volumes=[MORE]),
        },
        "spec.config.model.model",
        "server-1",
    ),
    # a whole pod's resources
    (
        of_role("learner", resources={"requests": {"memory": "64Gi"}, "limits": {"memory": "8Gi"}}),
        f"{LEARNER}.resources.limits[memory]",
        "at least its request",
    ),
    (of_role("learner", resources={"requests": {"memory": "64GB"}}), f"{LEARNER}.resources.requests[memory]", "amount"),
    (of_role("learner", **limits(cpu="2")), f"{LEARNER}.resources.limits[cpu]", "containers request 8"),
    (of_role("learner", resources={"requests": {"cpu": 2}}), f"{LEARNER}.resources.requests[cpu]", "containers"),
    (
        {"learner": {"resources": {"requests": {"cpu": 1}, "limits": {"cpu": 8}}, "template": {"spec": limits(cpu=4)}}},
        f"{LEARNER}.resources.limits[cpu]",
        "limit of learner, 8",
    ),
    (of_role("learner", **limits(nvidia_com__gpu=4)), f"{LEARNER}.resources.limits[nvidia.com/gpu]", "cpu, memory"),
    # room of /dev/shm
    (
        {"learner": {"resources": None, "template": {"spec": limits(memory="64Mi")}}},
        f"{LEARNER}.resources.limits[memory]",
        "/dev/shm",
    ),
    (
        {"learner": {"resources": None, **of_role("learner", {"name": "learner", **limits(memory="64Mi")})["learner"]}},
        f"{LEARNER}.containers[learner].resources.limits[memory]",
        "/dev/shm",
    ),
    (
        {"rollout": {"resources": None, **of_role("rollout", {"name": "server", **limits(memory="1G")})["rollout"]}},
        "spec.rollout.template.spec.containers[server-2].resources.limits[memory]",
        "/dev/shm",
    ),
    # two mounts at one path
    *(
        (
            of_role("learner", {"name": name, "image": "x", "volumeMounts": [data, models]}),
            f"{LEARNER}.containers[{name}].volumeMounts[{models['mountPath']}].mountPath",
            "data",
        )
        for name in ("learner", "side")
        for data, models in (
            ({"name": "data", "mountPath": "/x"}, {"name": "models", "mountPath": "/x"}),
            ({"name": "data", "mountPath": "/x"}, {"name": "models", "mountPath": "/y/../x/"}),
        )
    ),
    (
        mounting({"mountPath": "/data/", "name": "output"}),
        f"{LEARNER}.containers[learner].volumeMounts[/data/].mountPath",
        "data",
    ),
    # GPUs, and what has no such name
    *(
        (
            {role: {"resources": {part: {"nvidia.com/gpu": "4"}}}},
            f"spec.{role}.resources.{part}[nvidia.com/gpu]",
            "counted by the job",
        )
        for role in ("learner", "rollout")
        for part in ("limits", "requests")
    ),
    *(
        ({role: limits(**{name: "1"})}, f"spec.{role}.resources.limits[{name}]", words)
        for role in ("learner", "rollout")
        for name, words in (("gpu", "gpu"), ("gpus", "gpu"), ("mem", "cpu, memory"))
    ),
    (
        of_role("rollout", {"name": "server", **limits(gpu=1)}),
        "spec.rollout.template.spec.containers[server-0].resources.limits[gpu]",
        "spec.rollout.gpusPerServer",
    ),
    (of_role("learner", {"name": "lerner", "env": []}), "spec.learner.template.spec.containers[0].image", "learner"),
    (of_role("rollout", {"name": "sever"}), "spec.rollout.template.spec.containers[0].image", "server"),
    (of_role("rollout", {"name": "server-3"}), "spec.rollout.template.spec.containers[0].image", "server-2"),
    (of_role("learner", {"name": "server"}), "spec.learner.template.spec.containers[0].image", "learner"),
    (
        of_role("learner", initContainers=[{"name": "wait"}]),
        "spec.learner.template.spec.initContainers[0].image",
        "wait-for-servers",
    ),
    (
        mounting({"name": "dat", "mountPath": "/more"}),
        "spec.learner.template.spec.containers[learner].volumeMounts[/more].name",
        "data",
    ),
]  # fmt: skip
RIGHT: list[dict[str, Any]] = [
    {},
    writes_to("/output"),
    writes_to("/output/"),
    writes_to("/data/../output/run"),
    configured(model={"model": "Qwen/Qwen3-VL-8B-Instruct"}),
    configured(custom={"image_roots": ["/data/images"]}),
    resources("learner", {"cpu": 8, "memory": "64Gi"}, {"cpu": "8000m", "memory": "64Gi"}),
    resources("learner", {"cpu": 8}, {"memory": "64Gi"}),
    *(
        resources("learner", {"memory": "64Gi"}, {"memory": same})
        for same in ("67108864Ki", "65536Mi", "68719476736", "68719476736e0", "68719476736000m", "0.0625Ti")
    ),
    resources("learner", {"cpu": "1.1", NIC: "1e0"}, {"cpu": "1100m", NIC: "1000m"}),
    of_role("learner", volumes=[{"name": "q", "emptyDir": {"sizeLimit": "1024Ki"}}]),
    resources("learner", {"a.example/nic": 1}, {"a.example/nic": 1}),
    resources("learner", {}, {"a.example/nic": 1}),
    of_role("rollout", {"name": "server"}, {"name": "server-2"}),
    of_role("learner", {"name": "logs", "image": "x"}),
    of_role("learner", {"name": "logs", "image": "x", **limits(memory="64Mi")}),
    of_role("learner", resources={"requests": {"cpu": 8, "memory": "64Gi"}, "limits": {"memory": "128Gi"}}),
    resources("learner", {"ephemeral-storage": "1Gi", "hugepages-2Mi": "4Mi"}, {"hugepages-2Mi": "4Mi"}),
    mounting({"mountPath": "/data", "name": "output"}),
    {
        **configured(model={"model": "/more/model"}),
        **of_role("learner", {"name": "learner", "volumeMounts": [AT_MORE]}, volumes=[MORE]),
        **of_role("rollout", {"name": "server", "volumeMounts": [AT_MORE]}, volumes=[MORE]),
    },
    {
        **writes_to("/more/run"),
        **of_role(
            "learner",
            {"name": "learner", "volumeMounts": [{"name": "more", "mountPath": "/more"}]},
            volumes=[{"name": "more", "persistentVolumeClaim": {"claimName": "more"}}],
        ),
    },
    {
        **writes_to("/var/run"),
        **of_role("learner", {"name": "learner", "securityContext": {"readOnlyRootFilesystem": False}}),
    },
    {"image": "mine/trainer:1", **configured(custom={"train_jsonl": "/srv/train.jsonl"})},
]


def validated(folder: Path, *patches: dict[str, Any], name: str = "job-3v1") -> int:
    job = example(name)
    for patch in patches:
        job = merge_patch(job, {"spec": patch})
    (folder / "job.yaml").write_text(yaml.safe_dump(job))
    return validate_files([folder / "job.yaml"])


@pytest.mark.parametrize(
    ("patch", "path", "words"), WRONG, ids=[f"{case[1]} {number}" for number, case in enumerate(WRONG)]
)
def test_impossible_pod_setting_is_refused(
    patch: dict[str, Any], path: str, words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validated(tmp_path, patch) == 64
    shown = capsys.readouterr().err
    assert f"  {path}" in shown
    assert words in shown.partition(f"  {path}")[2].partition("fix:")[0] + shown.partition("fix:")[2]


@pytest.mark.parametrize("patch", RIGHT, ids=[str(patch)[:60] for patch in RIGHT])
def test_possible_pod_setting_is_valid(
    patch: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validated(tmp_path, patch) == 0, capsys.readouterr().err


def test_model_path_outside_volumes_is_listed_as_unchecked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validated(tmp_path, {"image": "mine/trainer:1", **configured(model={"model": "/srv/model"})}) == 0
    assert "  not checked: model.model: /srv/model: in no volume" in capsys.readouterr().out


def test_data_file_may_be_created_by_init_container(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    fetch = {"name": "fetch", "image": "x", "volumeMounts": [{"name": "tmp", "mountPath": "/tmp"}]}
    patch = {
        **configured(custom={"train_jsonl": "/tmp/train.jsonl"}),
        **of_role("learner", initContainers=[fetch]),
    }
    assert validated(tmp_path, patch) == 0, capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((ROOT / "examples").glob("job-*.yaml")), ids=lambda path: path.stem)
def test_example_jobs_are_valid(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validate_files([path]) == 0, capsys.readouterr().err


def test_same_mistake_in_all_servers_is_reported_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert validated(tmp_path, resources("rollout", {"memory": "32Gi"}, {"memory": "1Gi"})) == 64
    assert capsys.readouterr().err.count("limits[memory]") == 1


@pytest.mark.parametrize(
    ("folder", "of_learner"),
    [("runs", {}), ("/var/runs", {"securityContext": {"readOnlyRootFilesystem": False}})],
    ids=["relative", "in no volume"],
)
def test_checkpoints_lost_with_pod_cause_warning(
    folder: str, of_learner: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert validated(tmp_path, writes_to(folder), of_role("learner", {"name": "learner", **of_learner})) == 0
    warned = " ".join(capsys.readouterr().err.split())
    assert f"1 warning {OUTPUT}: '{folder}'" in warned
    assert "ends with the learner's pod" in warned
    assert "persistentVolumeClaim" in warned


SETTINGS = {"apiVersion": "v1", "kind": "ConfigMap", "metadata": {"name": "settings"}, "data": {"a": "b"}}
NAMELESS: dict[str, Any] = {"apiVersion": "v1", "kind": "Secret", "metadata": None, "stringData": {"a": "b"}}
NEEDED_CLAIM = {"apiVersion": "v1", "kind": "PersistentVolumeClaim", "metadata": {"name": "output"}, "spec": {}}


def beside(folder: Path, *documents: Any) -> int:
    (folder / "job.yaml").write_text(yaml.safe_dump_all(documents))
    return validate_files([folder / "job.yaml"], changes=["training.max_steps=3"])


def test_other_objects_in_job_file_are_skipped_and_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert beside(tmp_path, SETTINGS, NAMELESS, example(), NEEDED_CLAIM) == 0, capsys.readouterr().err
    shown = capsys.readouterr().out
    assert "valid RolloutMatchingJob" in shown
    assert "  not checked: ConfigMap settings, Secret, PersistentVolumeClaim output" in shown


@pytest.mark.parametrize(
    ("documents", "path"),
    [
        ([SETTINGS], "kind: 'ConfigMap'"),
        ([SETTINGS, NEEDED_CLAIM], "kind: 'ConfigMap'"),
        ([{**example(), "kind": "RolloutMatchingjob"}, SETTINGS], "kind: 'RolloutMatchingjob'"),
        ([SETTINGS, {**example(), "apiVersion": "stage2/v1"}], "apiVersion: 'stage2/v1'"),
        ([SETTINGS, {"kind": "ConfigMap"}, {**example(), "spec": {}}], "spec.config"),
        ([example(), {"kind": ["Job"]}], "kind: ['Job']"),
        ([example(), {"training": {}}], "kind"),
        ([{"training": {}}, SETTINGS], "2 documents"),
    ],
    ids=str,
)
def test_file_without_valid_job_is_refused(
    documents: list[Any], path: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert beside(tmp_path, *documents) == 64
    assert path in capsys.readouterr().err
