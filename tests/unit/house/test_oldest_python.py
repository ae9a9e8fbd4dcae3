"""The code keeps away from what the oldest Python of pyproject.toml has wrong: Debian 12 ships 3.11.2."""

import re
import re._constants as opcodes  # type: ignore[import-untyped]
import re._parser as parser  # type: ignore[import-untyped]
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[3]
PACKAGES = "crds", "controller", "trainer", "report", "cli", "hack", "examples", "bench"
WRONG = opcodes.POSSESSIVE_REPEAT, opcodes.ATOMIC_GROUP
"""Python 3.11.2 matches these wrongly around alternatives, and 3.11.7 does not (CPython's issue 106052)."""
LITERAL = re.compile(r"""([a-z]*)("{3}|'{3}|"|')(.*)\2""", re.DOTALL | re.IGNORECASE)


def wrong_parts(pattern: str) -> bool:
    """Whether a regular expression has a possessive quantifier or an atomic group; text that is none has not."""
    try:
        return any(part in WRONG for part in parts(parser.parse(pattern)))
    except (re.error, OverflowError):
        return False


def parts(parsed: Any) -> Iterator[Any]:
    if isinstance(parsed, parser.SubPattern | tuple | list):
        for part in parsed:
            yield part
            yield from parts(part)


def raw_strings(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and content of each raw string and f-string of a file, in which regular expressions are written."""
    with tokenize.open(path) as file:
        for token in tokenize.generate_tokens(file.readline):
            literal = LITERAL.fullmatch(token.string) if token.type == tokenize.STRING else None
            if literal and set("rf") & set(literal[1].lower()):
                yield token.start[0], literal[3]
            elif token.type == getattr(tokenize, "FSTRING_MIDDLE", None):  # of an f-string, since Python 3.12
                yield token.start[0], token.string


@pytest.mark.parametrize("pattern", ["a*+", "(?>a|b)", '"((?:[^"]++|x)*+)"', "x(?:a?+)"])
def test_possessive_quantifier_and_atomic_group_are_found(pattern: str) -> None:
    assert wrong_parts(pattern)


@pytest.mark.parametrize("pattern", ["a+", "a*?", r"\++", "[+]+", "(a|b)*", "a(?!b)", "no ( pattern"])
def test_other_patterns_are_allowed(pattern: str) -> None:
    assert not wrong_parts(pattern)


def test_raw_strings_of_each_form_are_read(tmp_path: Path) -> None:
    file = tmp_path / "file.py"
    file.write_text("""a = r'"x*+'\nb = R"y'"\nc = 'plain'\nd = r\'\'\'z\'\'\'\ne = f'[{a}]*+'\n""")
    *raw, (line, written) = [one for one in raw_strings(file) if one[1] != "["]  # Python 3.12 splits an f-string
    assert raw == [(1, '"x*+'), (2, "y'"), (4, "z")]
    assert line == 5
    assert wrong_parts(written)


def test_regular_expressions_avoid_syntax_that_early_python_3_11_mismatches() -> None:
    files = [file for package in PACKAGES for file in sorted((ROOT / package).rglob("*.py"))]
    assert len(files) > 300
    found = [
        f"{file.relative_to(ROOT)}:{line}" for file in files for line, text in raw_strings(file) if wrong_parts(text)
    ]
    assert found == []
