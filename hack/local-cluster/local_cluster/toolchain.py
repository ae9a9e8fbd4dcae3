"""The parts of a cluster: Debian packages, and programs built from pinned Go modules and cached."""

import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from local_cluster import other_kubernetes
from local_cluster.layout import ClusterError, Layout
from local_cluster.processes import in_use, run, tail
from local_cluster.steps import Steps

MODULE = Path(__file__).resolve().parent.parent / "go"
"""One Go module for all programs: what two of them import is of one version, and is compiled once."""
PINNED_KUBERNETES = "v1.34.4"

PACKAGES = {
    "containerd": "containerd",
    "runc": "runc",
    "iptables": "iptables",
    "conntrack": "conntrack",
    "ipset": "ipset",
    "buildah": "buildah",
    "skopeo": "skopeo",
    "debootstrap": "debootstrap",
    "ip": "iproute2",
    "mount": "mount",
    "faketime": "faketime",  # for tests of a clock that jumps
    "/usr/lib/cni/ptp": "containernetworking-plugins",
}
"""A command (or file) that must be there, and the Debian package that brings it."""


@dataclass(frozen=True)
class Binary:
    """A program: the package to build, and the names by which it is each of several programs."""

    name: str
    package: str
    aliases: tuple[str, ...] = ()


KUBERNETES = Binary(
    "kubernetes",
    "./kubernetes",
    ("etcd", "kube-apiserver", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubelet"),
)
"""Linked once, since linking each of the six takes as long as linking this."""
COREDNS = Binary("coredns", "./coredns")
PAUSE = Binary("pause", "./pause")
CONTROL_PLANE = (KUBERNETES,)
NODE = (COREDNS, PAUSE)

OTHER_KUBERNETES = "STAGE2_KUBERNETES"
"""The environment variable that names another version to build and run."""

COMPILE_FLAGS = ("-trimpath", "-gcflags=all=-dwarf=false -l", "-gcflags=std=-dwarf=false")
"""A cold build takes half the time without inlining and debug tables; the standard library keeps its inlining."""
COMPILER_MEMORY = {"GOGC": "400", "GOMEMLIMIT": "2GiB"}
"""The compiler collects its garbage less often."""


def missing_packages() -> list[str]:
    """Return the Debian packages that this machine lacks."""
    return sorted({package for command, package in PACKAGES.items() if not _found(command)})


def ensure_packages(steps: Steps) -> None:
    """Install the Debian packages that are missing, in one step."""
    missing = missing_packages()
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise ClusterError(f"missing on this machine, which has no apt-get to install them: {', '.join(missing)}")
    with steps.step(f"apt-get install {' '.join(missing)}"):
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update", "-qq"], env=env)
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], env=env)


def _found(command: str) -> bool:
    return Path(command).exists() if command.startswith("/") else shutil.which(command) is not None


def missing_binaries(layout: Layout, binaries: Sequence[Binary]) -> list[Binary]:
    """Return the programs that the cache lacks."""
    return [binary for binary in binaries if not path_of(layout, binary).exists()]


def ensure_binaries(layout: Layout, binaries: Sequence[Binary], steps: Steps) -> None:
    """Build what the cache lacks, a step for each: a single link of Kubernetes keeps every core busy."""
    missing = missing_binaries(layout, binaries)
    if not missing:
        return
    if not shutil.which("go"):
        raise ClusterError("Go (1.26 or newer) must be on PATH to build Kubernetes: https://go.dev/dl")
    for binary in missing:
        with steps.step(f"building {binary.name} from source"):
            _build(layout, binary)


def path_of(layout: Layout, binary: Binary) -> Path:
    """Where the cache keeps a program: keyed by the pins, its own source, the Go version and how it is built.

    What is built with another version of Kubernetes has a folder of its own, and supersedes nothing.
    """
    folder = (
        layout.cache / "bin" if _version_for(binary) == PINNED_KUBERNETES else others(layout) / _version_for(binary)
    )
    return folder / f"{binary.name}-{_key(binary)}" / binary.name


def kubernetes_version() -> str:
    """Return the version of Kubernetes that this command builds and runs."""
    named = os.environ.get(OTHER_KUBERNETES)
    return f"v{named.removeprefix('v')}" if named else PINNED_KUBERNETES


def others(layout: Layout) -> Path:
    """Return the folder of other versions of Kubernetes."""
    return layout.cache / "kubernetes"


def _version_for(binary: Binary) -> str:
    """Return the version of Kubernetes that a program is built with: only Kubernetes itself may have another one."""
    return kubernetes_version() if binary == KUBERNETES else PINNED_KUBERNETES


def binary_path(layout: Layout, name: str) -> Path:
    """The cached program of that name."""
    binary = next(binary for binary in (*CONTROL_PLANE, *NODE) if name in (binary.name, *binary.aliases))
    return path_of(layout, binary).with_name(name)


def _key(binary: Binary) -> str:
    digest = hashlib.sha256(json.dumps([_go_version(), *_build_flags(_version_for(binary))]).encode())
    for path in (MODULE / "go.mod", MODULE / "go.sum", *sorted((MODULE / binary.name).glob("*.go"))):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def _go_version() -> str:
    go = shutil.which("go")
    return run([go, "env", "GOVERSION"], env={"GOTOOLCHAIN": "local"}).strip() if go else ""


def _build(layout: Layout, binary: Binary) -> None:
    target = path_of(layout, binary)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_suffix(".partial")
    log = layout.cache / "build.log"
    version, module = _version_for(binary), MODULE
    if version != PINNED_KUBERNETES:
        module = target.parent / "module"
        other_kubernetes.write_module(module, MODULE / binary.name, version, _go_version().removeprefix("go"))
    with log.open("wb") as output:
        failed = subprocess.run(
            ["nice", "-n", "5", "go", "build", *_build_flags(version), "-o", str(partial), binary.package],
            cwd=module,
            env={**COMPILER_MEMORY, **os.environ, "CGO_ENABLED": "0"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if failed:
        raise ClusterError(f"building {binary.name} failed. The end of {log}:\n{tail(log)}")
    for alias in binary.aliases:
        link = target.with_name(alias)
        link.unlink(missing_ok=True)
        link.symlink_to(target.name)
    partial.replace(target)
    for folder in superseded(layout, binary):
        shutil.rmtree(folder)


def superseded(layout: Layout, binary: Binary) -> list[Path]:
    """Return the folders of a program's other versions, but for those that a process still runs."""
    own = path_of(layout, binary).parent
    return [folder for folder in own.parent.glob(f"{binary.name}-*") if folder != own and not in_use(folder)]


def _build_flags(kubernetes: str) -> tuple[str, ...]:
    major, minor, _ = kubernetes.removeprefix("v").split(".")
    package = "k8s.io/component-base/version"
    stamps = {"gitVersion": kubernetes, "gitMajor": major, "gitMinor": minor}
    return (*COMPILE_FLAGS, "-ldflags=-s -w " + " ".join(f"-X {package}.{name}={v}" for name, v in stamps.items()))
