"""The one node: containerd, the kubelet, kube-proxy and the device plugin."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import yaml

from local_cluster.control_plane import free_port, kubectl
from local_cluster.images import PAUSE_IMAGE
from local_cluster.layout import (
    CLUSTER_DOMAIN,
    DNS_SERVICE_IP,
    KUBELET_STATE,
    NODE_IP,
    NODE_NAME,
    POD_CIDR,
    ClusterError,
    Layout,
)
from local_cluster.pki import Credentials, kubeconfig_of
from local_cluster.processes import Daemon, run, spawn, stop, wait_until
from local_cluster.toolchain import binary_path

CNI_BINARIES = "/usr/lib/cni"
GPU_RESOURCE = "nvidia.com/gpu"

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
    return run(["ctr", f"--address={layout.containerd_socket}", "--namespace=k8s.io", *arguments])


def containerd_answers(layout: Layout) -> bool:
    """Whether this cluster's containerd is up."""
    command = ["ctr", f"--address={layout.containerd_socket}", "--connect-timeout=1s", "version"]
    return (
        layout.containerd_socket.exists() and subprocess.run(command, capture_output=True, check=False).returncode == 0
    )


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
    daemon = _spawn_containerd(layout, config)
    if forget_containers(layout):
        stop([daemon])
        _spawn_containerd(layout, config)


def _spawn_containerd(layout: Layout, config: Path) -> Daemon:
    daemon = spawn(layout, "containerd", ["containerd", f"--config={config}"])
    wait_until(layout, lambda: containerd_answers(layout), what="containerd", daemon=daemon)
    return daemon


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


def start_kubelet(layout: Layout, credentials: Credentials) -> Daemon:
    """Start the kubelet with the webhook authorization and the certificates of a real cluster."""
    KUBELET_STATE.mkdir(exist_ok=True)
    config = layout.home / "kubelet.yaml"
    config.write_text(yaml.safe_dump(_kubelet_config(layout, credentials)))
    return spawn(
        layout,
        "kubelet",
        [
            binary_path(layout, "kubelet"),
            f"--config={config}",
            f"--kubeconfig={kubeconfig_of(layout, 'kubelet')}",
            f"--root-dir={layout.home / 'kubelet'}",
            f"--cert-dir={layout.pki}",
            f"--hostname-override={NODE_NAME}",
            f"--node-ip={NODE_IP}",
        ],
    )


def _kubelet_config(layout: Layout, credentials: Credentials) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": NODE_IP,
        "port": free_port(NODE_IP),
        "readOnlyPort": 0,
        "healthzPort": free_port(),
        "tlsCertFile": str(credentials.kubelet.cert),
        "tlsPrivateKeyFile": str(credentials.kubelet.key),
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(credentials.ca)},
        },
        "authorization": {"mode": "Webhook"},
        "containerRuntimeEndpoint": f"unix://{layout.containerd_socket}",
        "cgroupDriver": "cgroupfs",
        "cgroupRoot": layout.cgroup,
        "failCgroupV1": False,
        "failSwapOn": False,
        # Machines that are themselves containers may not lower a process's score.
        "oomScoreAdj": 0,
        "clusterDNS": [DNS_SERVICE_IP],
        "clusterDomain": CLUSTER_DOMAIN,
        "podLogsDir": str(layout.home / "pod-logs"),
        "volumePluginDir": str(layout.home / "volume-plugins"),
        # Images are the cache that a later cluster lives from: never collected.
        "imageGCHighThresholdPercent": 100,
        "evictionHard": {"memory.available": "100Mi", "nodefs.available": "1%", "imagefs.available": "1%"},
        "serializeImagePulls": False,
        # How soon the node tells of its GPUs: at the default of 10 s that is most of the boot.
        "nodeStatusUpdateFrequency": "1s",
    }


def start_kube_proxy(layout: Layout) -> None:
    """Start kube-proxy in iptables mode; the machine's connection tracking limits stay as they are."""
    config = layout.home / "kube-proxy.yaml"
    document = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig_of(layout, "kube-proxy"))},
        "mode": "iptables",
        "clusterCIDR": POD_CIDR,
        "hostnameOverride": NODE_NAME,
        "bindAddress": NODE_IP,
        "metricsBindAddress": f"127.0.0.1:{free_port()}",
        "healthzBindAddress": f"127.0.0.1:{free_port()}",
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    config.write_text(yaml.safe_dump(document))
    spawn(layout, "kube-proxy", [binary_path(layout, "kube-proxy"), f"--config={config}"])


def start_device_plugin(layout: Layout, gpus: int) -> Daemon:
    """Advertise fake GPUs through the kubelet's device plugin interface."""
    argv = [sys.executable, "-m", "local_cluster.device_plugin", f"--resource={GPU_RESOURCE}", f"--count={gpus}"]
    package_root = Path(__file__).resolve().parent.parent
    return spawn(layout, "device-plugin", argv, env={"PYTHONPATH": str(package_root)})


def wait_ready(layout: Layout, kubelet: Daemon, gpus: int) -> None:
    """Wait until the node is Ready with all its GPUs, and pods can be created."""
    query = '{.status.conditions[?(@.type=="Ready")].status} {.status.allocatable.nvidia\\.com/gpu}'

    def ready() -> bool:
        try:
            node = kubectl(layout, "get", "node", NODE_NAME, f"-o=jsonpath={query}")
            kubectl(layout, "get", "serviceaccount", "default", "-o=name")
        except ClusterError:
            return False
        return node == f"True {gpus}"

    wait_until(layout, ready, what=f"node with {gpus} {GPU_RESOURCE}", daemon=kubelet)
