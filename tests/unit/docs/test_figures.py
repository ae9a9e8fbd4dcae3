"""Figures of the pages are those of the tables that they cite.

The rule: a paragraph, a list item or a table row that cites a file of `bench/results` (or `docs/results.md`) has no
number that is in none of the files that it cites. A number is in a file if some number there, as it is, in percent, or
a thousand times larger or smaller (ms and s), rounds to the digits that are written. A table belongs to the paragraph
below it, if that cites a file of `bench/results`. Code, links, dates, versions and names (`job-3v1`, decision 13) are
no figures. What a page computes from a table goes into a paragraph of its own.
"""

import json
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "bench" / "results"
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
CITED = re.compile(r"bench/results/([\w-]+\.(?:md|json))|\((?:docs/)?(results\.md)")
NUMBER = re.compile(r"(?<![\w.,/^-])[+-]?(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?(?![\w/^-]|[.,]\d)")
NO_FIGURES = re.compile(r"`[^`]*`|\]\([^)]*\)|[Dd]ecision \d+|\d{4}-\d\d-\d\d", re.MULTILINE)
FENCE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
BLOCK = re.compile(r"\n\s*\n|\n(?=\s*- )")
SCALES = (1, 100, 1000, 0.001)


def claims(text: str) -> Iterator[tuple[str, set[Path]]]:
    """Yield each block of a page that cites files, with the table above it, and these files."""
    table = ""
    for block in BLOCK.split(FENCE.sub("", text)):
        if block.lstrip().startswith("|"):
            table = block
            yield from ((row, cited(row)) for row in block.splitlines() if cited(row))
        else:
            files = cited(block)
            measured = any(file.parent == RESULTS for file in files)
            yield f"{table}\n{block}" if measured else block, files
            table = ""


def cited(block: str) -> set[Path]:
    """Return the files with figures that a block cites."""
    return {RESULTS / name if name else ROOT / "docs" / page for name, page in CITED.findall(block)}


@cache
def numbers(file: Path) -> tuple[float, ...]:
    """Return every number of a file with figures."""
    text = file.read_text(encoding="utf-8")
    if file.suffix == ".json":
        return tuple(leaves(json.loads(text)))
    return tuple(float(found.replace(",", "")) for found in re.findall(r"-?\d[\d,]*(?:\.\d+)?", text))


def leaves(value: object) -> Iterator[float]:
    """Yield the numbers of a JSON document."""
    if isinstance(value, dict | list):
        for one in value.values() if isinstance(value, dict) else value:
            yield from leaves(one)
    elif isinstance(value, int | float):
        yield value


def stands_in(written: str, file: Path) -> bool:
    """Return whether a number of the file rounds to what is written."""
    digits = written.replace(",", "")
    half = 0.5000001 * 10.0 ** -len(digits.partition(".")[2])
    return any(abs(one * scale - float(digits)) <= half for one in numbers(file) for scale in SCALES)


def unfounded(text: str) -> list[str]:
    """Return the numbers of a page that none of the files cited beside them has."""
    return [
        written
        for block, files in claims(text)
        if files
        for written in NUMBER.findall(NO_FIGURES.sub(" ", block))
        if not any(stands_in(written, file) for file in files)
    ]


def test_figures_in_docs_come_from_cited_tables():
    missing = {str(page.relative_to(ROOT)): unfounded(page.read_text(encoding="utf-8")) for page in PAGES}
    assert {page: found for page, found in missing.items() if found} == {}


def test_figure_missing_from_cited_table_is_found():
    table = "| rank | ns |\n| --- | --- |\n| 16 | 1.51 |\n| 16 | 1.41 |"
    page = f"{table}\n\nSee `bench/results/merge.md`: 8.42 and 8.43.\n\n- 7.77"
    assert unfounded(page) == ["1.41", "8.43"]
