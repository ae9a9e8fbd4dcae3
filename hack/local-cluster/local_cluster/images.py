"""Images without a registry: built by buildah on a debootstrap base, and handed to containerd layer by layer."""

import hashlib
import json
import os
import shutil
import ssl
import subprocess
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from local_cluster.layout import ClusterError, Layout
from local_cluster.processes import run
from local_cluster.toolchain import PAUSE, path_of

REPOSITORY = Path(__file__).resolve().parents[3]
HUB = "docker.io/"
"""What a reference without a host means; containerd keeps images under their full names."""
PAUSE_IMAGE = f"{HUB}stage2/pause:local"
BASE_IMAGE = f"{HUB}library/python:3.11-slim-bookworm"
ROOT_IMAGE = f"{HUB}stage2/python-root:bookworm"
BASE_PACKAGES = "python3,python3-venv,python3-pip,ca-certificates"
CA_BUNDLE = "/etc/ssl/certs/ca-certificates.crt"
NAME_ANNOTATION = "io.containerd.image.name"

TRUST = dict.fromkeys(("SSL_CERT_FILE", "PIP_CERT", "REQUESTS_CA_BUNDLE"), CA_BUNDLE)
INDEX_VARIABLES = (
    *("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_TRUSTED_HOST", "PIP_DEFAULT_TIMEOUT"),
    *("UV_INDEX_URL", "UV_DEFAULT_INDEX", "UV_INDEX", "UV_HTTP_TIMEOUT"),
)
"""How this machine reaches its package index: given to build steps, taken out of the finished image."""


@dataclass(frozen=True)
class ProjectImage:
    """One image of this project."""

    name: str

    @property
    def reference(self) -> str:
        """Full reference, as containerd keeps it."""
        return f"{HUB}stage2/{self.name}:dev"

    @property
    def dockerfile(self) -> Path:
        """What it is built from, with the repository as context."""
        return REPOSITORY / "images" / f"{self.name}.Dockerfile"


PROJECT_IMAGES = (ProjectImage("controller"), ProjectImage("trainer"))


def _buildah(layout: Layout, *arguments: str | Path) -> list[str]:
    storage = layout.cache / "buildah"
    roots = [f"--root={storage / 'root'}", f"--runroot={storage / 'run'}", "--storage-driver=overlay"]
    return ["buildah", *roots, *(str(part) for part in arguments)]


def _environment(layout: Layout) -> dict[str, str]:
    """buildah keeps cache mounts and half-made layers below TMPDIR."""
    folder = layout.cache / "buildah" / "tmp"
    folder.mkdir(parents=True, exist_ok=True)
    return {"TMPDIR": str(folder)}


def run_buildah(layout: Layout, *arguments: str | Path) -> str:
    """Run one buildah command to its end."""
    return run(_buildah(layout, *arguments), env=_environment(layout)).strip()


def built(layout: Layout, reference: str) -> bool:
    """Whether buildah's storage has the image."""
    command = _buildah(layout, "inspect", "--type=image", reference)
    return subprocess.run(command, capture_output=True, check=False).returncode == 0


@contextmanager
def _working_container(layout: Layout, image: str = "scratch") -> Iterator[str]:
    container = run_buildah(layout, "from", "--pull-never", image)
    try:
        yield container
    finally:
        run_buildah(layout, "rm", container)


def ensure_pause(layout: Layout) -> None:
    """Make the image that holds a pod's namespaces."""
    if built(layout, PAUSE_IMAGE):
        return
    with _working_container(layout) as container:
        run_buildah(layout, "copy", container, path_of(layout, PAUSE), "/pause")
        run_buildah(layout, "config", '--entrypoint=["/pause"]', "--user=65535:65535", container)
        run_buildah(layout, "commit", container, PAUSE_IMAGE)


def ensure_base(layout: Layout, console: Console) -> dict[str, str]:
    """Make a stand-in for the official Python image; return the environment that it gives to build steps.

    The environment lies in the base since this buildah's --env reaches the finished image, but no RUN step.
    """
    environment = {**TRUST, **{name: os.environ[name] for name in INDEX_VARIABLES if name in os.environ}}
    prepared = f"{ROOT_IMAGE}-{hashlib.sha256(json.dumps(environment, sort_keys=True).encode()).hexdigest()[:12]}"
    if not built(layout, ROOT_IMAGE):
        with console.status("debootstrap: the base image"):
            _bootstrap(layout)
    if not built(layout, prepared):
        with _working_container(layout, ROOT_IMAGE) as container:
            run_buildah(layout, "config", *(f"--env={name}={value}" for name, value in environment.items()), container)
            run_buildah(layout, "commit", container, prepared)
    run_buildah(layout, "tag", prepared, BASE_IMAGE)
    return environment


