"""The terminal to which all commands print: whatever a file holds is shown, and none of it is obeyed."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from stage2_api.log_lines import json_text, lines_of, one_line


class Terminal(Console):
    """A console that prints unprintable characters escaped, markup and names of emoji as they are, and its own styles.

    A `str` is one line, so that a line break in it is escaped, too. What has several lines is a `Text`.

    wraps: break lines at the terminal's width.
    """

    def __init__(self, *, stderr: bool = False, width: int | None = None, wraps: bool = False) -> None:
        super().__init__(stderr=stderr, width=width, soft_wrap=not wraps, markup=False, emoji=False, highlight=False)

    def render_str(self, text: str, *args: Any, **options: Any) -> Text:
        """Return a line, or a table's cell, as text with styles."""
        return super().render_str(one_line(text), *args, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        """Yield the parts of whatever is printed."""
        for segment in super().render(renderable, options):
            text, style, control = segment
            yield segment if control or text.isprintable() else Segment(lines_of(text), style)


def print_json(value: object, *, indent: int | None = None) -> None:
    """Print a value for programs, in one line unless there is an indent."""
    print(json_text(value, indent=indent))
