"""Run tiers of tests, and say where the time went: `python -m tests.tiers unit,alone integration,cluster`.

Stages run one after the other. Tiers that a comma joins run side by side: one computes while the other waits. What a
tier needs is looked for before anything runs. Each run writes its output, its JUnit report and its times to out/tests;
a table and the ten slowest tests of each end it. `--write` puts the table into docs/testing.md.
"""

from __future__ import annotations

import argparse
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

from tests import prerequisites

ROOT = Path(__file__).parents[1]
OUT = ROOT / "out" / "tests"
PAGE = ROOT / "docs" / "testing.md"
BEGIN, END = "<!-- times: begin -->", "<!-- times: end -->"
TWICE = ("-n", "2", "--dist", "loadfile")  # whole files: what a file shares is started once
ARGUMENTS = {
    "unit": (*TWICE, "tests/unit"),
    "integration": (*TWICE, "tests/integration"),
    "cluster": ("-n", "3", "--dist", "loadfile", "-m", "not alone", "tests/cluster"),  # most of it is waiting
    "alone": ("-m", "alone", "tests/cluster"),
    "jobs": (*TWICE, "tests/jobs"),
}
SLOWEST = 10
SIGN_OF_LIFE_S = 60.0
OUTCOMES = re.compile(r"^[.sFExX]+(?= *\[|$)", re.MULTILINE)  # what pytest -q prints, one letter a test


@dataclass
class Tier:
    """One run of pytest; times in seconds, CPU time with that of all processes that it waited for."""

    name: str
    process: subprocess.Popen[bytes] | None = None
    exit_code: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    counts: dict[str, int] = field(default_factory=dict)
    slowest: list[tuple[float, str]] = field(default_factory=list)

    @property
    def log(self) -> Path:
        """What pytest printed."""
        return OUT / f"{self.name}.log"

    @property
    def report(self) -> Path:
        """pytest's JUnit report."""
        return OUT / f"{self.name}.xml"

    def run(self) -> None:
        """Run the tier to its end, and read its report."""
        command = [sys.executable, "-m", "pytest", "-q", f"--junitxml={self.report}", *ARGUMENTS[self.name]]
        # Tests call `python` and `stage2` as a person does whose virtual environment is active.
        environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
        # Each process of pytest computes on a core of its own: threads of several would wait for one another.
        environment.setdefault("OMP_NUM_THREADS", "1")
        self.report.unlink(missing_ok=True)
        start = time.monotonic()
        with self.log.open("wb") as output:
            self.process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=output, stderr=subprocess.STDOUT)
        _, status, usage = os.wait4(self.process.pid, 0)
        self.process.returncode = self.exit_code = os.waitstatus_to_exitcode(status)
        self.wall_s, self.cpu_s = time.monotonic() - start, usage.ru_utime + usage.ru_stime
        if self.report.exists():
            self._read()

    def progress(self) -> str:
        """Return how far the tier has come."""
        printed = self.log.read_text(errors="replace") if self.log.exists() else ""
        outcomes = "".join(OUTCOMES.findall(printed))
        broken = len(outcomes) - outcomes.count(".") - outcomes.count("s")
        return f"{self.name} {len(outcomes)} tests" + (f", {broken} failed" if broken else "")

    def _read(self) -> None:
        suite = ElementTree.parse(self.report).getroot().find("testsuite")
        assert suite is not None
        counts = {name: int(suite.get(name, "0")) for name in ("tests", "failures", "errors", "skipped")}
        self.counts = counts | {"passed": counts["tests"] - sum(counts[n] for n in ("failures", "errors", "skipped"))}
        timed = [
            # xdist writes a test's group behind its name
            (float(case.get("time", "0")), f"{case.get('classname', '')}::{case.get('name', '').partition('@')[0]}")
            for case in suite.iter("testcase")
        ]
        self.slowest = sorted(timed, reverse=True)[:SLOWEST]


def run_stage(names: Sequence[str]) -> list[Tier]:
    """Run tiers side by side to their ends; print what each said, and every minute how far they are."""
    tiers = [Tier(name) for name in names]
    threads = [threading.Thread(target=tier.run, name=tier.name, daemon=True) for tier in tiers]
    for thread in threads:
        thread.start()
    start, told = time.monotonic(), time.monotonic()
    try:
        while any(thread.is_alive() for thread in threads):
            time.sleep(0.2)
            if time.monotonic() - told > SIGN_OF_LIFE_S:
                told = time.monotonic()
                print(f"{told - start:.0f} s: " + ", ".join(tier.progress() for tier in tiers), flush=True)
    finally:
        for tier, thread in zip(tiers, threads, strict=True):
            if thread.is_alive() and tier.process is not None:
                os.kill(tier.process.pid, signal.SIGINT)  # pytest then takes down what its fixtures brought up
                thread.join()
    for tier in tiers:
        print(f"\n{'=' * 20} {tier.name} {'=' * 20}\n{tier.log.read_text(errors='replace')}", flush=True)
    return tiers


def table(tiers: Sequence[Tier]) -> str:
    """Return the times of the tiers as Markdown."""
    lines = ["| tier | passed | failed | skipped | wall | CPU |", "| --- | ---: | ---: | ---: | ---: | ---: |"]
    for tier in tiers:
        failed = tier.counts.get("failures", 0) + tier.counts.get("errors", 0)
        counts = f"{tier.counts.get('passed', 0)} | {failed} | {tier.counts.get('skipped', 0)}"
        lines.append(f"| {tier.name} | {counts} | {_clock(tier.wall_s)} | {_clock(tier.cpu_s)} |")
    for tier in tiers:
        lines += ["", f"The slowest of {tier.name}:", ""]
        lines += [f"- {seconds:.0f} s: `{name}`" for seconds, name in tier.slowest]
    return "\n".join(lines)


def _clock(seconds: float) -> str:
    return f"{int(seconds) // 60}:{int(seconds) % 60:02d}"


def write_page(text: str) -> None:
    """Replace the table of docs/testing.md."""
    page = PAGE.read_text(encoding="utf-8")
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the stages until one fails; return the exit code of the worst tier."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="+", help="tiers, those of a stage joined by commas")
    parser.add_argument("--write", action="store_true", help="put the table into docs/testing.md")
    options = parser.parse_args(arguments)
    stages = [stage.split(",") for stage in options.stages]
    asked = {tier for stage in stages for tier in stage}
    if unknown := asked - set(ARGUMENTS):
        parser.error(f"no such tier: {', '.join(sorted(unknown))}; there are {', '.join(ARGUMENTS)}")
    if missing := prerequisites.missing(asked):
        print("\n".join(missing), file=sys.stderr)
        return prerequisites.EXIT_MISSING
    OUT.mkdir(parents=True, exist_ok=True)
    done: list[Tier] = []
    for stage in stages:
        done += run_stage(stage)
        if any(tier.exit_code for tier in done):
            break
    found = table(done)
    print(f"\n{found}", flush=True)
    if options.write:
        write_page(found)
    return max(abs(tier.exit_code) for tier in done)


if __name__ == "__main__":
    sys.exit(main())
