"""Held-out samples as cards: the ground truth, and the answers at the steps that a reader can choose."""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from stage2_api.coordinates import BINS
from stage2_api.errors import counted
from stage2_report.held_out import EvaluatedStep, HeldOutRollout
from stage2_trainer.data.files import ROOTS_VARIABLE, leads_inside
from stage2_trainer.data.images import ImageError, load_image
from stage2_trainer.data.records import Record
from stage2_trainer.matching import GTObject
from stage2_trainer.scores.image_counts import f1_of, image_counts, rank_of, verdicts
from stage2_trainer.scores.scored_image import ScoredImage

SIDE = 480  # pixels of a thumbnail's longer side
UNITS = 400  # of the SVG, for the longer side: text has one size in all pictures
QUALITY = 70  # of its JPEG
MOST_DRAWN = 80  # objects of one picture
MOST_LABELLED = 16
LABEL_CHARACTERS, TEXT_CHARACTERS = 24, 1500
PATH_POINTS = 64  # of an outline
WORST, BEST, BETWEEN = 24, 12, 12


@dataclass(frozen=True)
class Thumbnail:
    """An image inside the page, or why it is missing. width, height: in the SVG's units."""

    width: float
    height: float
    url: str = ""
    fault: str = ""


@dataclass(frozen=True)
class DrawnObject:
    """One object: its kind (a verdict, or found, missed), its corners, its label and the label's position."""

    kind: str
    points: str
    name: str
    label: str
    x: float
    y: float


@dataclass(frozen=True)
class Pane:
    """One picture of a card. left_out: how many objects are not drawn."""

    title: str
    objects: Sequence[DrawnObject]
    left_out: int = 0
    text: str = ""
    note: str = ""


@dataclass(frozen=True)
class CardView:
    """A card at one choice of steps, and the numbers by which the page sorts and filters it."""

    truth: Pane
    answers: Sequence[Pane]
    f1: float
    gain: float
    duplicates: int
    misses: int
    wrong: int
    cut_off: bool


@dataclass(frozen=True)
class SampleCard:
    """One held-out sample. views: None for a choice of steps that has no answer to it."""

    number: int
    sample_id: str
    thumbnail: Thumbnail
    classes: Sequence[str]
    views: Sequence[CardView | None] = field(repr=False)


@dataclass(frozen=True)
class StepChoice:
    """A choice of steps: its label, and for each run its own label and its evaluation."""

    label: str
    evaluations: Sequence[tuple[str, EvaluatedStep]]


def sample_card(number: int, sample_id: str, choices: Sequence[StepChoice], folder: Path | None) -> SampleCard:
    """Return the card of a sample. folder: where its images are found by name; None = at their recorded paths."""
    record = next(
        evaluation.rollouts[sample_id].record
        for choice in choices
        for _, evaluation in choice.evaluations
        if sample_id in evaluation.rollouts
    )
    picture = thumbnail(record, folder)
    views = [_view(sample_id, choice, picture) for choice in choices]
    names = {one.desc for one in record.objects} | {
        one.desc
        for choice in choices
        for _, evaluation in choice.evaluations
        if sample_id in evaluation.images
        for one in evaluation.images[sample_id].answer.objects
    }
    return SampleCard(number, sample_id, picture, sorted(names), views)


def choose_samples(scores: Mapping[str, float]) -> list[str]:
    """Return the samples that get a card: the lowest scores, the highest, and some between."""
    ranked = sorted(scores, key=lambda name: scores[name])
    if len(ranked) <= WORST + BEST + BETWEEN:
        return ranked
    middle = ranked[WORST:-BEST]
    spread = [middle[int(index)] for index in np.linspace(0, len(middle) - 1, BETWEEN)]
    return [*ranked[:WORST], *spread, *ranked[-BEST:]]


