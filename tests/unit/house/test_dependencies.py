"""docs/dependencies.md has a row for each package that pyproject.toml asks for, with the licence that it has."""

import importlib.metadata
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
ROW = re.compile(r"^\| ([a-z0-9-]+) \| ([a-z, ]+) \| ([^|]+) \| [^|]+ \|$", re.MULTILINE)
TABLE = (ROOT / "docs" / "dependencies.md").read_text(encoding="utf-8").partition("| --- |")[2]
ROWS = {row[1]: row for row in ROW.finditer(TABLE)}
WORDS = {
    "MIT": "MIT", "MIT-CMU": "MIT", "Apache-2.0": "Apache", "BSD-2-Clause": "BSD", "BSD-3-Clause": "BSD",
    "MPL-2.0": "MPL", "PSF-2.0": "Python Software Foundation",
}  # fmt: skip
"""Licences that may be combined with ours, and the word by which a package's metadata name them."""


def required() -> dict[str, set[str]]:
    """Return where pyproject.toml asks for each package: `all commands`, an extra or a group."""
    project = PROJECT["project"]
    tables = {**project["optional-dependencies"], **PROJECT["dependency-groups"]}
    found: dict[str, set[str]] = {}
    for place, lines in {"all commands": project["dependencies"], **tables}.items():
        for line in lines:
            found.setdefault(Requirement(line).name, set()).add(place)
    return found


def stated(package: str) -> str:
    """Return what the metadata of an installed package say of its licence; empty if it is not installed."""
    try:
        found = importlib.metadata.metadata(package)
    except importlib.metadata.PackageNotFoundError:
        return ""
    classifiers = [line for line in found.get_all("Classifier") or () if line.startswith("License ::")]
    return "\n".join([found.get("License-Expression") or "", found.get("License") or "", *classifiers])


def test_dependencies_are_documented_with_places_and_reason() -> None:
    assert {name: set(row[2].split(", ")) for name, row in ROWS.items()} == required()


def test_licences_match_packages_and_are_compatible() -> None:
    licences = {name: re.split(r" AND | OR ", re.sub("[()]", "", row[3])) for name, row in ROWS.items()}
    assert {one for found in licences.values() for one in found} <= set(WORDS)
    wrong = {
        name: text[:80]
        for name, found in licences.items()
        if (text := stated(name)) and not all(WORDS[one] in text for one in found)
    }
    assert wrong == {}
