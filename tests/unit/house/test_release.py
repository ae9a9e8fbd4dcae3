"""`make release`: one version everywhere, a tag, three artefacts; from a clean work tree alone."""

import os
import re
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import yaml
from hack.release import current, obstacle

ROOT = Path(__file__).parents[3]
HOME = "https://git.example/stage2"


def git(folder: Path, *words: str) -> str:
    name = {"GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@b.example"}
    environment = {**os.environ, **name, **{key.replace("AUTHOR", "COMMITTER"): value for key, value in name.items()}}
    return subprocess.run(
        ["git", *words], cwd=folder, env=environment, check=True, capture_output=True, text=True
    ).stdout


@pytest.fixture
def clone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A clone of this repository with today's files."""
    git(tmp_path, "clone", "--quiet", "--depth=1", ROOT.as_uri(), "clone")
    folder = tmp_path / "clone"
    for name in git(ROOT, "ls-files", "--modified", "--others", "--exclude-standard").splitlines():
        if (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes((ROOT / name).read_bytes())
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--allow-empty", "--message=today")
    for key in ("GIT_AUTHOR_NAME", "GIT_COMMITTER_NAME"):
        monkeypatch.setenv(key, "a")
    for key in ("GIT_AUTHOR_EMAIL", "GIT_COMMITTER_EMAIL"):
        monkeypatch.setenv(key, "a@b.example")
    monkeypatch.setenv("STAGE2_HOME", HOME)
    return folder


def release(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "hack/release.py", *words], cwd=folder, capture_output=True, text=True)


def test_release_sets_single_version_tag_and_three_artifacts(clone: Path) -> None:
    (clone / "left.txt").write_text("")
    dirty = release(clone, "7.8.9")
    assert (dirty.returncode, "?? left.txt" in dirty.stderr, git(clone, "tag")) == (64, True, "")
    (clone / "left.txt").unlink()
    done = release(clone, "7.8.9")
    assert done.returncode == 0, done.stderr
    assert "git push origin HEAD v7.8.9" in done.stdout
    assert git(clone, "describe", "--tags").strip() == "v7.8.9"
    assert git(clone, "status", "--porcelain") == ""
    assert {path.name for path in (clone / "dist").iterdir()} >= {
        "stage2-7.8.9.tar.gz",
        "stage2-7.8.9-py3-none-any.whl",
        "stage2-7.8.9.tgz",
    }
    with zipfile.ZipFile(clone / "dist" / "stage2-7.8.9-py3-none-any.whl") as wheel:
        described = wheel.read("stage2-7.8.9.dist-info/METADATA").decode()
    assert f"{HOME}/blob/v7.8.9/docs/" in described
    assert re.search(rf"!\[[^]]*\]\({HOME}/raw/v7\.8\.9/docs/", described), "the picture"
    with tarfile.open(clone / "dist" / "stage2-7.8.9.tgz") as chart:
        found = yaml.safe_load(chart.extractfile("stage2/Chart.yaml").read())
    assert (found["version"], found["appVersion"]) == ("7.8.9", "7.8.9")
    assert re.search(r"## \[Unreleased\]\n\n## \[7\.8\.9\] - \d{4}-", (clone / "CHANGELOG.md").read_text())
    assert yaml.safe_load((clone / "CITATION.cff").read_text())["version"] == "7.8.9"
    again = release(clone, "7.9.0")
    assert (again.returncode, "Unreleased is empty" in again.stderr) == (64, True)


@pytest.mark.parametrize(
    ("words", "shown"),
    [(["0.0.9"], "must be newer than"), (["next"], "must be three numbers"), ([], "must be")],
    ids=["an old version", "a word", "no version"],
)
def test_invalid_next_version_is_refused_with_reason(words: list[str], shown: str) -> None:
    assert shown in (obstacle(words) or "")


def test_same_version_cannot_be_released_twice(clone: Path) -> None:
    version = current()
    assert release(clone, "--check", version).returncode == 0
    assert git(clone, "tag") == "", "only checked"
    git(clone, "tag", f"v{version}")
    again = release(clone, "--check", version)
    assert (again.returncode, f"must be newer than {version}" in again.stderr) == (64, True)


def test_release_without_the_address_of_the_repository_is_refused(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("STAGE2_HOME")
    refused = release(clone, "--check", "7.8.9")
    assert (refused.returncode, "STAGE2_HOME is not set" in refused.stderr) == (64, True)


def test_nothing_is_tagged_where_the_build_fails(clone: Path) -> None:
    (clone / "README.md").unlink()
    git(clone, "commit", "--quiet", "--all", "--message=broken")
    assert release(clone, "7.8.9").returncode != 0
    assert git(clone, "tag") == ""


def test_release_without_uv_commits_and_tags_nothing(clone: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    before = git(clone, "rev-parse", "HEAD")
    refused = release(clone, "7.8.9")
    assert (refused.returncode, "make release VERSION=7.8.9" in refused.stderr) == (64, True), refused.stderr
    assert (git(clone, "rev-parse", "HEAD"), git(clone, "tag")) == (before, "")
