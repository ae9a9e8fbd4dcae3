"""What the images install, looked up in a database of vulnerabilities that is at hand: `make audit DATABASE=PATH`.

The database is one of OSV's (https://ossf.github.io/osv-schema/): a folder of its JSON files, or the zip of them that
OSV publishes for PyPI. Nothing is asked of a network; pip-audit and osv-scanner, which ask, read no folder by
themselves. Exit codes: 0, nothing known; 1, something is; 64, there is no database to ask.
"""

from __future__ import annotations

import json
import re
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from packaging.utils import canonicalize_name
from packaging.version import InvalidVersion, Version

FOLDER = Path(__file__).parents[1] / "images" / "requirements"
ENTRY = re.compile(r"^([A-Za-z0-9._-]+)==([^\s;]+)", re.MULTILINE)
ECOSYSTEM = "PyPI"
EXIT_FOUND, EXIT_NO_DATABASE = 1, 64
USAGE = (
    "make audit DATABASE=PATH: PATH must be a folder of OSV's JSON files for PyPI, or a zip of them ({0}); fetch the"
    " zip that OSV publishes for PyPI where there is a network, and name it here"
)


class DatabaseError(ValueError):
    """There is no database, or it cannot be read; with the way out."""


@dataclass(frozen=True)
class Finding:
    """A vulnerability that is known of a package that an image installs. fixed: the first versions without it."""

    lock: str
    package: str
    version: str
    name: str
    said: str
    fixed: tuple[str, ...]

    def __str__(self) -> str:
        fixed = f"fixed in {', '.join(self.fixed)}" if self.fixed else "no version without it is known"
        return f"{self.lock}: {self.package} {self.version}: {self.name}: {self.said or 'no summary'}; {fixed}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Print what is known of the packages of images/requirements; return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    installed = {path.name: packages_of(path.read_text(encoding="utf-8")) for path in sorted(FOLDER.glob("*.txt"))}
    try:
        if len(given) != 1 or not given[0]:
            raise DatabaseError(USAGE.format("none was given"))
        entries = by_package(Path(given[0]))
    except DatabaseError as error:
        print(error, file=sys.stderr)
        return EXIT_NO_DATABASE
    found = list(findings(installed, entries))
    for one in found:
        print(one)
    packages = {package for lock in installed.values() for package in lock}
    count = len({entry["id"] for some in entries.values() for entry in some})
    print(f"{len(packages)} packages with versions, {count} entries of {ECOSYSTEM}: {len(found)} are known")
    return EXIT_FOUND if found else 0


def packages_of(lock: str) -> set[tuple[str, str]]:
    """Return names and versions of a file of requirements; of one package there may be several, by machine."""
    return {(canonicalize_name(name), version) for name, version in ENTRY.findall(lock)}


def by_package(database: Path) -> dict[str, list[dict[str, Any]]]:
    """Return the entries of a database by the packages of PyPI that they are about; those withdrawn are left out.

    Raises:
        DatabaseError: it is no database, one of its files cannot be read, or it has nothing of PyPI.
    """
    found: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for name, content in _files(database):
        try:
            entry = json.loads(content)
            affected = [] if entry.get("withdrawn") else entry.get("affected", [])
            of_pypi = [one["package"]["name"] for one in affected if one["package"]["ecosystem"] == ECOSYSTEM]
            assert isinstance(entry["id"], str)
        except (ValueError, KeyError, TypeError, AttributeError, AssertionError, RecursionError) as error:
            raise DatabaseError(USAGE.format(f"{name} is none: {type(error).__name__}: {error}")) from error
        for package in dict.fromkeys(map(canonicalize_name, of_pypi)):
            found[package].append(entry)
    if not found:
        raise DatabaseError(USAGE.format(f"{database} has nothing of {ECOSYSTEM}"))
    return found


def findings(
    installed: Mapping[str, set[tuple[str, str]]], entries: Mapping[str, Sequence[Mapping[str, Any]]]
) -> Iterator[Finding]:
    """Yield what is known of installed packages, by file, package and entry."""
    for lock, packages in installed.items():
        for package, version in sorted(packages):
            for entry in sorted(entries.get(package, ()), key=lambda one: str(one["id"])):
                about = [
                    one
                    for one in entry["affected"]
                    if one["package"]["ecosystem"] == ECOSYSTEM and canonicalize_name(one["package"]["name"]) == package
                ]
                if any(_is_affected(Version(version), one) for one in about):
                    names = ", ".join([entry["id"], *entry.get("aliases", [])])
                    yield Finding(lock, package, version, names, entry.get("summary", ""), _fixed(about))


def _is_affected(version: Version, about: Mapping[str, Any]) -> bool:
    """Whether a version is listed, or lies in a range. A local part, such as +cpu, is that of a build."""
    public = Version(version.public)
    listed = {_parsed(one) for one in about.get("versions", [])}
    ranges = [one["events"] for one in about.get("ranges", []) if one["type"] == "ECOSYSTEM"]
    return public in listed or any(_lies_in(public, events) for events in ranges)


def _lies_in(version: Version, events: Sequence[Mapping[str, str]]) -> bool:
    """Whether events, in the order of their versions, leave a version affected (OSV's evaluation)."""
    affected = False
    for kind, at in sorted(((kind, at) for event in events for kind, at in event.items()), key=_place):
        begun = at == "0" or (parsed := _parsed(at)) is None or version >= parsed
        if kind == "introduced":
            affected |= begun
        elif kind == "last_affected":
            affected &= not (begun and version != _parsed(at))
        else:  # fixed, limit
            affected &= not begun
    return affected


def _place(event: tuple[str, str]) -> tuple[bool, Version]:
    parsed = _parsed(event[1])
    return (event[1] != "0", parsed if parsed is not None else Version("0"))


def _parsed(version: str) -> Version | None:
    try:
        return Version(version)
    except InvalidVersion:  # of the days before PEP 440: no image installs one
        return None


def _fixed(about: Sequence[Mapping[str, Any]]) -> tuple[str, ...]:
    events = (event for one in about for span in one.get("ranges", []) for event in span["events"])
    return tuple(dict.fromkeys(event["fixed"] for event in events if "fixed" in event))


def _files(database: Path) -> Iterator[tuple[str, bytes]]:
    if database.is_dir():
        for path in sorted(database.rglob("*.json")):
            yield str(path), path.read_bytes()
    elif zipfile.is_zipfile(database):
        with zipfile.ZipFile(database) as archive:
            for name in sorted(one for one in archive.namelist() if one.endswith(".json")):
                yield f"{database}: {name}", archive.read(name)
    else:
        raise DatabaseError(USAGE.format(f"{database} is neither"))


if __name__ == "__main__":
    sys.exit(main())
