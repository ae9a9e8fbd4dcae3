"""Kueue on the local cluster: what the cluster can do while Kueue is away."""

from pathlib import Path

import pytest

from tests.cluster.controller.conftest import Kubectl

KUEUE = "--namespace=kueue-system"
DEPLOYMENT = "deployment/kueue-controller-manager"


@pytest.mark.alone
@pytest.mark.in_turns(4)
def test_namespaces_can_be_deleted_while_kueue_is_down(admin: Kubectl, kueue: None, on_local_cluster: Path) -> None:
    admin("scale", KUEUE, DEPLOYMENT, "--replicas=0")
    try:
        admin("wait", KUEUE, "pods", "--all", "--for=delete", "--timeout=600s")
        admin("create", "namespace", "stage2-test-goes")
        admin("delete", "namespace", "stage2-test-goes", "--timeout=600s")
    finally:
        admin("scale", KUEUE, DEPLOYMENT, "--replicas=1")
        admin("rollout", "status", KUEUE, DEPLOYMENT, "--timeout=600s")
