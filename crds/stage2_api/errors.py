"""Problems of a configuration, in sentences for people, and exit codes for programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

EXIT_FAILURE: Final = 1
"""Exit code of an unforeseen failure, or of one that would happen again."""

EXIT_CONFIG: Final = 64
"""Exit code of a configuration error (EX_USAGE of sysexits.h), which is never retried because it would fail again."""

EXIT_EXHAUSTED: Final = 69
"""Exit code of a learner that used up its restarts in its container (EX_UNAVAILABLE of sysexits.h)."""

EXIT_RETRYABLE: Final = 75
"""Exit code of a failure that a retry may avoid (EX_TEMPFAIL of sysexits.h)."""


@dataclass(frozen=True)
class Problem:
    """One broken rule.

    path: dotted path of the field, from the root of the file (`spec.learner.gpus`).
    value: what was found there; None where nothing stands.
    rule: what must hold, without the path: "must be at least 1".
    way_out: what to write instead.
    """

    path: str
    value: object
    rule: str
    way_out: str

    @property
    def found(self) -> str:
        """The value as Python writes it, cut; "nothing" where there is none."""
        return "nothing" if self.value is None else shortened(self.value)

    def __str__(self) -> str:
        return f"{self.path}: {self.found}; {self.rule}; {self.way_out}"


class ConfigError(ValueError):
    """All broken rules of one file, found in one pass. Programs that meet it end with EXIT_CONFIG.

    unlisted: how many more there are, which nobody described.
    """

    def __init__(self, problems: Iterable[Problem], *, unlisted: int = 0) -> None:
        self.problems: tuple[Problem, ...] = tuple(problems)
        self.unlisted = unlisted
        super().__init__("\n".join([*map(str, self.problems), *([f"and {unlisted} more"] if unlisted else [])]))

    def first(self, most: int) -> ConfigError:
        """Return the error with at most so many problems; the others are only counted."""
        return ConfigError(self.problems[:most], unlisted=self.unlisted + len(self.problems[most:]))

    def within(self, characters: int) -> str:
        """Return as many problems as fit into so many characters, and the number of the others."""
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


def shortened(value: object, limit: int = 120) -> str:
    """Return the value as Python writes it, cut to `limit` characters."""
    text = repr(value)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"
