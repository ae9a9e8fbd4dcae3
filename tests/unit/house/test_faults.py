"""Each fault of docs/testing.md has a test that brings it about and looks for the words which the page has."""

import ast
import re
from pathlib import Path

import pytest

from tests.unit.house.test_runbook import SPOKEN

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "testing.md").read_text(encoding="utf-8")
TABLE = PAGE.partition("\n## Faults\n")[2].partition("\n## ")[0]
ROW = re.compile(r"^\| ([^|]+) \| (`[^`]+`|nothing) \| ([^|]+) \| ([^|]+) \| `([^`]+)`: `(test_\w+)` \|$", re.MULTILINE)
ROWS = ROW.findall(TABLE)
# of the operating system, of what a test chooses, or put together from parts
NOT_WHOLE_IN_THE_CODE = {"No such file", "training.seed", "GET /weight_info answered"}


def test_every_line_of_the_table_is_read_and_there_are_twenty() -> None:
    assert len(ROWS) == len(re.findall(r"^\| ", TABLE, re.MULTILINE)) - 2  # the head
    assert len(ROWS) >= 20
    assert len({name for *_, name in ROWS}) == len(ROWS)


@pytest.mark.parametrize(("said", "file", "name"), [(said, file, name) for _, said, _, _, file, name in ROWS])
def test_the_fault_is_brought_about_and_its_words_are_looked_for(said: str, file: str, name: str) -> None:
    source = (ROOT / file).read_text(encoding="utf-8")
    functions = {one.name for one in ast.walk(ast.parse(source)) if isinstance(one, ast.FunctionDef)}
    assert name in functions
    if said != "nothing":
        words = said.strip("`")
        assert words in re.sub(r"\\(.)", r"\1", source)
        assert words in NOT_WHOLE_IN_THE_CODE or words in SPOKEN
