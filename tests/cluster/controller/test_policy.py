"""The admin's policy before a real API server: what a tenant may not ask for is refused when the job is sent."""

import json
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import yaml

from stage2_controller.job.settings import read_policy
from tests.cluster.controller.conftest import ROOT, Kubectl, Object, eventually, job
from tests.unit.charts.test_policy import ALLOWED, NEEDED, RISKY
from tests.unit.charts.test_policy_agreement import LISTED, documents, named_by_controller

pytestmark = pytest.mark.in_turns(3, apart=True)

VALUES = (*ALLOWED, 'policy.largestJob={"*":4}')


@contextmanager
def bound(helm: str, admin: Kubectl, namespace: str, *of_policy: str) -> Iterator[None]:
    """Bind the chart's policy with these values to a namespace."""
    chart = str(ROOT / "charts" / "stage2")
    named = 'image.repository="registry.example/team"'
    values = [f"--set-json={value}" for value in (*of_policy, named, f'controller.namespaces=["{namespace}"]')]
    command = [helm, "template", "s", chart, "--namespace", namespace, "--show-only=templates/policy.yaml"]
    rendered = subprocess.run([*command, *values], check=True, text=True, capture_output=True).stdout
    made = list(yaml.safe_load_all(rendered))
    for manifest in made:
        admin.apply(manifest)
    yield
    for manifest in made:
        admin("delete", manifest["kind"], manifest["metadata"]["name"])


def refused(kubectl: Kubectl, sent: Object) -> str:
    """What the API server says if it refuses a new job."""
    done = kubectl.run("create", "--dry-run=server", "--validate=false", "-f", "-", stdin=sent)
    return done.stderr if done.returncode else ""


@pytest.fixture
def tenant(helm: str, admin: Kubectl, kubectl: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace that a policy is bound to."""
    with bound(helm, admin, kubectl.namespace, *VALUES):
        eventually(lambda: refused(kubectl, job(image="evil.example/x")), why="it is bound")
        yield kubectl


def test_api_server_and_controller_refuse_same_documents(helm: str, admin: Kubectl, kubectl: Kubectl) -> None:
    of_chart = yaml.safe_load((ROOT / "charts" / "stage2" / "values.yaml").read_text(encoding="utf-8"))["policy"]
    del of_chart["admission"]
    policy = read_policy(json.dumps({**of_chart, **dict(value_of(entry) for entry in LISTED)}))
    with bound(helm, admin, kubectl.namespace, *LISTED):
        eventually(lambda: refused(kubectl, job(image="evil.example/x")), why="it is bound")
        for raw, _ in documents():
            raw["metadata"] = {"name": raw["metadata"]["name"]}
            by_controller = named_by_controller({**raw, "metadata": {**raw["metadata"], "namespace": "x"}}, policy)
            by_server = refused(kubectl, raw)
            assert bool(by_server) is bool(by_controller), (raw["spec"], by_server)
            assert "expression" not in by_server, "a rule of CEL ended in an error"


def value_of(entry: str) -> tuple[str, object]:
    """A value of `policy` by its name."""
    key, _, value = entry.removeprefix("policy.").partition("=")
    return key, json.loads(value)


def test_tenant_scales_job_only_within_largest_job_policy(tenant: Kubectl) -> None:
    tenant.apply(job(image="my/trainer:1", volumes=[], rollout={"servers": 2}, suspend=True))
    within, beyond = (
        tenant.run("scale", "rmj/job-3v1", f"--replicas={servers}", "--dry-run=server") for servers in (3, 4)
    )
    assert within.returncode == 0, within.stderr
    assert "have 4 GPUs, and servers and learner ask for 5; ask for fewer" in beyond.stderr


def test_tenant_is_refused_risky_overrides_and_too_large_job(tenant: Kubectl) -> None:
    for override, path in RISKY:
        sent = job(image="my/trainer:1", volumes=[], learner={"gpus": 1, "template": override})
        done = tenant.run("create", "--dry-run=server", "--validate=false", "-f", "-", stdin=sent)
        assert done.returncode != 0, path
    for override in NEEDED:
        sent = job(image="my/trainer:1", volumes=[], learner={"gpus": 1, "template": override})
        done = tenant.run("create", "--dry-run=server", "-f", "-", stdin=sent)
        assert done.returncode == 0, (override, done.stderr)
    joins = {"metadata": {"labels": {"app": "payments"}}}
    for spec in ({"imagePullSecrets": [{"name": "others"}]}, {"rollout": {"servers": 3, "template": joins}}):
        done = tenant.run("create", "--dry-run=server", "-f", "-", stdin=job(image="my/trainer:1", volumes=[], **spec))
        assert "ask the admin to add it to policy." in done.stderr
    too_large = job(image="my/trainer:1", volumes=[], rollout={"servers": 4})
    done = tenant.run("create", "--dry-run=server", "-f", "-", stdin=too_large)
    assert f"lets a job of namespace {tenant.namespace} have 4 GPUs, and servers and learner ask for 5" in done.stderr


@pytest.mark.parametrize(("claimed", "taken"), [("one-gpu", True), ("all-gpus", False)])
def test_tenant_may_use_only_claim_templates_of_policy(tenant: Kubectl, claimed: str, taken: bool) -> None:
    rollout = {"servers": 3, "resourceClaimTemplate": claimed}
    learner = {"gpus": 1, "resourceClaimTemplate": claimed}
    mode = {"mode": "Scheduler"}
    sent = job(image="my/trainer:1", volumes=[], rollout=rollout, learner=learner, placement=mode)
    done = tenant.run("create", "--dry-run=server", "-f", "-", stdin=sent)
    assert (done.returncode == 0) is taken, done.stderr
    assert ("ResourceClaimTemplates of jobs are one-gpu" in done.stderr) is not taken
