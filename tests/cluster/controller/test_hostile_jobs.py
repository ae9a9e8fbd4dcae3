"""Jobs that are made to harm the controller, on a real API server: each harms itself alone, and says what is wrong."""

import json
import re
import subprocess
import uuid
from collections.abc import Iterator
from pathlib import Path
from tempfile import NamedTemporaryFile
from urllib.request import urlopen

import pytest

from stage2_api.validation.size import LARGEST, MOST_PARTS
from tests.cluster.controller.conftest import Controller, Kubectl, Object, eventually
from tests.support.ports import free_port
from tests.unit.api.wrong_jobs import good_job

DEEPEST = 9_997
"""Levels of a value in a job's spec that an API server's decoder takes; what it stores then, it cannot list again."""
OF_OTHERS = 100


@pytest.fixture
def figures(rights: Path, kubectl: Kubectl, node: str, tmp_path: Path) -> Iterator[str]:
    """The address of the metrics of a controller that works in this namespace."""
    port = free_port()
    running = Controller(rights, kubectl.namespace, tmp_path / "controller.log", f"--listen=127.0.0.1:{port}")
    running.start()
    yield f"http://127.0.0.1:{port}/metrics"
    ended = running.ended()
    running.stop()
    assert not ended
    assert "Traceback" not in running.text(), running.text()


def named(name: str, **spec: object) -> Object:
    """A good job of this name, with other parts of its spec."""
    made = good_job()
    return {**made, "metadata": {"name": name}, "spec": {**made["spec"], **spec}}


def sent(kubectl: Kubectl, body: Object, **values: str) -> subprocess.CompletedProcess[str]:
    """Create a job without a client's own checks; JSON text may stand for a word of it."""
    text = json.dumps(body)
    for word, value in values.items():
        text = text.replace(f'"{word}"', value)
    path = f"/apis/stage2.dev/v1alpha1/namespaces/{kubectl.namespace}/rolloutmatchingjobs"
    with NamedTemporaryFile("w", suffix=".json") as file:
        file.write(text)
        file.flush()
        return kubectl.run("create", "--raw", path, "-f", file.name)


def replaced(kubectl: Kubectl, name: str, key: str, text: str) -> subprocess.CompletedProcess[str]:
    """Write a job as it is, with JSON text for a key beside its spec."""
    body = json.dumps({**(kubectl.get("rmj", name) or {}), key: "HERE"}).replace('"HERE"', text)
    path = f"/apis/stage2.dev/v1alpha1/namespaces/{kubectl.namespace}/rolloutmatchingjobs/{name}"
    with NamedTemporaryFile("w", suffix=".json") as file:
        file.write(body)
        file.flush()
        return kubectl.run("replace", "--raw", path, "-f", file.name)


def created(kubectl: Kubectl, body: Object, **values: str) -> None:
    """The same, where the API server must take it."""
    done = sent(kubectl, body, **values)
    assert done.returncode == 0, done.stderr


def reported(kubectl: Kubectl, name: str, condition: str, reason: str = "") -> Object:
    """A condition of a job, once there is one of this reason."""

    def reported() -> Object | None:
        path = f"jsonpath={{.status.conditions[?(@.type=='{condition}')]}}"
        text = kubectl("get", "rmj", name, "-o", path)
        return json.loads(text) if reason in text and text else None

    one: Object = eventually(reported, why=f"{name} says of itself: {condition} {reason}")
    return one


def works(kubectl: Kubectl, name: str) -> None:
    """A good job that comes now gets its servers."""
    kubectl("apply", "-f", "-", stdin=named(name))
    eventually(lambda: kubectl.get("deployment", f"{name}-rollout"), why=f"{name} gets its servers")


def test_refusal_with_three_hundred_errors_is_reported_by_job(kubectl: Kubectl, figures: str) -> None:
    wrong = [{"key": f"key-{index}", "operator": "Exists", "effect": "Never"} for index in range(300)]
    template = {"spec": {"tolerations": wrong}}
    rollout = {**good_job()["spec"]["rollout"], "template": template}
    created(kubectl, named("refused", rollout=rollout))
    message = reported(kubectl, "refused", "ChildrenApplied", "ChildRefused")["message"]
    assert 'Unsupported value: "Never"' in message
    assert "characters, cut" in message


