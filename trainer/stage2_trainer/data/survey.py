"""A data file looked over: how many records and objects there are, every mistake, and the images that are missing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from stage2_api.errors import ConfigError, Problem
from stage2_trainer.data.image_headers import size_fault, size_problem
from stage2_trainer.data.records import Line, Record, RecordRules, is_missing, lines, no_records
from stage2_trainer.matching.parsed_objects import Kind

NAMED_IMAGES = 5


@dataclass
class Survey:
    """The findings of the first lines of a data file.

    records: those that are right. objects: of these, by kind. missing: images that are no files, in the order of the
    file, each once. whole: whether there was nothing more to read.
    """

    path: Path
    records: int = 0
    objects: Counter[Kind] = field(default_factory=Counter)
    broken: list[Problem] = field(default_factory=list)
    missing: dict[str, None] = field(default_factory=dict)
    whole: bool = True

    @property
    def problems(self) -> list[Problem]:
        """All that must be put right: broken lines, then missing images, the first few by name."""
        if not self.missing:
            return self.broken
        rule = f"{len(self.missing)} {'images are' if len(self.missing) > 1 else 'image is'} missing"
        way_out = "put them there, or correct the paths; they are relative to the JSONL file's folder"
        return [*self.broken, Problem(f"{self.path} images", [*self.missing][:NAMED_IMAGES], rule, way_out)]


def survey(
    path: Path | str, rules: RecordRules, limit: int | None = None, on_line: Callable[[Line], None] | None = None
) -> Survey:
    """Look over the first `limit` records of a JSONL file; `on_line` is told of each line.

    Raises ConfigError when the file cannot be read at all.
    """
    found, lenient = Survey(Path(path)), rules.without_images()
    for line in lines(path):
        if limit is not None and line.position >= limit:
            found.whole = False
            break
        if on_line is not None:
            on_line(line)
        try:
            record = line.record(lenient)
        except ConfigError as error:
            found.broken += error.problems
            continue
        if fault := size_fault(record):
            found.broken.append(size_problem(f"{path}:{line.number}", fault))
        else:
            _add(found, record)
    if not found.records and not found.broken:
        found.broken.append(no_records(path))
    return found


def _add(found: Survey, record: Record) -> None:
    found.records += 1
    found.objects.update(one.kind for one in record.objects)
    found.missing.update(dict.fromkeys(filter(is_missing, record.images)))
