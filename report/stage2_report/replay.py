"""`stage2 replay`: the `Y_train` of every rollout of a step, rebuilt from the learner's records and its tokenizer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from rich.table import Table

from stage2_api.errors import refused
from stage2_api.pod.report import EVENT
from stage2_report.run_history import read_records
from stage2_report.terminal import Terminal
from stage2_report.tokenizer_file import load_tokenizer
from stage2_trainer.data.files import check_file
from stage2_trainer.matching import MatchOptions
from stage2_trainer.rollouts.replay import Replayed, lines_of_step, replay
from stage2_trainer.telemetry.run_log import STEP_LOG

_PLAIN_WIDTH = 100  # of tables in a file or a pipe


def replay_step(records: Path, step: int, *, tokenizer: Path | None, output: Path | None) -> int:
    """Rebuild a step, print one row for each rollout, and write the token ids to `output`.

    Returns 0 where all targets equal those that were trained on, else 1. Raises ConfigError where there are no such
    records, or no tokenizer.
    """
    if output is not None:
        check_file("--output", output)
    if not os.path.isfile(records):
        raise refused(str(records), None, "no such file", "give <output_dir>/rollouts.jsonl")
    lines = lines_of_step(read_records(records), step - 1)  # the records count from 0
    if not lines:
        rule = f"must hold training rollouts of step {step}"
        way_out = "give <output_dir>/rollouts.jsonl, and --step as the log counts: the first is 1"
        raise refused(str(records), "none", rule, way_out)
    known = {one.name for one in fields(MatchOptions)}
    if unknown := sorted({name for line in lines for name in line["options"]} - known):
        rule = "must have only options of matching that this version of stage2 has"
        raise refused(str(records), ", ".join(unknown), rule, "use the version that wrote the file")
    replayed = replay(lines, load_tokenizer(tokenizer or _model_of_run(records)))
    console = Terminal(width=None if sys.stdout.isatty() else _PLAIN_WIDTH, wraps=True)
    console.print(_table(step, replayed))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("".join(json.dumps(_document(one), ensure_ascii=False) + "\n" for one in replayed))
    return 0 if all(one.same for one in replayed) else 1


def _model_of_run(records: Path) -> Path:
    """Return the folder of the run's model, which the log beside the rollouts names."""
    log = records.with_name(STEP_LOG)
    events = read_records(log) if log.exists() else ()
    model = next((event["model"] for event in events if event["event"] == EVENT), "")
    if not os.path.isdir(model) or not model:
        rule = "must be the folder of the run's model, for its tokenizer"
        raise refused("--tokenizer", model, rule, "name the folder: --tokenizer DIR")
    return Path(model)


def _table(step: int, replayed: Sequence[Replayed]) -> Table:
    same = sum(one.same for one in replayed)
    table = Table(title=f"Step {step}: {same} of {len(replayed)} are what was trained on", header_style="bold")
    for title in ("micro-step", "request", "version", "seed", "answer", "Y_train", "same"):
        table.add_column(title, justify="right")
    for one in replayed:
        line = one.line
        numbers = (line["micro_step"], line["index"], line["version"], line["seed"], len(line["token_ids"]))
        table.add_row(*map(str, numbers), str(one.target.train_len), "yes" if one.same else "NO")
    return table


def _document(one: Replayed) -> dict[str, Any]:
    kept = ("micro_step", "index", "sample_id", "version", "seed")
    target = one.target
    return {
        **{name: one.line[name] for name in kept},
        "same": one.same,
        "y_train_ids": list(target.y_train_ids),
        "labels": list(target.labels),
        "y_train_text": target.y_train_text,
    }
