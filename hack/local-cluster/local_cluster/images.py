"""Images without a registry: built by buildah on a debootstrap base, and handed to containerd layer by layer."""

import hashlib
import itertools
import json
import os
import shutil
import ssl
import subprocess
import tarfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from local_cluster import buildah, context, locks
from local_cluster.containerd import ctr, ctr_command
from local_cluster.layout import HUB, PAUSE_IMAGE, ClusterError, Layout
from local_cluster.processes import run
from local_cluster.steps import Steps
from local_cluster.toolchain import PAUSE, path_of

BASE_IMAGE = f"{HUB}library/python:3.11-slim-bookworm"
ROOT_IMAGE = f"{HUB}stage2/python-root:bookworm"
BASE_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
NAME_ANNOTATION = "io.containerd.image.name"
GC_ROOT = "containerd.io/gc.root"

TRUST = dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"), CA_BUNDLE)
INDEX_VARIABLES = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT"),
    *("UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_HTTP_TIMEOUT"),
)
"""How this machine reaches its package index: given to build steps, taken out of the finished image."""


@dataclass(frozen=True)
class ProjectImage:
    """One image of this project. variant: tag of a build with other arguments (`NAME=value`) than the default's."""

    name: str
    variant: str = "dev"
    arguments: tuple[str, ...] = ()

    @property
    def reference(self) -> str:
        """Full reference, as containerd keeps it."""
        return f"{HUB}stage2/{self.name}:{self.variant}"

    @property
    def dockerfile(self) -> Path:
        """What it is built from, with the repository as context."""
        return context.REPOSITORY / "images" / f"{self.name}.Dockerfile"


PROJECT_IMAGES = (ProjectImage("controller"), ProjectImage("trainer"))


def ensure_pause(layout: Layout) -> None:
    """Make the image that holds a pod's namespaces."""
    if not buildah.built(layout, PAUSE_IMAGE):
        of_program(layout, PAUSE_IMAGE, path_of(layout, PAUSE), "/pause")


def of_program(layout: Layout, reference: str, program: Path, target: str) -> None:
    """Build an image of one static program, which runs as the user `nobody`."""
    with locks.held(layout, "build"), buildah.working_container(layout) as container:
        buildah.call(layout, "copy", container, program, target)
        buildah.call(layout, "config", f'--entrypoint=["{target}"]', "--user=65535:65535", container)
        buildah.call(layout, "commit", container, reference)


def base_missing(layout: Layout) -> bool:
    """Return whether the stand-in for the official Python image has to be made."""
    return shutil.which("buildah") is None or not buildah.built(layout, ROOT_IMAGE)


def ensure_base(layout: Layout, steps: Steps) -> dict[str, str]:
    """Make a stand-in for the official Python image, in one step; return the environment that it gives to build steps.

    The environment lies in the base since this buildah's --env reaches the finished image, but no RUN step.
    """
    environment = {**TRUST, **{name: os.environ[name] for name in INDEX_VARIABLES if name in os.environ}}
    prepared = f"{ROOT_IMAGE}-{hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:12]}"
    if base_missing(layout):
        with steps.step("debootstrap: the base image"):
            _bootstrap(layout)
    if not buildah.built(layout, prepared):
        with buildah.working_container(layout, ROOT_IMAGE) as container:
            buildah.call(layout, "config", *(f"--env={name}={value}" for name, value in environment.items()), container)
            buildah.call(layout, "commit", container, prepared)
    buildah.call(layout, "tag", prepared, BASE_IMAGE)
    return environment


def _bootstrap(layout: Layout) -> None:
    with context.scratch(layout.cache, "debootstrap") as folder, buildah.working_container(layout) as container:
        root = folder / "root"
        run(["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", root, *_debian_mirror()])
        _like_the_official_image(root)
        buildah.call(layout, "add", container, root, "/")
        path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        buildah.call(layout, "config", f"--env={path}", "--cmd=python3", container)
        buildah.call(layout, "commit", container, ROOT_IMAGE)


