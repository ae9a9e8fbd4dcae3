"""Run a tier of tests with pytest; tests that fail run once more, alone, and those that pass then are flaky.

    python -m tests.support.once_more TIER PYTEST-ARGUMENT... run a tier, or exit with pytest's code
    python -m tests.support.once_more --flaky                 print what was flaky in all tiers, exit with 1 if too much

A test of real processes, servers or a real cluster can fail because the machine was busy. Such a test is a defect, so
its name stays in the last lines of a run until somebody mends it.
"""

from __future__ import annotations

import fcntl
import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

MOST_FLAKY = 2
OUTPUT = Path("out/tests")
TESTS_FAILED = 1  # pytest's exit code; others mean that it could not run them


def run(tier: str, arguments: Sequence[str], output: Path = OUTPUT) -> int:
    """Run a tier; run again what failed, unless it is more than may be flaky. Return pytest's exit code.

    output: the folder of pytest's caches and of the names of flaky tests.
    """
    output.mkdir(parents=True, exist_ok=True)
    cache = output / tier
    record = output / f"{tier}.flaky"
    record.unlink(missing_ok=True)
    pytest = [sys.executable, "-m", "pytest", "-o", f"cache_dir={cache.absolute()}", *arguments]
    with _turn(output, fcntl.LOCK_SH):
        code = subprocess.call([*pytest, "--cache-clear"])
    failed = _failed(cache) if code == TESTS_FAILED else []
    if not 0 < len(failed) <= MOST_FLAKY:
        return code
    print(f"{tier}: {len(failed)} failed and will run once more, alone:", *failed, sep="\n  ", flush=True)
    with _turn(output, fcntl.LOCK_EX):
        code = subprocess.call([*pytest, "--last-failed", "--last-failed-no-failures=none", "-n", "0"])
    if code == 0:
        record.write_text("".join(f"{name}\n" for name in failed))
        print(f"{tier}: passed alone, so flaky:", *failed, sep="\n  ", flush=True)
    return code


def report(output: Path = OUTPUT) -> int:
    """Print the flaky tests of all tiers; return 1 where they are more than a run may have."""
    names = [name for record in sorted(output.glob("*.flaky")) for name in record.read_text().splitlines()]
    for name in names:
        print(f"flaky: {name} failed, and passed when it ran alone")
    if len(names) > MOST_FLAKY:
        print(f"{len(names)} tests are flaky; at most {MOST_FLAKY} may be: mend them")
    return int(len(names) > MOST_FLAKY)


@contextmanager
def _turn(output: Path, kind: int) -> Iterator[None]:
    """Share the machine with other tiers (LOCK_SH), or wait for their end and keep new ones waiting (LOCK_EX)."""
    with (output / "lock").open("w") as lock:
        fcntl.flock(lock, kind)
        yield


def _failed(cache: Path) -> list[str]:
    path = cache / "v/cache/lastfailed"
    return sorted(json.loads(path.read_text())) if path.exists() else []


if __name__ == "__main__":
    if sys.argv[1:] == ["--flaky"]:
        sys.exit(report())
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    sys.exit(run(sys.argv[1], sys.argv[2:]))
