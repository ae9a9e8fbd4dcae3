"""`make lock-bases` against a registry: the digest of each tag comes into lock and Dockerfiles, or nothing does."""

from __future__ import annotations

import hashlib
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from hack.lock_bases import LOCK, ROOT, tag_of
from rich.console import Console

from local_cluster.toolchain import ensure_packages
from tests.patience import Patience
from tests.tools import tool

(TAG,) = {tag_of(line) for line in (ROOT / LOCK).read_text(encoding="utf-8").split()}
INDEX = "application/vnd.oci.image.index.v1+json"
MANIFEST = "application/vnd.oci.image.manifest.v1+json"
CONFIG = "application/vnd.oci.image.config.v1+json"


@dataclass(frozen=True)
class Registry:
    """docker-registry on a port of this machine, which stands for the one that the tag names."""

    folder: Path
    address: str

    @property
    def mirrors(self) -> Path:
        """A file that sends what is asked of the tag's own registry here."""
        written = self.folder / "registries.conf"
        prefix = TAG.partition("/")[0]
        written.write_text(f'[[registry]]\nprefix = "{prefix}"\nlocation = "{self.address}"\ninsecure = true\n')
        return written

    def push(self, name: str, machines: Sequence[str]) -> str:
        """Give the tag a list of images, one for each machine; return the list's digest."""
        layout = self.folder / name
        (layout / "blobs" / "sha256").mkdir(parents=True)
        listed = [{**self._image(layout, one), "platform": {"os": "linux", "architecture": one}} for one in machines]
        index = _blob(layout, {"schemaVersion": 2, "mediaType": INDEX, "manifests": listed}, INDEX)
        named = {**index, "annotations": {"org.opencontainers.image.ref.name": "image"}}
        (layout / "oci-layout").write_text('{"imageLayoutVersion": "1.0.0"}')
        (layout / "index.json").write_text(json.dumps({"schemaVersion": 2, "manifests": [named]}))
        target = f"docker://{self.address}/{TAG.partition('/')[2]}"
        flags = ["--insecure-policy", "copy", "--all", "--quiet", "--dest-tls-verify=false"]
        subprocess.run(["skopeo", *flags, f"oci:{layout}:image", target], check=True)
        return str(index["digest"])

    @staticmethod
    def _image(layout: Path, machine: str) -> dict[str, Any]:
        nothing = {"type": "layers", "diff_ids": []}
        config = _blob(layout, {"architecture": machine, "os": "linux", "rootfs": nothing}, CONFIG)
        manifest = {"schemaVersion": 2, "mediaType": MANIFEST, "config": config, "layers": []}
        return _blob(layout, manifest, MANIFEST)


def _blob(layout: Path, body: object, media_type: str) -> dict[str, Any]:
    content = json.dumps(body).encode()
    name = hashlib.sha256(content).hexdigest()
    (layout / "blobs" / "sha256" / name).write_bytes(content)
    return {"mediaType": media_type, "digest": f"sha256:{name}", "size": len(content)}


@pytest.fixture
def registry(tmp_path: Path) -> Iterator[Registry]:
    """A registry that holds nothing yet."""
    ensure_packages(Console(stderr=True))
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    settings = tmp_path / "registry.yaml"
    storage = {"filesystem": {"rootdirectory": str(tmp_path / "storage")}}
    settings.write_text(json.dumps({"version": "0.1", "storage": storage, "http": {"addr": address}}))
    with (
        (tmp_path / "registry.log").open("wb") as log,
        subprocess.Popen([tool("docker-registry"), "serve", str(settings)], stdout=log, stderr=log) as process,
    ):
        try:
            _answers(address)
            yield Registry(tmp_path, address)
        finally:
            process.terminate()


def _answers(address: str) -> None:
    host, _, port = address.partition(":")
    patience = Patience(60)
    while not patience.ended():
        try:
            socket.create_connection((host, int(port)), timeout=1).close()
        except OSError:
            time.sleep(0.05)
        else:
            return
    pytest.fail("the registry does not answer")


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    """A copy of what says what the images are built on."""
    made = tmp_path / "repository"
    shutil.copytree(ROOT / "images", made / "images")
    return made


def lock(repository: Path, *options: str | Path) -> subprocess.CompletedProcess[str]:
    """Run what `make lock-bases` runs, on a copy."""
    command = [sys.executable, ROOT / "hack" / "lock_bases.py", f"--root={repository}", *options]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def written(repository: Path) -> dict[str, str]:
    """The lock and the Dockerfiles."""
    return {path.name: path.read_text() for path in sorted((repository / "images").glob("*.*")) if path.is_file()}


def test_the_digest_of_today_comes_into_the_lock_and_every_dockerfile(registry: Registry, repository: Path) -> None:
    for number, machines in enumerate((("amd64", "arm64"), ("amd64", "arm64", "s390x"))):
        digest = registry.push(f"image-{number}", machines)
        done = lock(repository, f"--registries-conf={registry.mirrors}")
        assert (done.returncode, done.stdout) == (0, f"{TAG}@{digest}\n"), done.stderr
        found = written(repository)
        assert found.pop("bases.txt") == f"{TAG}@{digest}\n"
        assert found
        assert all(f"ARG BASE={TAG}@{digest}\nFROM $BASE\n" in text for text in found.values())


def test_a_base_that_lacks_a_machine_changes_nothing(registry: Registry, repository: Path) -> None:
    before = written(repository)
    registry.push("image", ("amd64",))
    done = lock(repository, f"--registries-conf={registry.mirrors}")
    assert done.returncode == 1
    assert done.stderr == f"lock_bases: {TAG}: has no image for linux/arm64; its digest would shut such machines out\n"
    assert written(repository) == before


def test_a_registry_without_the_tag_changes_nothing(registry: Registry, repository: Path) -> None:
    before = written(repository)
    done = lock(repository, f"--registries-conf={registry.mirrors}")
    assert done.returncode == 1
    assert done.stderr.startswith(f"lock_bases: {TAG}: ")
    assert "manifest unknown" in done.stderr
    assert written(repository) == before
