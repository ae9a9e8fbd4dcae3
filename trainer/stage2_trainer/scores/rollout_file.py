"""The answers in a file of rollouts, matched to their records.

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
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

from stage2_api.coordinates import coord_bin
from stage2_api.errors import ConfigError, refused
from stage2_trainer.data.records import Record, lines
from stage2_trainer.scores.scored_image import NO_ANSWER, ReadAnswer, count_coordinates, read_answer

EVENT, PART = "rollout", "held-out"
STEP_MARK = "@"
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
class Answered:
    """The answers in the order of the records. missing: ids of records without an answer.

    of_a_run: they are a learner's own, which was asked about the answered records alone.
    """

    answers: list[ReadAnswer]
    missing: list[str]
    of_a_run: bool


@dataclass(frozen=True)
class _Line:
    place: str
    content: Mapping[str, Any]

    def wrong(self, key: str, rule: str, way_out: str = WAY_OUT) -> ConfigError:
        return refused(f"{self.place} {key}".rstrip(), self.content.get(key), rule, way_out)


def places_in(path: Path) -> list[str]:
    """Return FILE:LINE of each record of a data file, in order."""
    return [f"{path.name}:{line.number}" for line in lines(path)]


def read_rollouts(rollouts: Rollouts, records: Sequence[Record], places: Sequence[str]) -> Answered:
    """Return the answer to each record, empty if there is none. places: FILE:LINE of the records.

    Raises ConfigError if a line is malformed, or answers an unknown record, or one that an earlier line answers.
    """
    index, of_a_run = _Index(records, places), _is_of_a_run(rollouts)
    answers: dict[int, ReadAnswer] = {}
    for line in _lines_of_run(rollouts) if of_a_run else _lines(rollouts.path):
        place = index.find(line)
        if place in answers:
            raise line.wrong("sample_id", "is answered by an earlier line too", "leave one answer to each record")
        answers[place] = _answer(line)
    if not answers:
        raise refused(str(rollouts.path), "none", "must hold answers", WAY_OUT)
    found = [answers.get(place, NO_ANSWER) for place in range(len(records))]
    missing = [record.sample_id for place, record in enumerate(records) if place not in answers]
    return Answered(_with_comparable_scores(found), missing, of_a_run)


class _Index:
    """Records by the names that a line may use."""

    def __init__(self, records: Sequence[Record], places: Sequence[str]) -> None:
        self._places: dict[str, list[int]] = defaultdict(list)
        for place, (record, line) in enumerate(zip(records, places, strict=True)):
            for name in {record.sample_id, line, *record.images, *map(os.path.basename, record.images)}:
                self._places[name].append(place)

    def find(self, line: _Line) -> int:
        """Return the place of the record that a line answers."""
        key = "sample_id" if "sample_id" in line.content else "image"
        name = line.content.get(key)
        if not isinstance(name, str):
            raise line.wrong(key, "must name a record", WAY_OUT)
        found = self._places.get(name) or self._places.get(os.path.basename(name), [])
        if len(found) != 1:
            rule = "names several records" if found else "names none of the records"
            raise line.wrong(key, rule, "give the records that were asked about, and name one as FILE:LINE")
        return found[0]


def _is_of_a_run(rollouts: Rollouts) -> bool:
    first = next(_lines(rollouts.path), None)
    return first is not None and first.content.get("event") == EVENT


def _lines_of_run(rollouts: Rollouts) -> Iterator[_Line]:
    """Yield the lines of one evaluation of a learner, of all its processes."""
    siblings = sorted(rollouts.path.parent.glob(f"rank-*-{rollouts.path.name}"))
    every = chain.from_iterable(_lines(path, with_halves=True) for path in (rollouts.path, *siblings))
    yield from _lines_of_step(every, rollouts)


def _lines_of_step(every: Iterable[_Line], rollouts: Rollouts) -> Iterator[_Line]:
    held_out = [line for line in every if line.content.get("event") == EVENT and line.content.get("part") == PART]
    steps = sorted({line.content["step"] for line in held_out})
    step = rollouts.step if rollouts.step is not None else (steps[-1] if steps else 0)
    if step not in steps:
        rule = f"must hold an evaluation of step {step}; it has those of {', '.join(map(str, steps)) or 'none'}"
        raise refused(str(rollouts.path), step, rule, f"name one of them: FILE{STEP_MARK}STEP")
    newest: dict[str, _Line] = {}  # a resumed run may evaluate a step again
    for line in held_out:
        if line.content["step"] == step:
            newest[line.content["sample_id"]] = line
    yield from newest.values()


def _lines(path: Path, *, with_halves: bool = False) -> Iterator[_Line]:
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
        yield _Line(place, content)


def _answer(line: _Line) -> ReadAnswer:
    text, reason = line.content.get("text", line.content.get("answer")), line.content.get("finish_reason")
    if not isinstance(text, str):
        raise line.wrong("text", "must be a string")
    return read_answer(text, _logprobs(line, text), reason if isinstance(reason, str) else None)


def _logprobs(line: _Line, text: str) -> list[float] | None:
    """Return the log-probabilities of an answer's coordinate tokens, in order; None if it has none."""
    pairs = _token_logprobs(line)
    if pairs is None:
        return None
    found = [logprob for token, logprob in pairs if coord_bin(token) is not None]
    if len(found) != (wanted := count_coordinates(text)):
        rule = f"has {len(found)} coordinate tokens, and the text has {wanted}"
        raise line.wrong("text", rule, "give the tokens of this text, or leave their log-probabilities out")
    return found


def _token_logprobs(line: _Line) -> list[tuple[str, float]] | None:
    content = line.content
    try:
        if content.get("logprobs") is not None:
            logprobs = content["logprobs"]
            logprobs = logprobs["content"] if isinstance(logprobs, dict) else logprobs
            return [(str(one["token"]), float(one["logprob"])) for one in logprobs]
        if content.get("token_logprobs") is not None:
            pairs = zip(content["tokens"], content["token_logprobs"], strict=True)
            return [(str(token), float(logprob)) for token, logprob in pairs]
    except (KeyError, TypeError, ValueError) as error:
        key = "logprobs" if content.get("logprobs") is not None else "token_logprobs"
        rule = f"must have a token and its log-probability for each token of the text ({error!r})"
        raise line.wrong(key, rule, 'write [{"token": ..., "logprob": ...}, ...], or leave it out') from error
    return None


def _with_comparable_scores(answers: list[ReadAnswer]) -> list[ReadAnswer]:
    """Return the answers, without scores if any answer with objects lacks them, since they could not be compared."""
    if all(one.scores is not None for one in answers if one.objects):
        return answers
    return [replace(one, scores=None) for one in answers]
