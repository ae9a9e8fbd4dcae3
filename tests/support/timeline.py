"""Measure where the processors of a whole run of tests go: a table of tiers, and a picture of busy cores over time.

    python -m tests.support.timeline OUTPUT COMMAND...  run a command, write OUTPUT.json, OUTPUT.svg,
                                                        OUTPUT.costs.jsonl (costs.py), and print the table
    python -m tests.support.timeline --draw OUTPUT      draw OUTPUT.svg again from OUTPUT.json

Each second one sample: the busy share of all cores, without what computes at a nice value above 0 beside it, and the
CPU seconds of each tier that runs, which are those of all processes below the process that runs the tier, dead ones
included. A tier begins and ends with that process.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from tests.support import costs

TIERS = {
    "unit": r"once_more (?:--later )?unit|pytest .*tests/unit",
    "integration": r"once_more (?:--later )?integration|pytest .*tests/integration",
    "alone": r"once_more (?:--later )?alone",
    "shared": r"once_more (?:--later )?shared",
    "jobs": r"once_more (?:--later )?jobs",
    "mutants": r"-m tests\.support\.mutants",
    "lint": r"\bmypy\b|ruff|lint-imports|vulture|actionlint|generate\.py",
}


@dataclass
class Tier:
    """began_s, ended_s: since the command began. cpu_s: processor seconds of all its processes."""

    began_s: float
    ended_s: float
    cpu_s: float = 0.0


@dataclass
class Timeline:
    """busy: of each second, the share of all cores that computes; wall_s: of the command; cores: of the machine."""

    cores: int
    wall_s: float = 0.0
    busy: list[float] = field(default_factory=list)
    tiers: dict[str, Tier] = field(default_factory=dict)

    def table(self) -> Iterator[str]:
        """Yield the lines of a Markdown table: wall and CPU seconds of each tier, and of the whole run."""
        yield "| tier | began | wall | CPU seconds |"
        yield "| --- | ---: | ---: | ---: |"
        for name, tier in self.tiers.items():
            yield f"| {name} | {_clock(tier.began_s)} | {_clock(tier.ended_s - tier.began_s)} | {tier.cpu_s:.0f} |"
        mean = sum(self.busy) / len(self.busy) if self.busy else 0.0
        yield f"| all | 0:00 | {_clock(self.wall_s)} | {mean * self.cores * self.wall_s:.0f} |"
        yield f"\nOf {self.cores} cores {1 - mean:.0%} of the time were idle."


def measure(command: Sequence[str], costs_of_tests: Path) -> tuple[Timeline, int]:
    """Run a command to its end; return what was measured, and its exit code. Each test notes its cost in a file."""
    timeline, start = Timeline(psutil.cpu_count() or 1), time.monotonic()
    process = subprocess.Popen(command, env={**os.environ, costs.FILE: f"{costs_of_tests.resolve()}"})
    busy_share()
    while process.poll() is None:
        time.sleep(1)
        timeline.busy.append(busy_share())
        timeline.wall_s = time.monotonic() - start
        _sample(timeline, psutil.Process().children(recursive=True))
    return timeline, process.returncode


def busy_share() -> float:
    """Return the busy share of all cores since the last call, without processes at a nice value above 0."""
    share = psutil.cpu_times_percent()
    return (share.user + share.system + share.irq + share.softirq) / 100


def _sample(timeline: Timeline, processes: Sequence[psutil.Process]) -> None:
    """Note for each tier that runs how long it has run, and the CPU seconds of the processes below it."""
    seen: set[str] = set()
    for process in processes:  # parents come before their children
        try:
            tier = tier_of(process.cmdline())
            if tier is None or tier in seen:
                continue
            seen.add(tier)
            known = timeline.tiers.setdefault(tier, Tier(timeline.wall_s, timeline.wall_s))
            known.ended_s = timeline.wall_s
            if tier != "lint":  # several processes, one after the other
                known.cpu_s = max(known.cpu_s, costs.cpu_seconds(process))
        except psutil.NoSuchProcess:
            continue


def tier_of(command: Sequence[str]) -> str | None:
    """Return the tier that a process runs; None for any other process.

    >>> tier_of(["python", "-m", "tests.support.once_more", "alone", "-q"])
    'alone'
    """
    line = " ".join(command)
    return next((name for name, pattern in TIERS.items() if re.search(pattern, line)), None)


def draw(timeline: Timeline, path: Path) -> None:
    """Draw busy cores over minutes, averaged over ten seconds, above the tiers that ran."""
    import matplotlib.pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(9, 4), sharex=True, height_ratios=(2, 1))
    parts = [timeline.busy[i : i + 10] for i in range(0, len(timeline.busy), 10)]
    scale = timeline.wall_s / max(1, len(timeline.busy)) / 60
    minutes = [10 * i * scale for i in range(len(parts))]
    above.fill_between(minutes, [timeline.cores * sum(one) / len(one) for one in parts], step="post", alpha=0.6)
    above.set_ylim(0, timeline.cores)
    above.set_ylabel("busy cores")
    for row, (name, tier) in enumerate(timeline.tiers.items()):
        below.barh(row, (tier.ended_s - tier.began_s) / 60, left=tier.began_s / 60)
        below.text(tier.began_s / 60, row, f" {name}", va="center", fontsize=8)
    below.invert_yaxis()
    below.set_yticks([])
    below.set_xlabel("minutes")
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)


def read(path: Path) -> Timeline:
    """Read what `write` wrote."""
    raw = json.loads(path.read_text())
    return Timeline(**{**raw, "tiers": {name: Tier(**tier) for name, tier in raw["tiers"].items()}})


def write(timeline: Timeline, path: Path) -> None:
    """Write a timeline as JSON."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(asdict(timeline)))


def _clock(seconds: float) -> str:
    return f"{seconds // 60:.0f}:{seconds % 60:02.0f}"


def main(arguments: Sequence[str]) -> int:
    """Run the command of the module's docstring; return its exit code."""
    match arguments:
        case ["--draw", output]:
            draw(read(Path(f"{output}.json")), Path(f"{output}.svg"))
            return 0
        case [output, first, *rest]:
            timeline, code = measure([first, *rest], Path(f"{output}.costs.jsonl"))
            write(timeline, Path(f"{output}.json"))
            draw(timeline, Path(f"{output}.svg"))
            print(*timeline.table(), sep="\n")
            return code
    sys.exit(__doc__)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
