"""A console for lines that hold names of a person: they stand there letter by letter, brackets and colons too."""

from __future__ import annotations

from rich.console import Console


def plain_console(*, stderr: bool = False, width: int | None = None) -> Console:
    """Return a console that takes `[bold]` and `:cat:` for text, and breaks no line."""
    return Console(highlight=False, soft_wrap=True, markup=False, emoji=False, stderr=stderr, width=width)