def _bootstrap(layout: Layout) -> None:
    with tempfile.TemporaryDirectory(dir=layout.cache) as folder, _working_container(layout) as container:
        root = Path(folder) / "root"
        run(["debootstrap", "--variant=minbase", f"--include={BASE_PACKAGES}", "bookworm", root, *_debian_mirror()])
        _like_the_official_image(root)
        run_buildah(layout, "add", container, root, "/")
        path = "PATH=/usr/local/bin:/usr/local/sbin:/usr/sbin:/usr/bin:/sbin:/bin"
        run_buildah(layout, "config", f"--env={path}", "--cmd=python3", container)
        run_buildah(layout, "commit", container, ROOT_IMAGE)


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


def build(layout: Layout, image: ProjectImage, environment: Mapping[str, str]) -> None:
    """Build one image with buildah's layer cache, its output shown as it comes; `environment` is kept out of it."""
    command = _buildah(
        layout,
        *("build", "--isolation=chroot", "--layers", "--pull-never", "--network=host", "--format=oci"),
        *(f"--unsetenv={name}" for name in environment),
        *(f"--volume={mount}" for mount in _mounts()),
        *(f"--file={image.dockerfile}", f"--tag={image.reference}", REPOSITORY),
    )
    result = subprocess.run(command, env={**os.environ, **_environment(layout)}, check=False)
    if result.returncode:
        raise ClusterError(f"buildah could not build {image.dockerfile.name}: see its output above")


def _mounts() -> list[str]:
    """This machine's certificates and package index configuration, read-only."""
    bundle = os.environ.get("SSL_CERT_FILE") or ssl.get_default_verify_paths().cafile or CA_BUNDLE
    files = [(bundle, CA_BUNDLE), *((path, path) for path in ("/etc/pip.conf", "/etc/uv/uv.toml"))]
    return [f"{source}:{target}:ro" for source, target in files if Path(source).exists()]


def load_built(layout: Layout, reference: str) -> None:
    """Bring an image from buildah's storage into containerd; only layers that containerd lacks travel."""
    with tempfile.TemporaryDirectory(dir=layout.cache, prefix="export-") as folder:
        export = Path(folder)
        blobs = export / "blobs" / "sha256"
        blobs.mkdir(parents=True)
        for blob in (layout.containerd_root / "io.containerd.content.v1.content/blobs/sha256").glob("*"):
            # A hard link: buildah takes the layer as already pushed, and no byte is copied.
            (blobs / blob.name).hardlink_to(blob)
        run_buildah(layout, "push", "--disable-compression", "--format=oci", reference, f"oci:{export}")
        _name_image(export / "index.json", reference)
        new = [path for path in sorted(blobs.iterdir()) if path.stat().st_nlink == 1]
        _import_stream(layout, [export / "oci-layout", export / "index.json", *new], export)


def _name_image(index: Path, reference: str) -> None:
    document = json.loads(index.read_text())
    document["manifests"][0]["annotations"] = {NAME_ANNOTATION: reference}
    index.write_text(json.dumps(document))


def _import_stream(layout: Layout, files: Sequence[Path], root: Path) -> None:
    """Stream an OCI archive of `files` into containerd: nothing lies on the disk twice."""
    command = ["ctr", f"--address={layout.containerd_socket}", "--namespace=k8s.io", "images", "import", "-"]
    importer = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)
    assert importer.stdin is not None
    assert importer.stderr is not None
    try:
        with tarfile.open(fileobj=importer.stdin, mode="w|") as archive:
            for path in files:
                archive.add(path, arcname=str(path.relative_to(root)))
        importer.stdin.close()
    except BrokenPipeError:
        pass  # ctr has ended early; what it says below is the reason
    error = importer.stderr.read().decode()
    if importer.wait():
        raise ClusterError(f"containerd could not import the image:\n{error.strip()[-2000:]}")


def load_archive(layout: Layout, archive: Path) -> str:
    """Import an image archive (docker or OCI) and return what containerd says."""
    return run(
        ["ctr", f"--address={layout.containerd_socket}", "--namespace=k8s.io", "images", "import", archive]
    ).strip()


def load_all_built(layout: Layout, console: Console) -> None:
    """Bring every image that was built, now or by an earlier cluster, into containerd."""
    for reference in (PAUSE_IMAGE, *(image.reference for image in PROJECT_IMAGES)):
        if built(layout, reference):
            with console.status(f"loading {reference.removeprefix(HUB)}"):
                load_built(layout, reference)
