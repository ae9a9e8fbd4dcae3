"""What code and documents cite of the semantics page is there: "semantics, section 4.2" names one of its headings."""

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[3]
PAGE = ROOT / "docs" / "semantics.md"
SUFFIXES = (".md", ".py", ".toml", ".yaml", ".yml")
NUMBER = r"\d+(?:\.\d+)?"
ONE = rf"{NUMBER}(?: \([^)]*\))?"
CITATION = re.compile(rf"semantics(?:\.md)?,? sections? ({ONE}(?:(?:, | and |, and | to |-){ONE})*)", re.IGNORECASE)


def headings() -> set[str]:
    """Return the numbers of the page's sections."""
    return set(re.findall(rf"^#+ ({NUMBER})\.? ", PAGE.read_text(encoding="utf-8"), re.MULTILINE))


def cited(text: str) -> Iterator[str]:
    """Return the section numbers that a text cites, also where a line ends within the citation."""
    for citation in CITATION.findall(re.sub(r"\s*\n[\s#]*", " ", text)):
        yield from re.findall(rf"(?<![\d.]){NUMBER}", re.sub(r"\([^)]*\)", "", citation))


def citations() -> dict[str, set[str]]:
    """Return the cited sections of every file that cites any."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.splitlines() if name.endswith(SUFFIXES)]
    texts = {path: path.read_text(encoding="utf-8") for path in paths if path.is_file() and path != Path(__file__)}
    found = {str(path.relative_to(ROOT)): set(cited(text)) for path, text in texts.items()}
    return {name: sections for name, sections in found.items() if sections}


def test_a_citation_is_read_across_line_ends_lists_and_remarks() -> None:
    text = "Source: semantics sections 3 (keys, defaults), 7-8 (rows) and\n15.4. See semantics,\n    # section 9."
    assert list(cited(text)) == ["3", "7", "8", "15.4", "9"]


def test_every_cited_section_is_a_heading_of_the_page() -> None:
    found = citations()
    assert len(found) > 30  # the code that does what the page says
    known = headings()
    assert {name: sections - known for name, sections in found.items() if sections - known} == {}


def test_nothing_cites_the_page_in_another_form() -> None:
    loose = re.compile(r"\(semantics(?!(?:\.md)?,? sections? \d)[^)]*\)|semantics:", re.IGNORECASE)
    listed = subprocess.run(["git", "ls-files", "*.py"], cwd=ROOT, capture_output=True, text=True, check=True)
    paths = [ROOT / name for name in listed.stdout.splitlines() if "tests/" not in name]
    texts = {path.name: path.read_text(encoding="utf-8") for path in paths if path.is_file()}
    assert {name: found for name, text in texts.items() if (found := loose.findall(text))} == {}
