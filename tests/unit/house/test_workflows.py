"""The workflows: what runs is pinned, what may publish or sign runs nothing of the repository, and tests come first."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = sorted(FOLDER.glob("*.yml"))
PINNED = re.compile(r"[\w.-]+/[\w./-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+")
RUNS_THE_REPOSITORY = re.compile(r"actions/checkout|build-push-action|\bmake\b|uv build|uvx|pip install|npm|go install")
RELEASE: dict[str, Any] = yaml.safe_load((FOLDER / "release.yml").read_text(encoding="utf-8"))["jobs"]
SIGNED = {"controller", "trainer", "trainer-cpu"}


def jobs(workflow: Path) -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(workflow.read_text(encoding="utf-8"))["jobs"]
    return found


def needed(name: str) -> set[str]:
    """Return all jobs of the release that come before one."""
    needs = RELEASE[name].get("needs", [])
    before = {needs} if isinstance(needs, str) else set(needs)
    return before.union(*map(needed, before))


def may_write(job: dict[str, Any]) -> set[str]:
    return {what for what, right in job.get("permissions", {}).items() if right == "write"}


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_by_commit(workflow: Path) -> None:
    used = re.findall(r"^\s*(?:-\s+)?uses:\s*(.+?)\s*$", workflow.read_text(encoding="utf-8"), re.MULTILINE)
    assert used
    assert [one for one in used if not (PINNED.fullmatch(one) or one.startswith("./.github/workflows/"))] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_fetched_tools_have_version(workflow: Path) -> None:
    text = workflow.read_text(encoding="utf-8")
    fetched = re.findall(r"\b(?:uvx|go install|npx|pipx run)\s+(\S+)", text)
    assert [one for one in fetched if not re.search(r"(?:==|@v?)\d+\.\d+", one)] == []


@pytest.mark.parametrize("workflow", WORKFLOWS, ids=lambda path: path.stem)
def test_workflow_permissions_default_to_read_only(workflow: Path) -> None:
    assert yaml.safe_load(workflow.read_text(encoding="utf-8"))["permissions"] == {"contents": "read"}


@pytest.mark.parametrize(
    ("workflow", "name"),
    [(path, name) for path in WORKFLOWS for name in jobs(path)],
    ids=lambda value: value if isinstance(value, str) else value.stem,
)
def test_job_with_signing_identity_runs_no_repository_code(workflow: Path, name: str) -> None:
    """Whoever changes a build script, or a package that a build fetches, would sign and publish in our name."""
    job = jobs(workflow)[name]
    if not {"id-token", "attestations"} & may_write(job):
        return
    steps = [str(step.get("uses", "")) + str(step.get("run", "")) for step in job["steps"]]
    assert [step for step in steps if RUNS_THE_REPOSITORY.search(step)] == []
    assert job["environment"] == "release", "an environment whose reviewers let it run"


def test_release_jobs_depend_on_all_tests() -> None:
    (tests,) = [name for name, job in RELEASE.items() if str(job.get("uses", "")).endswith("/ci.yml")]
    triggers = yaml.safe_load((FOLDER / "ci.yml").read_text(encoding="utf-8"))[True]  # `on`, as YAML 1.1 reads it
    assert "workflow_call" in triggers
    for name, job in RELEASE.items():
        if name != tests:
            assert tests in needed(name), f"{name} writes {may_write(job)}"


def test_images_and_chart_are_signed_by_digest_before_release() -> None:
    built = {f"{one['name']}{one['suffix']}" for one in RELEASE["images"]["strategy"]["matrix"]["include"]}
    assert built == SIGNED
    steps = RELEASE["publish"]["steps"]
    (signs,) = [index for index, step in enumerate(steps) if "cosign sign" in str(step.get("run"))]
    (publishes,) = [index for index, step in enumerate(steps) if "gh release create" in str(step.get("run"))]
    (uploads,) = [index for index, step in enumerate(steps) if "uv publish" in str(step.get("run"))]
    (pushes,) = [index for index, step in enumerate(steps) if "helm push" in str(step.get("run"))]
    assert pushes < signs < min(publishes, uploads)
    assert "@sha256" in steps[pushes]["run"] or "digest" in steps[pushes]["run"]
    recorded = [step for step in RELEASE["images"]["steps"] if "outputs.digest" in str(step)]
    assert len(recorded) == 1, "a tag may be moved between its push and its signature"


def test_documented_cosign_command_names_signing_workflow() -> None:
    text = (ROOT / "docs" / "operator.md").read_text(encoding="utf-8")
    assert "cosign verify" in text
    assert "workflow=$repository/.github/workflows/release.yml\n" in text
    assert "--certificate-identity https://github.com/$workflow@refs/tags/v$version" in text
    assert "https://token.actions.githubusercontent.com" in text
    for name in (*SIGNED - {"trainer-cpu"}, "charts/stage2"):
        assert name in text
