"""buildah with a storage of its own below the cluster's cache."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from local_cluster.layout import Layout
from local_cluster.processes import run


def command(layout: Layout, *arguments: str | Path) -> list[str]:
    """The command line of one buildah call."""
    storage = layout.cache / "buildah"
    roots = [f"--root={storage / 'root'}", f"--runroot={storage / 'run'}", "--storage-driver=overlay"]
    return ["buildah", *roots, *(str(part) for part in arguments)]


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


def prune(layout: Layout) -> None:
    """Remove what broken builds and superseded images have left; the layers of current images stay as the cache."""
    call(layout, "rm", "--all")
    superseded = sorted(set(call(layout, "images", "--filter=dangling=true", "--quiet", "--no-trunc").split()))
    if superseded:
        call(layout, "rmi", *superseded)
