"""`python -m bench.regimes run FOLDER` trains what the figures lack; `table` shows what came of it."""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path

from bench.regimes.arms import ARMS, REGIMES

RESULTS = Path(__file__).parents[1] / "results" / "regimes.jsonl"


def main(arguments: list[str] | None = None) -> int:
    """Run the study, or show its table; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.regimes", description=__doc__)
    parser.add_argument("verb", choices=("run", "table"))
    parser.add_argument("folder", type=Path, nargs="?", help="of run: where data, starts and runs lie")
    parser.add_argument("--regimes", nargs="+", choices=tuple(REGIMES), default=list(REGIMES))
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(ARMS))
    parser.add_argument("--starts", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--figures", type=Path, default=RESULTS, help="the file of figures (default: %(default)s)")
    options = parser.parse_args(arguments)
    if options.verb == "table":
        from bench.regimes.table import tables

        sys.stdout.writelines(tables(_read(options.figures), options.regimes))
        return 0
    if options.folder is None:
        parser.error("run needs a folder")
    for regime in options.regimes:
        for start in options.starts:
            _run(options, regime, start)
    return 0


def _run(options: argparse.Namespace, regime: str, start: int) -> None:
    from bench.regimes.study import Study  # torch takes seconds that the table need not

    study = Study(options.folder.resolve(), regime, REGIMES[regime], start)
    for arm in options.arms:
        done = {one["arm"] for one in _read(options.figures) if (one["regime"], one["start"]) == (regime, start)}
        if arm in done:
            continue
        if (line := study.prepare()) and "start" not in done:
            _append(options.figures, line)
        began = time.process_time()
        for each in [*study.lines(arm)]:
            _append(options.figures, each)
        print(f"{regime}, start {start}, {arm}: {time.process_time() - began:.0f} CPU s with answers", flush=True)


def _read(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []


def _append(path: Path, line: object) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    sys.exit(main())
