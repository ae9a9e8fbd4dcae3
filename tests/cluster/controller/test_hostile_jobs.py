"""Jobs that are made to harm the controller, on a real API server: each harms itself alone, and is told what is wrong."""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import pytest

from stage2_api.validation.size import LARGEST
from tests.cluster.controller.conftest import Controller, Kubectl, Object, eventually
from tests.tools import free_port
from tests.unit.api.wrong_jobs import good_job

pytestmark = pytest.mark.timeout(300)
DEEPEST = 9_980
"""Levels of a value in a job's spec that an API server takes: its decoder ends at 10,000 for the whole object."""


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


def created(kubectl: Kubectl, body: Object, **values: str) -> None:
    """Create a job without a client's own checks; JSON text may stand for a word of it."""
    text = json.dumps(body)
    for word, value in values.items():
        text = text.replace(f'"{word}"', value)
    path = f"/apis/stage2.dev/v1alpha1/namespaces/{kubectl.namespace}/rolloutmatchingjobs"
    file = kubectl.kubeconfig.parent / f"{body['metadata']['name']}.json"
    file.write_text(text, encoding="utf-8")
    kubectl("create", "--raw", path, "-f", str(file))
    file.unlink()


def accepted(kubectl: Kubectl, name: str) -> Object:
    """The job's condition Accepted, once there is one."""
    return told(kubectl, name, "Accepted")


def told(kubectl: Kubectl, name: str, condition: str, reason: str = "") -> Object:
    """A condition of a job, once there is one of this reason."""

    def found() -> Object | None:
        path = f"jsonpath={{.status.conditions[?(@.type=='{condition}')]}}"
        text = kubectl("get", "rmj", name, "-o", path)
        return json.loads(text) if reason in text and text else None

    one: Object = eventually(found, why=f"{name} says of itself: {condition} {reason}")
    return one


def works(kubectl: Kubectl, name: str) -> None:
    """A good job that comes now gets its servers."""
    kubectl("apply", "-f", "-", stdin=named(name))
    eventually(lambda: kubectl.get("deployment", f"{name}-rollout"), why=f"{name} gets its servers")


def test_a_refusal_of_three_hundred_sentences_is_told_by_the_job(kubectl: Kubectl, figures: str) -> None:
    wrong = [{"key": f"key-{index}", "operator": "Exists", "effect": "Never"} for index in range(300)]
    template = {"spec": {"tolerations": wrong}}
    rollout = {**good_job()["spec"]["rollout"], "template": template}
    created(kubectl, named("refused", rollout=rollout))
    message = told(kubectl, "refused", "ChildrenApplied", "ChildRefused")["message"]
    assert 'Unsupported value: "Never"' in message
    assert "characters, cut" in message


def test_objects_of_any_size_and_depth_harm_themselves_alone(kubectl: Kubectl, figures: str) -> None:
    config = {**good_job()["spec"]["config"], "deepspeed": "HERE"}
    shapes = {
        "keys": json.dumps({f"key_{index}": index for index in range(30_000)}),
        "numbers": json.dumps({"long": [1] * 400_000}),
        "text": json.dumps({"text": "x" * 1_400_000}),
        "deep": '{"a":' * DEEPEST + "1" + "}" * DEEPEST,
        "deep-list": '{"a":' + "[" * DEEPEST + "]" * DEEPEST + "}",
        "below": json.dumps({"long": [1] * (LARGEST // 4 // 5)}),
    }
    for name, text in shapes.items():
        created(kubectl, named(name, config=config), HERE=text)
    found = {name: accepted(kubectl, name) for name in shapes}
    for name in ("keys", "numbers", "text"):
        assert found[name]["message"].startswith("spec.config: more than 131,072 characters; ")
    for name in ("deep", "deep-list"):
        assert "must not be nested deeper than 64 levels" in found[name]["message"]
    assert found["below"]["reason"] == "Valid"
    works(kubectl, "good")
    lag = re.findall(r"^stage2_event_loop_lag_seconds_(\S+) (\S+)$", urlopen(figures).read().decode(), re.MULTILINE)
    print(f"\nthe loop's lag beside {len(shapes)} hostile jobs: {dict(lag)}")
    assert float(dict(lag)["count"]) > 0
    assert kubectl("get", "events", "-o", "name", "--field-selector=reason=InvalidSpec").count("event") == 5
