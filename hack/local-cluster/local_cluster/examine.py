"""The examination of a trainer image, from inside: run by the image's own Python, as the user of its pods.

    python examine.py        in the image, its root read-only, /tmp as a pod has it

It needs no GPU, and nothing but the standard library. Looked for: packages that stage2 imports and that are not there,
packages of another version than vLLM was built with, shared libraries that no package brings, compilers that run at a
server's or learner's start, and folders that must be writable, or must not be.
"""

from __future__ import annotations

import ast
import importlib.metadata
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

OURS = ("stage2_api", "stage2_trainer", "stage2_report", "stage2_cli")
OTHER_SIDE = frozenset({"stage2_controller", "kopf", "kubernetes"})
"""What the command imports where a controller is installed, which the trainer's image is not for."""

ONLY_ON_GPUS = frozenset({"deepspeed"})
"""Packages that the image for CPUs leaves out: a configuration has to ask for them."""

DRIVER_LIBRARIES = re.compile(r"lib(cuda|nvidia-[\w-]+|nvcuvid|nvoptix)\.so(\.\d+)*")
"""Libraries of the NVIDIA driver: the node has them, and the container toolkit lends them to a container."""

PLUGINS = re.compile(
    r"torchcodec/"  # videos, one library for each FFmpeg
    r"|nvidia/nvshmem/lib/nvshmem_(transport|bootstrap)_|libcufile_rdma\.so"  # networks of other kinds than ours
    r"|numba/np/ufunc/tbbpool"  # one of several thread pools
)
"""Libraries that are loaded where what they link is there, and left alone where it is not."""

COMPILERS = ("gcc", "g++")
"""Triton compiles the launcher of each kernel, and PyTorch its C++ code."""

COMPILED_WITH_NVCC = ("VLLM_USE_FLASHINFER_SAMPLER", "VLLM_ALLREDUCE_USE_FLASHINFER")

WRITABLE = ("/tmp", "/dev/shm")
READ_ONLY = ("/", "/opt/stage2", "/usr")

Resolves = Callable[[str], bool]


def imported_names(source: str) -> set[str]:
    """Return the top-level names of the packages that a module imports, anywhere in it."""
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module)
    return {name.partition(".")[0] for name in names}


def importing_files(folders: Iterable[Path]) -> dict[str, list[Path]]:
    """Return for each foreign package that modules below the folders import the files that do."""
    found: dict[str, list[Path]] = {}
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            for name in imported_names(path.read_text(encoding="utf-8")):
                found.setdefault(name, []).append(path)
    return {name: files for name, files in found.items() if name not in sys.stdlib_module_names}


def missing_packages(folders: Iterable[Path], resolves: Resolves, spared: frozenset[str]) -> list[str]:
    """Return a sentence for each package that is imported and not there."""
    return [
        f"package {name}: imported by {files[0].name} and {len(files) - 1} other files, and not installed"
        for name, files in sorted(importing_files(folders).items())
        if name not in spared and not resolves(name)
    ]


def other_versions(requirements: Iterable[str], installed: Callable[[str], str | None]) -> list[str]:
    """Return a sentence for each package pinned by `==` that is installed in another version, local parts aside.

    vLLM pins what its compiled code was built against.
    """
    found = []
    for requirement in requirements:
        pin = re.match(r"([\w.-]+)==([\w.]+)", requirement.replace(" ", ""))
        if pin is None or ";" in requirement:
            continue
        version = installed(pin[1])
        if version is None or version.partition("+")[0] != pin[2]:
            found.append(f"package {pin[1]}: vLLM was built with {pin[2]}, and {version or 'none'} is installed")
    return found


def lacking(ldd: str) -> set[str]:
    """Return the libraries that ldd did not find."""
    return {line.split()[0] for line in ldd.splitlines() if line.endswith("=> not found")}


