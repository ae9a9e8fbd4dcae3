"""The stages of `hack/gpu-hour` that need no vLLM, in one folder for a machine with a GPU and without network.

    hack/gpu-hour --carry FOLDER
    FOLDER/run [STAGE ...] [--rehearse] ...    there, with its Python 3.12, PyTorch 2.11, torchvision and Triton

The folder has `run` and an archive: the sources, and the packages that the stages import, for Python 3.12 on x86-64
Linux, in the versions of images/requirements/gpu.txt. PyTorch, torchvision and Triton are there already. What nothing
imports stays behind: tests, type stubs, most of transformers' models, half of scipy. Of vLLM only its wrapper of NCCL
comes along, which the learner uses, with stand-ins for what it imports.
"""

from __future__ import annotations

import importlib.util
import lzma
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path

from lock_images import NEVER

ROOT = Path(__file__).parents[1]
VERSIONS = ROOT / "images/requirements/gpu.txt"
MOST_BYTES = 60 * 10**6
ARCHIVE = "stage2.tar.xz"
PACKAGES = (
    *("numpy", "scipy", "pillow", "pycocotools", "safetensors", "cryptography", "pydantic", "pyyaml", "jinja2"),
    *("transformers", "peft", "accelerate", "aiohttp", "prometheus-client", "typer", "rich", "psutil", "filelock"),
    *("pytest>=9,<10", "pytest-timeout", "pytest-asyncio"),
)
"""What the stages import. What it needs comes along."""
THERE = ("torch", "hf-xet")  # hf-xet downloads, and there is no network
TARGET = ("--python-version=3.12", "--python-platform=x86_64-manylinux_2_28", "--only-binary=:all:", "--no-config")
SOURCES = (
    *("bench", "cli", "controller", "crds", "examples", "hack", "report", "trainer", "tests/gpu", "tests/support"),
    *("tests/conftest.py", "tests/unit/trainer/conftest.py", "pyproject.toml"),
)
OF_VLLM = ("distributed/device_communicators/pynccl_wrapper.py", "utils/nccl.py")
STAND_INS = {
    "__init__.py": "",
    "distributed/__init__.py": "",
    "distributed/device_communicators/__init__.py": "",
    "utils/__init__.py": "",
    "envs.py": "VLLM_NCCL_SO_PATH = None\nVLLM_USE_NCCL_SYMM_MEM = False\n",
    "logger.py": """import logging


class Logger(logging.Logger):
    debug_once, info_once, warning_once = logging.Logger.debug, logging.Logger.info, logging.Logger.warning


def init_logger(name):
    return Logger(name)
""",
    "platforms.py": """import torch


class current_platform:
    fp8_dtype, is_rocm = staticmethod(lambda: torch.float8_e4m3fn), staticmethod(lambda: True)
""",
}
"""Modules of the package vllm, for what OF_VLLM imports.

is_rocm: there the wrapper does without functions that its NCCL lacks, and the NCCL of PyTorch 2.11 (2.28) lacks two
that suspend a group. stage2 calls neither.
"""
LEFT_OUT = re.compile(
    r"(^|/)(tests|__pycache__)(/|$)|\.pyi$|\.dist-info/(?!METADATA$|entry_points\.txt$)"
    r"|^transformers/models/(?!auto/|bloom/|qwen)[^/]+/(modeling|modular|convert)_"
    r"|^bin/|^scipy/(cluster|datasets|differentiate|fftpack|integrate|interpolate|io|misc|ndimage|odr|signal|stats)/"
)
"""Files of packages, by their paths below the folder of packages."""
SOURCES_LEFT_OUT = re.compile(r"^examples/(tiny-(?!qwen3-vl/)|.*\.ipynb$)|^crds/schema/|^bench/results/|^hack/.*/")
COMPRESSED = [
    {"id": lzma.FILTER_X86},
    {"id": lzma.FILTER_LZMA2, "preset": 9, "dict_size": 2**27},
]
"""Machine code first becomes more alike (x86), then smaller."""
RUN = r"""#!/bin/sh
# Runs stages of stage2's first hour on a GPU: ./run [STAGE ...] [--rehearse] [--out DIR]; docs/gpu.md says more.
# STAGE2_UNPACKED: the folder below which the archive is unpacked. PYTHON: which Python, with PyTorch and Triton.
set -eu
here=$(cd "$(dirname "$0")" && pwd)
archive=$here/stage2.tar.xz
there=${STAGE2_UNPACKED:-${HOME:-${TMPDIR:-/tmp}}/.cache/stage2}/gpu-hour-$(sha256sum "$archive" | cut -c -16)
python=$(command -v "${PYTHON:-python3}")
if [ ! -e "$there/ready" ]; then
    rm -rf "$there"  # of an earlier call that was killed
    mkdir -p "$there"
    "$python" -c 'import sys, tarfile; tarfile.open(sys.argv[1]).extractall(sys.argv[2], filter="tar")' \
        "$archive" "$there"
    mkdir "$there/bin"
    printf '#!/bin/sh\nexec "%s" "$@"\n' "$python" >"$there/bin/python"
    chmod +x "$there/bin/python"
    touch "$there/ready"
fi
src=$there/src
export PATH="$there/bin:$PATH"
export PYTHONPATH="$there/site:$src:$src/examples:$src/crds:$src/controller:$src/trainer:$src/report:$src/cli:$src/hack"
exec "$python" "$src/hack/gpu_hour.py" --without-vllm "$@"
"""


