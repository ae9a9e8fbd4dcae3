"""Cuts a release of this repository: `make release VERSION=0.2.0`, which runs all tests first.

python hack/release.py --check 0.2.0    say what keeps this version from being released
python hack/release.py 0.2.0            release it

The version stands in pyproject.toml, the chart and CITATION.cff; this writes it there, closes the section "Unreleased"
of the changelog, commits, builds sdist, wheel and chart into dist/, and tags what was built. It pushes nothing.
STAGE2_HOME is the address of the repository, with which links and pictures of the README work on a package index.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from datetime import UTC, date, datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
VERSION = re.compile(r"(\d+)\.(\d+)\.(\d+)")
CHECK = "--check"
UNRELEASED = "## [Unreleased]\n"
USAGE = 64


def main(words: list[str]) -> int:
    """Cut the release; return 0, or 64 if the version, the changelog or the work tree does not allow it."""
    only_check, words = words[:1] == [CHECK], words[words[:1] == [CHECK] :]
    problem = obstacle(words)
    if problem:
        sys.stderr.write(f"release: {problem}\n")
        return USAGE
    if only_check:
        return 0
    version = words[0]
    helm = run("hack/local-cluster/local-cluster", "tool", "helm")
    for name, text in changed(version, datetime.now(UTC).date()).items():
        Path(ROOT, name).write_text(text, encoding="utf-8")
    run("git", "commit", "--quiet", "--all", f"--message=Release {version}")
    run("uv", "build", "--quiet", "--out-dir", "dist")
    run(helm, "package", "charts/stage2", "--destination", "dist")
    run("git", "tag", "--annotate", f"--message=stage2 {version}", f"v{version}")
    sys.stdout.write(f"dist/ has the release; to publish it: git push origin HEAD v{version}\n")
    return 0


def obstacle(words: list[str]) -> str | None:
    """Return why no release of this version can be cut; None if it can."""
    if len(words) != 1 or not VERSION.fullmatch(words[0]):
        return f"VERSION: {' '.join(words) or 'nothing'}; must be three numbers; make release VERSION=0.2.0"
    released = run("git", "tag", "--list", f"v{current()}")
    if numbers(words[0]) < numbers(current()) or (words[0] == current() and released):
        return f"VERSION: {words[0]}; must be newer than {current()}, the last release; choose a larger one"
    if dirty := run("git", "status", "--porcelain"):
        return f"the work tree differs from its commit; commit or remove:\n{dirty}"
    if not notes(Path(ROOT, "CHANGELOG.md").read_text(encoding="utf-8")).strip():
        return "CHANGELOG.md: the section Unreleased is empty; say what changed for users"
    if not os.environ.get("STAGE2_HOME"):
        return "STAGE2_HOME is not set: README's links and pictures need the address of the repository; set it"
    if shutil.which("uv") is None:
        return f"uv, which builds the wheel, is not on PATH; run make release VERSION={words[0]}, which finds it"
    return None


def numbers(version: str) -> tuple[int, ...]:
    """Return a version as numbers that compare."""
    return tuple(map(int, version.split(".")))


def current() -> str:
    """Return the version of pyproject.toml."""
    version: str = tomllib.loads(Path(ROOT, "pyproject.toml").read_text(encoding="utf-8"))["project"]["version"]
    return version


def notes(changelog: str, section: str = "Unreleased") -> str:
    """Return what the changelog says of a release."""
    found = re.search(rf"^## \[{re.escape(section)}\].*?\n(.*?)(?=^## \[|\Z)", changelog, re.MULTILINE | re.DOTALL)
    return found[1] if found else ""


def changed(version: str, today: date) -> dict[str, str]:
    """Return the files that name the version, as they are after the release."""
    places = {
        "pyproject.toml": (r'^version = ".*"', f'version = "{version}"'),
        "charts/stage2/Chart.yaml": (r"^(version|appVersion): .*", rf"\1: {version}"),
        "CITATION.cff": (r"^version: .*\ndate-released: .*", f"version: {version}\ndate-released: {today}"),
        "CHANGELOG.md": (re.escape(UNRELEASED), f"{UNRELEASED}\n## [{version}] - {today}\n"),
    }
    texts = {}
    for name, (pattern, put) in places.items():
        texts[name], count = re.subn(pattern, put, Path(ROOT, name).read_text(encoding="utf-8"), flags=re.MULTILINE)
        assert count, f"{name} has no version"
    return texts


def run(*command: str) -> str:
    """Run a command at the root; return what it prints."""
    return subprocess.run(command, cwd=ROOT, check=True, text=True, stdout=subprocess.PIPE).stdout.strip()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
