"""What a cluster is made of: Debian packages, and programs built from pinned Go modules and cached."""

import hashlib
import os
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

from local_cluster.layout import ClusterError, Layout
from local_cluster.processes import run, tail

MODULES = Path(__file__).resolve().parent.parent / "go"
KUBERNETES_VERSION = "v1.34.4"

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
    "/usr/lib/cni/ptp": "containernetworking-plugins",
}
"""A command (or file) that must be there, and the Debian package that brings it."""


@dataclass(frozen=True)
class Binary:
    """One program: the folder under go/ that pins its module, and the package to build."""

    name: str
    module: str
    package: str


def _kubernetes(name: str) -> Binary:
    return Binary(name, "kubernetes", f"k8s.io/kubernetes/cmd/{name}")


ETCD = Binary("etcd", "etcd", "go.etcd.io/etcd/server/v3")
API_SERVER = _kubernetes("kube-apiserver")
PAUSE = Binary("pause", "pause", ".")
CONTROL_PLANE = (ETCD, API_SERVER)
NODE = (
    *(_kubernetes(name) for name in ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy")),
    PAUSE,
    Binary("coredns", "coredns", "github.com/coredns/coredns"),
)


def ensure_packages(console: Console) -> None:
    """Install the Debian packages that are missing."""
    missing = sorted({package for command, package in PACKAGES.items() if not _found(command)})
    if not missing:
        return
    if not shutil.which("apt-get"):
        raise ClusterError(f"missing on this machine, which has no apt-get to install them: {', '.join(missing)}")
    with console.status(f"apt-get install {' '.join(missing)}"):
        env = {"DEBIAN_FRONTEND": "noninteractive"}
        run(["apt-get", "update", "-qq"], env=env)
        run(["apt-get", "install", "-y", "-qq", "--no-install-recommends", *missing], env=env)


def _found(command: str) -> bool:
    return Path(command).exists() if command.startswith("/") else shutil.which(command) is not None


def ensure_binaries(layout: Layout, binaries: Sequence[Binary], console: Console) -> None:
    """Build what the cache lacks, one after the other: a single link of Kubernetes keeps every core busy."""
    missing = [binary for binary in binaries if not path_of(layout, binary).exists()]
    if not missing:
        return
    if not shutil.which("go"):
        raise ClusterError("Go (1.24 or newer) must be on PATH to build Kubernetes: https://go.dev/dl")
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress:
        for number, binary in enumerate(missing, start=1):
            task = progress.add_task(f"building {binary.name} ({number} of {len(missing)})", total=1)
            _build(layout, binary)
            progress.update(task, completed=1)


def path_of(layout: Layout, binary: Binary) -> Path:
    """Where the cache keeps a program: keyed by its module's pins, the Go version and how it is built."""
    return layout.cache / "bin" / f"{binary.module}-{_key(binary.module)}" / binary.name


def binary_path(layout: Layout, name: str) -> Path:
    """The cached program of that name."""
    return path_of(layout, next(binary for binary in (*CONTROL_PLANE, *NODE) if binary.name == name))


def _key(module: str) -> str:
    digest = hashlib.sha256(_go_version().encode() + KUBERNETES_VERSION.encode())
    for path in sorted((MODULES / module).iterdir()):
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
    with log.open("wb") as output:
        failed = subprocess.run(
            [
                *("nice", "-n", "5", "go", "build", "-trimpath"),
                "-ldflags",
                _link_flags(),
                "-o",
                str(partial),
                binary.package,
            ],
            cwd=MODULES / binary.module,
            env={**os.environ, "CGO_ENABLED": "0"},
            stdout=output,
            stderr=subprocess.STDOUT,
            check=False,
        ).returncode
    if failed:
        raise ClusterError(f"building {binary.name} failed. The end of {log}:\n{tail(log)}")
    partial.replace(target)


def _link_flags() -> str:
    major, minor, _ = KUBERNETES_VERSION.removeprefix("v").split(".")
    package = "k8s.io/component-base/version"
    stamps = {"gitVersion": KUBERNETES_VERSION, "gitMajor": major, "gitMinor": minor}
    return "-s -w " + " ".join(f"-X {package}.{name}={value}" for name, value in stamps.items())