def _debian_mirror() -> list[str]:
    """The mirror that this machine's own apt uses; debootstrap's default where there is none."""
    lines = [
        line for path in Path("/etc/apt").glob("sources.list*/*.sources") for line in path.read_text().splitlines()
    ]
    lines += Path("/etc/apt/sources.list").read_text().splitlines() if Path("/etc/apt/sources.list").exists() else []
    words = [word for line in lines if not line.startswith("#") for word in line.split()]
    return [word for word in words if word.startswith("http") and word.rstrip("/").endswith("/debian")][:1]


def _like_the_official_image(root: Path) -> None:
    """`python` and an unrestricted pip, as Docker's image has; caches away."""
    (root / "usr/local/bin/python").symlink_to("/usr/bin/python3")
    for marker in root.glob("usr/lib/python3*/EXTERNALLY-MANAGED"):
        marker.unlink()
    for cache in ("var/cache/apt", "var/lib/apt/lists"):
        shutil.rmtree(root / cache)
        (root / cache / "partial").mkdir(parents=True)


def build(layout: Layout, image: ProjectImage, steps: Steps) -> None:
    """Build one image with buildah's layer cache, in one step, its output shown as it comes."""
    with locks.held(layout, "build"):
        buildah.prune(layout)
        buildah.share_wheels(layout)
        environment = ensure_base(layout, steps)
        with steps.step(f"building {image.reference}", prints=True):
            _build(layout, image, environment)
        buildah.prune(layout)


def _build(layout: Layout, image: ProjectImage, environment: Mapping[str, str]) -> None:
    with context.staged(layout.cache) as folder:
        command = buildah.command(
            layout,
            *("build", "--isolation=chroot", "--layers", "--pull-never", "--network=host", "--format=oci"),
            *(f"--unsetenv={name}" for name in environment),
            *(f"--volume={mount}" for mount in _mounts()),
            *(f"--build-arg={argument}" for argument in (f"BASE={BASE_IMAGE}", *image.arguments)),
            *(f"--file={image.dockerfile}", f"--tag={image.reference}", folder),
        )
        result = subprocess.run(command, env={**os.environ, **buildah.environment(layout)}, check=False)
    if result.returncode:
        raise ClusterError(f"buildah could not build {image.dockerfile.name}: see its output above")


def _mounts() -> list[str]:
    """This machine's certificates and package index configuration, read-only."""
    bundle = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile or CA_BUNDLE
    files = [(bundle, CA_BUNDLE), *((path, path) for path in ("/etc/pip.conf", "/etc/uv/uv.toml"))]
    return [f"{source}:{target}:ro" for source, target in files if Path(source).exists()]


def load_built(layout: Layout, reference: str) -> None:
    """Bring an image from buildah's storage to every node.

    Superseded images stay where there are several nodes: the layers of the further ones are links to the first one's.
    """
    nodes = layout.nodes()
    with locks.held(layout, "load"):
        for node in nodes:
            _load_built(node, reference)
        if len(nodes) == 1:
            _forget_superseded(layout)


def _load_built(layout: Layout, reference: str) -> None:
    """Bring an image into a node's containerd; only layers that it has not unpacked travel."""
    with context.scratch(layout.cache, "export") as export:
        blobs = export / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        layers = buildah.layers(layout, reference)
        with _unpacked(layout, layers) as there:
            for layer in there:
                # An empty file of the layer's size: it counts as exported already, and no byte is copied.
                with (blobs / layer.name).open("wb") as file:
                    file.truncate(layer.size)
            buildah.export(layout, reference, export)
            index = json.loads((export / "index.json").read_text())
            index["manifests"][0]["annotations"] = {NAME_ANNOTATION: reference}
            (export / "index.json").write_text(json.dumps(index))
            new = [path for path in sorted(blobs.iterdir()) if path.name not in {layer.name for layer in there}]
            _import_stream(layout, [export / "oci-layout", export / "index.json", *new], export)
        _drop_packed(layout, layers)


