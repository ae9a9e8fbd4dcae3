"""The admin's policy before a real API server: what a tenant may not ask for is refused when the job is sent."""

import subprocess
from collections.abc import Iterator

import pytest
import yaml

from tests.cluster.controller.conftest import ROOT, Kubectl, eventually, job
from tests.unit.charts.test_policy import NEEDED, RISKY

VALUES = (
    'policy.hostPaths=["/data"]',
    'policy.imageRegistries=["my/trainer", "my/x", "my/team"]',
    'policy.labels=["team", "of"]',
    'policy.pullSecrets=["registry"]',
    'policy.serviceAccounts=["trainer"]',
    'policy.secrets=["hub-token"]',
    'policy.resourceClaimTemplates=["one-gpu"]',
    'policy.largestJob={"*":4}',
)


@pytest.fixture
def tenant(helm: str, admin: Kubectl, kubectl: Kubectl) -> Iterator[Kubectl]:
    """kubectl in a namespace that a policy is bound to."""
    chart = str(ROOT / "charts" / "stage2")
    named = 'image.repository="registry.example/team"'
    values = [f"--set-json={value}" for value in (*VALUES, named, f'controller.namespaces=["{kubectl.namespace}"]')]
    command = [helm, "template", "s", chart, "--namespace", kubectl.namespace, "--show-only=templates/policy.yaml"]
    rendered = subprocess.run([*command, *values], check=True, text=True, capture_output=True).stdout
    made = list(yaml.safe_load_all(rendered))
    for manifest in made:
        admin.apply(manifest)
    risky = job(image="evil.example/x")
    eventually(lambda: kubectl.run("create", "--dry-run=server", "-f", "-", stdin=risky).returncode, why="it is bound")
    yield kubectl
    for manifest in made:
        admin("delete", manifest["kind"], manifest["metadata"]["name"])


def test_a_tenant_gets_what_training_needs_and_nothing_else(tenant: Kubectl) -> None:
    for override, path, known in RISKY:
        sent = job(image="my/trainer:1", volumes=[], learner={"gpus": 1, "template": override})
        done = tenant.run("create", "--dry-run=server", "--validate=false", "-f", "-", stdin=sent)
        assert (done.returncode != 0) is known, (path, done.stderr)
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
def test_a_tenant_names_the_claim_templates_that_the_admin_named(tenant: Kubectl, claimed: str, taken: bool) -> None:
    rollout = {"servers": 3, "resourceClaimTemplate": claimed}
    learner = {"gpus": 1, "resourceClaimTemplate": claimed}
    mode = {"mode": "Scheduler"}
    sent = job(image="my/trainer:1", volumes=[], rollout=rollout, learner=learner, placement=mode)
    done = tenant.run("create", "--dry-run=server", "-f", "-", stdin=sent)
    assert (done.returncode == 0) is taken, done.stderr
    assert ("ResourceClaimTemplates of jobs are one-gpu" in done.stderr) is not taken
