"""What the cluster keeps for the next boot: how large it is, what of it nothing uses any more, and how it goes."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from local_cluster import buildah, packaged
from local_cluster.addons import PROGRAMS
from local_cluster.layout import ClusterError, Layout
from local_cluster.processes import in_use, run
from local_cluster.toolchain import CONTROL_PLANE, NODE, others, path_of


@dataclass(frozen=True)
class Part:
    """Some folders of the cache, and what they are for."""

    name: str
    folders: tuple[Path, ...]

    def size_bytes(self) -> int:
        """Return the space that they take on the disk; a hard link counts once."""
        existing = [str(folder) for folder in self.folders if folder.is_dir() and not folder.is_symlink()]
        if not existing:
            return 0
        lines = run(["du", "--summarize", "--total", "--block-size=1", *existing], check=False).splitlines()
        return int(lines[-1].split()[0])


def parts(layout: Layout) -> list[Part]:
    """Return every part of the cache."""
    superseded = superseded_programs(layout)
    current = [folder for folder in _folders(layout.cache / "bin") if folder not in superseded]
    snapshots = layout.containerd_root / "io.containerd.snapshotter.v1.overlayfs"
    content = layout.containerd_root / "io.containerd.content.v1.content"
    return [
        Part("programs", tuple(current)),
        Part("programs, superseded", tuple(superseded)),
        Part("other versions of Kubernetes", (others(layout),)),
        Part("images as built: layers", (layout.cache / "buildah" / "root",)),
        Part("images as built: a second store of wheels", (buildah.wheels(layout),)),
        Part("images as run: layers, unpacked", (snapshots,)),
        Part("images as run: manifests and packed layers", (content,)),
    ]


def superseded_programs(layout: Layout) -> list[Path]:
    """Return the folders of programs that no command of this version starts, and no process runs."""
    wanted = {path_of(layout, binary).parent for binary in (*CONTROL_PLANE, *NODE, *PROGRAMS)}
    wanted.add(packaged.folder(layout))
    return [folder for folder in _folders(layout.cache / "bin") if folder not in wanted and not in_use(folder)]


def prune(layout: Layout) -> None:
    """Remove what nothing uses: superseded programs and images, what broken builds have left, doubled wheels."""
    unused = [folder for folder in _folders(others(layout)) if not in_use(folder)]
    for folder in (*superseded_programs(layout), *unused):
        shutil.rmtree(folder)
    if (layout.cache / "buildah").exists():
        buildah.prune(layout)
        buildah.share_wheels(layout)


def empty(layout: Layout) -> None:
    """Remove all of it, but the locks that this very command holds.

    Raises:
        ClusterError: a cluster lives from it.
    """
    if layout.home.exists() or in_use(layout.cache):
        raise ClusterError(
            f"a cluster lives from the cache {layout.cache}, so it cannot be emptied; `local-cluster down` removes the "
            "cluster"
        )
    for folder in _folders(layout.cache):
        shutil.rmtree(folder)


def _folders(parent: Path) -> list[Path]:
    return sorted(path for path in parent.iterdir() if path.is_dir()) if parent.exists() else []
