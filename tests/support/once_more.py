"""Run a tier of tests with pytest; tests that fail run once more, alone, and those that pass then are flaky.

    python -m tests.support.once_more TIER PYTEST-ARGUMENT...          run a tier, or exit with pytest's code
    python -m tests.support.once_more --later TIER PYTEST-ARGUMENT...  leave the tests that failed to --again
    python -m tests.support.once_more --again                          run them, when no other tier runs any more

The last prints what was flaky in all tiers, and exits with 1 if it is too much. A test of real processes, servers or a
real cluster can fail because the machine was busy. Such a test is a defect, so its name stays in the last lines of a
run until somebody mends it.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

MOST_FLAKY = 2
OUTPUT = Path("out/tests")
TESTS_FAILED = 1  # pytest's exit code; others mean that it could not run them


def run(tier: str, arguments: Sequence[str], output: Path = OUTPUT, *, later: bool = False) -> int:
    """Run a tier; run again what failed, unless it is more than may be flaky. Return pytest's exit code.

    output: the folder of pytest's caches and of the names of flaky tests. later: `again` runs what failed.
    """
    output.mkdir(parents=True, exist_ok=True)
    for record in (output / f"{tier}.flaky", output / f"{tier}.failed"):
        record.unlink(missing_ok=True)
    code = _pytest(tier, arguments, output, "--cache-clear")
    failed = _failed(output / tier) if code == TESTS_FAILED else []
    if not 0 < len(failed) <= MOST_FLAKY:
        return code
    print(f"{tier}: {len(failed)} failed and will run once more, alone:", *failed, sep="\n  ", flush=True)
    if later:
        (output / f"{tier}.failed").write_text(json.dumps(arguments))
        return 0
    return _alone(tier, arguments, output)


def again(output: Path = OUTPUT) -> int:
    """Run what failed in tiers that left it for later; return the exit code of one that failed again, else report's."""
    records = sorted(output.glob("*.failed"))
    codes = [_alone(record.stem, json.loads(record.read_text()), output) for record in records]
    return report(output) or max(codes, default=0)


def report(output: Path = OUTPUT) -> int:
    """Print the flaky tests of all tiers; return 1 where they are more than a run may have."""
    names = [name for record in sorted(output.glob("*.flaky")) for name in record.read_text().splitlines()]
    for name in names:
        print(f"flaky: {name} failed, and passed when it ran alone")
    if len(names) > MOST_FLAKY:
        print(f"{len(names)} tests are flaky; at most {MOST_FLAKY} may be: mend them")
    return int(len(names) > MOST_FLAKY)


def _alone(tier: str, arguments: Sequence[str], output: Path) -> int:
    failed = _failed(output / tier)
    code = _pytest(tier, arguments, output, "--last-failed", "--last-failed-no-failures=none", "-n", "0")
    if code == 0:
        (output / f"{tier}.flaky").write_text("".join(f"{name}\n" for name in failed))
        print(f"{tier}: passed alone, so flaky:", *failed, sep="\n  ", flush=True)
    return code


def _pytest(tier: str, arguments: Sequence[str], output: Path, *more: str) -> int:
    cache = f"cache_dir={(output / tier).absolute()}"
    return subprocess.call([sys.executable, "-m", "pytest", "-o", cache, *arguments, *more])


def _failed(cache: Path) -> list[str]:
    path = cache / "v/cache/lastfailed"
    return sorted(json.loads(path.read_text())) if path.exists() else []


if __name__ == "__main__":
    match sys.argv[1:]:
        case ["--again"]:
            sys.exit(again())
        case ["--later", name, first, *rest]:
            sys.exit(run(name, [first, *rest], later=True))
        case [name, first, *rest] if not name.startswith("-"):
            sys.exit(run(name, [first, *rest]))
    sys.exit(__doc__)
