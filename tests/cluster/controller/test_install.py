"""The chart on a real cluster: the controller's own image, pod and rights."""

import json
import subprocess

import pytest

from tests.cluster.controller.conftest import ROOT, Kubectl, Kubelet, job
from tests.cluster.controller.test_steadiness import settled, versions
from tests.support.clusters import ON_A_KUBELET


class Helm:
    """helm for one release, `stage2`, in the namespace of the test."""

    def __init__(self, binary: str, kubectl: Kubectl, image: str) -> None:
        self._common = [f"--kubeconfig={kubectl.kubeconfig}", f"--namespace={kubectl.namespace}"]
        self._binary = binary
        self._values = [
            "--set=crd.install=false",
            f'--set-json=controller.namespaces=["{kubectl.namespace}"]',
            f"--set=image.controller={image},image.trainer=registry.example/team/trainer:1",
            f"--set-json=controller.affinity={json.dumps(ON_A_KUBELET)}",
        ]

    def __call__(self, *arguments: str) -> None:
        """Runs helm; raises with what it complains about."""
        done = subprocess.run([self._binary, *arguments, *self._common], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr

    def upgrade(self, *values: str) -> None:
        """Installs or upgrades the release and waits until the controller is ready."""
        chart = str(ROOT / "charts" / "stage2")
        self("upgrade", "--install", "stage2", chart, "--wait", "--timeout=10m", *self._values, *values)


@pytest.fixture
def release(helm: str, kubectl: Kubectl, controller_image: str) -> Helm:
    """The chart, not installed yet."""
    return Helm(helm, kubectl, controller_image)


def test_helm_upgrade_rollback_and_uninstall_leave_running_job_untouched(
    release: Helm, kubectl: Kubectl, node: str, kubelet: Kubelet
) -> None:
    release.upgrade()
    kubectl.apply(job())
    kubelet.job_runs("job-3v1")
    before = _without_the_controller(settled(kubectl))

    release.upgrade("--set=controller.logLevel=debug", "--set=image.trainer=registry.example/team/trainer:2")
    assert _without_the_controller(settled(kubectl)) == before

    release("rollback", "stage2", "1", "--wait", "--timeout=10m")
    assert _without_the_controller(settled(kubectl)) == before

    release("uninstall", "stage2", "--wait")
    assert _without_the_controller(versions(kubectl)) == before


def _without_the_controller(found: dict[tuple[str, str], str]) -> dict[tuple[str, str], str]:
    own = ("stage2", "sh.helm")
    return {key: version for key, version in found.items() if not key[1].startswith(own)}
