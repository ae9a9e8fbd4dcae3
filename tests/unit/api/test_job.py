"""The job around a training YAML."""

import json
from collections.abc import Callable

import pytest

from stage2_api.errors import ConfigError
from stage2_api.parsing import parse_job
from tests.unit.api.wrong_jobs import good_job, merge_patch, problems_of


def test_fields_added_by_api_server_are_accepted() -> None:
    metadata = {"uid": "u", "generation": 3, "creationTimestamp": "2026-01-01T00:00:00Z", "resourceVersion": "7"}
    people = {"managedFields": [{"manager": "kubectl"}], "annotations": {"a": "b"}}
    accepted = {"type": "Accepted", "status": "True", "reason": "Valid", "message": "m"}
    status = {"phase": "Running", "conditions": [accepted], "ofANewerController": 1}
    job = parse_job(merge_patch(good_job(), {"metadata": metadata | people, "status": status}))
    assert (job.metadata.generation, job.status.phase if job.status else None) == (3, "Running")


def test_job_round_trips_through_json() -> None:
    job = parse_job(good_job())
    written = json.loads(job.model_dump_json(by_alias=True, exclude_unset=True))
    assert written == good_job()
    assert parse_job(written) == job


def test_job_defaults() -> None:
    raw = good_job()
    raw["spec"] = {"config": raw["spec"]["config"], "rollout": {"servers": 1}}
    spec = parse_job(raw).spec
    assert spec.model_dump(by_alias=True, exclude={"config"}, exclude_none=True) == {
        "engine": "Node",
        "suspend": False,
        "imagePullPolicy": "IfNotPresent",
        "imagePullSecrets": [],
        "gpuResource": "nvidia.com/gpu",
        "rollout": {"servers": 1, "serversPerPod": 1, "gpusPerServer": 1, "port": 8000, "template": {}},
        "learner": {"nodes": 1, "gpus": 1, "template": {}, "backoffLimit": 3, "startDeadlineSeconds": 3600},
        "placement": {
            "nodeSelector": {},
            "tolerations": [],
            "priorityClassName": "",
            "mode": "Reserve",
            "topology": "Preferred",
        },
        "tls": {"enabled": True},
        "network": {"egress": "Auto"},
        "volumes": [],
        "evictionLimit": 10,
    }


def test_cpu_job_accepts_zero_gpus_per_server() -> None:
    patch = {"gpuResource": "", "rollout": {"gpusPerServer": 0}, "learner": {"gpus": 0}}
    assert parse_job(merge_patch(good_job(), {"spec": patch})).spec.rollout.gpus_per_server == 0


def test_volume_source_has_form_of_pod_volume() -> None:
    volumes = [
        {"name": "a", "mountPath": "/a", "hostPath": {"path": "/srv/a", "type": "Directory"}},
        {"name": "b", "mountPath": "/b", "readOnly": True, "persistentVolumeClaim": {"claimName": "b"}},
        {"name": "c", "mountPath": "/c", "emptyDir": {"sizeLimit": "1Gi"}},
    ]
    job = parse_job(merge_patch(good_job(), {"spec": {"volumes": volumes}}))
    assert [volume.source for volume in job.spec.volumes] == [
        {"hostPath": {"path": "/srv/a", "type": "Directory"}},
        {"persistentVolumeClaim": {"claimName": "b", "readOnly": False}},
        {"emptyDir": {"medium": "", "sizeLimit": "1Gi"}},
    ]


@pytest.mark.parametrize(
    ("patch", "gpus"),
    [({"learner": {"gpus": 4}, "rollout": None}, 4), ({"learner": {"gpus": 0}, "rollout": None, "gpuResource": ""}, 0)],
)
def test_colocated_job_accepts_any_number_of_learner_gpus(patch: dict[str, object], gpus: int) -> None:
    colocate = {"config": {"custom": {"extra": {"rollout_matching": {"vllm": {"mode": "colocate"}}}}}}
    job = parse_job(merge_patch(good_job(), {"spec": {**patch, **colocate}}))
    assert job.spec.learner.gpus == gpus


