"""containerd with a socket, a configuration and a root of its own: the machine's own engine is not disturbed."""

import os
import shutil
import subprocess
from collections.abc import Sequence

from local_cluster.layout import PAUSE_IMAGE, Layout
from local_cluster.processes import Daemon, respawn, run, spawn, stop, wait_until

NAME = "containerd"
CNI_BINARIES = "/usr/lib/cni"
SNAPSHOTS = "io.containerd.snapshotter.v1.overlayfs/snapshots"

CONTAINERD_CONFIG = """\
version = 2
root = "{root}"
state = "{home}/containerd"
temp = "{home}/tmp"
oom_score = 0
disabled_plugins = [
  "io.containerd.internal.v1.opt",
  "io.containerd.snapshotter.v1.aufs", "io.containerd.snapshotter.v1.btrfs",
  "io.containerd.snapshotter.v1.devmapper", "io.containerd.snapshotter.v1.zfs",
  "io.containerd.tracing.processor.v1.otlp",
]

[grpc]
address = "{socket}"

[plugins."io.containerd.grpc.v1.cri"]
sandbox_image = "{pause}"
restrict_oom_score_adj = true
netns_mounts_under_state_dir = true

[plugins."io.containerd.grpc.v1.cri".cni]
bin_dir = "{cni_binaries}"
conf_dir = "{home}/cni/net.d"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
runtime_type = "io.containerd.runc.v2"

[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
SystemdCgroup = false
Root = "{home}/runc"
"""


def ctr(layout: Layout, *arguments: str) -> str:
    """Run containerd's own client in the namespace of Kubernetes' images and containers."""
    return run(ctr_command(layout, *arguments))


def ctr_command(layout: Layout, *arguments: str) -> list[str]:
    """The command line of one call of that client."""
    return ["ctr", f"--address={layout.containerd_socket}", "--namespace=k8s.io", *arguments]


def containerd_answers(layout: Layout) -> bool:
    """Whether this cluster's containerd is up."""
    command = ["ctr", f"--address={layout.containerd_socket}", "--connect-timeout=1s", "version"]
    return (
        layout.containerd_socket.exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


def share_images(nodes: Sequence[Layout]) -> None:
    """Give further nodes the first one's images, while its containerd is down: its databases, and links to all else."""
    first, *further = nodes
    layers = first.containerd_root / SNAPSHOTS
    for node in further:
        shutil.rmtree(node.containerd_root, ignore_errors=True)
        if layers.exists():
            shutil.copytree(first.containerd_root, node.containerd_root, copy_function=_link, ignore=_layers)
            for layer in layers.iterdir():
                (node.containerd_root / SNAPSHOTS / layer.name).symlink_to(layer)


def _layers(folder: str, names: list[str]) -> list[str]:
    return names if folder.endswith(SNAPSHOTS) else []


def _link(source: str, target: str) -> None:
    """Copy what containerd writes in place, and link what it only reads."""
    if source.endswith(".db"):
        shutil.copy2(source, target)
    else:
        os.link(source, target)


def start_containerd(layout: Layout) -> None:
    """Start containerd; containers that a crash left in its books are struck out before the kubelet sees them."""
    (layout.home / "tmp").mkdir(exist_ok=True)
    config = layout.home / "containerd.toml"
    config.write_text(
        CONTAINERD_CONFIG.format(
            root=layout.containerd_root,
            home=layout.home,
            socket=layout.containerd_socket,
            pause=PAUSE_IMAGE,
            cni_binaries=CNI_BINARIES,
        )
    )
    daemon = spawn(layout, NAME, ["containerd", f"--config={config}"])
    await_containerd(layout, daemon)
    if forget_containers(layout):
        stop([daemon])
        await_containerd(layout, respawn(layout, daemon))


def await_containerd(layout: Layout, daemon: Daemon) -> None:
    """Wait until containerd answers: a kubelet that finds none ends."""
    wait_until(layout, lambda: containerd_answers(layout), what="containerd", daemon=daemon)


def forget_containers(layout: Layout) -> int:
    """Kill and delete every container that containerd knows; return how many there were."""
    containers = ctr(layout, "containers", "list", "--quiet").split()
    for task in ctr(layout, "tasks", "list", "--quiet").split():
        run(
            ["ctr", f"--address={layout.containerd_socket}", "--namespace=k8s.io", "tasks", "delete", "--force", task],
            check=False,
        )
    if containers:
        ctr(layout, "containers", "delete", *containers)
    return len(containers)