def _view(sample_id: str, choice: StepChoice, picture: Thumbnail) -> CardView | None:
    if not all(sample_id in evaluation.images for _, evaluation in choice.evaluations):
        return None
    images = [evaluation.images[sample_id] for _, evaluation in choice.evaluations]
    judged = [verdicts(image) for image in images]
    counts = [image_counts(image) for image in images]
    found = [any(flags) for flags in zip(*(one.found for one in judged), strict=True)]
    scores = [f1_of(one) for one in counts]
    answers = [
        _answer(label, evaluation.rollouts[sample_id], image, one.answered, score, picture)
        for (label, evaluation), image, one, score in zip(choice.evaluations, images, judged, scores, strict=True)
    ]
    last = counts[-1]
    return CardView(
        truth=_pane("ground truth", images[-1].truth, ["found" if one else "missed" for one in found], picture),
        answers=answers,
        f1=rank_of(scores[-1]),
        gain=rank_of(scores[-1]) - rank_of(scores[0]),
        duplicates=int(last.duplicates),
        misses=int(last.truth - last.class_right),
        wrong=int(last.class_judged - last.class_right),
        cut_off=bool(last.truncated),
    )


def _answer(
    label: str,
    rollout: HeldOutRollout,
    image: ScoredImage,
    judged: Sequence[str],
    score: float | None,
    picture: Thumbnail,
) -> Pane:
    f1 = "–" if score is None else f"{score:.2f}"
    note = f"{counted(len(judged), 'object')}, F1 {f1}" + (", cut off" if image.answer.truncated else "")
    text = rollout.text[:TEXT_CHARACTERS] + ("…" if len(rollout.text) > TEXT_CHARACTERS else "")
    return _pane(label, image.answer.objects, judged, picture, text=text, note=note)


def _pane(
    title: str, objects: Sequence[GTObject], kinds: Sequence[str], picture: Thumbnail, *, text: str = "", note: str = ""
) -> Pane:
    drawn = [
        _drawn_object(one, kind, picture, labelled=len(objects) <= MOST_LABELLED)
        for one, kind in list(zip(objects, kinds, strict=True))[:MOST_DRAWN]
    ]
    left_out = max(0, len(objects) - MOST_DRAWN)
    return Pane(title, drawn, left_out, text, note or counted(len(objects), "object"))


def _drawn_object(one: GTObject, kind: str, picture: Thumbnail, *, labelled: bool) -> DrawnObject:
    corners = [(x * picture.width / BINS, y * picture.height / BINS) for x, y in _corners(one)]
    left, top = min(x for x, _ in corners), min(y for _, y in corners)
    short = one.desc if len(one.desc) <= LABEL_CHARACTERS else f"{one.desc[:LABEL_CHARACTERS]}…"
    return DrawnObject(
        kind=kind,
        points=" ".join(f"{x:.0f},{y:.0f}" for x, y in corners),
        name=one.desc[:TEXT_CHARACTERS],
        label=short if labelled else "",
        x=round(min(left, max(0.0, picture.width - 7 * len(short))), 1),
        y=round(max(11.0, top - 3), 1),
    )


def _corners(one: GTObject) -> list[tuple[int, int]]:
    if one.kind == "bbox":
        x1, y1, x2, y2 = one.bins
        return [(x1, y1), (x2, y1), (x2, y2), (x1, y2)]
    corners = list(zip(one.bins[0::2], one.bins[1::2], strict=True))
    return corners[:: -(-len(corners) // PATH_POINTS)]


def thumbnail(record: Record, folder: Path | None) -> Thumbnail:
    """Return the first image of a record as a JPEG. folder: where it is found by name; None = at its recorded path."""
    size = _units(record.width, record.height)
    if not record.images:
        return Thumbnail(*size, fault="the run's records do not name its image")
    try:
        image = recorded_image(record.images[0], folder)
    except ImageError as error:
        return Thumbnail(*size, fault=str(error))
    image.thumbnail((SIDE, SIDE))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=QUALITY, optimize=True)
    return Thumbnail(*_units(*image.size), url=f"data:image/jpeg;base64,{base64.b64encode(file.getvalue()).decode()}")


def recorded_image(path: str, folder: Path | None) -> Image.Image:
    """Return the image at a log's path; in a folder, the one of that name, if no link leads out. Raises ImageError."""
    if folder is None:
        return load_image(path)
    found = folder / Path(path).name
    if not leads_inside(found, (folder,)):
        way_out = f"move the image there, or name its folder in {ROOTS_VARIABLE}"
        raise ImageError.at(str(found), f"leads out of {folder}", way_out=way_out)
    return load_image(str(found))


def _units(width: int, height: int) -> tuple[float, float]:
    longest = max(width, height)
    return round(width * UNITS / longest, 1), round(max(height * UNITS / longest, 1.0), 1)
