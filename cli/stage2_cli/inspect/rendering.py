"""The inspected sample for people: the answer and its target in colours, then tables."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from rich.console import Console
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stage2_cli.inspect.inspection_document import KEY_OF_KIND, TokenSupervision, token_supervision
from stage2_trainer.matching import CoordVocab, MatchedTarget
from stage2_trainer.matching.parsed_objects import CUT_OFF, ParsedObject

_MATCHED, _UNMATCHED, _DROPPED, _CUT, _TAIL = "green", "yellow", "red", "dim strike", "bold cyan"
_LABEL_STYLES = {"none": "dim", "ce": "green", "coord": "bold magenta", "penalised": "bold red"}
# Control characters as their pictures, so that an answer cannot steer the terminal; a newline stays one.
_VISIBLE = {code: 0x2400 + code for code in range(32) if code != ord("\n")}


@dataclass(frozen=True)
class Inspection:
    """One inspected sample.

    sample: which one it is. origin: where its answer comes from, in words. picture: where it was drawn, if it was.
    """

    sample: str
    origin: str
    target: MatchedTarget
    vocab: CoordVocab
    picture: Path | None


def show(inspection: Inspection) -> None:
    """Print everything about a sample to standard output."""
    console = Console(highlight=False)
    target = inspection.target
    supervised = token_supervision(target, inspection.vocab)
    colored = console.color_system is not None
    console.print(summary(inspection), soft_wrap=True)
    legend = _answer_legend() if colored else None
    console.print(Panel(answer_text(target), title="Answer and appended tail", subtitle=legend))
    if colored:
        trained = supervision_text(inspection, supervised)
        console.print(Panel(trained, title="Supervision of each token", subtitle=_supervision_legend()))
    else:
        console.print(supervision_table(inspection, supervised))
    for table in (matches_table(target), unmatched_table(target), dropped_table(target), missed_table(target)):
        if table.row_count:
            console.print(table)
    if inspection.picture:
        console.print(Text(f"picture: {inspection.picture}"), soft_wrap=True)


def summary(inspection: Inspection) -> Text:
    """Where the sample and its answer come from, and how it went in figures."""
    target = inspection.target
    parsed, counters = target.parsed, target.counters
    state = ", ".join([*(["truncated"] if parsed.truncated else []), *parsed.notes]) or "closed"
    lines = [
        f"sample {inspection.sample}, answer from {inspection.origin}",
        f"answer: {state}; {len(parsed.objects)} objects: {counters['matched_pairs']} matched, "
        f"{counters['fp_count']} unmatched, {parsed.dropped_invalid} dropped; "
        f"{target.matching.gating_rejections} of {target.matching.candidates} candidate pairs below the gate",
        f"ground truth: {len(target.ground_truth.objects)} objects, {len(target.false_negatives)} missed",
        f"y_train: {target.prefix_len} prefix + {target.train_len - target.prefix_len} appended tokens",
    ]
    return Text("\n".join(lines))


def answer_text(target: MatchedTarget) -> Text:
    """The answer with its objects in colours, its cut-off part struck out, the appended tail on a line of its own."""
    parsed = target.parsed
    kept = len(parsed.prefix_text) if parsed.text.startswith(parsed.prefix_text) else 0
    text = _plain(parsed.text)
    styles = _object_styles(target)
    cursor = 0
    for one, style in zip(parsed.objects, styles, strict=True):
        start, cursor = _extent(one, parsed.text, cursor)
        text.stylize(style, start, cursor)
    text.stylize(_CUT, kept)
    opening = "" if kept and target.prefix_text == parsed.prefix_text else target.prefix_text
    return Text.assemble(text, "\n", opening, (target.append_text.translate(_VISIBLE), _TAIL))


def supervision_text(inspection: Inspection, supervised: TokenSupervision) -> Text:
    """`y_train` token by token in the colours of their labels; `→n` after a coordinate that is taught bin n instead."""
    text = Text()
    for i, (piece, label) in enumerate(zip(_pieces(inspection), supervised.labels, strict=True)):
        text.append(piece, _LABEL_STYLES[label])
        text.append(_taught(inspection, supervised, i), "magenta")
    return text


def supervision_table(inspection: Inspection, supervised: TokenSupervision) -> Table:
    """The same for where there are no colours: one row for each run of tokens with one label."""
    table = _table("Supervision of each token", "positions", "label", "tokens of y_train (→n: taught bin n instead)")
    pieces = _pieces(inspection)
    for label, run in groupby(range(len(pieces)), key=lambda i: supervised.labels[i]):
        positions = list(run)
        spelled = "".join(pieces[i] + _taught(inspection, supervised, i) for i in positions)
        first, last = positions[0], positions[-1]
        table.add_row(str(first) if first == last else f"{first}–{last}", label, Text(spelled))
    return table


def matches_table(target: MatchedTarget) -> Table:
    """Each match, with what both sides say."""
    table = _table("Matches", "predicted", "true", "IoU", "cost", "predicted desc", "true desc")
    for pair in target.matching.pairs:
        pred, true = target.parsed.valid_objects[pair.pred], target.ground_truth.objects[pair.gt]
        figures = (f"{pair.iou:.4f}", f"{pair.cost:.4f}")
        table.add_row(pred.key, str(pair.gt), *figures, _plain(pred.desc), _plain(true.desc), style=_MATCHED)
    return table


def unmatched_table(target: MatchedTarget) -> Table:
    """Valid objects of the answer that stand for no true one; they stay in the prefix unsupervised."""
    table = _table("Unmatched predictions", "predicted", "type", "bins", "desc")
    for i in target.matching.false_positives:
        one = target.parsed.valid_objects[i]
        table.add_row(one.key, _type(one), _bins(one.bins), _plain(one.desc), style=_UNMATCHED)
    return table


def dropped_table(target: MatchedTarget) -> Table:
    """Objects of the answer that cannot be matched, and why."""
    table = _table("Dropped objects", "predicted", "reason", "stays in the prefix", "desc")
    for one in target.parsed.objects:
        if one.reason:
            stays = "yes, unsupervised" if one.in_prefix else "no"
            table.add_row(one.key, one.reason, stays, _plain(one.desc), style=_DROPPED)
    return table


def missed_table(target: MatchedTarget) -> Table:
    """True objects that the answer missed, as they are appended."""
    table = _table("Missed objects (false negatives)", "true", "appended as", "type", "bins", "desc")
    first = (target.parsed.max_object_index or 0) + 1
    for key, i in enumerate(target.false_negatives, first):
        one = target.ground_truth.objects[i]
        geometry = KEY_OF_KIND[one.kind]
        table.add_row(str(i), f"object_{key}", geometry, _bins(one.bins), _plain(one.desc), style=_TAIL)
    return table


def _object_styles(target: MatchedTarget) -> list[str]:
    valid = iter(
        _MATCHED if i in {pair.pred for pair in target.matching.pairs} else _UNMATCHED
        for i in range(len(target.parsed.valid_objects))
    )
    return [next(valid) if one.valid else _DROPPED for one in target.parsed.objects]


def _extent(one: ParsedObject, text: str, cursor: int) -> tuple[int, int]:
    """Where an object stands in the answer, key included; the next one is to be looked for after it."""
    key = f'"{one.key}"'
    start = text.find(key, cursor)
    if one.reason == CUT_OFF:
        return start, len(text)
    return start, max(one.span[1], start + len(key))


def _pieces(inspection: Inspection) -> list[str]:
    pieces = inspection.vocab.align(list(inspection.target.y_train_ids)).pieces
    return [piece.translate(_VISIBLE) for piece in pieces]


def _taught(inspection: Inspection, supervised: TokenSupervision, position: int) -> str:
    """The mark of a coordinate that is taught another bin than its own."""
    taught = supervised.coord_targets.get(position)
    own = inspection.vocab.bin_of(inspection.target.y_train_ids[position])
    return "" if taught is None or taught == own else f"→{taught}"


def _answer_legend() -> Text:
    styles = {"matched": _MATCHED, "unmatched": _UNMATCHED, "dropped": _DROPPED, "cut off": _CUT, "missed": _TAIL}
    return _legend(styles)


def _supervision_legend() -> Text:
    meanings = {
        "none": "none",
        "ce": "own id (ce)",
        "coord": "bin (coord), →n: another than its own",
        "penalised": "against its own id (penalised)",
    }
    return _legend({meanings[label]: style for label, style in _LABEL_STYLES.items()})


def _legend(styles: dict[str, str]) -> Text:
    return Text("  ").join(Text(name, style) for name, style in styles.items())


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for name in columns:
        table.add_column(name)
    return table


def _plain(text: str) -> Text:
    return Text(text.translate(_VISIBLE))


def _type(one: ParsedObject) -> str:
    return KEY_OF_KIND[one.kind] if one.kind else ""


def _bins(bins: tuple[int, ...]) -> str:
    return " ".join(map(str, bins))
