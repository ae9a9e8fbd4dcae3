"""The repository's pages as a site: `python hack/build_site.py OUT` builds OUT/site.

Each page keeps its path in the repository, so one link serves GitHub and the site. Pages are all tracked Markdown files
that a reader needs; other files come along where a page links to them. OUT/pages has what the generator reads.
"""

from __future__ import annotations

import os
import posixpath
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFIG = ROOT / "docs" / "zensical.toml"
HOME = "STAGE2_HOME"
"""The variable with the repository's address; without it, the address of the remote `origin`."""
_PAGES = re.compile(r"[A-Z]+\.md|(docs|bench/results|examples|charts)/.*\.md")
_STYLE = "docs/site.css"
_LINK = re.compile(r"\]\(([^)\s#:]+)")
_ADDRESS = re.compile(r"(?:https://(?:[^@/]*@)?|(?:ssh://)?git@)([^/:]+)[/:](.+?)(?:\.git)?/?")


def build(out: Path) -> int:
    """Write pages and configuration into a folder, and the site beside them; return the generator's exit code."""
    pages, config = out / "pages", out / CONFIG.name
    shutil.rmtree(pages, ignore_errors=True)
    for name in files():
        copy = pages / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if _PAGES.fullmatch(name):
            copy.write_text(without_backslashes((ROOT / name).read_text(encoding="utf-8")), encoding="utf-8")
        else:
            shutil.copyfile(ROOT / name, copy)
    text = CONFIG.read_text(encoding="utf-8")
    if home := address(os.environ.get(HOME) or _git("config", "--get", "remote.origin.url")):
        text = text.replace("[project]\n", f'[project]\nrepo_url = "{home}"\n', 1)
    config.write_text(text, encoding="utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", f"--config-file={config}"]
    return subprocess.run(command, check=False).returncode


def files() -> list[str]:
    """Return the tracked files of the site: its pages, their style, and what they link to."""
    tracked = set(_git("ls-files").splitlines())
    pages = {name for name in tracked if _PAGES.fullmatch(name)}
    linked = {
        posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        for page in pages
        for link in _LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    }
    return sorted(pages | {_STYLE} | (linked & tracked))


def without_backslashes(text: str) -> str:
    r"""Return a page with `a|b` for `a\|b` in tables: GitHub needs the backslash in code, Python-Markdown shows it."""
    return re.sub(
        r"^\|.*$",
        lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]),
        text,
        flags=re.M,
    )


def address(remote: str) -> str:
    """Return the address of a repository's page for that of its remote, without credentials; empty if it has none."""
    found = _ADDRESS.fullmatch(remote.strip())
    return f"https://{found[1]}/{found[2]}" if found else ""


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=False).stdout


if __name__ == "__main__":
    sys.exit(build(Path(sys.argv[1]).resolve()))
