"""The statement beside an image names what it was made of, by digests that anybody can make again."""

from __future__ import annotations

import hashlib
import json
import subprocess
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from local_cluster import images, provenance
from local_cluster.context import REPOSITORY

IMAGE = images.ProjectImage("trainer", variant="gpu", arguments=("VLLM=gpu",))
AT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=timezone(timedelta(hours=1)))
BUILD = provenance.Build(IMAGE.reference, IMAGE.dockerfile, images.BASE_IMAGE, IMAGE.all_arguments, IMAGE.packages, AT)
DIGESTS = {IMAGE.reference: "sha256:" + "1" * 64, images.BASE_IMAGE: "sha256:" + "2" * 64}
SOURCE = provenance.Source("3" * 40, changed=False)


def made(source: provenance.Source | None = SOURCE) -> Any:
    """The statement, as a reader gets it."""
    return json.loads(
        json.dumps(provenance.statement(BUILD, DIGESTS, source=source, finished=datetime(2026, 1, 2, 3, tzinfo=UTC)))
    )


def dependencies(statement: Any) -> dict[str, dict[str, str]]:
    """The digests of what the image was made of, by name."""
    return {one["name"]: one["digest"] for one in statement["predicate"]["buildDefinition"]["resolvedDependencies"]}


def test_it_is_an_in_toto_statement_of_slsa_provenance_about_the_image() -> None:
    found = made()
    assert (found["_type"], found["predicateType"]) == (
        "https://in-toto.io/Statement/v1",
        "https://slsa.dev/provenance/v1",
    )
    assert found["subject"] == [{"name": IMAGE.reference, "digest": {"sha256": "1" * 64}}]
    assert set(found["predicate"]["buildDefinition"]) >= {"buildType", "externalParameters", "resolvedDependencies"}
    assert found["predicate"]["runDetails"]["builder"]["id"].startswith("https://")
    assert found["predicate"]["runDetails"]["metadata"]["startedOn"] == "2026-01-02T02:04:05Z"


def test_base_commit_dockerfile_and_its_locked_packages_are_named_by_digest() -> None:
    found = dependencies(made())
    assert "images/requirements/cpu.txt" not in found
    assert found[images.BASE_IMAGE] == {"sha256": "2" * 64}
    assert found["source"] == {"gitCommit": "3" * 40}
    files = ["images/trainer.Dockerfile", "images/requirements/gpu.txt", "images/requirements/tools.txt"]
    for name in files:
        assert found[name] == {"sha256": hashlib.sha256((REPOSITORY / name).read_bytes()).hexdigest()}


def test_each_image_names_the_packages_that_it_installs() -> None:
    found = {image.name: image.packages for image in images.PROJECT_IMAGES}
    assert found == {"controller": ("controller", "tools"), "trainer": ("cpu", "tools")}


def test_arguments_of_the_build_are_its_parameters() -> None:
    parameters = made()["predicate"]["buildDefinition"]["externalParameters"]
    assert parameters == {
        "dockerfile": "images/trainer.Dockerfile",
        "arguments": {"BASE": images.BASE_IMAGE, "VLLM": "gpu"},
    }


@pytest.mark.parametrize("source", [provenance.Source("3" * 40, changed=True), None])
def test_files_that_no_commit_has_are_said(source: provenance.Source | None) -> None:
    assert made(source)["predicate"]["buildDefinition"]["internalParameters"] == {"sourceChanged": True}
    assert ("source" in dependencies(made(source))) == (source is not None)


def test_the_source_is_the_commit_and_whether_anything_differs(tmp_path: Path) -> None:
    assert provenance.source(tmp_path) is None
    for command in (
        ["init", "--quiet"],
        ["-c", "user.name=a", "-c", "user.email=a@b", "commit", "--quiet", "--allow-empty", "--message=x"],
    ):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    found = provenance.source(tmp_path)
    assert found is not None
    assert (len(found.commit), found.changed) == (40, False)
    (tmp_path / "new").touch()
    assert provenance.source(tmp_path) == provenance.Source(found.commit, changed=True)
