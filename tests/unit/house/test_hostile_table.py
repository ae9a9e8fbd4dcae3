"""The table of hostile cases in the threat model names fronts and tests that are, and no fewer cases than before."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from tests import hostile_counts
from tests.hostile_counts import DOCS, FRONTS, ROOT, Count, Front, counted, faults, table

ROWS = [line.strip("| ").split(" | ") for line in hostile_counts.written(DOCS.read_text("utf-8")).splitlines()[2:]]
FIRST = FRONTS[0]


def test_the_table_has_every_front_with_its_files() -> None:
    assert [(name, where) for name, _, _, where in ROWS] == [
        (front.name, ", ".join(f"`{file}`" for file in front.files)) for front in FRONTS
    ]


@pytest.mark.parametrize(("front", "row"), list(zip(FRONTS, ROWS, strict=True)), ids=[front.name for front in FRONTS])
def test_a_front_held_everything_and_had_no_less_than_before(front: Front, row: list[str]) -> None:
    cases, held = (int(number.replace(",", "")) for number in row[1:3])
    assert cases == held >= front.least


@pytest.mark.parametrize("front", FRONTS, ids=[front.name for front in FRONTS])
def test_every_test_of_a_front_exists(front: Front) -> None:
    for test in front.tests:
        file, _, function = test.partition("::")
        assert re.search(
            rf"^(async )?def {function}", (ROOT / "tests" / "unit" / file).read_text("utf-8"), re.MULTILINE
        )


def report(name: str, inside: str = "") -> ElementTree.Element:
    """A report of one test of the first front."""
    file, _, function = FIRST.tests[0].partition("::")
    case = f'<testcase file="tests/unit/{file}" name="{function}{name}" time="0.5">{inside}</testcase>'
    return ElementTree.fromstring(f"<testsuites><testsuite>{case}</testsuite></testsuites>")  # our own


@pytest.mark.parametrize(
    ("inside", "expected"),
    [
        ("", (1, 1, 0)),
        ('<properties><property name="cases" value="70"/></properties>', (70, 70, 0)),
        ("<failure>x</failure>", (1, 0, 0)),
        ("<error>x</error>", (1, 0, 0)),
        ("<skipped/>", (1, 0, 0)),
        ("<system-err>Traceback (most recent call last):</system-err>", (1, 1, 1)),
    ],
)
def test_what_a_report_says_is_counted(inside: str, expected: tuple[int, int, int]) -> None:
    found = counted(report("[x]", inside))[FIRST.name]
    assert (found.cases, found.held, found.tracebacks) == expected
    told = faults({FIRST.name: found})
    assert any("did not hold" in one for one in told) is (found.held < found.cases)
    assert any("traceback" in one for one in told) is (found.tracebacks > 0)
    assert any("of at least" in one for one in told)


def test_a_table_that_is_written_is_read_again() -> None:
    made = table({front.name: Count(cases=7, held=7) for front in FRONTS})
    text = f"before\n{hostile_counts.BEGIN}old\n{hostile_counts.END}after\n"
    found = hostile_counts.with_table(text, made)
    assert hostile_counts.written(found) == made
    assert found.startswith("before\n")
    assert found.endswith("after\n")
