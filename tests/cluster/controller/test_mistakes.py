"""Wrong job files are refused by `kubectl apply` or by a condition, with the field, the rule and the way out."""

import functools
import sys
from collections.abc import Iterator

import pytest

from tests.cluster.controller.conftest import Controller, Kubectl, Object, eventually
from tests.unit.api.wrong_jobs import Mistake, good_job, mistakes

MISTAKES = mistakes()


def test_valid_job_is_accepted(kubectl: Kubectl) -> None:
    kubectl("apply", "-f", "-", stdin=good_job())


@pytest.mark.parametrize(
    "mistake", [item for item in MISTAKES if item.apply], ids=lambda item: item.name.replace(" ", "-")
)
def test_api_server_refuses_mistake(admin: Kubectl, mistake: Mistake) -> None:
    assert mistake.apply
    refused = admin.run("apply", "--dry-run=server", "-f", "-", stdin=mistake.job)
    assert refused.returncode != 0
    assert mistake.apply in refused.stderr


def test_mistakes_api_server_cannot_see_become_condition(kubectl: Kubectl, controller: Controller) -> None:
    unknowable = [item for item in MISTAKES if not item.apply]
    for index, mistake in enumerate(unknowable):
        job = mistake.job
        job["metadata"] = {**job["metadata"], "name": f"mistaken-{index}"}
        kubectl("apply", "-f", "-", stdin=job)
    for index, mistake in enumerate(unknowable):
        refusal = functools.partial(_refusal, kubectl, f"mistaken-{index}")
        reported = eventually(refusal, why=mistake.name)
        assert reported.startswith(f"{mistake.path}: ")
        assert mistake.rule in reported
    assert not kubectl.list("deployments", "jobs", "secrets")


def test_template_that_breaks_contract_becomes_condition(kubectl: Kubectl, controller: Controller) -> None:
    job = good_job()
    job["spec"]["learner"]["template"] = {"spec": {"containers": [{"name": "learner", "command": ["sh"]}]}}
    kubectl("apply", "-f", "-", stdin=job)
    reported = eventually(lambda: _refusal(kubectl, "mistaken"), why="it is refused")
    assert reported.startswith("spec.learner.template.spec.containers[0].command: ")


@pytest.fixture
def deep_template() -> Iterator[Object]:
    """6 kB of template, a thousand levels deep: the API server takes it, and Python must be asked to read it."""
    usual = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    nested: Object = {}
    for _ in range(1_000):
        nested = {"a": nested}
    yield {"spec": nested}
    sys.setrecursionlimit(usual)


def test_deeply_nested_job_affects_only_itself(kubectl: Kubectl, controller: Controller, deep_template: Object) -> None:
    deep = good_job()
    deep["metadata"] = {**deep["metadata"], "name": "deep"}
    deep["spec"]["rollout"]["template"] = deep_template
    kubectl("create", "--validate=false", "-f", "-", stdin=deep)
    reported = eventually(lambda: _refusal(kubectl, "deep"), why="it is refused")
    assert "must not be nested deeper than 64 levels" in reported
    for restarted in (False, True):
        if restarted:
            controller.stop(kill=True)
            controller.start()
        name = f"good-{restarted}".lower()
        kubectl("apply", "-f", "-", stdin=good_job() | {"metadata": {"name": name}})
        eventually(lambda name=name: kubectl.get("deployment", f"{name}-rollout"), why=f"{name} gets its servers")


def test_corrected_job_runs(kubectl: Kubectl, controller: Controller) -> None:
    job = good_job()
    job["spec"]["learner"]["template"] = {"spec": {"restartPolicy": "Always"}}
    job["spec"]["suspend"] = True
    kubectl("apply", "-f", "-", stdin=job)
    eventually(lambda: _refusal(kubectl, "mistaken"), why="it is refused")
    kubectl("apply", "-f", "-", stdin=good_job())
    eventually(lambda: kubectl.get("deployment", "mistaken-rollout"), why="the corrected job gets its servers")


def test_kubectl_explain_describes_every_field(admin: Kubectl) -> None:
    text = admin("explain", "rmj.spec.rollout")
    assert "Number of vLLM servers" in text
    assert "<none>" not in admin("explain", "rmj.spec", "--recursive")


def _refusal(kubectl: Kubectl, name: str) -> str | None:
    conditions = (kubectl.get("rmj", name) or {}).get("status", {}).get("conditions", [])
    return next((item["message"] for item in conditions if item["reason"] == "InvalidSpec"), None)
