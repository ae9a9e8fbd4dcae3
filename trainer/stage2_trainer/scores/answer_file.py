"""The answers in a file, in whichever form they were written.

A text is stage2's form, with coordinate tokens, or that of other models, with plain numbers (`plain_answers`). A file
that is one JSON list has COCO's results (`coco_results`).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from stage2_api.coordinates import BINS, coord_bin
from stage2_api.errors import counted, refused
from stage2_trainer.data.records import Record, lines
from stage2_trainer.matching.ground_truth import Unit
from stage2_trainer.scores.coco_results import Annotations, Finders, Results, doubt
from stage2_trainer.scores.plain_answers import PlainAnswer, read_plain_answer, seen_form
from stage2_trainer.scores.rollout_file import WAY_OUT, Index, Line, Rollouts, is_of_a_run, lines_of
from stage2_trainer.scores.scored_image import NO_ANSWER, ReadAnswer, count_coordinates, read_answer

Form = Literal["stage2", "qwen", "coco"]


@dataclass(frozen=True)
class Reading:
    """How the answers of a file are read.

    form: `auto` recognises it. unit: of plain numbers in answers; None takes that which all numbers fit, if there is
    only one. annotations: COCO's annotation file, for results.
    """

    form: Literal["auto"] | Form = "auto"
    unit: Unit | None = None
    annotations: Path | None = None


AS_RECOGNISED = Reading()
DETECTION = frozenset({"image_id", "category_id"})
BEYOND = 1.1  # times the largest number of a unit: greater ones are not of that unit
STRAY = 0.1  # share of the answers that may have such numbers, and do not tell the unit of a file


@dataclass(frozen=True)
class Answered:
    """The answers in the order of the records. missing: ids of records without an answer.

    of_a_run: they are a learner's own, which was asked about the answered records alone. form: in which they were read.
    unit: of their plain numbers. notes: what should be known about them.
    """

    answers: list[ReadAnswer]
    missing: list[str]
    of_a_run: bool = False
    form: Form = "stage2"
    unit: Unit | None = None
    notes: tuple[str, ...] = ()


def read_rollouts(
    rollouts: Rollouts, records: Sequence[Record], places: Sequence[str], reading: Reading = AS_RECOGNISED
) -> Answered:
    """Return the answer to each record, empty if there is none. places: FILE:LINE of the records.

    Raises ConfigError if a line is malformed, or answers an unknown record, or one that an earlier line answers, and if
    the form of the answers, or the unit of their numbers, is not clear.
    """
    index = Index(records, places)
    document = _document(rollouts.path) if reading.form in ("auto", "coco") else None
    if reading.form == "coco" or document is not None:
        return _read_results(rollouts.path, document, records, index, reading)
    of_a_run = is_of_a_run(rollouts)
    answered: dict[int, Line] = {}
    for line in lines_of(rollouts):
        line.check_text()
        place = index.find(line)
        if place in answered:
            raise line.wrong(line.naming_key, "is answered by an earlier line too", "leave one answer to each record")
        answered[place] = line
    if not answered:
        raise refused(str(rollouts.path), "none", "must hold answers", WAY_OUT)
    form = "stage2" if of_a_run and reading.form == "auto" else reading.form
    texts = _Texts(answered, {place: (records[place].width, records[place].height) for place in answered})
    return texts.answered(records, replace(reading, form=form), of_a_run=of_a_run)


@dataclass(frozen=True)
class _Texts:
    """The texts of a file, by the position of their records, and the sizes of these records' images."""

    lines: Mapping[int, Line]
    sizes: Mapping[int, tuple[int, int]]

    def answered(self, records: Sequence[Record], reading: Reading, *, of_a_run: bool) -> Answered:
        """Return the answers, read in one form."""
        form = reading.form if reading.form in ("stage2", "qwen") else self._recognised_form()
        unit, notes = None, []
        if form == "qwen":
            unit, note = self._unit(reading.unit)
            notes.append(note)
            answers = {
                place: one.measured(unit or "bins", self.sizes[place], self.lines[place].finish_reason)
                for place, one in self._plain.items()
            }
        else:
            answers = self._in_tokens
            if others := [place for place, one in self._plain.items() if one.objects and not answers[place].objects]:
                notes.append(
                    f"{counted(len(others), 'answer')} with JSON of another form, such as that of"
                    f" {self.lines[others[0]].place}, count as broken; --answers qwen reads them"
                )
        notes += self._broken(answers)
        every = [answers.get(place, NO_ANSWER) for place in range(len(records))]
        missing = [record.sample_id for place, record in enumerate(records) if place not in answers]
        return Answered(_with_comparable_scores(every), missing, of_a_run, form, unit, tuple(notes))

    @cached_property
    def _in_tokens(self) -> dict[int, ReadAnswer]:
        return {place: _answer(line) for place, line in self.lines.items()}

    @cached_property
    def _plain(self) -> dict[int, PlainAnswer]:
        return {place: read_plain_answer(line.text) for place, line in self.lines.items()}

    def _broken(self, answers: Mapping[int, ReadAnswer]) -> list[str]:
        """Return a note on the answers of which nothing can be read, with the form of the first."""
        unread = [
            place
            for place, one in answers.items()
            if not one.objects and not one.parsed and not self._plain[place].objects
        ]
        if not unread:
            return []
        first = self.lines[unread[0]]
        return [
            f"{counted(len(unread), 'answer')} of {len(answers):,} cannot be read, and count as broken; the first,"
            f" {first.place}, has {seen_form(first.text)}"
        ]

    def _recognised_form(self) -> Form:
        """Return the form in which the answers can be read. Raises ConfigError that names the one that was seen."""
        in_tokens, plain = (
            sum(bool(one.objects) for one in answers.values()) for answers in (self._in_tokens, self._plain)
        )
        if in_tokens or plain:
            return "stage2" if 2 * in_tokens >= plain else "qwen"
        empty = [place for place, one in self._plain.items() if one.is_whole]
        if empty and all(self.lines[place].text.strip() == "{}" for place in empty):
            return "stage2"
        if empty:
            return "qwen"
        line = next((line for line in self.lines.values() if line.text.strip()), next(iter(self.lines.values())))
        rule = f"can be read in no form; seen: {seen_form(line.text)}"
        way_out = (
            "give answers with coordinate tokens, or a JSON list of bbox_2d and label; --answers stage2 scores any"
        )
        raise refused(f"{line.place} text", line.text[:80], rule, way_out)

    def _unit(self, given: Unit | None) -> tuple[Unit | None, str]:
        """Return the unit of plain numbers, and a note on it and on the answers that it does not fit."""
        numbers = {
            self.lines[place].place: [*answer.numbers(self.sizes[place])] for place, answer in self._plain.items()
        }
        units = _Units({place: found for place, found in numbers.items() if found})
        if not units.numbers:
            return given, "no answer has numbers"
        unit = given or units.recognised()
        reason = (
            "as --answer-units says"
            if given
            else f"because {units.excluding('bins' if unit == 'pixels' else 'pixels')}"
        )
        others = units.beyond[unit]
        disagreeing = f"; {units.excluding(unit)}, and disagree" if others else ""
        return unit, f"plain numbers are {unit}, {reason}{disagreeing}"


