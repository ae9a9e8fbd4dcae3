"""Problems of a configuration, and exit codes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

EXIT_FAILURE: Final = 1
"""Exit code of an unexpected failure, or of one that a retry would repeat."""

EXIT_CONFIG: Final = 64
"""Exit code of a configuration error (EX_USAGE of sysexits.h), which is never retried."""

EXIT_DATA: Final = 65
"""Exit code of an import that keeps no object (EX_DATAERR of sysexits.h)."""

EXIT_EXHAUSTED: Final = 69
"""Exit code of a learner without restarts left in its container (EX_UNAVAILABLE of sysexits.h)."""

EXIT_RETRYABLE: Final = 75
"""Exit code of a failure that a retry may fix (EX_TEMPFAIL of sysexits.h)."""


@dataclass(frozen=True)
class Problem:
    """One broken rule.

    path: dotted path of the field, from the root of the file (`spec.learner.gpus`).
    value: the value found there; None if there is none.
    rule: what must hold, without the path: "must be at least 1".
    way_out: what to write instead.
    """

    path: str
    value: object
    rule: str
    way_out: str

    @property
    def shown_value(self) -> str | None:
        """The shortened repr of the value; None without one."""
        return None if self.value is None else shortened(self.value)

    @property
    def statement(self) -> str:
        """The path, the value if there is one, and the rule."""
        return f"{self.path}: {self.rule}" if self.value is None else f"{self.path}: {self.shown_value}; {self.rule}"

    def __str__(self) -> str:
        return f"{self.statement}; {self.way_out}"


class ConfigError(ValueError):
    """All broken rules of one file. Programs exit with EXIT_CONFIG.

    unlisted: number of further problems, which are not described.
    """

    def __init__(self, problems: Iterable[Problem], *, unlisted: int = 0) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.unlisted = unlisted
        super().__init__("\n".join([*map(str, self.problems), *([f"and {unlisted} more"] if unlisted else [])]))

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(type(self), unlisted=self.unlisted), (self.problems,)

    def first(self, most: int) -> ConfigError:
        """Return the error with at most this many problems; the rest are only counted."""
        return ConfigError(self.problems[:most], unlisted=self.unlisted + len(self.problems[most:]))

    def within(self, characters: int) -> str:
        """Return as many problems as fit into this many characters, and the number of the rest."""
        kept: list[str] = []
        left = characters
        for problem in self.problems:  # there may be tens of thousands, so each is formatted at most once
            line = str(problem)
            if kept and len(line) > left:
                break
            kept.append(line[:characters])
            left -= len(line) + 1
        more = len(self.problems) - len(kept) + self.unlisted
        return "\n".join([*kept, *([f"and {more} more"] if more else [])])


def refused(path: str, value: object, rule: str, way_out: str) -> ConfigError:
    """Return the error of one broken rule; the arguments are those of `Problem`."""
    return ConfigError([Problem(path, value, rule, way_out)])


def shortened(value: object, limit: int = 120) -> str:
    """Return the repr of a value, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "step"), counted(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