def test_objects_of_any_size_and_depth_affect_only_themselves(kubectl: Kubectl, figures: str) -> None:
    config = {**good_job()["spec"]["config"], "deepspeed": "HERE"}
    deep = MOST_PARTS - 100
    shapes = {
        "keys": (json.dumps({f"key_{index}": index for index in range(6_000)}), "Valid"),
        "numbers": (json.dumps({"long": [1] * (LARGEST // 4)}), "Valid"),
        "mappings": (json.dumps({"long": [{}] * deep}), "Valid"),
        "deep": ('{"a":' * deep + "1" + "}" * deep, "must not be nested deeper than 64 levels"),
        "deep-list": ('{"a":' + "[" * deep + "]" * deep + "}", "must not be nested deeper than 64 levels"),
    }
    for name, (text, _) in shapes.items():
        created(kubectl, named(name, config=config), HERE=text)
    template = {"spec": {f"field_{index}": index for index in range(5_000)}}
    created(kubectl, named("mistakes", learner={**good_job()["spec"]["learner"], "template": template}))
    for name, (_, expected) in shapes.items():
        found = reported(kubectl, name, "Accepted")
        assert expected in (found["reason"], *found["message"].split("; "))
    assert reported(kubectl, "mistakes", "Accepted", "InvalidSpec")
    works(kubectl, "good")
    lag = re.findall(r"^stage2_event_loop_lag_seconds_(\S+) (\S+)$", urlopen(figures).read().decode(), re.MULTILINE)
    print(f"\nthe loop's lag beside {len(shapes)} hostile jobs: {dict(lag)}")
    assert float(dict(lag)["count"]) > 0
    refusals = lambda: [one for one in kubectl.list("events") if one["reason"] == "InvalidSpec"]  # noqa: E731
    eventually(lambda: len(refusals()) == 3, why="each refusal has an Event")


@pytest.mark.parametrize(
    ("text", "of"),
    [
        ('{"a":' * DEEPEST + "1" + "}" * DEEPEST, "mappings, lists and brackets in texts"),
        ('{"a":' + "[" * (DEEPEST - 10) + "]" * (DEEPEST - 10) + "}", "mappings, lists and brackets in texts"),
        (json.dumps({"text": "x" * 1_571_000}), "characters"),
        (json.dumps({"long": [1] * 400_000}), "characters"),
    ],
    ids=["mappings", "lists", "text", "numbers"],
)
def test_oversized_or_too_deep_spec_is_refused_by_api_server(kubectl: Kubectl, text: str, of: str) -> None:
    config = {**good_job()["spec"]["config"], "deepspeed": "HERE"}
    refused = sent(kubectl, named("huge", config=config), HERE=text)
    assert refused.returncode != 0
    assert f" {of}; the whole spec must have at most " in refused.stderr
    assert "No resources found" in kubectl.run("get", "rmj").stderr


@pytest.mark.parametrize(
    "text", ['{"a":' * (DEEPEST - 10) + "1" + "}" * (DEEPEST - 10), json.dumps([1] * 400_000)], ids=["deep", "wide"]
)
def test_oversized_or_too_deep_top_level_key_is_refused_by_api_server(kubectl: Kubectl, text: str) -> None:
    kubectl("apply", "-f", "-", stdin=named("mine"))
    refused = replaced(kubectl, "mine", "junk", text)
    assert refused.returncode != 0
    assert "junk: not keys of stage2: " in refused.stderr
    kubectl("label", "rmj", "mine", "still=listed")
    kubectl("patch", "rmj", "mine", "--type=merge", "-p", '{"spec": {"suspend": true}}')
    assert [one["metadata"]["labels"] for one in kubectl.list("rmj")] == [{"still": "listed"}]


@pytest.fixture
def neighbours(admin: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace of another tenant."""
    name = f"stage2-test-{uuid.uuid4().hex[:8]}"
    admin("create", "namespace", name)
    yield Kubectl(admin.kubeconfig, name)
    admin("delete", "namespace", name, "--wait=false")


def test_repair_of_job_is_not_delayed_by_other_tenants(
    kubectl: Kubectl, neighbours: Kubectl, node: str, tmp_path: Path
) -> None:
    both = f"--namespace={neighbours.namespace}"
    running = Controller(kubectl.kubeconfig, kubectl.namespace, tmp_path / "controller.log", both)
    running.start()
    works(kubectl, "mine")
    running.stop()
    wrong = {**good_job()["spec"]["learner"], "template": {"spec": {"hostNetwork": True}}}
    theirs = [named(f"theirs-{index}", learner=wrong) for index in range(OF_OTHERS)]
    neighbours("create", "--validate=false", "-f", "-", stdin={"apiVersion": "v1", "kind": "List", "items": theirs})
    kubectl("delete", "service", "mine-rollout")
    running.start()  # with all of them to be looked at
    repaired = eventually(lambda: kubectl.get("service", "mine-rollout"), why="the Service is there again")
    judged = lambda: [one for one in neighbours.list("rmj") if "conditions" in one.get("status", {})]  # noqa: E731
    eventually(lambda: len(judged()) == OF_OTHERS, why="the others have their turn, and are judged once each")
    running.stop()
    sooner = sum(version(one) < version(repaired) for one in judged())
    print(f"\n{sooner} of {OF_OTHERS} jobs of another tenant were judged before the repair")
    assert sooner < OF_OTHERS / 2


def version(one: Object) -> int:
    """When an object was last written: the API server counts all writes."""
    return int(one["metadata"]["resourceVersion"])
