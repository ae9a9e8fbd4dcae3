"""Jobs that run while the controller is upgraded: no pod of theirs notices, whatever defaults and rules are new.

`old/states/` has the example jobs of earlier versions as their API server held them, with their status and children.
`python -m tests.unit.controller.job.test_upgrades >tests/unit/controller/old/states/DATE.jsonl` records those of today.
"""

import copy
import json
import re
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml

from stage2_api.crd import custom_resource_definition
from stage2_controller.children import comparison
from stage2_controller.children.build import parse
from stage2_controller.job import kinds, names
from stage2_controller.place.capacity import Capacity
from stage2_controller.state import conditions, reasons
from stage2_controller.state.observed import Observed
from tests.unit.controller import builders as b
from tests.unit.controller import nodes as n
from tests.unit.controller.place.test_placement import planned

pytestmark = pytest.mark.in_turns(3, apart=True)

STATES = sorted((Path(__file__).parents[1] / "old" / "states").glob("*.jsonl"))
ROOT = Path(__file__).parents[4]
EXAMPLES = sorted((ROOT / "examples").glob("job-*.yaml"))
RECORDED = [
    pytest.param(json.loads(line), id=f"{path.stem}-{json.loads(line)['job']['metadata']['name']}")
    for path in STATES
    for line in path.read_text(encoding="utf-8").splitlines()
]


def defaulted(value: Any, schema: Any) -> Any:
    """What an API server with the definition of today reads where it stored `value`."""
    if isinstance(value, dict):
        for key, below in schema.get("properties", {}).items():
            if key not in value and "default" in below:
                value[key] = copy.deepcopy(below["default"])
            if key in value:
                defaulted(value[key], below)
    elif isinstance(value, list):
        for one in value:
            defaulted(one, schema.get("items", {}))
    return value


def running(recorded: Any) -> tuple[b.Object, Observed]:
    """The job and what is observed of it, once the API server has the definition of today."""
    (version,) = custom_resource_definition()["spec"]["versions"]
    raw, children = copy.deepcopy(recorded["job"]), recorded["children"]
    defaulted(raw["spec"], version["schema"]["openAPIV3Schema"]["properties"]["spec"])
    parts: Any = {kinds.CHILD[kind].field: child for kind, child in children.items()}
    pods = [b.pod(names.ROLE_LEARNER, b.up("learner"))]
    if "Deployment" in children:
        containers = children["Deployment"]["spec"]["template"]["spec"]["containers"]
        pods.append(b.pod(names.ROLE_ROLLOUT, *(b.up(one["name"]) for one in containers)))
    return raw, Observed(**parts, pods=tuple(pods))


def nodes() -> Capacity:
    """A node for any example."""
    return n.capacity(n.node(gpus=64, has={"stage2.dev/fake-gpu": "64"}))


def record(example: Path) -> str:
    """An example that runs, as one line."""
    written = yaml.safe_load(example.read_text(encoding="utf-8"))
    blank = b.job(written["metadata"]["name"])
    raw = {**blank, "metadata": {**written["metadata"], **blank["metadata"]}, "spec": written["spec"]}
    children = {child["kind"]: child for child in planned(raw, nodes()).children}
    raw, observed = running({"job": raw, "children": children})
    return json.dumps({"job": b.with_status(raw, planned(raw, nodes(), observed)), "children": children})


