"""The pictures of docs/concepts.md: one small scene, matched and turned into a target by the trainer's own code."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

import numpy as np

from stage2_api.coordinates import BINS, coord_token
from stage2_api.rollout_matching import RECOMMENDED, RolloutMatching
from stage2_trainer.matching import (
    CoordVocab,
    GroundTruth,
    GTObject,
    MatchedTarget,
    MatchOptions,
    build_target,
    serialize_objects,
)
from stage2_trainer.matching.geometry import mask_iou

TRUTH = (
    GTObject("cat", "bbox", (120, 180, 420, 600)),
    GTObject("dog", "bbox", (520, 420, 880, 900)),
    GTObject("cup", "bbox", (600, 80, 760, 260)),
)
ANSWER = (
    GTObject("cat", "bbox", (140, 210, 440, 640)),
    GTObject("fox", "bbox", (540, 450, 930, 930)),
    GTObject("hat", "bbox", (480, 30, 580, 200)),
)
_FILLS = ("#f59e0b", "#a16207", "#60a5fa")
_GREEN, _BLUE, _RED, _INK, _PALE = "#15803d", "#1d4ed8", "#b91c1c", "#0f172a", "#475569"
_LABELS = {"none": "#e2e8f0", "ce": "#bbf7d0", "coord": "#bfdbfe"}
_SIDE, _LINE, _CHARACTER, _WIDTH = 280, 46, 8.4, 860
_PIECE = re.compile(r"<\|coord_(\d+)\|>|\w+|[{}]|[^\w<{}]+")


def pictures() -> dict[Path, str]:
    """Return the pictures by their paths in the repository."""
    target = _target(MatchOptions())
    drawn = {"answer": _answer(target), "match": _match(target), "target": _targets(target), "loss": _loss(target)}
    return {Path(f"docs/concepts-{name}.svg"): text for name, text in drawn.items()}


_WORDS: list[str] = []


def _encode(text: str) -> list[int]:
    """Return the ids of a text: words, brackets and coordinates are tokens."""
    found = [(piece[0], piece[1]) for piece in _PIECE.finditer(text)]
    _WORDS.extend(word for word, coordinate in found if not coordinate and word not in _WORDS)
    return [int(coordinate) if coordinate else BINS + _WORDS.index(word) for word, coordinate in found]


def _decode(ids: Sequence[int]) -> str:
    return "".join(coord_token(one) if one < BINS else _WORDS[one - BINS] for one in ids)


def _target(options: MatchOptions) -> MatchedTarget:
    vocab = CoordVocab(ids=np.arange(BINS), decode=_decode, encode=_encode, size=2 * BINS)
    return build_target(_encode(serialize_objects(ANSWER)), GroundTruth(TRUTH), vocab, options)


def _svg(height: int, title: str, parts: Sequence[str], width: int = _WIDTH) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" font-size="14"'
        f' viewBox="0 0 {width} {height}"'
        " font-family=\"Helvetica, Arial, 'Liberation Sans', sans-serif\">"
        f"\n<!-- Drawn by hack/concept_pictures.py. -->\n<title>{escape(title)}</title>"
        f'\n<rect x="1" y="1" width="{width - 2}" height="{height - 2}" rx="12" fill="#f8fafc" stroke="#e2e8f0"/>'
    )
    return "\n".join([head, *parts, "</svg>\n"])


def _text(x: float, y: float, text: str, color: str = _INK, more: str = "") -> str:
    return f'<text x="{x:g}" y="{y:g}" fill="{color}" {more}>{escape(text)}</text>'


def _scene(x: int, y: int, title: str) -> Iterator[str]:
    """Yield the image: three blobs."""
    yield _text(x, y - 10, title, more='font-weight="bold"')
    yield f'<rect x="{x}" y="{y}" width="{_SIDE}" height="{_SIDE}" fill="#ffffff" stroke="#cbd5e1"/>'
    for one, fill in zip(TRUTH, _FILLS, strict=True):
        x1, y1, x2, y2 = (value * _SIDE / BINS for value in one.bins)
        yield (
            f'<ellipse cx="{x + (x1 + x2) / 2:g}" cy="{y + (y1 + y2) / 2:g}" rx="{(x2 - x1) / 2:g}"'
            f' ry="{(y2 - y1) / 2:g}" fill="{fill}" fill-opacity="0.45"/>'
        )


def _boxes(x: int, y: int, objects: Sequence[GTObject], colors: Sequence[str], dash: str = "") -> Iterator[str]:
    """Yield boxes in their colors; the name of a dashed one is at its lower edge, so that two on one object differ."""
    for one, color in zip(objects, colors, strict=True):
        x1, y1, x2, y2 = (value * _SIDE / BINS for value in one.bins)
        yield (
            f'<rect x="{x + x1:g}" y="{y + y1:g}" width="{x2 - x1:g}" height="{y2 - y1:g}" fill="none" stroke="{color}"'
            f' stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        yield _text(x + x1 + 4, y + (y2 - 5 if dash else y1 + 15), one.desc, color)


def _answer(target: MatchedTarget) -> str:
    parts = [*_scene(24, 44, "the image and its true objects"), *_boxes(24, 44, TRUTH, [_GREEN] * 3)]
    parts += [*_scene(340, 44, "the model's answer"), *_boxes(340, 44, ANSWER, [_BLUE] * 3)]
    text = re.sub(r"<\|coord_(\d+)\|>", r"\1", serialize_objects(ANSWER))
    for row, line in enumerate(re.sub(r"(, )(\"object)", r",\n\2", text).splitlines()):
        parts.append(_text(24, 356 + 22 * row, line, more='font-family="monospace" font-size="13"'))
    return _svg(420, "An image with three true objects, and an answer with three objects", parts, 644)


def _match(target: MatchedTarget) -> str:
    parts = [*_scene(24, 44, "truth and answer"), *_boxes(24, 44, TRUTH, [_GREEN] * 3)]
    pairs = {(pair.pred, pair.gt) for pair in target.matching.pairs}
    parts += _boxes(24, 44, ANSWER, [_RED if i in target.matching.false_positives else _BLUE for i in range(3)], "6 4")
    parts.append(_text(350, 34, "IoU of each answered object with each true one", more='font-weight="bold"'))
    every = np.array([(i, j) for i in range(3) for j in range(3)])
    overlap = mask_iou(ANSWER, TRUTH, every).reshape(3, 3)
    for j, true in enumerate(TRUTH):
        parts.append(_text(470 + 100 * j, 76, f"true {true.desc}", _GREEN))
    for i, one in enumerate(ANSWER):
        parts.append(_text(350, 116 + 44 * i, f"answered {one.desc}", _BLUE))
        for j in range(3):
            if (i, j) in pairs:
                parts.append(
                    f'<rect x="{462 + 100 * j}" y="{94 + 44 * i}" width="64" height="32" rx="6" fill="#bbf7d0"/>'
                )
            parts.append(_text(476 + 100 * j, 116 + 44 * i, f"{overlap[i, j]:.2f}"))
    (unmatched,), (missed,) = target.matching.false_positives, target.matching.false_negatives
    gate = RolloutMatching().maskiou_gate
    lines = (
        (f"Pairs below the gate of {gate} cannot match. The best sum decides.", _INK),
        ("The two green pairs match, whatever their names.", _GREEN),
        (f"The answered {ANSWER[unmatched].desc} is unmatched.", _RED),
        (f"The true {TRUTH[missed].desc} is missed.", _RED),
    )
    parts += [_text(350, 244 + 24 * row, line, color) for row, (line, color) in enumerate(lines)]
    return _svg(348, "IoU of each pair; two pairs match, one object is unmatched, one is missed", parts)


def _targets(target: MatchedTarget) -> str:
    recommended = MatchOptions.from_config(RolloutMatching(**{**RECOMMENDED, "recipe": "recommended"}))
    legend = (
        ("ce", "cross entropy: the token, or the word below"),
        ("coord", "coordinate loss: the bin below"),
        ("none", "no loss"),
    )
    parts, x, top = [], 24.0, 24
    for label, meaning in legend:
        parts.append(f'<rect x="{x:g}" y="{top - 4}" width="16" height="16" rx="3" fill="{_LABELS[label]}"/>')
        parts.append(_text(x + 24, top + 9, meaning))
        x += 60 + 7 * len(meaning)
    top += 50
    for title, one in (("the defaults", target), ("recipe: recommended", _target(recommended))):
        parts.append(_text(24, top, title, more='font-weight="bold"'))
        lines = list(_strip(one, top + 12))
        parts += [part for line in lines for part in line]
        top += _LINE * len(lines) + 34
    return _svg(top - 16, "The target's tokens with their losses, by the defaults and by the recommended recipe", parts)


def _strip(target: MatchedTarget, top: int) -> Iterator[list[str]]:
    """Yield lines of tokens, one for each object of the target, with the bin or word that is taught below."""
    pieces = [*_spelled(target), ("<|im_end|>", "ce", "")]
    line: list[str] = []
    x, y, before = 24.0, top, ""
    for piece, label, taught in pieces:
        if before == "}" and piece.startswith(", "):
            yield line
            line, x, y = [], 24.0, y + _LINE
        width = _CHARACTER * len(piece)
        mono = f'font-family="monospace" textLength="{width:g}" lengthAdjust="spacingAndGlyphs" xml:space="preserve"'
        line.append(f'<rect x="{x:g}" y="{y}" width="{width:g}" height="20" rx="3" fill="{_LABELS[label]}"/>')
        line.append(_text(x, y + 15, piece, more=mono))
        if taught:
            line.append(_text(x, y + 34, taught, _BLUE, 'font-size="12"'))
        x, before = x + width + 2, piece
    yield line


def _spelled(target: MatchedTarget) -> Iterator[tuple[str, str, str]]:
    """Yield each token of the target: its text, its label, and what is taught where that is something else."""
    names = dict(target.text_labels)
    for at, (token, label) in enumerate(zip(target.y_train_ids, target.labels, strict=True)):
        word = str(token) if token < BINS else _decode([token])
        taught = str(target.coord_targets[at]) if label == "coord" else _decode([names.get(at, token)])
        yield word, label, "" if taught == word or label == "none" else taught


def _loss(target: MatchedTarget) -> str:
    """Draw the first coordinate: what is taught, what a model might predict, and the area between their sums."""
    taught, answered = TRUTH[0].bins[0], ANSWER[0].bins[0]
    logits = [
        -((np.arange(BINS) - middle) ** 2) / (2 * width**2)
        for middle, width in ((taught, RolloutMatching().target_sigma), (answered, 6.0))
    ]
    logs = [one - np.log(np.exp(one).sum()) for one in logits]
    wanted, predicted = np.exp(logs)
    cross = -(wanted * logs[1]).sum()
    far = np.abs(np.cumsum(wanted) - np.cumsum(predicted)).sum() / BINS
    shown = slice(taught - 20, answered + 26)
    parts = [
        _text(24, 34, f"soft cross entropy: {cross:.1f}", more='font-weight="bold"'),
        *_curve(24, wanted[shown], 0.21, _GREEN),
        *_curve(24, predicted[shown], 0.21, _BLUE),
        _text(450, 34, f"W1: {far:.3f}, the area between the sums", more='font-weight="bold"'),
        *_curve(450, np.cumsum(wanted)[shown], 1.05, _GREEN),
        *_curve(450, np.cumsum(predicted)[shown], 1.05, _BLUE),
    ]
    for x in (24, 450):
        for middle, color, words in ((taught, _GREEN, "taught"), (answered, _BLUE, "predicted")):
            at = x + (middle - shown.start) * 380 / (shown.stop - shown.start)
            parts.append(_text(at, 252, f"{words}: {middle}", color, 'text-anchor="middle"'))
    return _svg(272, "Two losses of one coordinate: soft cross entropy, and the distance of the sums", parts)


def _curve(x: int, values: np.ndarray, top: float, color: str) -> Iterator[str]:
    points = [(x + 380 * i / len(values), 230 - 180 * value / top) for i, value in enumerate(values)]
    path = " ".join(f"{a:.1f},{b:.1f}" for a, b in [(x, 230), *points, (points[-1][0], 230)])
    yield f'<polygon points="{path}" fill="{color}" fill-opacity="0.15" stroke="{color}" stroke-width="1.5"/>'
