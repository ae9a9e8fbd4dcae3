"""Held-out answers as tables with pictures, in those trackers of `training.report_to` that have such tables.

transformers starts a tracker's run and reports its figures; it knows of no answers.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from stage2_api.runconfig import RunConfig
from stage2_trainer.data.drawing import draw_outlines, grid
from stage2_trainer.data.images import load_image
from stage2_trainer.data.records import Record
from stage2_trainer.process.ranks import rank
from stage2_trainer.scores.answer_picture import answered_outlines, true_outlines
from stage2_trainer.scores.image_counts import sample_f1
from stage2_trainer.scores.scored_image import ScoredImage, read_answer, scored_images

logger = logging.getLogger(__name__)
MOST_ROWS = 8  # of each evaluation, the same samples each time
NAME, PICTURE = "held_out_answers", "picture"

Table = list[dict[str, Any]]
"""Rows with the same columns."""


@dataclass(frozen=True)
class HeldOutAnswer:
    """An answer to a held-out record. figures: GRPO's rewards; without them, its row has its F1."""

    record: Record
    text: str
    finish_reason: str | None
    figures: Mapping[str, float] = field(default_factory=dict)


AnswerTables = Callable[[int, Sequence[HeldOutAnswer]], None]
"""Receives an optimizer step and the answers of its evaluation in this process."""


def answer_tables(config: RunConfig) -> AnswerTables:
    """Return what writes the first answers of each evaluation into the run's trackers; the first process alone does."""
    names = [one for one in config.training.report_to if one in _WRITERS]

    def write(step: int, answers: Sequence[HeldOutAnswer]) -> None:
        if not (names and answers) or rank():
            return
        table = _table(step, answers[:MOST_ROWS])
        for name in names:
            try:
                _WRITERS[name](import_module(name), table)
            except Exception as error:  # noqa: BLE001  # a tracker may raise anything; no picture is worth a run
                logger.warning("%s did not accept the table of answers of step %d: %s", name, step, error)

    return write


def _table(step: int, answers: Sequence[HeldOutAnswer]) -> Table:
    read = [read_answer(one.text, finish_reason=one.finish_reason) for one in answers]
    scored = scored_images([one.record for one in answers], read)
    return [_row(step, *one) for one in zip(answers, scored, strict=True)]


def _row(step: int, one: HeldOutAnswer, image: ScoredImage) -> dict[str, Any]:
    source = load_image(one.record.images[0])
    sides = [draw_outlines(source, found) for found in (true_outlines(one.record.objects), answered_outlines(image))]
    return {
        "step": step,
        "sample": one.record.sample_id,
        PICTURE: grid([sides], ["ground truth", "answer"]),
        **(one.figures or {"F1": sample_f1(image)}),
        "finish_reason": one.finish_reason or "",
        "answer": one.text,
    }


def _wandb_or_trackio(tracker: Any, table: Table) -> None:
    """Log a table to wandb, or to trackio, which has the same functions."""
    rows = [[tracker.Image(value) if name == PICTURE else value for name, value in row.items()] for row in table]
    # transformers logs figures by this step, too
    tracker.log({NAME: tracker.Table(columns=list(table[0]), data=rows), "train/global_step": table[0]["step"]})


def _mlflow(mlflow: Any, table: Table) -> None:
    """Append to the table among the run's artifacts."""
    mlflow.log_table({name: [row[name] for row in table] for name in table[0]}, f"{NAME}.json")


_WRITERS: dict[str, Callable[[Any, Table], None]] = {
    "wandb": _wandb_or_trackio, "trackio": _wandb_or_trackio, "mlflow": _mlflow,
}  # fmt: skip
