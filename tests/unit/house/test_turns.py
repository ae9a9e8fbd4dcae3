"""Turns by date: every test has its day, and an exhaustive run has them all."""

import re
from collections.abc import Callable
from datetime import date, timedelta
from pathlib import Path

import pytest

from tests.support.turns import TODAY, pytest_collection_modifyitems

ROOT = Path(__file__).parents[3]
FIRST = date(2026, 11, 28)
CASES = """
import pytest

@pytest.mark.in_turns(3)
@pytest.mark.parametrize("case", "abcdefg")
def test_case(case): pass

def test_always(): pass
"""
FILE = """
import pytest

pytestmark = pytest.mark.in_turns(2, first={first})

def test_one(): pass
def test_two(): pass
"""
Names = Callable[..., set[str]]


@pytest.fixture
def names(pytester: pytest.Pytester, monkeypatch: pytest.MonkeyPatch) -> Names:
    """Return the names of the tests of a file that run so many days after the first."""
    pytester.makeini("[pytest]\nmarkers = in_turns\nasyncio_default_fixture_loop_scope = function")
    monkeypatch.delenv("STAGE2_EXHAUSTIVE", raising=False)

    collected: dict[str, list[pytest.Item]] = {}

    def on(file: str, days: int = 0, *arguments: str) -> set[str]:
        monkeypatch.setenv(TODAY, str(FIRST + timedelta(days=days)))
        if file not in collected:
            path = pytester.makepyfile(**{f"test_{len(collected)}": file})
            collected[file] = pytester.inline_genitems(path)[0]
        items = list(collected[file])
        config = items[0].config
        config.args[:] = arguments
        pytest_collection_modifyitems(config, items)
        return {item.name for item in items}

    return on


def test_cases_take_turns_by_day_unless_named_or_exhaustive(names: Names, monkeypatch: pytest.MonkeyPatch) -> None:
    days = [names(CASES, day) for day in range(3)]
    assert all("test_always" in day for day in days)
    assert sorted(name for day in days for name in day if "case" in name) == [
        f"test_case[{case}]" for case in "abcdefg"
    ]
    assert sorted(map(len, days)) == [3, 3, 4]
    for named in ("test_file.py", "folder/test_file.py::test_case"):
        assert all(len(names(CASES, day, named)) == 8 for day in range(3))
    monkeypatch.setenv("STAGE2_EXHAUSTIVE", "1")
    assert len(names(CASES)) == 8


def test_marked_files_run_whole_and_alternate_by_first_day(names: Names) -> None:
    whole = {"test_one", "test_two"}
    days = [[names(FILE.format(first=first), day) for day in range(2)] for first in range(2)]
    assert sorted(days, key=str) == sorted([[whole, set()], [set(), whole]], key=str)


def test_each_test_of_marked_file_takes_its_own_turn_with_apart_option(names: Names) -> None:
    apart = FILE.replace("first={first}", "apart=True")
    assert sorted((names(apart, day) for day in range(2)), key=str) == [{"test_one"}, {"test_two"}]


def test_turns_longer_than_week_are_refused(names: Names) -> None:
    with pytest.raises(pytest.UsageError, match=r"in_turns\(8\) must have from 1 to 7 days"):
        names("import pytest\n@pytest.mark.in_turns(8)\ndef test_rare(): pass\n")


def test_docs_list_files_with_turns_and_their_days() -> None:
    marked = {
        (str(file.relative_to(ROOT / "tests")), days)
        for file in (ROOT / "tests").rglob("test_*.py")
        if file.name != Path(__file__).name
        for days in re.findall(r"mark\.in_turns\((\d)", file.read_text())
    }
    rows = re.findall(r"^\| `(\S+\.py)` \| .+ \| (\d) \|$", (ROOT / "docs/testing.md").read_text(), re.MULTILINE)
    assert sorted(rows) == sorted(marked)
