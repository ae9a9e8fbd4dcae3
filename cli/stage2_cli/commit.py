"""The commit that a wheel was built from."""

from __future__ import annotations

from pathlib import Path

_FILE = Path(__file__).with_name("commit.txt")
"""hatch_build.py puts it into wheels."""


def built_from() -> str | None:
    """Return the commit of the wheel; None outside a wheel."""
    return _FILE.read_text().strip() if _FILE.is_file() else None
