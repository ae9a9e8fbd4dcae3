"""Records as the dataset that TRL's trainer reads: each row is made when it is asked for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from datasets import Dataset

from stage2_trainer.data.images import ImageError, blank_image, load_image
from stage2_trainer.data.records import Record
from stage2_trainer.grpo.task import Task


class Rows:
    """Makes rows of records. `epoch` says whose turn it is to be asked about irrelevant images.

    first: number of the first record among all that the run has.
    """

    def __init__(self, records: Sequence[Record], task: Task, *, first: int = 0) -> None:
        self.records = records
        self.task = task
        self.first = first
        self.epoch = 0

    def dataset(self) -> Any:
        """Return the dataset, a row for each record."""
        return Dataset.from_dict({"index": list(range(len(self.records)))}).with_transform(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """Return a row: TRL's prompt and images, and what rollouts and rewards need.

        `fault` is None, or why the row's images cannot be read: then they are small grey ones.
        """
        record = self.records[index]
        user_text = self.task.user_text(record, self.epoch)
        images, fault = _images(record)
        system = [{"role": "system", "content": self.task.system}] if self.task.system else []
        return {
            "index": self.first + index,
            "user_text": user_text,
            "prompt": [*system, {"role": "user", "content": user_text}],
            "images": images,
            "fault": fault,
            "metadata": dict(record.metadata),
        }

    def _rows(self, batch: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
        rows = [self.row(index) for index in batch["index"]]
        return {name: [row[name] for row in rows] for name in rows[0]}


def _images(record: Record) -> tuple[list[Any], ImageError | None]:
    """Return a record's images, or as many that stand for them and why they must."""
    try:
        return [load_image(source) for source in record.images], None
    except ImageError as error:
        return [load_image(blank_image()) for _ in record.images], error
