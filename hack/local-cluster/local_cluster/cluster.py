"""Boots a cluster in order, and says what of it runs."""

import json
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from local_cluster import cgroups, containerd, dns, images, network, node, pki, teardown
from local_cluster.control_plane import Endpoint, free_port, start_api_server, start_controllers, start_etcd
from local_cluster.layout import KUBELET_STATE, NODE_IP, NODE_LINK, PAUSE_IMAGE, ClusterError, Layout
from local_cluster.processes import recorded, respawn
from local_cluster.steps import Steps
from local_cluster.toolchain import (
    CONTROL_PLANE,
    NODE,
    ensure_binaries,
    ensure_packages,
    kubernetes_version,
    missing_binaries,
    missing_packages,
)

CONTROL_PLANE_ONLY, WHOLE = "control plane only", "whole cluster"


def running(layout: Layout) -> str | None:
    """Which kind of cluster runs in this folder, all its processes alive; None when none does."""
    daemons = [daemon for one in layout.nodes() for daemon in recorded(one)]
    if not _state(layout).exists() or not all(daemon.alive() for daemon in daemons):
        return None
    return str(json.loads(_state(layout).read_text())["kind"])


def _state(layout: Layout) -> Path:
    return layout.home / "cluster.json"


def up(layout: Layout, console: Console, *, control_plane_only: bool, gpus: int, nodes: int) -> bool:
    """Boot; return False when that cluster was running already. What an earlier one has left is removed first."""
    wanted = CONTROL_PLANE_ONLY if control_plane_only else WHOLE
    kind, version = running(layout), kubernetes_version()
    if kind:
        runs = json.loads(_state(layout).read_text())
        if runs == {"kind": wanted, "kubernetes": version, "nodes": nodes}:
            return False
        found = f"{kind}, Kubernetes {runs.get('kubernetes')}, nodes: {runs.get('nodes')}"
        raise ClusterError(f"in {layout.home} runs: {found}; take it down first (`local-cluster down`)")
    if layout.home.exists():
        console.print("Removing what an earlier cluster has left.")
        teardown.down(layout)
    if not control_plane_only:
        _refuse_second_cluster()
    binaries = CONTROL_PLANE if control_plane_only else (*CONTROL_PLANE, *NODE)
    of_boot, packages = (1, []) if control_plane_only else (3, missing_packages())
    steps = Steps(console, bool(packages) + len(missing_binaries(layout, binaries)) + of_boot)
    if not control_plane_only:
        ensure_packages(steps)
    ensure_binaries(layout, binaries, steps)
    layout.home.mkdir(parents=True, mode=0o755)
    if control_plane_only:
        with steps.step("starting the control plane"):
            _boot_control_plane([layout], Endpoint("127.0.0.1", free_port()))
    else:
        _boot_whole([layout.node(number) for number in range(1, nodes + 1)], steps, gpus)
    _state(layout).write_text(json.dumps({"kind": wanted, "kubernetes": version, "nodes": nodes}))
    return True


def mend(layout: Layout) -> list[str]:
    """Start what has died of a booted cluster again, as a machine's supervisor would; the names of what it was.

    Pods live on: containerd finds them by their shims. Unlike `up`, this keeps all state.
    """
    if not _state(layout).exists():
        raise ClusterError(f"no cluster was booted in {layout.home} (`local-cluster up` boots one)")
    dead = [(one, daemon) for one in layout.nodes() for daemon in recorded(one) if not daemon.alive()]
    for one in layout.nodes()[1:]:
        network.plug(one, "up")
    for one, daemon in dead:
        started = respawn(one, daemon)
        if daemon.name == containerd.NAME:
            containerd.await_containerd(one, started)
    return [f"{daemon.name}{one.suffix}" for one, daemon in dead]


def _refuse_second_cluster() -> None:
    if Path(f"/sys/class/net/{NODE_LINK}").exists():
        raise ClusterError(
            f"another local cluster runs on this machine (its link {NODE_LINK} exists); take that one down first"
        )
    if (KUBELET_STATE / "device-plugins/kubelet.sock").exists():
        raise ClusterError(
            f"a kubelet lives on this machine already ({KUBELET_STATE}); use its cluster: export KUBECONFIG=…"
        )


def _boot_control_plane(nodes: Sequence[Layout], endpoint: Endpoint) -> pki.Credentials:
    layout = nodes[0]
    credentials = pki.create(nodes, endpoint.host, endpoint.port)
    start_api_server(layout, credentials, endpoint, start_etcd(layout))
    return credentials


def _boot_whole(nodes: Sequence[Layout], steps: Steps, gpus: int) -> None:
    """Boot in three steps."""
    layout = nodes[0]
    images.ensure_pause(layout)
    teardown.remember_host(layout)
    for one in nodes:
        one.home.mkdir(exist_ok=True)
        cgroups.create(one)
    network.set_up(nodes)
    containerd.share_images(nodes)
    with steps.step("starting the control plane"):
        credentials = _boot_control_plane(nodes, Endpoint(NODE_IP, free_port(NODE_IP)))
        start_controllers(layout, credentials)
    with steps.step("starting the nodes"):
        for one in nodes:
            containerd.start_containerd(one)
        images.load_built(layout, PAUSE_IMAGE)
        kubelets = [node.start(one, credentials, gpus) for one in nodes]
        dns.start(layout)
        for one, kubelet in zip(nodes, kubelets, strict=True):
            node.wait_ready(one, kubelet, gpus)
    with steps.step("loading the images that were built"):
        images.load_all_built(layout)