def carry(folder: Path) -> int:
    """Write the folder, and print its size; return the exit code. A folder that is there already is refused."""
    uv, vllm = shutil.which("uv"), importlib.util.find_spec("vllm")
    if folder.exists():
        return refuse(f"{folder} exists: name another folder")
    if uv is None:
        return refuse("uv is not on PATH: pip install 'uv>=0.9,<1'")
    if vllm is None or vllm.origin is None:
        return refuse("vLLM is not installed, whose wrapper of NCCL comes along: activate what `make setup` installed")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{folder.name}-", dir=folder.parent) as name:
        site, whole = Path(name, "site"), Path(name, "whole")
        install(uv, site)
        stand_in(site / "vllm", Path(vllm.origin).parent)
        name_itself(site)
        whole.mkdir()
        write(whole, [*packages(site), *sources()])
        return publish(whole, folder)


def refuse(fault: str) -> int:
    """Print why nothing is carried; return the exit code."""
    sys.stderr.write(f"hack/gpu-hour --carry: {fault}\n")
    return 1


def publish(whole: Path, folder: Path, most: int = MOST_BYTES) -> int:
    """Move the folder to its place, and print its size; return 1 instead if it is too large to be carried."""
    sizes = {one.name: one.stat().st_size for one in sorted(whole.iterdir())}
    told = ", ".join(f"{name} {size / 1e6:.1f} MB" for name, size in sizes.items())
    if sum(sizes.values()) > most:
        return refuse(f"{told} is more than {most / 1e6:.0f} MB: leave more out in hack/gpu_carry.py (LEFT_OUT)")
    whole.rename(folder)
    print(f"{folder}: {told}")
    return 0


def install(uv: str, site: Path) -> None:
    """Install the packages into a folder."""
    locked = re.findall(r"^([a-z0-9._-]+)==(\S+)", VERSIONS.read_text(encoding="utf-8"), re.MULTILINE)
    lists = {
        "constraint": [f"{name}=={version}" for name, version in locked],
        "override": [f"{name}; {NEVER}" for name in THERE],
    }
    with tempfile.TemporaryDirectory() as folder:
        files = {kind: Path(folder) / f"{kind}s.txt" for kind in lists}
        for kind, lines in lists.items():
            files[kind].write_text("\n".join(lines), encoding="utf-8")
        chosen = [f"--{kind}={file}" for kind, file in files.items()]
        subprocess.run([uv, "pip", "install", "--quiet", f"--target={site}", *TARGET, *chosen, *PACKAGES], check=True)


def stand_in(folder: Path, vllm: Path) -> None:
    """Write a package of vLLM's name, with its wrapper of NCCL alone."""
    for name in (*STAND_INS, *OF_VLLM):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(STAND_INS[name] if name in STAND_INS else (vllm / name).read_text(encoding="utf-8"))


def name_itself(site: Path) -> None:
    """Write what importlib.metadata reads of stage2, whose sources come along uninstalled: runs record its version."""
    itself = metadata.distribution("stage2")
    folder = site / f"stage2-{itself.version}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(itself.read_text("METADATA") or "", encoding="utf-8")


def packages(site: Path) -> Iterator[tuple[str, Path]]:
    """Return the files that stages may import, by their names in the archive."""
    for path in sorted(site.rglob("*")):
        name = path.relative_to(site).as_posix()
        if path.is_file() and not LEFT_OUT.search(name):
            yield f"site/{name}", path


def sources() -> Iterator[tuple[str, Path]]:
    """Return the sources of stages, by their names in the archive."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", *SOURCES]
    for name in subprocess.run(listed, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True).stdout.splitlines():
        if not SOURCES_LEFT_OUT.search(name):
            yield f"src/{name}", ROOT / name


def write(folder: Path, files: Sequence[tuple[str, Path]]) -> None:
    """Write the archive, and the command that runs it."""
    with lzma.open(folder / ARCHIVE, "w", filters=COMPRESSED) as packed, tarfile.open(fileobj=packed, mode="w") as tar:
        for name, path in files:
            tar.add(path, name, recursive=False)
    (folder / "run").write_text(RUN, encoding="utf-8")
    (folder / "run").chmod(0o755)
