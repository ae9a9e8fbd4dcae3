"""What is inspected: one record of a JSONL file, a tokenizer, and an answer that lies in a file."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.data.records import AS_DECLARED, Record, RecordRules, load_record
from stage2_trainer.data.regular_files import read_named
from stage2_trainer.matching import CoordVocab, cut_before, vision_ids


@dataclass(frozen=True)
class Place:
    """One line of a JSONL file: `position` counts its records from 0, among the first `limit` of them.

    option: the command-line option that gave the position, for messages.
    """

    path: Path
    position: int
    option: str
    limit: int | None = None
    rules: RecordRules = AS_DECLARED


@dataclass(frozen=True)
class Spelling:
    """A model's tokenizer: its vocabulary, and the ids at which an answer is cut."""

    vocab: CoordVocab
    vision_ids: frozenset[int]

    def cut(self, token_ids: list[int]) -> list[int]:
        """The ids before the first one that stands for pixels, as in training."""
        return cut_before(token_ids, self.vision_ids)


def read_record(place: Place) -> Record:
    """The record of a line, read as the learner reads it; ConfigError names the line and every field that is wrong.

    Its images need not exist: without a server and without a picture nobody looks at them.
    """
    rules = place.rules.without_images()
    return load_record(place.path, place.position, limit=place.limit, rules=rules, named=place.option)


def read_spelling(folder: Path, *, option: str) -> Spelling:
    """The tokenizer of a model folder. ConfigError when there is none, or it lacks the coordinate tokens."""
    if not os.path.isfile(folder / "tokenizer_config.json"):
        rule = "must be a folder with a Hugging Face tokenizer (tokenizer_config.json)"
        raise ConfigError([Problem(option, str(folder), rule, "give the model's folder with --tokenizer")])
    try:
        from stage2_report.tokenizer_file import load_tokenizer

        tokenizer = load_tokenizer(folder)
    except ModuleNotFoundError as error:
        rule = f"needs the package {error.name} to read the tokenizer"
        raise ConfigError([Problem(option, str(folder), rule, "pip install 'stage2[trainer]'")]) from error
    try:
        vocab = CoordVocab.from_tokenizer(tokenizer)
    except ValueError as error:
        rule = f"must know the coordinate tokens ({error})"
        raise ConfigError([Problem(option, str(folder), rule, "give a stage-1 model's folder")]) from error
    return Spelling(vocab, vision_ids(tokenizer))


def read_ids(path: Path) -> list[int]:
    """The JSON list of token ids in a file; stop tokens may be there."""
    try:
        value = json.loads(read_text(path, "--response-ids"))
    except json.JSONDecodeError as error:
        raise _no_ids(path, f"no JSON ({error})") from error
    if not isinstance(value, list):
        raise _no_ids(path, f"a {type(value).__name__}")
    wrong = next((one for one in value if not isinstance(one, int) or isinstance(one, bool)), None)
    if wrong is not None:
        raise _no_ids(path, f"a list with {wrong!r}")
    return value


def read_text_ids(path: Path, vocab: CoordVocab) -> list[int]:
    """The token ids of the text in a file, without the newline that editors put at its end."""
    text = read_text(path, "--response-file")
    return vocab.encode(text.removesuffix("\n").removesuffix("\r"))


def check_images(record: Record) -> None:
    """ConfigError names the record's first image that cannot be read, or has another size than the record says."""
    from stage2_trainer.data.messages import record_fault

    if fault := record_fault(record):
        rule = f"must have images that can be used: their pixels are needed here ({fault})"
        raise ConfigError([Problem(f"{record.sample_id} images", list(record.images), rule, "correct the record")])


def read_text(path: Path, option: str) -> str:
    """Return the text of a file that a person has named. Raises ConfigError."""
    try:
        return read_named(path).decode()
    except OSError as error:
        rule = f"must be a readable file ({error.strerror})"
        raise ConfigError([Problem(option, str(path), rule, "correct the path")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(option, str(path), f"must be UTF-8 ({error})", "save it as UTF-8")]) from error


def _no_ids(path: Path, found: str) -> ConfigError:
    way_out = "write [5031, 42, ...], or give text with --response-file"
    return ConfigError([Problem("--response-ids", f"{path}: {found}", "must be a JSON list of token ids", way_out)])
