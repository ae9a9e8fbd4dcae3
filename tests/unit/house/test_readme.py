"""The README's tree and reading list, the links of all pages, the rooms of the design page: all are there."""

import re
import subprocess
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
TREE = re.search(r"## The house\n\n```\n(.*?)```", README, re.DOTALL)[1]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
PAGES = [name for name in TRACKED if name.endswith(".md") and (ROOT / name).is_file()]
PACKAGES = ("controller/stage2_controller", "trainer/stage2_trainer")


def tree() -> list[str]:
    """Return the paths of the README's tree, those that stand under others joined with them."""
    paths: list[str] = []
    above = ""
    for line in TREE.splitlines():
        name = line.split()[0].rstrip("/")
        if not line.startswith(" "):
            above = name
        paths.append(f"{above}/{name}" if line.startswith(" ") else name)
    return paths


def rooms(package: str) -> set[str]:
    """Return the folders of a package that hold its modules."""
    return {path.name for path in (ROOT / package).iterdir() if (path / "__init__.py").is_file()}


def test_every_path_of_the_tree_exists():
    assert [path for path in tree() if not (ROOT / path).is_dir()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_tree_has_every_room(package):
    assert {path.rpartition("/")[2] for path in tree() if path.startswith(f"{package}/")} == rooms(package)


def test_the_tree_has_every_folder_of_the_repository():
    folders = {name.split("/")[0] for name in TRACKED if "/" in name and not name.startswith(".")}
    assert folders - {path.split("/")[0] for path in tree()} == set()


def test_every_file_of_the_reading_list_exists():
    listed = re.findall(r"`([\w/]+\.py)`", README)
    assert len(listed) >= 4
    assert [name for name in listed if not (ROOT / name).is_file()] == []


def test_every_link_of_every_page_leads_to_a_file():
    missing = []
    for page in PAGES:
        text = re.sub(r"```.*?```|`[^`\n]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
        targets = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"[a-z]+:|#", link)]
        missing += [(page, link) for link in targets if not (ROOT / page).parent.joinpath(link.split("#")[0]).exists()]
    assert missing == []


@pytest.mark.parametrize("package", PACKAGES)
def test_the_design_names_every_room(package):
    row = next(
        line
        for line in (ROOT / "docs" / "design.md").read_text(encoding="utf-8").splitlines()
        if line.startswith(f"| `{package.rpartition('/')[2]}`")
    )
    assert rooms(package) - set(re.findall(r"`(\w+)`", row)) == set()


def test_one_version_stands_everywhere():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = (ROOT / "charts/stage2/Chart.yaml").read_text()
    assert re.findall(r"^(?:appVersion|version): (.*)$", chart, re.MULTILINE) == [version, version]
    assert f"## [{version}]" in (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")


def test_every_module_that_a_page_names_exists():
    homes = {"api": "crds", "controller": "controller", "trainer": "trainer", "cli": "cli"}
    missing = set()
    for page in PAGES:
        for name in re.findall(r"\bstage2_(?:api|controller|trainer|cli)(?:\.\w+)+", (ROOT / page).read_text("utf-8")):
            parts = name.split(".")
            home = ROOT / homes[parts[0].removeprefix("stage2_")]
            paths = [home.joinpath(*parts), home.joinpath(*parts).with_suffix(".py"), home.joinpath(*parts[:-1])]
            missing |= set() if any(path.exists() for path in paths) else {(page, name)}
    assert missing == set()
