"""The keys that docs/log.md explains."""

import re
from pathlib import Path

PAGE = Path(__file__).parents[3] / "docs" / "log.md"


def explained(*titles: str) -> set[str]:
    """Return the keys in the sections whose titles begin so."""
    sections = re.split(r"^## ", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    found = [one for one in sections if one.startswith(titles)]
    assert len(found) == len(titles)
    return {key for one in found for key in re.findall(r"^\| `([^`]+)` \|", one, re.MULTILINE)}