@dataclass(frozen=True)
class _Units:
    """What the plain numbers of answers say about their unit. numbers: by FILE:LINE, each with the side of its image.

    A box may extend a little beyond its image, and one answer may be nonsense, so few numbers prove nothing.
    """

    numbers: Mapping[str, Sequence[tuple[float, int]]]

    @cached_property
    def beyond(self) -> Mapping[Unit, Mapping[str, str]]:
        """The first number that is not of a unit, in each answer that has one, by FILE:LINE."""
        no_bins, no_pixels = {}, {}
        for place, numbers in self.numbers.items():
            if (no_bin := next((number for number, _ in numbers if number > BEYOND * BINS), None)) is not None:
                no_bins[place] = f"{no_bin:g} in {place}"
            no_pixel = next(((number, side) for number, side in numbers if number > BEYOND * side), None)
            if no_pixel is not None:
                no_pixels[place] = f"{no_pixel[0]:g} of {no_pixel[1]} pixels in {place}"
        return {"bins": no_bins, "pixels": no_pixels}

    def excluding(self, unit: Unit) -> str:
        """Describe the answers with numbers that are not of a unit."""
        found = [*self.beyond[unit].values()]
        limit = f"{BINS}" if unit == "bins" else "their image"
        verb = "exceeds" if len(found) == 1 else "exceed"
        return f"{len(found):,} of {counted(len(self.numbers), 'answer')} {verb} {limit} ({found[0] if found else '-'})"

    def recognised(self) -> Unit:
        """Return the one unit that fits nearly all answers. Raises ConfigError where both fit, or neither."""
        where = f"{next(iter(self.numbers))} text"
        way_out = "give --answer-units bins (0 to 1000, as Qwen3-VL writes them) or pixels (of the image)"
        most = STRAY * len(self.numbers)
        self._refuse_shares(where, most)
        fitting = [unit for unit, beyond in self.beyond.items() if len(beyond) <= most]
        if len(fitting) == 1:
            return fitting[0]
        if not fitting:
            rule = (
                f"numbers are neither all bins ({self.excluding('bins')}) nor all pixels ({self.excluding('pixels')})"
            )
            raise refused(where, None, rule, way_out)
        strays = [self.excluding(unit) for unit, beyond in self.beyond.items() if beyond]
        but = f" (but {', and '.join(strays)})" if strays else ""
        rule = f"all numbers fit both bins (0 to 1000) and the pixels of the images{but}, so their unit is not clear"
        raise refused(where, None, rule, way_out)

    def _refuse_shares(self, where: str, most: float) -> None:
        """Raise ConfigError where nearly all answers have shares of the image, 0 to 1."""
        within = [numbers for numbers in self.numbers.values() if all(0 <= number <= 1 for number, _ in numbers)]
        broken = any(number % 1 for numbers in within for number, _ in numbers)
        others = len(self.numbers) - len(within)
        if others > most or not broken:
            return
        but = f" but in {counted(others, 'answer')} of {len(self.numbers):,}" if others else ""
        rule = f"all numbers lie between 0 and 1{but}: they are shares of the image, which are not read"
        raise refused(where, None, rule, "multiply them by 1000, and give --answer-units bins")


