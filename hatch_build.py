"""What hatchling adds to a build: the commit, the project's address, and the README as a package index shows it.

STAGE2_HOME is the address of the repository, which the release workflow knows. STAGE2_COMMIT names the commit where a
build has no repository, as in a container.
"""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface
from hatchling.metadata.plugin.interface import MetadataHookInterface

COMMIT = "stage2_cli/commit.txt"
RELATIVE = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?![a-z]+:)(?P<path>[^)]*)\)")
PAGES = {"Documentation": "tree/v{}/docs", "Changelog": "blob/v{}/CHANGELOG.md", "Issues": "issues"}


class Address(MetadataHookInterface):
    """The README and the project's links."""

    def update(self, metadata: dict[str, Any]) -> None:
        """Add both to the metadata."""
        home, version = os.environ.get("STAGE2_HOME", "").rstrip("/"), metadata["version"]
        text = Path(self.root, "README.md").read_text(encoding="utf-8")
        metadata["readme"] = {"content-type": "text/markdown", "text": with_links(text, home, version)}
        pages = {name: f"{home}/{page.format(version)}" for name, page in PAGES.items()}
        metadata["urls"] = {"Source": home, **pages} if home else {}


def with_links(text: str, home: str, version: str) -> str:
    """Return a page whose relative links lead to this version's files; without an address it has no such links."""

    def absolute(link: re.Match[str]) -> str:
        if not home:
            return "" if link["image"] else link["text"]
        folder = "raw" if link["image"] else "blob"
        return f"{link['image']}[{link['text']}]({home}/{folder}/v{version}/{link['path']})"

    return RELATIVE.sub(absolute, text)


class Commit(BuildHookInterface[Any]):
    """The commit that `stage2 --version` shows: a file of the wheel, which a wheel built from an sdist has already."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the file; an editable installation has none."""
        commit = os.environ.get("STAGE2_COMMIT") or described(Path(self.root))
        if version == "editable" or not commit:
            return
        self._folder = tempfile.TemporaryDirectory()
        file = Path(self._folder.name, "commit.txt")
        file.write_text(f"{commit}\n", encoding="utf-8")
        build_data["force_include"][str(file)] = f"cli/{COMMIT}" if self.target_name == "sdist" else COMMIT


def described(root: Path) -> str:
    """Return the commit of a repository, marked where files differ from it; empty outside of one."""
    if not (root / ".git").exists():
        return ""
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False).stdout.strip()
