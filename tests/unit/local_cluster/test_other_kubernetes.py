"""Another version of Kubernetes than the pinned one: its Go module, and where its program lies."""

from pathlib import Path

import pytest

from local_cluster import toolchain
from local_cluster.layout import Layout
from local_cluster.other_kubernetes import go_mod

OF_KUBERNETES = """module k8s.io/kubernetes

require k8s.io/api v0.0.0

replace (
\tk8s.io/api => ./staging/src/k8s.io/api
\tk8s.io/client-go => ./staging/src/k8s.io/client-go
)

replace example.com/other => example.com/fork v1.0.0
"""


def test_kubernetes_modules_follow_requested_version() -> None:
    *_, required, api, client = go_mod("v1.37.2", "1.26.8", OF_KUBERNETES).splitlines()
    assert required == "require k8s.io/kubernetes v1.37.2"
    assert api == "replace k8s.io/api => k8s.io/api v0.37.2"
    assert client == "replace k8s.io/client-go => k8s.io/client-go v0.37.2"


def test_other_kubernetes_version_has_own_folder_and_changes_no_other_program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = Layout(home=tmp_path / "home", cache=tmp_path / "cache")
    pinned, coredns = (toolchain.path_of(layout, one) for one in (toolchain.KUBERNETES, toolchain.COREDNS))
    monkeypatch.setenv("STAGE2_KUBERNETES", "1.37.2")
    other = toolchain.path_of(layout, toolchain.KUBERNETES)
    assert other.is_relative_to(tmp_path / "cache" / "kubernetes" / "v1.37.2")
    assert toolchain.path_of(layout, toolchain.COREDNS) == coredns
    other.parent.mkdir(parents=True)
    pinned.parent.mkdir(parents=True)
    assert toolchain.superseded(layout, toolchain.KUBERNETES) == []
