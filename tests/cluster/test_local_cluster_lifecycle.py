"""`local-cluster down` leaves nothing behind, whatever state it finds, and a later `up` works."""

import json
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from local_cluster.layout import Layout

pytestmark = [pytest.mark.alone, pytest.mark.in_turns(3, apart=True)]
BOOT_TIMEOUT_S = 1800
HOME = Path("/var/lib/stage2-cluster")
FOLDERS = ("/var/lib/kubelet", "/var/lib/cni", "/var/log/containers", "/var/log/pods", "/run/containerd", "/run/netns")
SYSCTLS = ("net/ipv4/ip_forward", "net/ipv4/conf/all/route_localnet", "vm/overcommit_memory", "kernel/panic")
POD = {
    "apiVersion": "v1",
    "kind": "Pod",
    "metadata": {"name": "idle"},
    "spec": {
        "containers": [
            {
                "name": "idle",
                "image": "stage2/pause:local",
                "imagePullPolicy": "IfNotPresent",
                "resources": {"limits": {"nvidia.com/gpu": 1}},
            }
        ]
    },
}


def _machine() -> dict[str, object]:
    """What a cluster changes on the machine, from its mounts to the kernel's settings."""

    def lines(*command: str) -> list[str]:
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()

    rules = [line for family in ("iptables-save", "ip6tables-save") for line in lines(family)]
    return {
        "mounts": sorted(line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()),
        "links": sorted(line.split()[1] for line in lines("ip", "-oneline", "link")),
        "routes": lines("ip", "route"),
        "rules": [line for line in rules if line.startswith("-A") or (line.startswith(":") and " - " in line)],
        "cgroups": sorted(path for path, _, _ in os.walk("/sys/fs/cgroup") if "stage2" in path or "kubepods" in path),
        "processes": _processes(),
        "folders": [folder for folder in (*FOLDERS, str(HOME)) if Path(folder).exists()],
        "settings": {name: Path("/proc/sys", name).read_text() for name in SYSCTLS},
    }


def _processes() -> list[str]:
    """Command lines that name the cluster's folder, live ones only; a pod's own process is `/pause`."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            command = path.read_bytes().replace(b"\0", b" ").decode()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if str(HOME) in command or command.startswith("/pause"):
            found.append(command)
    return sorted(found)


@pytest.fixture
def before(root: None, local_cluster: Any, networks: None) -> Iterator[dict[str, object]]:
    """The machine without a cluster; skips where one runs, since these tests crash theirs."""
    if os.environ.get("KUBECONFIG") or HOME.exists():
        pytest.skip("a cluster is in use; these tests boot and crash one of their own")
    if shutil.which("iptables-save") is None:  # the first boot on a machine installs what it takes to look
        local_cluster.up()
        local_cluster("down")
    try:
        yield _machine()
    finally:
        local_cluster("down")


def _run_pod(local_cluster: Any, *, node: int = 1) -> None:
    kubectl = ["kubectl", f"--kubeconfig={local_cluster.up(f'--nodes={node}')}"]
    pod = {
        **POD,
        "spec": {**POD["spec"], "nodeSelector": {"kubernetes.io/hostname": Layout(HOME, HOME).node(node).node_name}},
    }
    subprocess.run([*kubectl, "apply", "--filename=-"], input=json.dumps(pod), text=True, check=True)
    subprocess.run([*kubectl, "wait", "--for=condition=Ready", "pod/idle", "--timeout=600s"], check=True)


def _kill(*names: str) -> None:
    for name in names:
        os.kill(json.loads((HOME / "processes" / f"{name}.json").read_text())["pid"], signal.SIGKILL)


def _crash_runtime(local_cluster: Any) -> None:
    _run_pod(local_cluster)
    _kill("containerd", "kubelet")


def _crash_control_plane(local_cluster: Any) -> None:
    _run_pod(local_cluster)
    _kill("etcd", "kube-apiserver", "device-plugin", "kube-proxy")


def _cut_off_a_node(local_cluster: Any) -> None:
    """One that has run a pod, and that comes back once before."""
    _run_pod(local_cluster, node=2)
    local_cluster("cut-off", "2")
    assert local_cluster.running() is None
    local_cluster("mend")
    assert local_cluster.running()
    local_cluster("cut-off", "2")


def _boot_half(local_cluster: Any) -> None:
    """Kill `up` itself once the kubelet has started."""
    booting = subprocess.Popen([local_cluster.command, "up"], stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + BOOT_TIMEOUT_S
    while not (HOME / "processes" / "kubelet.json").exists():
        assert time.monotonic() < deadline
        assert booting.poll() is None
        time.sleep(0.02)
    booting.kill()
    booting.wait()


@pytest.mark.parametrize("bring_about", [_crash_runtime, _crash_control_plane, _cut_off_a_node, _boot_half])
def test_down_leaves_nothing_behind(
    local_cluster: Any, before: dict[str, object], bring_about: Callable[[Any], None]
) -> None:
    bring_about(local_cluster)
    assert _machine() != before
    local_cluster("down")
    assert _machine() == before


def test_up_boots_a_clean_cluster_after_a_crash(local_cluster: Any, before: dict[str, object]) -> None:
    _crash_runtime(local_cluster)
    kubeconfig = local_cluster.up()
    command = ["kubectl", f"--kubeconfig={kubeconfig}", "get", "pods", "--output=name"]
    assert subprocess.run(command, check=True, capture_output=True, text=True).stdout == ""
    assert local_cluster.running()
    _run_pod(local_cluster)
    started = {record.name: record.read_text() for record in (HOME / "processes").iterdir()}
    assert local_cluster.up() == kubeconfig
    assert {record.name: record.read_text() for record in (HOME / "processes").iterdir()} == started
    local_cluster("down")
    assert _machine() == before, "of a cluster that ran a pod and did not crash"


def test_down_without_a_cluster_succeeds(local_cluster: Any, before: dict[str, object]) -> None:
    assert local_cluster("down").returncode == 0
    assert _machine() == before
