"""A Go module for another version of Kubernetes than the pinned one; etcd and all else are as that version has them."""

import json
import re
import shutil
from pathlib import Path

from local_cluster.layout import ClusterError
from local_cluster.processes import run

KUBERNETES = "k8s.io/kubernetes"


def write_module(folder: Path, program: Path, version: str, go_version: str) -> None:
    """Make the folder a module that builds a program with this version of Kubernetes.

    program: the program's folder, which is copied.

    Raises:
        ClusterError: there is no such version.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(program, folder / program.name)
    found = json.loads(run(["go", "mod", "download", "-json", f"{KUBERNETES}@{version}"], cwd=program, check=False))
    if "GoMod" not in found:
        raise ClusterError(f"STAGE2_KUBERNETES: {version!r}: must be a version of {KUBERNETES}: {found.get('Error')}")
    (folder / "go.mod").write_text(go_mod(version, go_version, Path(found["GoMod"]).read_text()))
    run(["go", "mod", "tidy"], cwd=folder)


def go_mod(version: str, go_version: str, of_kubernetes: str) -> str:
    """Return a go.mod that requires Kubernetes, and the modules of its repository in the same version.

    of_kubernetes: its own go.mod. That replaces those modules by folders, which counts only there.
    """
    staged = re.findall(r"^\s*(?:replace )?(k8s\.io/\S+) => \./staging/", of_kubernetes, re.MULTILINE)
    same = version.replace("v1.", "v0.", 1)
    lines = ["module stage2.dev/local-cluster", f"go {go_version}", f"require {KUBERNETES} {version}"]
    return "\n".join([*lines, *(f"replace {module} => {module} {same}" for module in staged), ""])
