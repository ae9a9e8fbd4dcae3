"""buildah with a storage of its own below the cluster's cache."""

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from local_cluster.layout import Layout
from local_cluster.processes import run

CACHE_MOUNTS = "buildah-cache"
"""Folder below TMPDIR in which this buildah keeps what `RUN --mount=type=cache` shares between builds."""


OWN_MOUNTS = ("unshare", "--mount")
"""The storage driver mounts its folder onto itself and leaves that behind; in a namespace it goes with the process."""


def command(layout: Layout, *arguments: str | Path) -> list[str]:
    """The command line of one buildah call."""
    storage = layout.cache / "buildah"
    roots = [f"--root={storage / 'root'}", f"--runroot={storage / 'run'}", "--storage-driver=overlay"]
    return [*OWN_MOUNTS, "buildah", *roots, *(str(part) for part in arguments)]


def environment(layout: Layout) -> dict[str, str]:
    """buildah keeps cache mounts and half-made layers below TMPDIR."""
    folder = layout.cache / "buildah" / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    return {"TMPDIR": str(folder)}


def call(layout: Layout, *arguments: str | Path) -> str:
    """Run one buildah command to its end and return what it prints."""
    return run(command(layout, *arguments), env=environment(layout)).strip()


def built(layout: Layout, reference: str) -> bool:
    """Whether the storage has the image."""
    inspect = command(layout, "inspect", "--type=image", reference)
    return subprocess.run(inspect, capture_output=True, check=False).returncode == 0


@contextmanager
def working_container(layout: Layout, image: str = "scratch") -> Iterator[str]:
    """A container to make an image from, removed afterwards."""
    container = call(layout, "from", "--pull-never", image)
    try:
        yield container
    finally:
        call(layout, "rm", container)


def export(layout: Layout, reference: str, folder: Path) -> None:
    """Write an image as OCI layout with uncompressed layers: their names are then known before they are read.

    skopeo does it since buildah's own push compresses whatever it is told, and so finds no layer that is there already.
    """
    storage = layout.cache / "buildah"
    source = f"containers-storage:[overlay@{storage / 'root'}+{storage / 'run'}]{reference}"
    flags = ["--insecure-policy", "copy", "--quiet", "--dest-oci-accept-uncompressed-layers"]
    scratch = folder / "tmp"
    scratch.mkdir()
    run([*OWN_MOUNTS, "skopeo", *flags, source, f"oci:{folder}:image"], env={"TMPDIR": str(scratch)})


def prune(layout: Layout) -> None:
    """Remove what broken builds and superseded images have left; the layers of current images stay as the cache."""
    call(layout, "rm", "--all")
    for leftover in Path(environment(layout)["TMPDIR"]).iterdir():
        if leftover.is_file():
            leftover.unlink()
        elif leftover.name != CACHE_MOUNTS:
            shutil.rmtree(leftover)
    superseded = sorted(set(call(layout, "images", "--filter=dangling=true", "--quiet", "--no-trunc").split()))
    if superseded:
        call(layout, "rmi", *superseded)
