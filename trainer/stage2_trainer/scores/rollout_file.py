"""The lines of a file of rollouts, and the records that they answer.

A line is a JSON object with `text`, and with `sample_id` (the record's own, or FILE:LINE) or `image` for the record
that it answers. It may have `finish_reason`, and log-probabilities of its tokens, as chat servers give them
(`logprobs`, a list of `token` and `logprob`) or as `tokens` with `token_logprobs`. A learner's own `rollouts.jsonl` is
read as it is; a GRPO run writes `answer` in place of `text`.
"""

from __future__ import annotations

import json
import os
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from stage2_api.errors import ConfigError, refused
from stage2_trainer.data.records import Record, lines
from stage2_trainer.scores.coco_results import id_text

EVENT, PART = "rollout", "held-out"
STEP_MARK = "@"
SWIFT_LINES = "{image: (.images[0].path? // .images[0]), text: .response}"
NAMING_KEYS = ("sample_id", "image", "image_id")
WAY_OUT = 'write {"sample_id": "FILE:LINE", "text": "..."}, one JSON object a line'


@dataclass(frozen=True)
class Rollouts:
    """A file of rollouts. step: of a learner's own file; None is the last that was evaluated."""

    path: Path
    step: int | None = None

    @classmethod
    def from_name(cls, name: str) -> Rollouts:
        """Parse FILE or FILE@STEP."""
        path, mark, step = name.rpartition(STEP_MARK)
        if mark and step.isdecimal() and not os.path.exists(name):
            return cls(Path(path), int(step))
        return cls(Path(name))


@dataclass(frozen=True)
class Line:
    """A line of a file. place: FILE:LINE."""

    place: str
    content: Mapping[str, Any]

    @property
    def text(self) -> str:
        """Its answer."""
        return str(self.content.get("text", self.content.get("answer")))

    @property
    def finish_reason(self) -> str | None:
        """Why the answer ended, as servers report it."""
        reason = self.content.get("finish_reason")
        return reason if isinstance(reason, str) else None

    @property
    def naming_key(self) -> str:
        """The key that names the record."""
        return next((key for key in NAMING_KEYS if key in self.content), "image")

    def check_text(self) -> None:
        """Raise ConfigError, which names the form of the line, if it has no text."""
        if isinstance(self.content.get("text", self.content.get("answer")), str):
            return
        keys = ", ".join([*self.content][:6]) or "nothing"
        rule, way_out = f"must be a string; the line has {keys}", WAY_OUT
        if "response" in self.content:
            rule, way_out = f"{rule}, as ms-swift writes", f"jq -c '{SWIFT_LINES}'"
        elif "annotations" in self.content:
            rule, way_out = f"{rule}, as COCO's annotation file", "give answers: COCO's results are a JSON list"
        raise self.wrong("text", rule, way_out)

    def wrong(self, key: str, rule: str, way_out: str = WAY_OUT) -> ConfigError:
        """Return the error of a key of this line."""
        return refused(f"{self.place} {key}".rstrip(), self.content.get(key), rule, way_out)


def places_in(path: Path) -> list[str]:
    """Return FILE:LINE of each record of a data file, in order."""
    return [f"{path.name}:{line.number}" for line in lines(path)]


class Index:
    """Records by the names that a line may use."""

    def __init__(self, records: Sequence[Record], places: Sequence[str]) -> None:
        self._records = records
        self._places: dict[str, list[int]] = defaultdict(list)
        for place, (record, line) in enumerate(zip(records, places, strict=True)):
            for name in {record.sample_id, line, *record.images, *map(os.path.basename, record.images)}:
                self._places[name].append(place)

    def places_of(self, name: str) -> list[int]:
        """Return the positions of the records with a name."""
        return self._places.get(name, [])

    def places_of_stem(self, key: str) -> list[int]:
        """Return the positions of the records whose image's name, without its ending, is this id."""
        return self._stems.get(key, [])

    @cached_property
    def _stems(self) -> Mapping[str, list[int]]:
        stems: dict[str, list[int]] = defaultdict(list)
        for place, record in enumerate(self._records):
            for key in {id_text(os.path.splitext(os.path.basename(image))[0]) for image in record.images}:
                stems[str(key)].append(place)
        return stems

    def find(self, line: Line) -> int:
        """Return the place of the record that a line answers."""
        key = line.naming_key
        value = line.content.get(key)
        name = id_text(value)
        if name is None:
            raise line.wrong(key, "must name a record", WAY_OUT)
        found = next(filter(None, map(self.places_of, (str(value), os.path.basename(str(value)), name))), [])
        if len(found) != 1:
            rule = "names several records" if found else "names none of the records"
            raise line.wrong(key, rule, "give the records that were asked about, and name one as FILE:LINE")
        return found[0]


def is_of_a_run(rollouts: Rollouts) -> bool:
    """Whether a file is a learner's own."""
    first = next(_lines(rollouts.path), None)
    return first is not None and first.content.get("event") == EVENT


def lines_of(rollouts: Rollouts) -> Iterator[Line]:
    """Yield the lines of a file; from a learner's own file only those of one evaluation."""
    return _lines_of_run(rollouts) if is_of_a_run(rollouts) else _lines(rollouts.path)


def _lines_of_run(rollouts: Rollouts) -> Iterator[Line]:
    """Yield the lines of one evaluation of a learner, of all its processes."""
    siblings = sorted(rollouts.path.parent.glob(f"rank-*-{rollouts.path.name}"))
    every = chain.from_iterable(_lines(path, with_halves=True) for path in (rollouts.path, *siblings))
    yield from _lines_of_step(every, rollouts)


def _lines_of_step(every: Iterable[Line], rollouts: Rollouts) -> Iterator[Line]:
    held_out = [line for line in every if line.content.get("event") == EVENT and line.content.get("part") == PART]
    steps = sorted({line.content["step"] for line in held_out})
    step = rollouts.step if rollouts.step is not None else (steps[-1] if steps else 0)
    if step not in steps:
        rule = f"must hold an evaluation of step {step}; it has those of {', '.join(map(str, steps)) or 'none'}"
        raise refused(str(rollouts.path), step, rule, f"name one of them: FILE{STEP_MARK}STEP")
    newest: dict[str, Line] = {}  # a resumed run may evaluate a step again
    for line in held_out:
        if line.content["step"] == step:
            newest[line.content["sample_id"]] = line
    yield from newest.values()


def _lines(path: Path, *, with_halves: bool = False) -> Iterator[Line]:
    """Yield the lines of a file. with_halves: lines may be truncated by a crash, or still being written."""
    for line in lines(path):
        place = f"{path}:{line.number}"
        try:
            content = json.loads(line.text)
        except ValueError as error:
            if with_halves:
                continue
            shown = line.text.decode(errors="replace").strip()[:80]
            raise refused(place, shown, f"must be JSON ({error})", WAY_OUT) from error
        if not isinstance(content, dict):
            raise refused(place, content, "must be a JSON object", WAY_OUT)
        yield Line(place, content)
