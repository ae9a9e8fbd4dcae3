"""Nodes of one cluster share its own files and the images that were built, and nothing else."""

import ipaddress
from pathlib import Path

import pytest

from local_cluster.layout import MAX_NODES, POD_CIDR, ClusterError, Layout, need_space


def test_nodes_share_only_cluster_files(tmp_path: Path) -> None:
    first = Layout(home=tmp_path, cache=tmp_path / "cache")
    for number in (3, 10, 2):
        first.node(number).home.mkdir()
    nodes = first.nodes()
    assert [node.number for node in nodes] == [1, 2, 3, 10]
    for common in ("cluster", "kubeconfig", "pki", "cache"):
        assert len({getattr(node, common) for node in nodes}) == 1
    own = ("home", "node_name", "node_ip", "cgroup", "records", "logs", "containerd_socket", "containerd_root")
    for name in own:
        assert len({getattr(node, name) for node in nodes}) == len(nodes), name


def test_max_nodes_have_distinct_pod_networks() -> None:
    home = Layout(home=Path("/home"), cache=Path("/cache"))
    networks = {ipaddress.ip_network(home.node(number).pod_cidr) for number in range(1, MAX_NODES + 1)}
    assert len(networks) == MAX_NODES
    assert all(network.subnet_of(ipaddress.ip_network(POD_CIDR)) for network in networks)


def test_work_that_would_fill_disk_does_not_start(tmp_path: Path) -> None:
    need_space(tmp_path / "not" / "there", 1, "the build")
    with pytest.raises(
        ClusterError, match=r"GB free; the build needs 1000000000.0 GB; free some \(.*, or set XDG_CACHE"
    ):
        need_space(tmp_path, 10**18, "the build")