def test_colocated_tensor_parallel_size_must_divide_learner_gpus() -> None:
    vllm = {"mode": "colocate", "tensor_parallel_size": 3}
    patch = {
        "learner": {"gpus": 4},
        "rollout": None,
        "config": {"custom": {"extra": {"rollout_matching": {"vllm": vllm}}}},
    }
    with pytest.raises(ConfigError, match=r"must divide spec\.learner\.gpus"):
        parse_job(merge_patch(good_job(), {"spec": patch}))


def matching(**keys: object) -> dict[str, object]:
    return {"config": {"custom": {"extra": {"rollout_matching": keys}}}}


def more_memory_than(number: int) -> dict[str, object]:
    expression = {"key": "memory", "operator": "Gt", "values": [str(number)]}
    terms = {"nodeSelectorTerms": [{"matchExpressions": [expression]}]}
    return {"placement": {"affinity": {"nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": terms}}}}


BOUNDS = [
    ("rollout.port", 65533, lambda port: {"rollout": {"servers": 3, "port": port}}),
    ("max_model_len", 2047, lambda new: matching(max_new_tokens=new, vllm={"max_model_len": 2048})),
    ("nodeAffinity.requiredDuringSchedulingIgnoredDuringExecution", 10**18 - 1, more_memory_than),
    ("num_return_sequences", 4, lambda count: matching(num_beams=4, num_return_sequences=count)),
]


@pytest.mark.parametrize(("path", "last", "spec"), BOUNDS, ids=[row[0] for row in BOUNDS])
def test_largest_allowed_number_is_accepted_and_next_is_refused(
    path: str, last: int, spec: Callable[[int], object]
) -> None:
    assert problems_of(parse_job, merge_patch(good_job(), {"spec": spec(last)})) == ()
    (problem,) = problems_of(parse_job, merge_patch(good_job(), {"spec": spec(last + 1)}))
    assert problem.path.endswith(path)


@pytest.mark.parametrize("raw", [{}, {"spec": []}, {"apiVersion": 1, "kind": 2, "metadata": 3, "spec": 4}])
def test_malformed_job_is_refused_like_other_mistakes(raw: dict[str, object]) -> None:
    assert "spec" in {problem.path for problem in problems_of(parse_job, raw)}


NAMES = [("name", name) for name in ("", "a..b", "-a", "a.", "a\n", "A", "a/b", "n" * 254)]
NAMESPACES = [("namespace", name) for name in ("team.a", "Team_A", "-a", "n" * 64)]
PREFIXES = [("generateName", name) for name in ("A-", "-", "a.", "a_", "n" * 254)]


@pytest.mark.parametrize(("key", "value"), [*NAMES, *NAMESPACES, *PREFIXES])
def test_invalid_names_are_refused_with_advice(key: str, value: str) -> None:
    (problem,) = problems_of(parse_job, merge_patch(good_job(), {"metadata": {key: value}}))
    assert (problem.path, problem.value) == (f"metadata.{key}", value)
    assert problem.rule.startswith("must be text of ")
    assert problem.way_out


def test_generate_name_yields_name_as_api_server_would() -> None:
    unnamed = {key: value for key, value in good_job().items() if key != "metadata"}
    assert parse_job({**unnamed, "metadata": {"generateName": "a-"}}).metadata.name == "a-xxxxx"
    assert parse_job({**unnamed, "metadata": {"generateName": "a" * 70}}).metadata.name == "a" * 58 + "xxxxx"
    assert parse_job({**unnamed, "metadata": {"generateName": "a-", "name": "b"}}).metadata.name == "b"
    (problem,) = problems_of(parse_job, {**unnamed, "metadata": {"generateName": ""}})
    assert problem.path == "metadata.name"


@pytest.mark.parametrize(
    "metadata",
    [
        {"name": "1.a-b"},
        {"name": "n" * 253},
        {"namespace": "1"},
        {"namespace": ""},
        {"generateName": "a-"},
        {"generateName": "a.b--"},
    ],
)
def test_valid_names_are_accepted(metadata: dict[str, str]) -> None:
    assert parse_job(merge_patch(good_job(), {"metadata": metadata}))
