"""`stage2 replay`: every `Y_train` of a step once more, from nothing but the learner's records and its tokenizer."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stage2_api.errors import ConfigError, Problem
from stage2_api.pod.report import EVENT
from stage2_trainer.data.output_places import check_file
from stage2_trainer.rollouts.replay import Replayed, lines_of_step, replay

STEP_LOG = "stage2_log.jsonl"  # beside the rollouts: a record of it names the model directory
_PLAIN_WIDTH = 100


def replay_step(records: Path, step: int, *, tokenizer: Path | None, output: Path | None) -> int:
    """Rebuild a step, print one row a rollout, and write the ids to `output`; 0 if all is what was trained on, else 1.

    Raises:
        ConfigError: there are no such records, or nobody says where the tokenizer is.
    """
    if output is not None:
        check_file("--output", output)
    lines = lines_of_step(_documents(records), step)
    if not lines:
        rule = f"must hold training rollouts of step {step}"
        way_out = "give <output_dir>/rollouts.jsonl, and --step as its lines count: the first is 0"
        raise ConfigError([Problem(str(records), "none", rule, way_out)])
    found = replay(lines, _tokenizer(tokenizer or _model_of_run(records)))
    console = Console(width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
    console.print(_table(step, found))
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("".join(json.dumps(_document(one), ensure_ascii=False) + "\n" for one in found))
    return 0 if all(one.same for one in found) else 1


def _documents(records: Path) -> list[Mapping[str, Any]]:
    if not os.path.isfile(records):
        raise ConfigError([Problem(str(records), None, "must be an existing file", "give <output_dir>/rollouts.jsonl")])
    with records.open(encoding="utf-8") as lines:
        return [json.loads(line) for line in lines if line.startswith('{"event"') and line.endswith("\n")]


def _model_of_run(records: Path) -> Path:
    log = records.with_name(STEP_LOG)
    events = _documents(log) if log.exists() else []
    model = next((event["model"] for event in events if event["event"] == EVENT), "")
    if not os.path.isdir(model) or not model:
        rule = "must be the folder of the run's model, for its tokenizer"
        raise ConfigError([Problem("--tokenizer", model, rule, "say where it lies now: --tokenizer DIR")])
    return Path(model)


def _tokenizer(folder: Path) -> Any:
    from stage2_report.tokenizer_file import load_tokenizer

    return load_tokenizer(folder)


def _table(step: int, found: Sequence[Replayed]) -> Table:
    same = sum(one.same for one in found)
    table = Table(title=f"Step {step}: {same} of {len(found)} are what was trained on", header_style="bold")
    for title in ("micro-step", "request", "version", "seed", "answer", "Y_train", "same"):
        table.add_column(title, justify="right")
    for one in found:
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
