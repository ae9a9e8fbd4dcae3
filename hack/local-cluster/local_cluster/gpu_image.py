"""The trainer image for GPUs, built and examined on a machine without one: what a pod on a GPU would not start with.

Examined as a pod runs it: user and group 10001, root read-only, /tmp and /dev/shm empty and its own. What needs the
driver, a GPU or a model is not examined.
"""

import os
import subprocess
import time
from pathlib import Path

from rich.console import Console

from local_cluster import buildah, images
from local_cluster.layout import Layout, need_space
from local_cluster.steps import Steps
from local_cluster.toolchain import ensure_packages, missing_packages

IMAGE = images.ProjectImage("trainer", variant="gpu", arguments=("VLLM=gpu",))
SPACE_BYTES = 40 * 10**9  # packages, their archive, a tar of the layer and the layer: 36 GB at the worst
USER = "10001:10001"
PYTHON = "/opt/stage2/bin/python"
EXAMINATION = Path(__file__).with_name("examine.py")

# In a mount namespace of its own: storage driver, bind mounts and tmpfs go with the process. $1: the container, $2: the
# examination, $3: the user, $4: Python; the rest is buildah with its storage.
_AS_A_POD = """
container=$1 examination=$2 user=$3 python=$4; shift 4
root=$("$@" mount "$container")
mount --bind "$root" "$root"
mount -o remount,bind,ro "$root"
mount -t proc proc "$root/proc"
mount --rbind /dev "$root/dev"
mount -t tmpfs -o mode=1777 tmpfs "$root/dev/shm"
mount -t tmpfs -o mode=1777 tmpfs "$root/tmp"
cp "$examination" "$root/tmp/examine.py"
exec chroot --userspec="$user" "$root" /usr/bin/env -i PATH="${python%/*}:/usr/local/bin:/usr/bin:/bin" HOME=/tmp \
  HF_HUB_OFFLINE=1 "$python" /tmp/examine.py
"""


def check(layout: Layout, console: Console) -> bool:
    """Build the image, say its size and the time that it took, and examine it; whether nothing is wrong."""
    steps = Steps(console, bool(missing_packages()) + images.base_missing(layout) + 2)
    ensure_packages(steps)
    need_space(layout.cache, SPACE_BYTES, "the build")
    start = time.monotonic()
    images.build(layout, IMAGE, steps)
    size = sum(layer.size for layer in buildah.layers(layout, IMAGE.reference))
    console.print(f"{IMAGE.reference}: {size / 1e9:.1f} GB unpacked, built in {time.monotonic() - start:.0f} s")
    with steps.step(f"examining {IMAGE.reference}", prints=True):
        return examine(layout, IMAGE.reference)


def examine(layout: Layout, reference: str) -> bool:
    """Examine an image as a pod would run it; whether nothing is wrong."""
    with buildah.working_container(layout, reference) as container:
        command = examination_command(layout, container)
        environment = {**os.environ, **buildah.environment(layout)}
        return subprocess.run(command, env=environment, check=False).returncode == 0


def examination_command(layout: Layout, container: str) -> list[str]:
    """Return the command line that examines a working container."""
    call = buildah.command(layout)[len(buildah.OWN_MOUNTS) :]  # the whole command gets one namespace
    shell = ["sh", "-euc", _AS_A_POD, "examine", container, str(EXAMINATION), USER, PYTHON]
    return [*buildah.OWN_MOUNTS, *shell, *call]
