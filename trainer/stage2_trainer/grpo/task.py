"""The task of a GRPO run: the prompts and reference answers of records, and the demands on a record.

Source: semantics, section 15.4. A record has `images` and `objects`, or with `custom.use_summary` a summary: in
`metadata` that fits the contract, or without a contract in `summary`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from stage2_api.errors import refused
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.images import ImageError, blank_image, load_image
from stage2_trainer.data.messages import chat_messages
from stage2_trainer.data.records import Record, RecordRules, units_by
from stage2_trainer.grpo.summaries import Contract, SummarySample
from stage2_trainer.matching.ground_truth import serialize_objects


class Rows:
    """Builds rows from records. `epoch`: selects the domain whose prompt asks about an irrelevant image.

    first: index of the first record among all records of the run.
    """

    def __init__(self, records: Sequence[Record], task: Task, *, first: int = 0) -> None:
        self.records = records
        self.task = task
        self.first = first
        self.epoch = 0

    def dataset(self) -> Any:
        """Return the dataset, a row for each record."""
        from datasets import Dataset  # takes seconds, and the check of a configuration needs none

        return Dataset.from_dict({"index": list(range(len(self.records)))}).with_transform(self._rows)

    def row(self, index: int) -> dict[str, Any]:
        """Return a row: TRL's prompt and images, and the inputs of rollouts and rewards.

        `fault`: why the row's images cannot be read, and are replaced by small grey ones; None where they can.
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
        }

    def _rows(self, batch: Mapping[str, Sequence[int]]) -> dict[str, list[Any]]:
        rows = [self.row(index) for index in batch["index"]]
        return {name: [row[name] for row in rows] for name in rows[0]}


def _images(record: Record) -> tuple[list[Any], ImageError | None]:
    """Return a record's images, or as many blank ones and why."""
    try:
        return [load_image(source) for source in record.images], None
    except ImageError as error:
        return [load_image(blank_image()) for _ in record.images], error


@dataclass(frozen=True)
class Task:
    """A task: the prompt and the right answer of each record.

    prompt: text of the user's turn, unless the record's domain has its own. summaries: whether answers are summaries,
    and not lists of objects. contract: of summaries, where there is one.
    """

    prompt: str
    system: str | None = None
    summaries: bool = False
    contract: Contract | None = None

    @classmethod
    def from_config(cls, config: RunConfig) -> Task:
        """Return the task of a run."""
        custom, contract = config.custom, None
        if custom.grpo.summary is not None and custom.assistant_prefix_format is not None:
            contract = Contract(custom.grpo.summary, custom.assistant_prefix_format)
        return cls(custom.user_prompt, config.template.system, custom.use_summary, contract)

    def user_text(self, record: Record, epoch: int) -> str:
        """Return the text of the user's turn.

        For an irrelevant image it is the prompt of another domain each epoch.
        """
        if self.contract is None:
            return self.prompt
        domains = self.contract.summary.domains
        if self._sample(record).irrelevant:
            return domains[(record.index + epoch) % len(domains)].prompt or self.prompt
        return self._sample(record).domain.prompt or self.prompt

    def chat(self, record: Record, user_text: str) -> list[dict[str, Any]]:
        """Return the messages of a record, without any answer."""
        return chat_messages(record, user_text, system=self.system)

    def reference(self, record: Record) -> str:
        """Return the right answer: the summary, or else the list of objects. Raises ConfigError without both."""
        if self.contract is not None:
            sample = self._sample(record)
            if sample.irrelevant:
                return self.contract.summary.irrelevant.text
            return f"{self.contract.header(sample.domain)}\n{record.metadata['summary_ref']}"
        if record.summary is not None:
            return record.summary
        if not self.summaries:
            return serialize_objects(record.objects)
        rule = "CHORD learns reference answers"
        way_out = "add the key to every record, or set custom.grpo.chord.enabled to false"
        raise refused(f"record {record.sample_id} summary", None, rule, way_out)

    def check(self, record: Record) -> None:
        """Raise ConfigError where a record does not fit the contract."""
        if self.contract is not None:
            sample = self._sample(record)
            if not sample.irrelevant and not sample.dense and sample.domain:
                _ = sample.truth

    def _sample(self, record: Record) -> SummarySample:
        assert self.contract is not None, "summaries have one"
        return SummarySample("", record.metadata, self.contract)


def record_rules(config: RunConfig) -> RecordRules:
    """Return how to read the records of a GRPO run: with their objects, or as summaries that fit the contract."""
    custom = config.custom
    return RecordRules(
        units=units_by(custom.coord_tokens.skip_bbox_norm),
        reads_objects=not custom.use_summary,
        image_roots=tuple(custom.image_roots),
        demand=Task.from_config(config).check,
    )
