"""Gives mkdocs the repository's pages at their own paths: one link serves GitHub and the site.

mkdocs loads this file as a hook (`mkdocs.yml`). Pages are all tracked Markdown files that a reader needs; other files
come along where a page links to them.
"""

from __future__ import annotations

import posixpath
import re
import subprocess
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parents[1]
_PAGES = re.compile(r"[A-Z]+\.md|(docs|bench/results|examples|charts)/.*\.md|docs/site\.css")
_LINK = re.compile(r"\]\(([^)\s#:]+)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Replace the files of docs_dir by the pages, and by what they link to."""
    for file in [one for one in files if one.src_dir == config.docs_dir]:
        files.remove(file)
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    tracked = set(listed.splitlines())
    pages = {name for name in tracked if _PAGES.fullmatch(name)}
    linked = {
        posixpath.normpath(posixpath.join(posixpath.dirname(page), link))
        for page in pages
        for link in _LINK.findall((ROOT / page).read_text(encoding="utf-8"))
    }
    for name in sorted(pages | (linked & tracked)):
        files.append(File.generated(config, name, abs_src_path=str(ROOT / name)))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    r"""Write `a\|b` in tables as `a|b`: GitHub needs the backslash in code, Python-Markdown shows it."""
    return re.sub(
        r"^\|.*$",
        lambda row: re.sub(r"`[^`]*`", lambda code: code[0].replace("\\|", "|"), row[0]),
        markdown,
        flags=re.M,
    )
