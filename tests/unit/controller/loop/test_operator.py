"""A controller that cannot start says why, and ends."""

import socket

import pytest
import yaml

from stage2_controller.loop import operator
from stage2_controller.loop.controller import Options
from stage2_controller.spec.settings import Settings


@pytest.fixture
def kubeconfig(tmp_path, monkeypatch):
    """A kubeconfig of a cluster that nobody runs."""
    path = tmp_path / "kubeconfig"
    named = {"name": "x"}
    document = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "x",
        "contexts": [{**named, "context": {"cluster": "x", "user": "x"}}],
        "clusters": [{**named, "cluster": {"server": "https://127.0.0.1:1"}}],
        "users": [{**named, "user": {"token": "t"}}],
    }
    path.write_text(yaml.safe_dump(document))
    monkeypatch.setenv("KUBECONFIG", str(path))


def test_without_a_cluster_it_names_the_kubeconfig_that_it_looked_for(tmp_path, monkeypatch):
    monkeypatch.setenv("KUBECONFIG", str(tmp_path / "none"))
    failure = operator.run(Settings(), Options())
    assert failure.startswith(f"KUBECONFIG: '{tmp_path / 'none'}'")
    assert "current context" in failure


@pytest.mark.usefixtures("kubeconfig")
def test_a_taken_address_is_named_with_the_flag():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        failure = operator.run(Settings(), Options(listen=("127.0.0.1", port)))
    assert failure.startswith(f"--listen: 127.0.0.1:{port}: must be a free address")
