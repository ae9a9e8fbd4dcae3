"""What the images install is looked up in a database in OSV's form, and nothing is taken for an answer but one."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hack.audit_locks import EXIT_FOUND, EXIT_NO_DATABASE, by_package, findings, main, packages_of
from hack.lock_images import FOLDER, ROOT

HTTP = "aiohttp"


def entry(name: str, package: str, *, ecosystem: str = "PyPI", **affected: Any) -> dict[str, Any]:
    about = {"package": {"ecosystem": ecosystem, "name": package}, **affected}
    return {"id": name, "summary": f"what {name} is", "aliases": [f"CVE-{name}"], "affected": [about]}


def between(*events: dict[str, str]) -> list[dict[str, Any]]:
    return [{"type": "ECOSYSTEM", "events": list(events)}]


def installed(package: str) -> str:
    """The version of a package that the controller's image installs."""
    return dict(packages_of((FOLDER / "controller.txt").read_text()))[package]


@pytest.fixture
def database(tmp_path: Path):
    """A function that writes entries into a folder, one a file."""

    def write(*entries: dict[str, Any]) -> Path:
        for one in entries:
            (tmp_path / f"{one['id']}.json").write_text(json.dumps(one))
        return tmp_path

    return write


def test_a_package_that_is_affected_is_named_with_the_way_out(database, capsys):
    folder = database(entry("A", "AIOHTTP", ranges=between({"introduced": "0"}, {"fixed": "99.1"})))
    assert main([str(folder)]) == EXIT_FOUND
    told = capsys.readouterr().out
    assert f"controller.txt: {HTTP} {installed(HTTP)}: A, CVE-A: what A is; fixed in 99.1\n" in told


def test_one_that_is_fixed_of_another_ecosystem_or_withdrawn_is_not(database, capsys):
    always = between({"introduced": "0"})
    folder = database(
        entry("A", HTTP, ranges=between({"introduced": "0"}, {"fixed": "0.1"})),
        entry("B", HTTP, ecosystem="npm", ranges=always),
        entry("C", HTTP, ranges=always) | {"withdrawn": "2026-01-01T00:00:00Z"},
        entry("D", "no-image-has-it", ranges=always),
    )
    assert main([str(folder)]) == 0
    assert "2 entries of PyPI: 0 are known" in capsys.readouterr().out


def test_the_zip_that_osv_publishes_is_read_too(database, tmp_path_factory):
    folder = database(entry("A", HTTP, versions=[installed(HTTP)]))
    path = tmp_path_factory.mktemp("zip") / "all.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.write(folder / "A.json", "A.json")
    assert main([str(path)]) == EXIT_FOUND


@pytest.mark.parametrize(
    ("version", "events", "affected"),
    [
        ("1.5", [{"introduced": "1.0"}, {"fixed": "2.0"}], True),
        ("2.0", [{"introduced": "1.0"}, {"fixed": "2.0"}], False),
        ("0.9", [{"introduced": "1.0"}, {"fixed": "2.0"}], False),
        ("2.5", [{"introduced": "0"}, {"fixed": "1.0"}, {"introduced": "2.0"}, {"fixed": "3.0"}], True),
        ("1.5", [{"introduced": "0"}, {"fixed": "1.0"}, {"introduced": "2.0"}, {"fixed": "3.0"}], False),
        ("2.5", [{"fixed": "3.0"}, {"introduced": "2.0"}], True),
        ("1.0", [{"introduced": "0"}, {"last_affected": "1.0"}], True),
        ("1.0.1", [{"introduced": "0"}, {"last_affected": "1.0"}], False),
        ("10.0", [{"introduced": "0"}, {"fixed": "9.0"}], False),
        ("1.9+cpu", [{"introduced": "0"}, {"last_affected": "1.9"}], True),
        ("2.0rc1", [{"introduced": "0"}, {"fixed": "2.0"}], True),
    ],
)
def test_versions_lie_in_ranges_as_osv_says(database, version, events, affected):
    entries = by_package(database(entry("A", "some-package", ranges=between(*events))))
    found = list(findings({"x.txt": {("some-package", version)}}, entries))
    assert [one.version for one in found] == ([version] if affected else [])


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "is neither"),
        ({}, "has nothing of PyPI"),
        ({"a.json": "{"}, "a.json is none"),
        ({"a.json": "[]"}, "a.json"),
    ],
    ids=["nothing there", "an empty folder", "half a file", "no entry"],
)
def test_no_database_is_no_answer(tmp_path, capsys, content, said):
    folder = tmp_path / "database"
    if content is not None:
        folder.mkdir()
        for name, text in content.items():
            (folder / name).write_text(text)
    assert main([str(folder)]) == EXIT_NO_DATABASE
    told = capsys.readouterr()
    assert said in told.err
    assert "make audit DATABASE=PATH" in told.err
    assert not told.out


def test_the_command_says_what_it_lacks() -> None:
    command = [sys.executable, "hack/audit_locks.py", ""]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (EXIT_NO_DATABASE, "")
    assert "none was given" in done.stderr


def test_every_package_of_every_image_is_looked_up() -> None:
    for path in FOLDER.glob("*.txt"):
        text = path.read_text()
        assert len(packages_of(text)) == len({line for line in text.splitlines() if "==" in line})
