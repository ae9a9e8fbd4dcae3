"""Paths of files as a data file has them: relative to its folder, and right where folders are links."""

from __future__ import annotations

import os
from pathlib import Path


def relative_path(file: Path, folder: Path) -> str:
    """Return a path that leads from a folder to a file.

    The `..` of a folder that is a link is not the folder that the link lies in, but the one above what it leads to. So
    the path of names is taken where it leads there, and else the one between what both are without links.
    """
    named = os.path.relpath(file.absolute(), folder.absolute())
    real = os.path.realpath(file)
    if os.path.realpath(folder / named) == real:
        return named
    return os.path.relpath(Path(os.path.realpath(file.parent), file.name), os.path.realpath(folder))
