"""Log format of learner and controller: one line per message, so that quoted text cannot forge a log record.

Messages quote servers and other people's objects. A line break in them could start a forged record, and an escape
sequence could control a terminal.
"""

from __future__ import annotations

import logging
import traceback

FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
_BELOW = "    "
"""Indents each line of a traceback, because only records of the run start at the left edge."""


def one_line(text: str) -> str:
    """Return the text with unprintable characters escaped as in Python: a line break as `\\n`."""
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text)


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
