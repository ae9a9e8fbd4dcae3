"""What the pages point at exists: folders, files, links, modules, tests, and commands."""

import ast
import re
import subprocess
import tomllib
from functools import cache
from pathlib import Path

import pytest
from typer.main import get_command

from stage2_cli.main import app

ROOT = Path(__file__).parents[3]
TRACKED = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
PAGES = {
    name: (ROOT / name).read_text(encoding="utf-8")
    for name in TRACKED
    if name.endswith(".md") and (ROOT / name).is_file()
}
GUIDE = PAGES["CONTRIBUTING.md"]
TREE = re.search(r"```\n(crds/stage2_api/ .*?)```", GUIDE, re.DOTALL)[1]
PACKAGES = ("controller/stage2_controller", "trainer/stage2_trainer")
PRODUCT = ("controller/", "trainer/", "crds/", "report/", "cli/")
DOCSTRING = re.compile(r'"""(.*?)"""', re.DOTALL)
HOMES = {"api": "crds", "controller": "controller", "trainer": "trainer", "report": "report", "cli": "cli"}
CONTRACTS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
HISTORY = "CHANGELOG.md"  # names what no longer exists


def tree() -> list[str]:
    """Return the folders of the guide's tree, as paths from the root."""
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


def named(pattern: str) -> set[tuple[str, ...]]:
    """Return what a pattern finds on the pages, each with the page's name first."""
    return {
        (page, *match.groups())
        for page, text in PAGES.items()
        if page != HISTORY
        for match in re.finditer(pattern, text, re.MULTILINE)
    }


@cache
def functions(file: str) -> set[str]:
    nodes = ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8")))
    return {node.name for node in nodes if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def test_folders_in_documented_tree_exist():
    assert [path for path in tree() if not (ROOT / path).is_dir()] == []


@pytest.mark.parametrize("package", PACKAGES)
def test_documented_tree_lists_every_subpackage(package):
    assert {path.rpartition("/")[2] for path in tree() if path.startswith(f"{package}/")} == rooms(package)


@pytest.mark.parametrize(("package", "entry"), list(zip(PACKAGES, ("__main__", "main"), strict=True)))
def test_only_entry_point_lies_outside_rooms(package, entry):
    assert {path.stem for path in (ROOT / package).glob("*.py")} == {"__init__", entry}


@pytest.mark.parametrize("package", PACKAGES)
def test_design_page_lists_subpackages_in_layer_order(package):
    (listed,) = re.findall(rf"^\| `{package.rpartition('/')[2]}` \| (.*?) \|", PAGES["docs/design.md"], re.MULTILINE)
    names = re.findall(r"`(\w+)`", listed)
    assert rooms(package) <= set(names)
    assert [
        name for name in names if name not in rooms(package) and not (ROOT / package / f"{name}.py").is_file()
    ] == []
    heights = [height(package, name) for name in names]
    assert heights == sorted(heights)


def height(package: str, room: str) -> int:
    """Return the layer of a room, by the contract that lint-imports checks; the top one is 0."""
    name = package.rpartition("/")[2]
    (layers,) = (one["layers"] for one in CONTRACTS if one["type"] == "layers" and one["containers"] == [name])
    (found,) = (index for index, layer in enumerate(layers) if room in layer.split(" | "))
    return found


def test_design_page_explains_every_trainer_subpackage():
    (table,) = re.findall(r"\| room \| what it deals with \|\n\| --- \| --- \|\n((?:\|.*\n)+)", PAGES["docs/design.md"])
    explained = [name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.split("|")[1])]
    assert sorted(explained) == sorted(rooms("trainer/stage2_trainer"))


def test_files_to_read_first_exist():
    files = re.findall(r"`(\w+/[\w/]+\.py)`", GUIDE)
    assert len(files) >= 4
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_links_in_docs_lead_to_files():
    missing = []
    for page, text in PAGES.items():
        prose = re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.DOTALL)
        targets = [link for link in re.findall(r"\]\(([^)\s]+)\)", prose) if not re.match(r"[a-z]+:|#", link)]
        missing += [(page, link) for link in targets if not (ROOT / page).parent.joinpath(link.split("#")[0]).exists()]
    assert missing == []


def test_modules_named_in_docs_exist():
    missing = set()
    for page, name in named(r"\b(stage2_(?:api|controller|trainer|report|cli)(?:\.\w+)+)"):
        parts = name.split(".")
        home = ROOT / HOMES[parts[0].removeprefix("stage2_")]
        paths = [home.joinpath(*parts), home.joinpath(*parts).with_suffix(".py"), home.joinpath(*parts[:-1])]
        missing |= set() if any(path.exists() for path in paths) else {(page, name)}
    assert missing == set()


def test_classes_named_in_docstrings_exist():
    """`finite.FiniteGuard`, with the module's room or without; what a library has is left to its own pages."""
    sources = {
        name: (ROOT / name).read_text(encoding="utf-8")
        for name in TRACKED
        if name.startswith(PRODUCT) and name.endswith(".py")
    }
    modules = {"." + ".".join(Path(name).with_suffix("").parts[1:]): text for name, text in sources.items()}
    stems = {module.rpartition(".")[2] for module in modules}
    missing = set()
    for name, text in sources.items():
        for module, cls in re.findall(r"(?<![\w./-])((?:[a-z_]\w*\.)+)([A-Z]\w+)", "\n".join(DOCSTRING.findall(text))):
            path = "." + module.rstrip(".")
            homes = [found for home, found in modules.items() if home.endswith(path)]
            defined = any(re.search(rf"^ *(?:class )?{cls}\b", found, re.MULTILINE) for found in homes)
            missing |= set() if defined or path.rpartition(".")[2] not in stems else {(name, module + cls)}
    assert missing == set()


def test_tests_named_in_docs_exist():
    files = named(r"`(tests/[\w/]+\.\w+)`")
    assert len(files) > 30
    assert {(page, file) for page, file in files if not (ROOT / file).is_file()} == set()
    tests = named(r"`(tests/[\w/]+\.py)`: `(test_\w+)`")
    assert {(page, file, test) for page, file, test in tests if test not in functions(file)} == set()


def test_make_targets_named_in_docs_exist():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    assert {(page, target) for page, target in named(r"(?:^|`)make ([a-z][a-z-]+)") if target not in targets} == set()


def test_commands_named_in_docs_exist():
    commands = set(get_command(app).commands)
    used = named(r"`stage2 ([a-z][a-z0-9-]*)")
    assert len({command for _, command in used}) > 10
    assert {(page, command) for page, command in used if command not in commands} == set()


def test_chart_changelog_and_citation_have_package_version():
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = (ROOT / "charts/stage2/Chart.yaml").read_text()
    assert re.findall(r"^(?:appVersion|version): (.*)$", chart, re.MULTILINE) == [version, version]
    released = re.findall(r"^## \[(\d\S*)\]", PAGES[HISTORY], re.MULTILINE)
    assert released[:1] in ([], [version])
    assert f"\nversion: {version}\n" in (ROOT / "CITATION.cff").read_text()


def test_no_tracked_file_names_package_registry():
    hosts = ["pypi" + ".org", "python" + "hosted.org", "proxy." + "golang.org", "registry." + "npmjs"]
    binary = {".png", ".safetensors"}
    texts = {
        name: path.read_text(encoding="utf-8")
        for name in TRACKED
        if (path := ROOT / name).is_file() and path.suffix not in binary
    }
    assert [name for name, text in texts.items() if any(host in text for host in hosts)] == []
