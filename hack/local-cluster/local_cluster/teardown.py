"""Removes every trace of a cluster, whole, half booted or crashed; only the caches stay."""

import json
import os
import shutil
from pathlib import Path

from local_cluster import cgroups, network
from local_cluster.containerd import containerd_answers, forget_containers
from local_cluster.layout import CONTAINER_LOG_LINKS, KUBELET_STATE, Layout
from local_cluster.processes import NAMESPACES, marked, named, recorded, run, stop

RUNTIME_STATE = Path("/run/containerd")
"""Compiled into containerd's shims as the home of their sockets."""
CNI_RESULTS = Path("/var/lib/cni/results")
"""Compiled into the CNI library as the home of what its plugins answered."""
SHARED_FOLDERS = (KUBELET_STATE, CONTAINER_LOG_LINKS, RUNTIME_STATE, CNI_RESULTS.parent)


def remember_host(layout: Layout) -> None:
    """Note which folders outside our own exist already: those are not ours to remove."""
    existing = [str(folder) for folder in SHARED_FOLDERS if folder.exists()]
    (layout.home / "host.json").write_text(json.dumps(existing))


def down(layout: Layout) -> None:
    """Bring the machine back to where it was before `up`; every step also works when what it removes is gone."""
    # Nothing they could still write is kept, so they get little time; a draining API server would take all it gets.
    nodes, kept = layout.nodes(), ("containerd", NAMESPACES)
    stop([daemon for node in nodes for daemon in recorded(node) if daemon.name not in kept], grace_s=0.5)
    host = layout.home / "host.json"
    if host.exists():
        for node in nodes:
            _remove_node(node)
        _clean_machine(layout, json.loads(host.read_text()))
    stop(marked(layout))
    _unmount(layout.home)
    shutil.rmtree(layout.home, ignore_errors=False)


def power_off(layout: Layout) -> None:
    """End all that runs on a further node at once, as if its power failed: its peers hear nothing of it."""
    (holder,) = named(layout, NAMESPACES)
    network.plug(layout, "down")
    stop([daemon for daemon in marked(layout) if daemon.pid != holder.pid], grace_s=0)
    cgroups.remove(layout)
    cgroups.create(layout)


def _remove_node(layout: Layout) -> None:
    if containerd_answers(layout):
        forget_containers(layout)
    cgroups.remove(layout)
    shim_sockets = _shim_sockets(layout)
    stop(marked(layout))
    for path in shim_sockets:
        path.unlink(missing_ok=True)
    if layout.number > 1:
        shutil.rmtree(layout.containerd_root, ignore_errors=True)


def _clean_machine(layout: Layout, existed_before: list[str]) -> None:
    _unmount(layout.home)
    _unmount(KUBELET_STATE)
    network.tear_down(layout)
    _remove_log_links(layout)
    _remove_cni_results()
    _remove_shared_folders(existed_before)


def _shim_sockets(layout: Layout) -> list[Path]:
    bundles = layout.home / "containerd/io.containerd.runtime.v2.task/k8s.io"
    return [Path(address.read_text().removeprefix("unix://")) for address in bundles.glob("*/address")]


def _unmount(folder: Path) -> None:
    """Detach every mount below `folder`, deepest first."""
    points = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    inside = [point.encode().decode("unicode_escape") for point in points if point.startswith(f"{folder}/")]
    for point in sorted(inside, reverse=True):
        run(["umount", "--lazy", point])


def _remove_log_links(layout: Layout) -> None:
    if CONTAINER_LOG_LINKS.exists():
        for link in CONTAINER_LOG_LINKS.iterdir():
            if link.is_symlink() and os.readlink(link).startswith(f"{layout.home}/"):
                link.unlink()


def _remove_cni_results() -> None:
    prefix, suffix = f"{network.CNI_NAME}-", "-eth0"
    for result in CNI_RESULTS.glob(f"{prefix}*{suffix}"):
        container = result.name.removeprefix(prefix).removesuffix(suffix)
        (CNI_RESULTS / f"cni-loopback-{container}-lo").unlink(missing_ok=True)
        result.unlink()


def _remove_shared_folders(existed_before: list[str]) -> None:
    for folder in SHARED_FOLDERS:
        if str(folder) not in existed_before:
            shutil.rmtree(folder, ignore_errors=True)
    (KUBELET_STATE / "device-plugins" / "stage2-gpu.sock").unlink(missing_ok=True)
