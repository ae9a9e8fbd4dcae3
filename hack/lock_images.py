"""What the images install, by name, version and hash: `make lock-images` rewrites images/requirements/*.txt.

pyproject.toml says what may be installed, these files say what is, on x86_64 and on aarch64 (arm64): what only one of
them installs has a marker. They hold no addresses: the packages come from whatever index a builder has, and are refused
there if they are not these.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "images" / "requirements"
MACHINES = ("x86_64", "aarch64")
SYSTEM = "manylinux_2_36"  # Debian bookworm
PACKAGE = re.compile(r"^(?P<name>[a-z0-9._-]+)(?P<rest>==(?P<version>\S+) \\\n(?:    \S+(?: \\)?\n)+)", re.MULTILINE)
FORM = ("--generate-hashes", "--no-header", "--no-annotate", "--no-emit-index-url", "--quiet")
BUILD_BACKEND = "hatchling>=1.27"
NEVER = "sys_platform == 'never'"


@dataclass(frozen=True)
class Lock:
    """One file of requirements.

    extras: of pyproject.toml, whose own dependencies come with them. others: requirements beside them. left_out:
    required packages that are not installed. groups: dependency groups of pyproject.toml.
    """

    name: str
    extras: Sequence[str] = ()
    others: Sequence[str] = ()
    left_out: Sequence[str] = ()
    groups: Sequence[str] = ()

    @property
    def path(self) -> Path:
        """Where it stands."""
        return FOLDER / f"{self.name}.txt"


OF_COMMANDS = (
    *("numpy", "scipy", "pycocotools", "pillow", "contourpy", "matplotlib", "jinja2", "safetensors"),
    *("typer", "rich"),
)
OF_CLUSTERS = ("kubernetes",)  # what the trainer never imports: 75 MB
LOCKS = (
    # What the commands and their reports need, and the controller never imports: 270 MB less.
    Lock("controller", ("controller",), left_out=OF_COMMANDS),
    # Triton has no use on a CPU, and nothing here hears or films: 700 MB less.
    Lock("cpu", ("trainer",), (BUILD_BACKEND,), ("triton", "torchaudio", "torchcodec", *OF_CLUSTERS), groups=("cpu",)),
    Lock(
        "gpu", ("trainer", "gpu", "deepspeed", "mlflow", "swanlab", "trackio", "wandb"), (BUILD_BACKEND,), OF_CLUSTERS
    ),
    Lock("tools", others=("uv>=0.9,<1", "cyclonedx-bom>=7,<8")),
)


def main() -> int:
    """Write all of them; return the exit code."""
    uv = shutil.which("uv")
    if uv is None:
        sys.stderr.write("lock_images: uv is not on PATH; pip install 'uv>=0.9,<1'\n")
        return 1
    for lock in LOCKS:
        write(uv, lock)
        sys.stdout.write(f"{lock.path.relative_to(ROOT)}\n")
    return 0


def write(uv: str, lock: Lock) -> None:
    """Resolve one to the newest versions that its requirements allow."""
    with tempfile.TemporaryDirectory() as name:
        others, overrides = Path(name) / "others.in", Path(name) / "overrides.txt"
        others.write_text("".join(f"{one}\n" for one in lock.others), encoding="utf-8")
        overrides.write_text("".join(f"{one}; {NEVER}\n" for one in lock.left_out), encoding="utf-8")
        chosen = [f"--extra={extra}" for extra in lock.extras] + [f"--group={group}" for group in lock.groups]
        project = ["pyproject.toml", *chosen] if lock.extras else []
        left_out = [f"--override={overrides}"] if lock.left_out else []
        found = {}
        for machine in MACHINES:
            platform = ("--python-version=3.11", f"--python-platform={machine}-{SYSTEM}")
            command = [uv, "pip", "compile", *platform, *FORM, *left_out, *project, str(others)]
            found[machine] = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, text=True).stdout
    lock.path.parent.mkdir(parents=True, exist_ok=True)
    lock.path.write_text(merged(found), encoding="utf-8")


def merged(by_machine: Mapping[str, str]) -> str:
    """Return the files of several machines as one: a package that not all of them install so says of which it is."""
    machines: dict[tuple[str, str, str], list[str]] = {}
    for machine, text in by_machine.items():
        for package in PACKAGE.finditer(text):
            machines.setdefault((package["name"], package["version"], package["rest"]), []).append(machine)
    entries = []
    for (name, version, rest), which in sorted(machines.items()):
        wanted = " or ".join(f"platform_machine == '{machine}'" for machine in which)
        marker = "" if len(which) == len(by_machine) else f" ; {wanted}"
        entries.append(f"{name}=={version}{marker}" + rest.removeprefix(f"=={version}"))
    return "".join(entries)


if __name__ == "__main__":
    sys.exit(main())
