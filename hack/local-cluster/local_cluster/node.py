"""A node: the kubelet, kube-proxy and the device plugin."""

import sys
from pathlib import Path
from typing import Any

import yaml

from local_cluster.control_plane import free_port, kubectl
from local_cluster.layout import (
    CLUSTER_DOMAIN,
    DNS_SERVICE_IP,
    KUBELET_STATE,
    NODE_IP,
    POD_CIDR,
    ClusterError,
    Layout,
)
from local_cluster.pki import Credentials, kubeconfig_of
from local_cluster.processes import Daemon, spawn, wait_until
from local_cluster.toolchain import binary_path

GPU_RESOURCE = "nvidia.com/gpu"


def start(layout: Layout, credentials: Credentials, gpus: int) -> Daemon:
    """Start all that a node runs beside containerd; return the kubelet."""
    kubelet = _start_kubelet(layout, credentials)
    _start_device_plugin(layout, gpus)
    _start_kube_proxy(layout)
    return kubelet


def _start_kubelet(layout: Layout, credentials: Credentials) -> Daemon:
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
            f"--kubeconfig={kubeconfig_of(layout, layout.node_name)}",
            f"--root-dir={layout.home / 'kubelet'}",
            f"--cert-dir={layout.pki}",
            f"--hostname-override={layout.node_name}",
            f"--node-ip={layout.node_ip}",
        ],
    )


def _kubelet_config(layout: Layout, credentials: Credentials) -> dict[str, Any]:
    return {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "address": layout.node_ip,
        "port": free_port(NODE_IP),
        "readOnlyPort": 0,
        "healthzPort": free_port(),
        "tlsCertFile": str(credentials.kubelets[layout.node_name].cert),
        "tlsPrivateKeyFile": str(credentials.kubelets[layout.node_name].key),
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
        # How soon the node reports its GPUs: the default of 10 s would be most of the boot.
        "nodeStatusUpdateFrequency": "1s",
        # How soon a pod sees a change of a Secret that it mounts: Kueue waits for its certificate, by default a minute.
        "syncFrequency": "5s",
    }


def _start_kube_proxy(layout: Layout) -> None:
    """Start kube-proxy in iptables mode; the machine's connection tracking limits stay as they are."""
    config = layout.home / "kube-proxy.yaml"
    document = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "clientConnection": {"kubeconfig": str(kubeconfig_of(layout, "kube-proxy"))},
        "mode": "iptables",
        "clusterCIDR": POD_CIDR,
        "hostnameOverride": layout.node_name,
        "bindAddress": layout.node_ip,
        "metricsBindAddress": f"127.0.0.1:{free_port()}",
        "healthzBindAddress": f"127.0.0.1:{free_port()}",
        "conntrack": {"maxPerCore": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
    }
    config.write_text(yaml.safe_dump(document))
    spawn(layout, "kube-proxy", [binary_path(layout, "kube-proxy"), f"--config={config}"])


def _start_device_plugin(layout: Layout, gpus: int) -> None:
    """Advertise fake GPUs through the kubelet's device plugin interface."""
    argv = [sys.executable, "-m", "local_cluster.device_plugin", f"--resource={GPU_RESOURCE}", f"--count={gpus}"]
    package_root = Path(__file__).resolve().parent.parent
    spawn(layout, "device-plugin", argv, env={"PYTHONPATH": str(package_root)})


def wait_ready(layout: Layout, kubelet: Daemon, gpus: int) -> None:
    """Wait until the node is Ready with all its GPUs, and pods can be created."""
    query = '{.status.conditions[?(@.type=="Ready")].status} {.status.allocatable.nvidia\\.com/gpu}'

    def ready() -> bool:
        try:
            node = kubectl(layout, "get", "node", layout.node_name, f"-o=jsonpath={query}")
            kubectl(layout, "get", "serviceaccount", "default", "-o=name")
        except ClusterError:
            return False
        return node == f"True {gpus}"

    wait_until(layout, ready, what=f"{layout.node_name} with {gpus} {GPU_RESOURCE}", daemon=kubelet)
