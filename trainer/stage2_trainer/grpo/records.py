"""GRPO's records: images with metadata, from a JSONL file, and the prompts and reference answers that they make.

One record a line (semantics section 15.4): `images`, `metadata`, optional `summary` (a reference answer where there is
no contract of summaries). Every mistake in the file is reported with its line, before a model is loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, Problem
from stage2_api.runconfig import RunConfig
from stage2_trainer.data.messages import chat_messages
from stage2_trainer.data.records import MAX_REPORTED_PROBLEMS, Record
from stage2_trainer.grpo.rewards import Contract, Sample


@dataclass(frozen=True)
class Task:
    """What a model is asked about records, and what a right answer is.

    prompt: text of the user's turn, unless the record's domain has its own. contract: of summaries, where there is one.
    """

    prompt: str
    system: str | None = None
    contract: Contract | None = None

    @classmethod
    def from_config(cls, config: RunConfig) -> Task:
        """Return the task of a run."""
        custom, contract = config.custom, None
        if custom.grpo.summary is not None and custom.assistant_prefix_format is not None:
            contract = Contract(custom.grpo.summary, custom.assistant_prefix_format)
        return cls(custom.user_prompt, config.template.system, contract)

    def user_text(self, record: Record, epoch: int) -> str:
        """Return the text of the user's turn.

        Irrelevant images are asked about in the words of each domain in turn, another one each epoch.
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
        """Return the right answer. Raises ConfigError where the record has none."""
        if self.contract is not None:
            sample = self._sample(record)
            if sample.irrelevant:
                return self.contract.summary.irrelevant.text
            return f"{self.contract.header(sample.domain)}\n{record.metadata['summary_ref']}"
        if record.summary is None:
            rule = "CHORD learns reference answers"
            way_out = "add the key to every record, or set custom.grpo.chord.enabled to false"
            raise ConfigError([Problem(f"record {record.sample_id} summary", None, rule, way_out)])
        return record.summary

    def check(self, record: Record) -> None:
        """Raise ConfigError where a record does not fit the contract."""
        if self.contract is not None:
            sample = self._sample(record)
            if not sample.irrelevant and not sample.dense and sample.domain:
                _ = sample.truth

    def _sample(self, record: Record) -> Sample:
        return Sample("", record.metadata, self.contract)


@dataclass
class _Found:
    records: list[Record] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)


def load_records(path: str, limit: int | None, task: Task) -> list[Record]:
    """Read the first `limit` records of a JSONL file. Raises ConfigError with every broken line (at most 20)."""
    file, found = Path(path), _Found()
    if not file.is_file():
        raise ConfigError([Problem(path, None, "must be a file of records, one JSON object a line", "check the path")])
    for number, line in _lines(file, limit):
        try:
            record = _record(line, file, number, len(found.records))
            task.check(record)
            found.records.append(record)
        except ConfigError as error:
            found.problems += [_placed(problem, path, number) for problem in error.problems]
        if len(found.problems) >= MAX_REPORTED_PROBLEMS:
            break
    if not found.records and not found.problems:
        found.problems.append(Problem(path, None, "must hold at least one record", "write one JSON object a line"))
    if found.problems:
        raise ConfigError(found.problems)
    return found.records


def _lines(file: Path, limit: int | None) -> Iterator[tuple[int, str]]:
    with file.open(encoding="utf-8") as lines:
        yield from islice(((number, line) for number, line in enumerate(lines, start=1) if line.strip()), limit)


def _record(line: str, file: Path, number: int, position: int) -> Record:
    try:
        document = json.loads(line)
    except ValueError as error:
        raise _invalid("", line.strip(), f"must be JSON ({error})", "correct the line") from error
    if not isinstance(document, dict):
        raise _invalid("", document, "must be a JSON object", "correct the line")
    metadata, summary = document.get("metadata", {}), document.get("summary")
    if not isinstance(metadata, Mapping):
        raise _invalid("metadata", metadata, "must be an object", "correct the line")
    if summary is not None and not isinstance(summary, str):
        raise _invalid("summary", summary, "must be text", "correct the line")
    name = str(document.get("sample_id", f"{file.stem}:{number}"))
    images = _images(document.get("images"), file.parent)
    return Record(position, name, images, 0, 0, {}, summary=summary, metadata=metadata)


def _images(found: object, folder: Path) -> tuple[str, ...]:
    if not isinstance(found, list) or not found or not all(isinstance(one, str) for one in found):
        raise _invalid("images", found, "must be a list of at least one path", "list the record's images")
    images = tuple(one if one.startswith("data:") else str((folder / one).resolve()) for one in found)
    for image in images:
        if not image.startswith("data:") and not Path(image).is_file():
            raise _invalid("images", image, "must be a file", "correct the path; it is relative to the JSONL's folder")
    return images


def _invalid(path: str, value: object, rule: str, way_out: str) -> ConfigError:
    return ConfigError([Problem(path, value, rule, way_out)])


def _placed(problem: Problem, path: str, number: int) -> Problem:
    return Problem(f"{path}:{number} {problem.path}".rstrip(), problem.value, problem.rule, problem.way_out)
