"""Problems of a configuration, as a person is told them, and the exit codes that say so to programs."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

EXIT_FAILURE: Final = 1
"""Exit code of a failure that nobody has foreseen, or that another try would meet again."""

EXIT_CONFIG: Final = 64
"""Exit code of a configuration error (EX_USAGE of sysexits.h): never retried, for it would fail again."""

EXIT_EXHAUSTED: Final = 69
"""Exit code of a learner that was started again in its container as often as it may be (EX_UNAVAILABLE of
sysexits.h)."""

EXIT_RETRYABLE: Final = 75
"""Exit code of a failure that another try may not meet (EX_TEMPFAIL of sysexits.h)."""


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
        """Return it with so many problems, and the others counted."""
        return ConfigError(self.problems[:most], unlisted=self.unlisted + len(self.problems[most:]))

    def told_within(self, characters: int) -> str:
        """Return as many problems as so many characters hold, and how many more there are."""
        kept: list[str] = []
        left = characters
        for problem in self.problems:  # there may be tens of thousands: none is looked at twice
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
