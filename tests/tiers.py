"""Run tiers of tests: `python -m tests.tiers unit,alone integration,cluster`.

Stages run one after the other, the tiers of a stage side by side: one computes while the other waits. Prerequisites are
checked before anything runs. Each tier's output goes to out/tests and is printed when its stage ends.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from tests import prerequisites

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out" / "tests"
TWO_PROCESSES = ("-n", "2", "--dist", "loadfile")  # by file: the servers of a file start once
ARGUMENTS = {
    "unit": (*TWO_PROCESSES, "tests/unit"),
    "integration": (*TWO_PROCESSES, "tests/integration"),
    "cluster": ("-n", "3", "--dist", "loadfile", "-m", "not alone", "tests/cluster"),  # it mostly waits
    "alone": ("-m", "alone", "tests/cluster"),
    "jobs": (*TWO_PROCESSES, "tests/jobs"),
}
PROGRESS_INTERVAL_S = 60.0
OUTCOMES = re.compile(r"^[.sFExX]+(?= *\[|$)", re.MULTILINE)  # pytest -q prints one letter a test


def log_file(tier: str) -> Path:
    """Return where a tier's output goes."""
    return OUT / f"{tier}.log"


def start(tier: str) -> subprocess.Popen[bytes]:
    """Start pytest for one tier, its output going to the tier's log file."""
    # Tests call `python` and `stage2` as in an active virtual environment. One core each: more threads only wait.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    environment = {"OMP_NUM_THREADS": "1", **os.environ, "PATH": path}
    command = [sys.executable, "-m", "pytest", "-q", "--durations=10", *ARGUMENTS[tier]]
    with log_file(tier).open("wb") as output:
        return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)


def progress(tier: str) -> str:
    """Return how many tests of a tier have ended, and how many failed."""
    outcomes = "".join(OUTCOMES.findall(log_file(tier).read_text(errors="replace")))
    failed = sum(letter in "FEX" for letter in outcomes)
    return f"{tier} {len(outcomes)} tests" + (f", {failed} failed" if failed else "")


def wait_for(processes: Mapping[str, subprocess.Popen[bytes]]) -> None:
    """Wait until all tiers have ended; print their progress every minute."""
    begin = last_report = time.monotonic()
    while any(process.poll() is None for process in processes.values()):
        time.sleep(0.2)
        if (now := time.monotonic()) - last_report > PROGRESS_INTERVAL_S:
            last_report = now
            print(f"{now - begin:.0f} s: " + ", ".join(map(progress, processes)), flush=True)


def run_stage(tiers: Sequence[str]) -> dict[str, int]:
    """Run tiers side by side, print their output, and return their exit codes."""
    processes = {tier: start(tier) for tier in tiers}
    try:
        wait_for(processes)
    finally:
        for process in processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGINT)  # pytest then tears its fixtures down
                process.wait()
    for tier in tiers:
        print(f"\n{'=' * 20} {tier} {'=' * 20}\n{log_file(tier).read_text(errors='replace')}", flush=True)
    return {tier: process.returncode for tier, process in processes.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages until one fails, print each tier's closing line, and return the worst exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", help="tiers; a comma joins those that run side by side")
    stages = [stage.split(",") for stage in parser.parse_args(arguments).stages]
    requested = {tier for stage in stages for tier in stage}
    if unknown := requested - set(ARGUMENTS):
        parser.error(f"no such tier: {', '.join(sorted(unknown))}; there are {', '.join(ARGUMENTS)}")
    if missing := prerequisites.missing(requested):
        print("\n".join(missing), file=sys.stderr)
        return prerequisites.EXIT_MISSING
    OUT.mkdir(parents=True, exist_ok=True)
    exit_codes: dict[str, int] = {}
    for stage in stages:
        exit_codes |= run_stage(stage)
        if any(exit_codes.values()):
            break
    for tier in exit_codes:
        print(f"{tier}:\n{log_file(tier).read_text(errors='replace').rstrip().rpartition(chr(10))[2]}")
    return max(map(abs, exit_codes.values()))


if __name__ == "__main__":
    sys.exit(main())
