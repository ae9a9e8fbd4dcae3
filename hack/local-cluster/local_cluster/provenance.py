"""What an image was made of and by what, beside its list of packages: an in-toto statement of SLSA's provenance.

The statement is not signed: who publishes the image signs (docs/operator.md). Formats: in-toto Statement v1, SLSA
provenance v1, CycloneDX.
"""

import hashlib
import json
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from local_cluster import buildah
from local_cluster.context import REPOSITORY
from local_cluster.layout import Layout
from local_cluster.processes import run

FOLDER = REPOSITORY / "out" / "images"
STATEMENT = "https://in-toto.io/Statement/v1"
PREDICATE = "https://slsa.dev/provenance/v1"
BUILD_TYPE = "https://stage2.dev/build/buildah/v1"
BUILDER = "https://stage2.dev/build/local-cluster/v1"
SBOM = "opt/stage2/sbom.cdx.json"
_READ = 'container=$1 file=$2; shift 2; root=$("$@" mount "$container"); cat "$root/$file"'


@dataclass(frozen=True)
class Build:
    """One finished build of an image.

    arguments: NAME=value, as the Dockerfile got them. packages: the locks of images/requirements that it installs.
    """

    reference: str
    dockerfile: Path
    base: str
    arguments: Sequence[str]
    packages: Sequence[str]
    started: datetime

    @property
    def files(self) -> list[Path]:
        """What says what it is made of: the Dockerfile, and the versions and hashes of its packages."""
        return [self.dockerfile, *(REPOSITORY / "images" / "requirements" / f"{one}.txt" for one in self.packages)]


@dataclass(frozen=True)
class Source:
    """The commit that was built; changed: whether files differed from it."""

    commit: str
    changed: bool


def write(layout: Layout, build: Build) -> list[Path]:
    """Write list and statement of an image that was just built; return the files."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    name = build.reference.rpartition("/")[2].replace(":", "-")
    packages, statement_file = FOLDER / f"{name}.sbom.cdx.json", FOLDER / f"{name}.provenance.json"
    packages.write_text(_sbom(layout, build.reference), encoding="utf-8")
    digests = {one: buildah.digest(layout, one) for one in (build.reference, build.base)}
    made = statement(build, digests, source=source(REPOSITORY), finished=datetime.now(UTC))
    statement_file.write_text(json.dumps(made, indent=2) + "\n", encoding="utf-8")
    return [packages, statement_file]


def statement(build: Build, digests: Mapping[str, str], *, source: Source | None, finished: datetime) -> dict[str, Any]:
    """Return the statement; digests: `sha256:…` of the image and its base, by reference; source: None outside git."""
    made_of: list[dict[str, Any]] = [_named(build.base, digests[build.base])]
    made_of += [
        _named(path.relative_to(REPOSITORY).as_posix(), hashlib.sha256(path.read_bytes()).hexdigest())
        for path in build.files
    ]
    if source:
        made_of.append({"name": "source", "digest": {"gitCommit": source.commit}})
    return {
        "_type": STATEMENT,
        "subject": [_named(build.reference, digests[build.reference])],
        "predicateType": PREDICATE,
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {
                    "dockerfile": build.dockerfile.relative_to(REPOSITORY).as_posix(),
                    "arguments": dict(argument.split("=", 1) for argument in build.arguments),
                },
                "internalParameters": {"sourceChanged": source is None or source.changed},
                "resolvedDependencies": made_of,
            },
            "runDetails": {
                "builder": {"id": BUILDER},
                "metadata": {"startedOn": _instant(build.started), "finishedOn": _instant(finished)},
            },
        },
    }


def source(repository: Path) -> Source | None:
    """Return the commit that stands in a folder, None where git knows none."""

    def git(*arguments: str) -> str | None:
        command = ["git", "-C", str(repository), *arguments]
        try:
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        except FileNotFoundError:
            return None
        return None if done.returncode else done.stdout.strip()

    commit, changes = git("rev-parse", "HEAD"), git("status", "--porcelain")
    return Source(commit, bool(changes)) if commit and changes is not None else None


def _named(name: str, digest: str) -> dict[str, Any]:
    return {"name": name, "digest": {"sha256": digest.removeprefix("sha256:")}}


def _instant(time: datetime) -> str:
    return time.astimezone(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


def _sbom(layout: Layout, reference: str) -> str:
    """Return the list that the image holds."""
    with buildah.working_container(layout, reference) as container:
        call = buildah.command(layout)[len(buildah.OWN_MOUNTS) :]  # one mount namespace for both steps
        shell = ["sh", "-euc", _READ, "read", container, SBOM]
        return run([*buildah.OWN_MOUNTS, *shell, *call], env=buildah.environment(layout))
