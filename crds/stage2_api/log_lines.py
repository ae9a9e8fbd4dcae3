"""Foreign text as text: in the lines of a log, in JSON, and on a terminal.

Messages quote servers, files, and other people's objects. A line break in them could start a forged record, an escape
sequence could control a terminal, and a bidi mark could show another text than there is.
"""

from __future__ import annotations

import json
import logging
import re
import sys
import traceback
from collections.abc import Iterable, Iterator
from types import TracebackType

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BELOW = "    "
"""Indents each line of a traceback, because only records of the run start at the left edge."""
LONGEST_LINE = 1 << 20
"""Bytes of a log's line that are kept in memory; a longer one becomes several."""
_COLOUR = re.compile("\x1b\\[[0-9;]*m")


def one_line(text: str) -> str:
    """Return the text with unprintable characters escaped as in Python: a line break as `\\n`."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


def lines_of(text: str) -> str:
    """Return a text of several lines with all but the line breaks escaped as in `one_line`."""
    return text if text.isprintable() else "\n".join(map(one_line, text.split("\n")))


def without_colours(text: str) -> str:
    """Return a text without the colours that programs write into their logs."""
    return _COLOUR.sub("", text)


def split_lines(parts: Iterable[bytes]) -> Iterator[str]:
    """Yield the lines of a log that comes in parts, each as soon as it is whole."""
    rest = b""
    for part in parts:
        *lines, rest = (rest + part).split(b"\n")
        if len(rest) >= LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        yield from (line.decode(errors="backslashreplace").removesuffix("\r") for line in lines)
    if rest:
        yield rest.decode(errors="backslashreplace").removesuffix("\r")


def json_text(value: object, *, indent: int | None = None) -> str:
    """Return a value as JSON that is readable, with unprintable characters escaped."""
    text = json.dumps(value, indent=indent, ensure_ascii=False)
    if text.replace("\n", "").isprintable():
        return text
    return "".join(c if c.isprintable() or c == "\n" else json.dumps(c)[1:-1] for c in text)


def print_error(line: str) -> None:
    """Print a line to standard error."""
    sys.stderr.write(f"{one_line(line)}\n")
    sys.stderr.flush()


class OneLineFormatter(logging.Formatter):
    """A formatter whose messages are one line each; tracebacks follow, indented."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Return the line of a record."""
        record.message = one_line(record.message)
        return super().formatMessage(record)

    def formatException(self, ei: object) -> str:
        """Return a traceback, indented."""
        lines = "".join(traceback.format_exception(*ei)).splitlines()  # type: ignore[misc]
        return "\n".join(_BELOW + one_line(line) for line in lines)


def configure(level: int | str) -> None:
    """Log to standard error, in this form, from a level on."""
    handler = logging.StreamHandler()
    handler.setFormatter(OneLineFormatter(FORMAT))
    logging.basicConfig(level=level, handlers=[handler])


def escape_errors() -> None:
    """Escape the warnings that libraries log where no log is configured, and the traceback of an unexpected error."""
    if logging.lastResort is not None:
        logging.lastResort.setFormatter(OneLineFormatter("%(message)s"))
    sys.excepthook = _print_traceback


def _print_traceback(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    sys.stderr.write(lines_of("".join(traceback.format_exception(kind, error, trace))))