def missing_libraries(lacked: dict[Path, set[str]], brought: frozenset[str]) -> list[str]:
    """Return a sentence for each library that no package brings.

    lacked: what ldd did not find, by file; plugins are left out. brought: names of all libraries that packages bring,
    for what is imported first loads them for the others.
    """
    users: dict[str, list[Path]] = {}
    for path, names in lacked.items():
        if PLUGINS.search(path.as_posix()):
            continue
        for name in names - brought:
            if not DRIVER_LIBRARIES.fullmatch(name):
                users.setdefault(name, []).append(path)
    return [
        f"library {name}: needed by {paths[0]} and {len(paths) - 1} other files, and not there"
        for name, paths in sorted(users.items())
    ]


def shared_libraries(folder: Path) -> list[Path]:
    """Return the shared libraries below a folder."""
    return sorted(path for path in folder.rglob("*.so*") if re.search(r"\.so(\.\d+)*$", path.name) and path.is_file())


def looked_up(paths: Iterable[Path]) -> dict[Path, set[str]]:
    """Return for each library those that the loader does not find for it."""

    def look(path: Path) -> tuple[Path, set[str]]:
        done = subprocess.run(["ldd", str(path)], capture_output=True, text=True, check=False)
        return path, lacking(done.stdout)

    with ThreadPoolExecutor() as pool:
        return {path: names for path, names in pool.map(look, paths) if names}


def unusable_folders(writable: Iterable[str], read_only: Iterable[str]) -> list[str]:
    """Return a sentence for each folder in which this user cannot write and must, or can and must not."""
    found = [f"folder {path}: must be writable" for path in writable if not os.access(path, os.W_OK)]
    return found + [f"folder {path}: must be read-only" for path in read_only if os.access(path, os.W_OK)]


def missing_compilers(which: Callable[[str], str | None]) -> list[str]:
    """Return a sentence for each part of a C compiler that is not there."""
    found = [f"compiler {name}: not there" for name in COMPILERS if which(name) is None]
    header = Path(sysconfig.get_path("include")) / "Python.h"
    return found if header.is_file() else [*found, f"compiler: {header} is not there"]


def needs_nvcc(environment: dict[str, str]) -> list[str]:
    """Return what a server compiles with nvcc under its environment."""
    return [
        f"{name}: must be 0: what it switches on is compiled with nvcc at a server's start"
        for name in COMPILED_WITH_NVCC
        if environment.get(name) != "0"
    ]


def faults(site: Path, *, for_gpus: bool) -> Iterator[str]:
    """Yield everything that is wrong with the image whose packages lie in `site`."""
    spared = OTHER_SIDE if for_gpus else OTHER_SIDE | ONLY_ON_GPUS
    yield from missing_packages([site / name for name in OURS if (site / name).is_dir()], _resolves, spared)
    libraries = shared_libraries(site)
    yield from missing_libraries(looked_up(libraries), frozenset(path.name for path in libraries))
    yield from missing_compilers(shutil.which)
    yield from unusable_folders(WRITABLE, READ_ONLY)
    if for_gpus:
        yield from other_versions(importlib.metadata.requires("vllm") or (), _version)
        if not any(site.glob("triton/backends/nvidia/bin/ptxas*")):  # which Triton brings for want of a CUDA toolkit
            yield "triton: brings no ptxas, and there is no nvcc"
        yield from needs_nvcc(_server_environment())


def main() -> int:
    """Examine the image that this Python is of; 1 where something is wrong."""
    found = list(faults(Path(sysconfig.get_path("purelib")), for_gpus=_version("vllm") is not None))
    for fault in found:
        print(fault)
    print(f"{len(found)} faults; user {os.getuid()}, Python {sys.version.split()[0]}, torch {_version('torch')}")
    return 1 if found else 0


def _resolves(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _server_environment() -> dict[str, str]:
    from stage2_trainer.serve.server_command import environment  # only the image has it for certain

    return environment({}, "cuda", cores=1, servers_here=1)


if __name__ == "__main__":
    sys.exit(main())
