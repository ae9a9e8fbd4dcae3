"""Other people's controllers on the local cluster, as they ship them: their own program and their own manifests.

The program is built from its Go module, put into an image of its own, and installed by the `config/default` of the same
module, but with an image of our own, and without APIs that its pod serves: while the pod is away, nobody could delete a
namespace.
"""

import json
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import yaml
from rich.console import Console

from local_cluster import buildah, images, network
from local_cluster.control_plane import kubectl
from local_cluster.layout import HUB, SERVICE_CIDR, ClusterError, Layout
from local_cluster.pki import kubeconfig_of
from local_cluster.processes import forget, named, run, spawn, stop, wait_until
from local_cluster.steps import Steps
from local_cluster.toolchain import (
    MODULE,
    Binary,
    ensure_binaries,
    ensure_packages,
    missing_binaries,
    missing_packages,
    path_of,
)

FIREWALL = Binary("kube-router", "github.com/cloudnativelabs/kube-router/v2/cmd/kube-router")
FIREWALL_CHAIN = "KUBE-ROUTER-FORWARD"
CONFIG = "config"
TIMEOUT = "--timeout=180s"
WITHOUT = {
    "apiVersion": "apiregistration.k8s.io/v1",
    "kind": "APIService",
    "metadata": {"name": "any"},
    "$patch": "delete",
}


class Addon(Protocol):
    """Something that `enable` adds to a running cluster."""

    @property
    def name(self) -> str:
        """As a person types it."""
        ...

    def enable(self, layout: Layout, console: Console) -> None:
        """Build what is missing, start it, and wait until it works."""
        ...

    def disable(self, layout: Layout, console: Console) -> None:
        """Remove it, and what it has left."""
        ...


@dataclass(frozen=True)
class Controller:
    """A controller: its name, the Go module that is both its program and its manifests, and the package to build."""

    name: str
    module: str
    package: str

    @property
    def binary(self) -> Binary:
        """The program."""
        return Binary(self.name, self.package)

    @property
    def namespace(self) -> str:
        """Where its manifests put it."""
        return f"{self.name}-system"

    def enable(self, layout: Layout, console: Console) -> None:
        """Build what is missing, install it, and wait until it answers."""
        steps = Steps(console, len(missing_binaries(layout, [self.binary])) + 1)
        ensure_binaries(layout, [self.binary], steps)
        with steps.step(f"starting {self.name}"):
            reference = _ensure_image(layout, self)
            overlay = f"--kustomize={_overlay(layout, self, reference)}"
            kubectl(layout, "apply", "--server-side", "--force-conflicts", overlay)
            rollout = ("rollout", "status", "deployment", f"--namespace={self.namespace}", TIMEOUT)
            kubectl(layout, *rollout)

    def disable(self, layout: Layout, console: Console) -> None:
        """Remove its objects while it still runs, since it holds some by finalizers, and then itself."""
        folder = _overlay(layout, self, "gone")
        with Steps(console, 1).step(f"removing {self.name}"):
            manifests = [*yaml.safe_load_all(kubectl(layout, "kustomize", str(folder)))]
            kinds = [item["metadata"]["name"] for item in manifests if item["kind"] == "CustomResourceDefinition"]
            kubectl(layout, "delete", "crd", *kinds, "--ignore-not-found", TIMEOUT)
            kubectl(layout, "delete", f"--kustomize={folder}", "--ignore-not-found", TIMEOUT)


def _ensure_image(layout: Layout, addon: Controller) -> str:
    """The addon's image, in the cluster; its tag is the key of the program that it holds."""
    program = path_of(layout, addon.binary)
    reference = f"{HUB}stage2/{addon.name}:{program.parent.name.rpartition('-')[2]}"
    if not buildah.built(layout, reference):
        images.of_program(layout, reference, program, "/manager")
    images.load_built(layout, reference)
    return reference


def _overlay(layout: Layout, addon: Controller, reference: str) -> Path:
    """A kustomization of the module's own manifests: with our image, without APIs that the API server passes on."""
    folder = layout.home / "addons" / addon.name
    folder.mkdir(parents=True, exist_ok=True)
    base = os.path.relpath(_manifests(layout, addon) / "default", folder)
    at = "/spec/template/spec/containers/0"
    ours = [
        {"op": "add", "path": f"{at}/image", "value": reference},
        {"op": "add", "path": f"{at}/imagePullPolicy", "value": "Never"},
    ]
    patches = [
        {"target": {"kind": "Deployment", "name": ".*controller-manager"}, "patch": json.dumps(ours)},
        {"target": {"kind": "APIService"}, "patch": json.dumps(WITHOUT)},
    ]
    (folder / "kustomization.yaml").write_text(json.dumps({"resources": [base], "patches": patches}))
    return folder


def _manifests(layout: Layout, addon: Controller) -> Path:
    """The module's manifests, kept beside its program so that a later cluster needs no module."""
    kept = path_of(layout, addon.binary).parent / CONFIG
    if not kept.exists():
        found = json.loads(run(["go", "mod", "download", "-json", addon.module], cwd=MODULE))
        if "Dir" not in found:
            raise ClusterError(f"Go module {addon.module} cannot be had: {found.get('Error')}")
        partial = kept.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        shutil.copytree(Path(found["Dir"]) / CONFIG, partial, copy_function=shutil.copyfile)
        for path in (partial, *partial.rglob("*")):
            path.chmod(0o755 if path.is_dir() else 0o644)
        partial.replace(kept)
    return kept


@dataclass(frozen=True)
class Firewall:
    """kube-router, which turns NetworkPolicies on and off: the CNI plugin itself knows nothing of them."""

    name = FIREWALL.name

    def enable(self, layout: Layout, console: Console) -> None:
        """Start it, and wait until packets pass its chain."""
        steps = Steps(console, bool(missing_packages()) + len(missing_binaries(layout, [FIREWALL])) + 1)
        ensure_packages(steps)
        ensure_binaries(layout, [FIREWALL], steps)
        with steps.step(f"starting {self.name}"):
            for node in layout.nodes():
                if not any(daemon.alive() for daemon in named(node, self.name)):
                    self._start(node)

    def _start(self, layout: Layout) -> None:
        flags = [
            *("--run-firewall=true", "--run-router=false", "--run-service-proxy=false", "--enable-cni=false"),
            *("--metrics-port=0", "--health-port=0", "--v=1"),
            f"--hostname-override={layout.node_name}",
            f"--service-cluster-ip-range={SERVICE_CIDR}",
            f"--kubeconfig={kubeconfig_of(layout, 'admin')}",
        ]
        daemon = spawn(layout, self.name, [path_of(layout, FIREWALL), *flags])
        wait_until(layout, lambda: network.has_chain(layout, FIREWALL_CHAIN), what="the firewall", daemon=daemon)

    def disable(self, layout: Layout, console: Console) -> None:
        """Stop it, and remove its chains and sets."""
        for node in layout.nodes():
            for daemon in named(node, self.name):
                stop([daemon])
                forget(node, daemon)
            network.remove_firewall(node)


_CONTROLLERS = (
    Controller("kueue", "sigs.k8s.io/kueue", "sigs.k8s.io/kueue/cmd/kueue"),
    Controller("jobset", "sigs.k8s.io/jobset", "sigs.k8s.io/jobset"),
)
ADDONS: dict[str, Addon] = {addon.name: addon for addon in (*_CONTROLLERS, Firewall())}
PROGRAMS = (*(addon.binary for addon in _CONTROLLERS), FIREWALL)
"""What addons run; each is built when it is first enabled."""