@pytest.mark.parametrize("example", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_recorded_example_matches_running_job(example: Path) -> None:
    recorded = json.loads(record(example))
    raw, observed = running(recorded)
    made = planned(raw, nodes(), observed)
    assert (made.status, made.deletions, of_pods(made, observed)) == (raw["status"], (), [])
    assert raw["status"]["phase"] == reasons.RUNNING


def test_jobs_of_every_release_are_recorded() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    released = re.findall(r"^## \[\d\S*\] - (\S+)$", changelog, re.MULTILINE)
    assert set(released) <= {path.stem for path in STATES}, "the docstring of this file has the command"


def of_pods(made: Any, observed: Observed) -> list[str]:
    """The kinds with pods that a plan would write."""
    writes = comparison.writes(made.children, observed)
    return [write.manifest["kind"] for write in writes if write.manifest["kind"] in kinds.ROLE_OF_PODS]


@pytest.mark.parametrize("recorded", RECORDED)
def test_running_job_from_older_release_is_managed_without_restart(recorded: Any) -> None:
    raw, observed = running(recorded)
    account = nodes()
    made = planned(raw, account, observed)
    assert (made.deletions, of_pods(made, observed)) == ((), [])
    assert made.status["phase"] == reasons.RUNNING
    again = planned(b.edited(b.with_status(raw, made), ttlSecondsAfterFinished=60), account, observed)
    assert (again.deletions, of_pods(again, observed)) == ((), [])
    stops = planned(b.edited(b.with_status(raw, made), suspend=True), account, observed)
    assert set(stops.deletions) == {"Job", "Deployment", names.JOBSET} & recorded["children"].keys()


@pytest.mark.parametrize("recorded", RECORDED)
def test_running_job_refused_by_older_controller_is_accepted_without_restart(recorded: Any) -> None:
    """The definition is new before each controller is: an earlier one then reads keys that it does not know."""
    raw, observed = running(recorded)
    accepted = conditions.find(raw["status"], reasons.ACCEPTED) or {}
    accepted |= {"status": "False", "reason": reasons.INVALID_SPEC, "message": "spec.tls: is not a key of stage2"}
    made = planned(raw, nodes(), observed)
    assert (made.deletions, of_pods(made, observed)) == ((), [])
    assert b.condition(made, reasons.ACCEPTED) == ("True", reasons.VALID)


def upgraded(raw: b.Object) -> b.Object:
    """A job whose hash another version has computed, by defaults of its own."""
    status = {**b.planned(raw, b.started(raw)).status, "specHash": "of-another-version"}
    del status["currentHash"]
    return {**raw, "status": status}


def built_by_another(raw: b.Object) -> Observed:
    """Its children."""
    parts = vars(b.started(raw)).copy()
    for field in ("learner", "deployment"):
        child = copy.deepcopy(parts[field])
        child["metadata"]["annotations"][names.ANNOTATION_SPEC_HASH] = "of-another-version"
        parts[field] = child
    return Observed(**parts)


def test_edit_after_upgrade_restarts_job_only_if_it_changes_pods() -> None:
    raw, observed = upgraded(b.job()), built_by_another(b.job())
    first = b.planned(raw, observed)
    assert first.deletions == ()
    assert first.status["specHash"] == "of-another-version"
    raw = b.with_status(raw, first)
    deadline = b.planned(b.edited(raw, activeDeadlineSeconds=86_400), observed)
    assert deadline.deletions == ()
    image = b.planned(b.edited(raw, image="another:1"), observed)
    assert image.deletions == ("Job", "Deployment")
    assert image.status["specHash"] == image.status["currentHash"]


@pytest.mark.parametrize("recorded", RECORDED)
@pytest.mark.parametrize("hashed", ["as before", "otherwise"])
def test_deadline_edit_during_upgrade_does_not_restart_pods(recorded: Any, hashed: str) -> None:
    """No controller ran when somebody set a deadline, and the next one may have other defaults."""
    raw, observed = running(recorded)
    if hashed == "otherwise" and "currentHash" in raw["status"]:
        raw, observed = by_another_version(raw, observed)
    made = planned(b.edited(raw, activeDeadlineSeconds=86_400), nodes(), observed)
    assert (made.deletions, of_pods(made, observed)) == ((), [])
    assert made.status["phase"] == reasons.RUNNING


OTHER_HASH = "of-another-version"


def by_another_version(raw: b.Object, observed: Observed) -> tuple[b.Object, Observed]:
    """The same job and children, by a version whose defaults give other hashes of the same spec."""
    raw, parts = copy.deepcopy(raw), dict(vars(observed))
    raw["status"] |= {"specHash": OTHER_HASH, "currentHash": OTHER_HASH}
    for field in ("learner", "deployment", "jobset"):
        if parts[field] is not None:
            parts[field] = copy.deepcopy(parts[field])
            parts[field]["metadata"]["annotations"][names.ANNOTATION_SPEC_HASH] = OTHER_HASH
    return raw, Observed(**parts)


def edits(raw: b.Object, *written: b.Object) -> b.Object:
    """The job after several writes that no controller saw."""
    for spec in written:
        raw = b.edited(raw, **spec)
    return raw


@pytest.fixture
def upgraded_job() -> tuple[b.Object, Observed]:
    """A running job of another version of the controller, with status and children of that version."""
    raw = b.job()
    observed = b.started(raw)
    return by_another_version(b.with_status(raw, b.planned(raw, observed)), observed)


NO_POD = [
    [{"activeDeadlineSeconds": 86_400}],
    [{"activeDeadlineSeconds": 86_400}, {"ttlSecondsAfterFinished": 60}, {"imagePullPolicy": "Always"}],
    [{"network": {"egress": "Open"}}, {"suspend": False}],
    [{"suspend": True}, {"suspend": False}],
    [{"tls": {"enabled": True}, "engine": "Node"}],
]


@pytest.mark.parametrize("written", NO_POD)
def test_non_pod_edits_together_with_upgrade_do_not_restart_pods(
    upgraded_job: tuple[b.Object, Observed], written: list[b.Object]
) -> None:
    raw, observed = upgraded_job
    if "tls" in written[0]:  # what was written has changed, though nothing else: it is the same for one version
        raw["status"]["currentHash"] = parse(raw, b.SETTINGS).current_hash
    made = b.planned(edits(raw, *written), observed)
    assert (made.deletions, of_pods(made, observed)) == ((), [])
    assert made.status["specHash"] == OTHER_HASH
    again = b.planned(edits(b.with_status(edits(raw, *written), made), {"ttlSecondsAfterFinished": 1}), observed)
    assert (again.deletions, of_pods(again, observed)) == ((), [])


WRITTEN_OUT: list[b.Object] = [
    {"tls": {"enabled": True}},
    {"tls": {}},
    {"engine": "Node"},
    {"placement": {"mode": "Reserve"}},
    {"rollout": {"servers": 3, "gpusPerServer": 1, "port": 8000, "serversPerPod": 1}},
    {"learner": {"gpus": 1, "backoffLimit": 3, "nodes": 1, "template": {}}},
    {"config": b.job(config={"training": {"learning_rate": 5e-5}})["spec"]["config"]},
]


@pytest.mark.parametrize("written", WRITTEN_OUT, ids=lambda spec: next(iter(spec)))
def test_writing_out_default_together_with_upgrade_does_not_restart_pods(written: b.Object) -> None:
    """Its pods ended. The API server allows it while they run."""
    raw = b.job(placement={})
    observed = b.started(raw)
    raw, observed = by_another_version(b.with_status(raw, b.planned(raw, observed)), observed)
    assert_unnoticed(b.edited(raw, **written), observed)
    status = {**b.planned(b.edited(raw, **written), observed).status, "currentHash": OTHER_HASH}
    assert_unnoticed({**b.edited(b.edited(raw)), "status": status}, observed)  # it is removed again


def assert_unnoticed(raw: b.Object, observed: Observed) -> None:
    made = b.planned(raw, observed)
    assert (made.deletions, of_pods(made, observed)) == ((), [])
    assert b.condition(made, reasons.ACCEPTED) == ("True", reasons.VALID)


@pytest.mark.parametrize("written", WRITTEN_OUT, ids=lambda spec: next(iter(spec)))
def test_changed_value_beside_written_defaults_restarts_job(
    upgraded_job: tuple[b.Object, Observed], written: b.Object
) -> None:
    raw, observed = upgraded_job
    made = b.planned(b.edited(raw, image="another:1", **written), observed)
    assert made.deletions == ("Job", "Deployment")


OF_PODS = [
    {"image": "another:1"},
    {"rollout": {"servers": 3, "port": 9000}},
    {"placement": {"nodeSelector": {"a": "b"}}},
    {"tls": {"enabled": False}},
    {"volumes": [{"name": "more", "mountPath": "/more", "emptyDir": {}}]},
]


@pytest.mark.parametrize("written", OF_PODS, ids=lambda spec: next(iter(spec)))
@pytest.mark.parametrize("by", ["this version", "another version"])
def test_pod_edit_restarts_job_suspended_and_resumed_between_passes(
    upgraded_job: tuple[b.Object, Observed], written: b.Object, by: str
) -> None:
    raw, observed = upgraded_job
    if by == "this version":
        raw, observed = b.job(), b.started(b.job())
        raw = b.with_status(raw, b.planned(raw, observed))
    made = b.planned(edits(raw, {"suspend": True, **written}, {"suspend": False}), observed)
    assert (made.deletions, made.status["specHash"]) == (("Job", "Deployment"), made.status["currentHash"])


def test_pod_edit_while_suspended_counts_after_upgrade() -> None:
    raw = b.job(suspend=True)
    raw = b.with_status(raw, b.planned(raw))
    before = raw["status"]["specHash"]
    raw, _ = by_another_version(raw, b.NOTHING)
    made = b.planned(b.edited(raw, image="another:1"))
    assert made.status["specHash"] not in (before, OTHER_HASH)
    assert b.planned(b.edited(raw, activeDeadlineSeconds=60)).status["specHash"] == OTHER_HASH


def test_ttl_edit_together_with_upgrade_does_not_rerun_failed_job() -> None:
    raw = b.job()
    observed = b.started(raw)
    raw = b.with_status(raw, b.planned(raw, observed))
    ended = replace(observed, pods=(b.pod(names.ROLE_LEARNER, b.down("learner", 64, "no such file")),))
    learner = copy.deepcopy(observed.learner) or {}
    learner["status"] = {"conditions": [{"type": "Failed", "status": "True", "reason": "PodFailurePolicy"}]}
    failed = b.planned(raw, replace(ended, learner=learner))
    assert failed.status["phase"] == reasons.FAILED
    raw, ended = by_another_version(b.with_status(raw, failed), replace(ended, learner=learner))
    made = b.planned(b.edited(raw, ttlSecondsAfterFinished=3600), ended, after_s=60)
    assert (made.status["phase"], made.status["specHash"]) == (reasons.FAILED, OTHER_HASH)
    assert b.planned(b.edited(raw, image="right:1"), ended, after_s=60).status["phase"] != reasons.FAILED


def test_changed_server_count_of_jobset_does_not_restart_pods() -> None:
    (recorded,) = [json.loads(line) for line in newest() if '"name": "job-jobset"' in line]
    raw, observed = running(recorded)
    raw = b.with_status(raw, planned(raw, nodes(), observed))
    raw, observed = by_another_version(raw, observed)
    more = {**raw["spec"]["rollout"], "servers": raw["spec"]["rollout"]["servers"] + 8}
    made = planned(b.edited(raw, rollout=more, activeDeadlineSeconds=60), nodes(), observed)
    assert (made.deletions, made.status["specHash"]) == ((), OTHER_HASH)


def newest() -> list[str]:
    return STATES[-1].read_text(encoding="utf-8").splitlines()


WIDE = {"volumes": [{"name": "data", "mountPath": "/data", "hostPath": {"path": "/nowhere"}}]}
NARROW = replace(b.SETTINGS, policy=replace(b.SETTINGS.policy, host_paths=()))


def under_a_narrow_policy(raw: b.Object, observed: Observed, *, after_s: float = 0) -> Any:
    return b.plan(raw, observed, settings=NARROW, now=b.NOW + timedelta(seconds=after_s))


def test_running_job_refused_by_narrowed_policy_is_managed_to_its_end() -> None:
    raw = b.job(activeDeadlineSeconds=600, ttlSecondsAfterFinished=60, **WIDE)
    observed = b.started(raw)
    raw = b.with_status(raw, b.planned(raw, observed))
    made = under_a_narrow_policy(raw, observed)
    assert (made.status["phase"], made.deletions) == (reasons.RUNNING, ())
    assert b.condition(made, reasons.ACCEPTED) == ("True", reasons.NO_LONGER_VALID)
    assert "spec.volumes[0].hostPath.path" in b.message(made, reasons.ACCEPTED)
    assert of_pods(made, observed) == []
    suspended = under_a_narrow_policy(b.edited(raw, suspend=True), observed)
    assert (suspended.status["phase"], suspended.deletions) == (reasons.SUSPENDED, ("Job", "Deployment"))
    late = under_a_narrow_policy(raw, observed, after_s=600)
    assert b.condition(late, reasons.FAILED) == ("True", reasons.DEADLINE_EXCEEDED)
    gone = under_a_narrow_policy(b.with_status(raw, late), b.NOTHING, after_s=661)
    assert gone.delete_job


@pytest.mark.parametrize(
    ("spec", "policy", "path"),
    [
        ({"image": "registry/team-b/x"}, {"image_registries": ("registry/team",)}, "spec.image"),
        ({"imagePullSecrets": [{"name": "registry"}]}, {"pull_secrets": ()}, "spec.imagePullSecrets[0].name"),
        (
            {"learner": {"gpus": 1, "template": {"metadata": {"labels": {"app": "x"}}}}},
            {"labels": ()},
            "spec.learner.template.metadata.labels[app]",
        ),
    ],
    ids=["image", "pull secret", "label"],
)
def test_running_job_keeps_settings_that_new_policy_refuses(spec: Any, policy: Any, path: str) -> None:
    raw = b.job(**spec)
    observed = b.started(raw)
    raw = b.with_status(raw, b.planned(raw, observed))
    made = b.plan(raw, observed, settings=replace(b.SETTINGS, policy=replace(b.SETTINGS.policy, **policy)))
    assert b.condition(made, reasons.ACCEPTED) == ("True", reasons.NO_LONGER_VALID)
    assert path in b.message(made, reasons.ACCEPTED)
    assert (made.status["phase"], made.deletions, of_pods(made, observed)) == (reasons.RUNNING, (), [])


def test_restart_of_job_refused_by_narrowed_policy_is_refused() -> None:
    raw = b.job(suspend=True, **WIDE)
    raw = b.with_status(raw, b.planned(raw))
    assert b.condition(under_a_narrow_policy(raw, b.NOTHING), reasons.ACCEPTED) == ("True", reasons.NO_LONGER_VALID)
    for resumed in (b.edited(raw, suspend=False), b.job(**WIDE)):
        made = under_a_narrow_policy(resumed, b.NOTHING)
        assert (made.children, made.status["phase"]) == ((), reasons.FAILED)
        assert b.condition(made, reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)
    assert b.condition(b.planned(b.with_status(raw, made)), reasons.ACCEPTED) == ("True", reasons.VALID)


def test_job_with_unbuildable_spec_can_still_be_suspended() -> None:
    raw = b.job()
    observed = b.started(raw)
    raw = b.with_status(raw, b.planned(raw, observed))
    template = {"spec": {"containers": "learner"}}
    made = b.planned(b.edited(raw, suspend=True, learner={"gpus": 1, "template": template}), observed)
    assert (made.children, made.deletions) == ((), ("Job", "Deployment"))
    assert b.condition(made, reasons.ACCEPTED) == ("False", reasons.INVALID_SPEC)
    assert b.planned(b.edited(raw, learner={"gpus": 1, "template": template}), observed).deletions == ()


def test_running_job_with_removed_config_key_keeps_running() -> None:
    raw = b.job()
    raw = b.with_status(raw, b.planned(raw, b.started(raw)))
    raw["spec"]["config"]["training"]["async_save"] = True
    parsed = parse(raw, b.SETTINGS)
    assert "training.async_save" in str(parsed.refused)
    made = b.planned(raw, b.started(b.job()))
    assert (made.status["phase"], made.deletions) == (reasons.RUNNING, ())


if __name__ == "__main__":
    print(*map(record, EXAMPLES), sep="\n")
