"""buildah with a storage of its own below the cluster's cache."""

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from local_cluster.layout import Layout, need_space
from local_cluster.processes import run

CACHE_MOUNTS = "buildah-cache"
"""Folder below TMPDIR in which this buildah keeps what `RUN --mount=type=cache` shares between builds."""

UV_CACHE = "/var/cache/uv"
"""Where images/trainer.Dockerfile mounts the cache of uv."""

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


@dataclass(frozen=True)
class Layer:
    """A layer of an image, uncompressed."""

    digest: str
    size: int

    @property
    def name(self) -> str:
        """The name of its file in an OCI layout."""
        return self.digest.removeprefix("sha256:")


def layers(layout: Layout, reference: str) -> list[Layer]:
    """Return an image's layers, the lowest first."""
    inspect = ["skopeo", "inspect", "--raw", _source(layout, reference)]
    manifest = json.loads(run([*OWN_MOUNTS, *inspect], env=environment(layout)))
    return [Layer(layer["digest"], layer["size"]) for layer in manifest["layers"]]


def _source(layout: Layout, reference: str) -> str:
    """Return the image's name for skopeo."""
    storage = layout.cache / "buildah"
    return f"containers-storage:[overlay@{storage / 'root'}+{storage / 'run'}]{reference}"


def export(layout: Layout, reference: str, folder: Path) -> None:
    """Write an image as OCI layout with uncompressed layers: their names are then known before they are read.

    skopeo exports, because buildah's own push always compresses and so finds no layer that is there already.
    """
    scratch = folder / "tmp"
    scratch.mkdir()
    _copy(scratch, "--dest-oci-accept-uncompressed-layers", _source(layout, reference), f"oci:{folder}:image")


def push(layout: Layout, reference: str, target: str, *, plain_http: bool) -> str:
    """Push an image to a registry, its layers as they are; return its name there by its digest, which so stays, too.

    With compressed layers it would have two digests, and a kubelet that has loaded it as built names the other one.

    Meanwhile the storage's disk holds a copy of each layer, which goes whether the push succeeds or not.

    Raises:
        ClusterError: that disk has no room for it, or the registry refuses.
    """
    folder = Path(environment(layout)["TMPDIR"])
    need_space(folder, sum(layer.size for layer in layers(layout, reference)), f"pushing {reference}")
    with tempfile.TemporaryDirectory(prefix="push-", dir=folder) as scratch:
        digest = Path(scratch) / "digest"
        flags = ["--preserve-digests", f"--digestfile={digest}"]
        flags += ["--dest-tls-verify=false"] if plain_http else []
        _copy(Path(scratch), *flags, _source(layout, reference), f"docker://{target}")
        return f"{target.rpartition(':')[0]}@{digest.read_text().strip()}"


def _copy(scratch: Path, *arguments: str) -> None:
    """Copy an image with skopeo, which writes layers to /var/tmp, whatever TMPDIR says, and leaves them if it fails."""
    skopeo = [*OWN_MOUNTS, "skopeo", "--insecure-policy", f"--tmpdir={scratch}", "copy", "--quiet"]
    run([*skopeo, *arguments], env={"TMPDIR": str(scratch)})


def share_wheels(layout: Layout) -> None:
    """Let build steps use this machine's own uv cache, so that no wheel is fetched and stored a second time.

    uv keeps wheels by index, name and version, whatever Python it works for, and locks what it writes.
    """
    place = wheels(layout)
    if place.is_symlink():
        place.unlink()
    elif place.exists():
        shutil.rmtree(place)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    shared = Path(os.environ.get("UV_CACHE_DIR") or cache / "uv").resolve()
    shared.mkdir(parents=True, exist_ok=True)
    place.parent.mkdir(parents=True, exist_ok=True)
    place.symlink_to(shared)


def wheels(layout: Layout) -> Path:
    """Return where this buildah keeps the cache mount of the trainer's Dockerfile."""
    return Path(environment(layout)["TMPDIR"]) / CACHE_MOUNTS / UV_CACHE.removeprefix("/")


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
