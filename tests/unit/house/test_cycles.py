"""No modules of a package import one another in a circle, not even for a type checker or inside a function."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = {
    "stage2_api": ROOT / "crds",
    "stage2_controller": ROOT / "controller",
    "stage2_trainer": ROOT / "trainer",
    "stage2_report": ROOT / "report",
    "stage2_cli": ROOT / "cli",
}
Graph = dict[str, set[str]]


def modules(root: Path, package: str) -> dict[str, Path]:
    """Return the files of a package by the names of their modules."""
    found = {}
    for path in (root / package).rglob("*.py"):
        parts = path.relative_to(root).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


def imports(module: str, path: Path, known: set[str]) -> Iterator[str]:
    """Yield every module of the package that the file names in an import statement, wherever that stands."""
    package = module if path.name == "__init__.py" else module.rpartition(".")[0]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
            base = ".".join([*above, *([node.module] if node.module else [])])
            for alias in node.names:
                whole = f"{base}.{alias.name}"
                if whole in known or base in known:
                    yield whole if whole in known else base


def graph(root: Path, package: str) -> Graph:
    """Return the modules that each module of a package imports."""
    files = modules(root, package)
    return {name: set(imports(name, path, set(files))) - {name} for name, path in files.items()}


def circles(edges: Graph) -> list[list[str]]:
    """Return the groups of modules that reach one another (Tarjan's strongly connected components)."""
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    stack: list[str] = []
    found: list[list[str]] = []

    def visit(name: str) -> None:
        order[name] = lowest[name] = len(order)
        stack.append(name)
        for other in sorted(edges[name]):
            if other not in order:
                visit(other)
                lowest[name] = min(lowest[name], lowest[other])
            elif other in stack:
                lowest[name] = min(lowest[name], order[other])
        if lowest[name] == order[name]:
            group = stack[stack.index(name) :]
            del stack[stack.index(name) :]
            if len(group) > 1:
                found.append(sorted(group))

    for name in sorted(edges):
        if name not in order:
            visit(name)
    return found


@pytest.mark.parametrize("package", PACKAGES)
def test_no_modules_import_one_another_in_a_circle(package: str) -> None:
    assert circles(graph(PACKAGES[package], package)) == []


def test_a_circle_is_found_whichever_way_it_is_hidden(tmp_path: Path) -> None:
    package = tmp_path / "room"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "a.py").write_text("from room import b\n")
    (package / "b.py").write_text("from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from room.c import C\n")
    (package / "c.py").write_text("class C:\n    def f(self):\n        from . import a\n        return a\n")
    (package / "d.py").write_text("import room.a\n")
    assert circles(graph(tmp_path, "room")) == [["room.a", "room.b", "room.c"]]
