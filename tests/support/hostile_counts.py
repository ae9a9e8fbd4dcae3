"""`python -m tests.support.hostile_counts`: run the tests with hostile input of each interface, and count their cases.

docs/threat-model.md lists the interfaces and their tests. The exit status is 1 where a case fails.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).parents[2]
ROW = re.compile(r"^\| (.+?) \| ((?:`tests/unit/\S+\.py`(?:, )?)+) \|$", re.MULTILINE)


def interfaces() -> dict[str, list[str]]:
    """Return the test files of each interface in the threat model."""
    section = (ROOT / "docs" / "threat-model.md").read_text(encoding="utf-8").partition("## Tests with hostile input")
    table = section[2].partition("\n## ")[0]
    return {name: re.findall(r"tests/\S+\.py", files) for name, files in ROW.findall(table)}


def count(files: list[str]) -> tuple[int, int]:
    """Run test files; return the number of cases, and of those that failed or did not run."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder, "report.xml")
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={report}", *files]
        subprocess.run(command, cwd=ROOT, stdout=sys.stderr, check=False)
        suite = ElementTree.parse(report).getroot()[0]
    return int(suite.attrib["tests"]), sum(int(suite.attrib[kind]) for kind in ("failures", "errors", "skipped"))


def main() -> int:
    """Print a line for each interface; return the exit status."""
    everything = {name: count(files) for name, files in interfaces().items()}
    for name, (cases, lost) in everything.items():
        print(f"{name}: {cases - lost:,} of {cases:,} held")
    return int(not everything or any(lost for _, lost in everything.values()))


if __name__ == "__main__":
    sys.exit(main())
