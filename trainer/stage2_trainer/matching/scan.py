"""One pass over the text of an answer that finds its objects by JSON's braces, brackets and strings.

The scanner knows no tokens and validates no objects. It never backtracks, and is linear in the text.
Source: semantics, section 4.2 (b).
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

GEOMETRY_KEYS = ("bbox_2d", "poly")
WHITE_SPACE = " \t\n\r"
"""All white space of JSON; Python's `strip` and `\\s` know more."""

# Strings and flat arrays are single events: nothing inside them opens or closes an object.
# Each character has one way to match, so nothing is tried twice. Possessive quantifiers would say so, but the Python of
# Debian 12, 3.11.2, matches them wrongly around alternatives (CPython's issue 106052).
INSIDE_STRING = r'[^"\\]*(?:\\.[^"\\]*)*'
"""The inside of a JSON string, with `re.DOTALL`."""
_STRING = rf'"(?P<text>{INSIDE_STRING})(?P<close>"?)'
_FLAT_ARRAY = r'\[[^\[\]{}"]*(?:"[^"\\]*"[^\[\]{}"]*)*\]'
_EVENT = re.compile(rf"{_STRING}|{_FLAT_ARRAY}|[{{}}\[\]:,]", re.DOTALL)
# Python converts at most some 4000 digits to a number; a key with more names no object.
OBJECT_KEY = re.compile("object_([0-9]{1,4000})")


@dataclass(slots=True)
class Entry:
    """One `"object_n": ...` at the top level of the answer; offsets in characters, ends exclusive, -1 for none.

    captures: the spans of its geometry arrays, brackets included.
    """

    key: str
    index: int
    key_start: int
    value_start: int = -1
    value_end: int = -1
    captures: list[tuple[int, int]] = field(default_factory=list)


@dataclass
class Scan:
    """The result of a pass.

    entries: in order of appearance. first_open: offset after the first `{`, -1 without one. closed_at: offset after the
    top-level object, -1 if it is not closed. truncated: whether the text ends inside something.
    """

    entries: list[Entry]
    first_open: int
    closed_at: int
    truncated: bool


def scan(text: str) -> Scan:
    """Scan up to the end of the first top-level object; what follows is not part of the answer."""
    scanner = _Scanner()
    for event in _EVENT.finditer(text):
        start = event.start()
        scanner.handlers[text[start]](start, event)
        if scanner.closed_at >= 0:
            break
    open_ended = scanner.in_string or bool(scanner.expecting) or scanner.brackets != 0
    truncated = open_ended or scanner.first_open < 0
    return Scan(scanner.entries, scanner.first_open, scanner.closed_at, truncated)


class _Scanner:
    """The state between two events. `expecting`: for each open brace whether the next string is a key."""

    def __init__(self) -> None:
        self.expecting: list[bool] = []
        self.brackets = 0
        self.in_string = False
        self.last_key = ""
        self.pending: Entry | None = None
        self.active: Entry | None = None
        self.capture_start = -1
        self.capture_brackets = 0
        self.entries: list[Entry] = []
        self.first_open = -1
        self.closed_at = -1
        self.handlers: dict[str, Callable[[int, re.Match[str]], None]] = {
            '"': self.string,
            "{": self.open_brace,
            "}": self.close_brace,
            "[": self.open_bracket,
            "]": self.close_bracket,
            ":": self.colon,
            ",": self.comma,
        }

    def string(self, start: int, event: re.Match[str]) -> None:
        if not event["close"]:
            self.in_string = True
            return
        if self.brackets or not self.expecting or not self.expecting[-1]:
            return
        self.last_key = event["text"]
        if len(self.expecting) == 1:
            match = OBJECT_KEY.fullmatch(event["text"])
            self.pending = Entry(event["text"], int(match[1]), start) if match else None
            if self.pending:
                self.entries.append(self.pending)

    def open_brace(self, start: int, _: re.Match[str]) -> None:
        self.expecting.append(True)
        if self.first_open < 0:
            self.first_open = start + 1
        if len(self.expecting) == 2 and self.active is None and self.pending and not self.brackets:
            self.active, self.pending = self.pending, None
            self.active.value_start = start

    def close_brace(self, start: int, _: re.Match[str]) -> None:
        if not self.expecting:
            return
        if len(self.expecting) == 2 and self.active:
            self.active.value_end = start + 1
            self.active = None
            self.capture_start = -1
        self.expecting.pop()
        if not self.expecting:
            self.closed_at = start + 1

    def open_bracket(self, start: int, event: re.Match[str]) -> None:
        flat = event.end() - start > 1
        captures = (
            self.active is not None
            and self.capture_start < 0
            and len(self.expecting) == 2
            and self.last_key in GEOMETRY_KEYS
        )
        if self.active and captures and flat:
            self.active.captures.append((start, event.end()))
        elif captures:
            self.capture_start, self.capture_brackets = start, self.brackets
        if not flat:
            self.brackets += 1

    def close_bracket(self, start: int, _: re.Match[str]) -> None:
        self.brackets = max(0, self.brackets - 1)
        if self.active and self.capture_start >= 0 and self.brackets == self.capture_brackets:
            self.active.captures.append((self.capture_start, start + 1))
            self.capture_start = -1

    def colon(self, _: int, __: re.Match[str]) -> None:
        if self.expecting and not self.brackets:
            self.expecting[-1] = False

    def comma(self, _: int, __: re.Match[str]) -> None:
        if self.expecting and not self.brackets:
            self.expecting[-1] = True