@contextmanager
def _unpacked(layout: Layout, layers: Sequence[buildah.Layer]) -> Iterator[list[buildah.Layer]]:
    """The lowest layers of which containerd has a snapshot, unless one above is the same; kept during the block.

    The snapshots may belong to an image that loses its last name while they are counted on: without a root of their own
    containerd would collect them, and an import that leaves their layers out could not unpack the layers above.
    """
    snapshots = {line.split()[0] for line in ctr(layout, "snapshots", "list").splitlines()[1:]}
    chain = chain_ids([layer.digest for layer in layers])
    count = sum(1 for _ in itertools.takewhile(snapshots.__contains__, chain))
    while count and not _hold(layout, chain[count - 1]):
        count -= 1  # collected since it was listed
    try:
        yield [layer for layer in layers[:count] if layer not in layers[count:]]
    finally:
        if count:
            ctr(layout, "snapshots", "label", chain[count - 1], f"{GC_ROOT}=")


def _hold(layout: Layout, snapshot: str) -> bool:
    """Make a snapshot, and so all below it, a root of containerd's garbage collection; return whether it was there."""
    command = ctr_command(layout, "snapshots", "label", snapshot, f"{GC_ROOT}=held")
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


def chain_ids(diff_ids: Sequence[str]) -> list[str]:
    """Return the names of an image's snapshots: the digest of each layer with all below it (OCI image spec)."""

    def joined(below: str, diff_id: str) -> str:
        return f"sha256:{hashlib.sha256(f'{below} {diff_id}'.encode()).hexdigest()}"

    return [*itertools.accumulate(diff_ids, joined)]


def _drop_packed(layout: Layout, layers: Sequence[buildah.Layer]) -> None:
    """Remove layers as they came: containers live from the snapshots, and buildah has each for an import to come."""
    kept = set(ctr(layout, "content", "list", "--quiet").split())
    if packed := sorted({layer.digest for layer in layers} & kept):
        ctr(layout, "content", "delete", *packed)


def _forget_superseded(layout: Layout) -> None:
    """Remove images whose name a newer one has taken, or that came from a registry on this machine, which tests start.

    The kubelet is configured to keep all images.
    """
    rows = [line.split() for line in ctr(layout, "images", "list").splitlines()[1:]]
    passing = ("sha256:", "127.0.0.1:")
    named = {digest for name, _, digest, *_ in rows if not name.startswith(passing)}
    superseded = [name for name, _, digest, *_ in rows if name.startswith(passing) and digest not in named]
    if superseded:
        ctr(layout, "images", "remove", *superseded)


def _import_stream(layout: Layout, files: Sequence[Path], root: Path) -> None:
    """Stream an OCI archive of `files` into containerd: nothing lies on the disk twice."""
    importer = subprocess.Popen(
        ctr_command(layout, "images", "import", "-"),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
    )
    assert importer.stdin is not None
    assert importer.stderr is not None
    with suppress(BrokenPipeError):  # ctr has ended early, and its error is raised below
        with tarfile.open(fileobj=importer.stdin, mode="w|") as archive:
            for path in files:
                archive.add(path, arcname=str(path.relative_to(root)))
        importer.stdin.close()
    error = importer.stderr.read().decode()
    if importer.wait():
        raise ClusterError(f"containerd could not import the image:\n{error.strip()[-2000:]}")


def load_archive(layout: Layout, archive: Path) -> str:
    """Import an image archive (docker or OCI) on every node and return what containerd says."""
    return "\n".join(ctr(node, "images", "import", str(archive)).strip() for node in layout.nodes())


def load_all_built(layout: Layout) -> None:
    """Bring every image that was built, now or by an earlier cluster, to every node."""
    for reference in (PAUSE_IMAGE, *(image.reference for image in PROJECT_IMAGES)):
        if buildah.built(layout, reference):
            load_built(layout, reference)
