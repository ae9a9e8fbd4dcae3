"""`python -m bench.pays run FOLDER` trains what has not been trained; `table FOLDER` says what came of it."""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import fields, replace
from pathlib import Path

from bench.pays.arms import ARMS, COMPARED, DATA, Sizes
from bench.pays.study import MODEL, Study, learn_here

from stage2_trainer.scores.answer_scores import without_nan

RESULTS = Path(__file__).parents[1] / "results" / "pays.json"


def main(arguments: list[str] | None = None) -> int:
    """Run the requested benchmarks; return the exit code."""
    parser = argparse.ArgumentParser(prog="python -m bench.pays", description=__doc__)
    parser.add_argument("verb", choices=("run", "table", "chart"))
    parser.add_argument("folder", type=Path, help="where data, checkpoints and runs lie; of chart, the picture")
    parser.add_argument("--files", type=Path, nargs="+", default=[], help="of chart: what `table --write` has written")
    parser.add_argument("--arms", nargs="+", choices=tuple(ARMS), default=list(COMPARED))
    parser.add_argument("--seeds", nargs="+", type=int, default=[1, 2, 3])
    parser.add_argument("--steps-only", action="store_true", help="no runs of equal CPU seconds")
    parser.add_argument("--best-of", type=int, default=0, help="of run: sampled answers of the start to each image")
    parser.add_argument("--write", type=Path, nargs="?", const=RESULTS, help="keep the figures; in which file")
    parser.add_argument("--model", type=Path, default=MODEL, help="what stage 1 trains (default: the tiny model)")
    parser.add_argument("--data", choices=tuple(DATA), default="digits", help="what the images show (default: digits)")
    for one in fields(Sizes):
        parser.add_argument(f"--{one.name.replace('_', '-')}", type=type(one.default))
    options = parser.parse_args(arguments)
    given = {one.name: getattr(options, one.name) for one in fields(Sizes)}
    sizes = replace(DATA[options.data], **{name: value for name, value in given.items() if value is not None})
    if options.verb == "chart":
        from bench.pays.chart import draw  # matplotlib takes a second that --help need not

        draw(options.files, options.arms[0], options.folder)
        return 0
    study = Study(options.folder.resolve(), sizes, learn_here, options.model.resolve())
    if options.verb == "run":
        study.prepare()
        if options.best_of:
            study.sample(options.best_of)
        for run in study.run(options.arms, options.seeds, seconds=not options.steps_only):
            print(f"{run.name} ({ARMS[run.arm].what}): done", flush=True)
    return shown(study, write=options.write)


def shown(study: Study, *, write: Path | None) -> int:
    """Print the tables of what has run, and keep its figures in a file where one is named; 0."""
    from bench.pays.findings import findings, tables  # scores take a second that --help need not

    found = findings(study)
    sys.stdout.writelines(tables(found))
    if write:
        write.write_text(json.dumps(without_nan(found), indent=1) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
