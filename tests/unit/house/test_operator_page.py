"""The operator's page tells every reason for which a job has no place, and every one for which it ends."""

import re
from pathlib import Path

import pytest

from stage2_controller import reasons

ROOT = Path(__file__).parents[3]
PAGE = (ROOT / "docs" / "operator.md").read_text("utf-8")
SECTIONS = re.split(r"^# ", Path(reasons.__file__).read_text("utf-8"), flags=re.MULTILINE)
ALSO_OF_PLACED = {reasons.OLD_LEARNER_ENDING, reasons.UNSCHEDULABLE, reasons.POD_REFUSED, reasons.QUEUED_TWICE}


def values(section: str) -> set[str]:
    """The reasons of the section of reasons.py that begins so, without the conditions themselves."""
    (text,) = [one for one in SECTIONS if one.startswith(section)]
    return set(re.findall(r'Final = "(\w+)"', text))


def named(heading: str) -> set[str]:
    """The words in backquotes below a heading of the page."""
    return set(re.findall(r"`(\w+)`", PAGE.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]))


@pytest.mark.parametrize(
    ("heading", "told"),
    [
        ("Where a job runs", values("Condition Placed") - {reasons.PLACED, reasons.NODE_CHOSEN} | ALSO_OF_PLACED),
        ("What ends a job", values("Conditions Succeeded and Failed") | {reasons.INVALID_SPEC}),
        ("Queues: Kueue", values("Condition QuotaReserved") - {reasons.QUOTA_RESERVED, reasons.ADMITTED}),
    ],
)
def test_the_page_names_every_reason(heading: str, told: set[str]) -> None:
    assert len(told) > 5
    assert told - named(heading) == set()
