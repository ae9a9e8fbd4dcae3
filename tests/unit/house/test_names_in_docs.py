"""What the pages name is there: children of a job that the plan gives, and files of tests."""

import re
import subprocess
from pathlib import Path

import yaml

from stage2_api.parsing import parse_job
from stage2_controller.static import static_children

ROOT = Path(__file__).parents[3]
JOB = "job-3v1"
SHORT = {"deploy": "Deployment", "job": "Job", "svc": "Service", "secret": "Secret", "configmap": "ConfigMap"}
ONLY_ON_A_CLUSTER = {f"{JOB}-quota"}  # Kueue's Workload
LISTED = subprocess.run(["git", "ls-files", "*.md"], cwd=ROOT, capture_output=True, text=True, check=True)
PAGES = {name: (ROOT / name).read_text(encoding="utf-8") for name in LISTED.stdout.splitlines()}


def children() -> list[dict]:
    """Return the children of the example job."""
    return static_children(parse_job(yaml.safe_load((ROOT / "examples" / f"{JOB}.yaml").read_text())), namespace="ml")


def named(text: str) -> set[str]:
    """Return the names of children of a job in a text, as those of the example job."""
    return {
        f"{JOB}-{role}"
        for role in re.findall(rf"(?:<job>|<name>|\b{JOB}(?:-tiny)?)-(?!tiny)([a-z0-9-]*[a-z0-9])", text)
    }


def test_every_child_that_a_page_names_is_one_of_the_plan():
    known = {child["metadata"]["name"] for child in children()} | ONLY_ON_A_CLUSTER
    assert {name: found - known for name, page in PAGES.items() if (found := named(page)) - known} == {}


def test_the_pages_name_children():
    assert len(set().union(*(named(page) for page in PAGES.values()))) >= 6


def test_every_log_that_a_page_reads_is_of_a_container_that_runs():
    found = {(child["kind"], child["metadata"]["name"]): child for child in children()}
    commands = re.findall(r"^ *kubectl logs (.*?)(?: +#.*)?$", "\n".join(PAGES.values()), re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        kind, name = re.search(r"(\w+)/(\S+)", command).groups()
        child = found[SHORT[kind], re.sub(r"<job>", JOB, name)]
        containers = {one["name"] for one in child["spec"]["template"]["spec"]["containers"]}
        asked = re.search(r"-c (\S+)", command)
        assert asked[1] in containers if asked else len(containers) == 1, command


def test_every_test_that_a_page_cites_is_there():
    cited = {(name, path) for name, page in PAGES.items() for path in re.findall(r"`(tests/[\w/]+\.\w+)`", page)}
    assert len(cited) > 30  # the threat model alone cites as many
    assert [(name, path) for name, path in sorted(cited) if not (ROOT / path).is_file()] == []