def _document(path: Path) -> Any:
    """Return the JSON document that a file is as a whole, or the list of its lines if they are COCO's results.

    None for other lines, and for what is no JSON.
    """
    first = next(iter(lines(path)), None)
    entry = _parsed(first.text) if first else None
    if first is None or isinstance(entry, dict):
        return [_parsed(line.text) for line in lines(path)] if entry and entry.keys() >= DETECTION else None
    return _parsed(path.read_bytes())


def _parsed(text: bytes) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _read_results(path: Path, document: Any, records: Sequence[Record], index: Index, reading: Reading) -> Answered:
    """Return the answers of COCO's results. A record without a detection has an empty answer."""
    if not isinstance(document, list) or not document:
        first = document if document is not None else _parsed(next((line.text for line in lines(path)), b""))
        seen = (
            "no JSON" if first is None else "a JSON list without entries, so no answers" if first == [] else "no list"
        )
        if isinstance(first, dict):
            lined = "lines, first " if document is None else ""
            seen = f"{lined}a JSON object with {', '.join(map(repr, [*first][:5]))}"
        rule = f"must be COCO's results, a JSON list of detections; seen: {seen}"
        raise refused(str(path), None, rule, "give the results, or another --answers")
    annotations = Annotations.from_file(reading.annotations) if reading.annotations else None
    sizes = [(record.width, record.height) for record in records]
    answers = Results(path, document).answers(Finders(index.places_of, index.places_of_stem), sizes, annotations)
    found = doubt(answers, sizes)
    if found and reading.form == "auto":
        rule, way_out = found
        raise refused(f"{path} bbox", None, rule, f"{way_out}; --answers coco scores them as they are")
    every = [answers.get(place, NO_ANSWER) for place in range(len(records))]
    missing = [record.sample_id for place, record in enumerate(records) if place not in answers]
    return Answered(every, missing, form="coco", unit="pixels", notes=found[:1] if found else ())


def _answer(line: Line) -> ReadAnswer:
    return read_answer(line.text, _logprobs(line, line.text), line.finish_reason)


def _logprobs(line: Line, text: str) -> list[float] | None:
    """Return the log-probabilities of an answer's coordinate tokens, in order; None if it has none."""
    pairs = _token_logprobs(line)
    if pairs is None:
        return None
    found = [logprob for token, logprob in pairs if coord_bin(token) is not None]
    if len(found) != (wanted := count_coordinates(text)):
        rule = f"has {len(found)} coordinate tokens, and the text has {wanted}"
        raise line.wrong("text", rule, "give the tokens of this text, or leave their log-probabilities out")
    return found


def _token_logprobs(line: Line) -> list[tuple[str, float]] | None:
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
