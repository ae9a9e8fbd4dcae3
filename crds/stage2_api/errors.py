"""Problems of a configuration, and exit codes."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

EXIT_FAILURE: Final = 1
EXIT_USAGE: Final = 2
EXIT_CONFIG: Final = 64
EXIT_DATA: Final = 65
EXIT_UNAVAILABLE: Final = 69
EXIT_RETRYABLE: Final = 75

EXIT_CODES: Final = {
    0: "done, or the answer is yes",
    EXIT_FAILURE: "failed so that a retry would fail too, or the answer is no: a job does not train, or has failed",
    EXIT_USAGE: "an argument is missing or unknown, or not of its type",
    EXIT_CONFIG: "a person must change something: a file, an option, the name of a job, or the rights in a cluster",
    EXIT_DATA: "an import kept no object",
    EXIT_UNAVAILABLE: "what it needs is not there: a package, a cluster, or a restart of the learner that is left",
    EXIT_RETRYABLE: "another try may succeed: a server was lost, a disk was full, a wait took too long",
}
"""What each exit code of a command means: 64 to 75 are those of sysexits.h. 64 and 69 are never retried."""


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
    """Return the repr of a value with `null` and `true` as YAML and JSON write them, cut to `limit` characters.

    >>> shortened({"a": [None, "None", True]})
    "{'a': [null, 'None', true]}"
    """
    text = _written(value, limit)
    return text if len(text) <= limit else f"{text[: limit - 1]}…"


def _written(value: object, deepest: int) -> str:
    """Return the text of `shortened`; what lies deeper would be cut off."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if type(value) not in (list, tuple, dict):
        return repr(value)
    if deepest == 0:
        return "…"
    if isinstance(value, dict):
        inner = (f"{_written(key, deepest - 1)}: {_written(one, deepest - 1)}" for key, one in value.items())
        return f"{{{', '.join(inner)}}}"
    assert isinstance(value, list | tuple)
    inner = (_written(one, deepest - 1) for one in value)
    left, right = "[]" if isinstance(value, list) else "()"
    return f"{left}{', '.join(inner)}{',' if isinstance(value, tuple) and len(value) == 1 else ''}{right}"


def kind_of(value: object) -> str:
    """Return what kind of value a JSON or YAML document has.

    >>> kind_of(None), kind_of([1]), kind_of(True)
    ('null', 'a list', 'a truth value')
    """
    kinds = {"NoneType": "null", "dict": "a mapping", "str": "a text", "bool": "a truth value"}
    kinds |= {"int": "a number", "float": "a number"}
    name = type(value).__name__
    return kinds.get(name, f"a {name}")


def counted(count: int, noun: str) -> str:
    """Return a number with its noun.

    >>> counted(1, "step"), counted(2000, "step")
    ('1 step', '2,000 steps')
    """
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
