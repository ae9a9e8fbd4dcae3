"""One sample's E-step for people and for machines: answer and target in colours, tables, and JSON.

The keys of the JSON are a promise.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from stage2_api.errors import counted
from stage2_api.log_lines import one_line
from stage2_report.terminal import Terminal
from stage2_trainer.matching import CoordVocab, MatchedTarget, Pair
from stage2_trainer.matching.parse import CUT_OFF, KIND_OF_KEY, Kind, ParsedObject

KEY_OF_KIND: dict[Kind, str] = {kind: key for key, kind in KIND_OF_KEY.items()}


def document(target: MatchedTarget) -> dict[str, Any]:
    """Return the whole E-step of one answer, ready for `json.dumps`.

    `type` is the key of the geometry in a record, `bbox_2d` or `poly` (null where an object has none); coordinates are
    bins 0..999, x and y in turn; positions count tokens of the prefix, which are those of `y_train`.
    """
    parsed = target.parsed
    return {
        "prefix_ids": list(target.y_train_ids[: target.prefix_len]),
        "prefix_text": target.prefix_text,
        "truncated": parsed.truncated,
        "objects": [_object(one) for one in parsed.objects],
        "ground_truth": [
            {"desc": one.desc, "type": KEY_OF_KIND[one.kind], "bins": list(one.bins)}
            for one in target.ground_truth.objects
        ],
        "matches": _pairs(target, target.matching.pairs),
        "following": _pairs(target, target.matching.following),
        "gating_rejections": target.matching.gating_rejections,
        "false_negatives": list(target.false_negatives),
        "appended": list(target.appended),
        "append_text": target.append_text,
        "y_train_ids": list(target.y_train_ids),
        "y_train_text": target.y_train_text,
        "labels": list(target.labels),
        "coord_targets": {str(position): target_bin for position, target_bin in sorted(target.coord_targets.items())},
    }


def _pairs(target: MatchedTarget, pairs: Sequence[Pair]) -> list[dict[str, Any]]:
    objects = target.parsed.valid_objects
    return [{"pred": objects[one.pred].key, "gt": one.gt, "iou": one.iou, "cost": one.cost} for one in pairs]


def _object(one: ParsedObject) -> dict[str, Any]:
    return {
        "key": one.key,
        "valid": one.valid,
        "reason": one.reason,
        "desc": one.desc,
        "type": KEY_OF_KIND[one.kind] if one.kind else None,
        "bins": list(one.bins),
        "token_positions": list(one.token_positions),
    }


_MATCHED, _FOLLOWING, _UNMATCHED, _DROPPED = "green", "blue", "yellow", "red"
_CUT, _TAIL = "dim strike", "bold cyan"
_ANSWER_LEGEND = {
    "matched": _MATCHED, "following": _FOLLOWING, "unmatched": _UNMATCHED, "dropped": _DROPPED, "cut off": _CUT,
    "appended": _TAIL,
}  # fmt: skip
LABEL_STYLES = {"none": "dim", "ce": "green", "coord": "bold magenta", "penalised": "bold red"}
# Control characters become visible symbols, so that an answer cannot control the terminal; newlines stay.
_VISIBLE = {code: 0x2400 + code for code in range(32) if code != ord("\n")}


@dataclass(frozen=True)
class Inspection:
    """One inspected sample.

    sample: its number and name. origin: where its answer comes from, in words; None in stage 1, which has no answer.
    picture: the file of its picture.
    """

    sample: str
    origin: str | None
    target: MatchedTarget
    vocab: CoordVocab
    picture: Path | None


def show(inspection: Inspection) -> None:
    """Print everything about a sample to standard output."""
    console = Terminal(wraps=True)
    target = inspection.target
    console.print(summary(inspection), soft_wrap=True)
    if inspection.origin is None:
        console.print(Panel(_plain(target.append_text), title="Ground truth"))
        tables = [supervision_table(inspection)]
    else:
        legend = Text("  ").join(Text(meaning, style) for meaning, style in _ANSWER_LEGEND.items())
        subtitle = None if console.color_system is None else legend
        console.print(Panel(answer_text(target), title="Answer and appended tail", subtitle=subtitle))
        tables = [supervision_table(inspection), matches_table(target), following_table(target)]
        tables += [unmatched_table(target), dropped_table(target), missed_table(target)]
    for table in tables:
        if table.row_count:
            console.print(table)
    if inspection.picture:
        console.print(Text(f"picture: {inspection.picture}"), soft_wrap=True)


def summary(inspection: Inspection) -> Text:
    """Return where sample and answer come from, and the numbers of objects and tokens."""
    target = inspection.target
    if inspection.origin is None:
        objects, tokens = len(target.ground_truth.objects), target.train_len
        what = f"{counted(objects, 'object')} in {counted(tokens, 'token')}"
        return Text(one_line(f"sample {inspection.sample}, stage 1: the ground truth, {what}"))
    parsed, counters = target.parsed, target.counters
    state = ", ".join([*(["truncated"] if parsed.truncated else []), *parsed.notes]) or "closed"
    following = len(target.matching.following)
    follow = f", {following} of them following a true one" if following else ""
    followed = f", {following} of them followed" if following else ""
    lines = [
        f"sample {inspection.sample}, answer from {inspection.origin}",
        f"answer: {state}; {counted(len(parsed.objects), 'object')}: {counters['matched_pairs']} matched, "
        f"{counters['fp_count']} unmatched{follow}, {parsed.dropped_invalid} dropped; "
        f"{target.matching.gating_rejections} of {target.matching.candidates} candidate pairs below the gate",
        f"ground truth: {counted(len(target.ground_truth.objects), 'object')}, {counters['fn_count']} missed{followed}",
        f"y_train: {target.prefix_len} prefix + {target.train_len - target.prefix_len} appended tokens",
    ]
    return Text("\n".join(map(one_line, lines)))


def answer_text(target: MatchedTarget) -> Text:
    """Return the answer with coloured objects, its cut-off part struck out, and the appended tail on its own line."""
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


def supervision_table(inspection: Inspection) -> Table:
    """Return `y_train`, one row for each run of tokens with the same label, in the label's colour."""
    table = _table("Supervision of each token", "positions", "label", "tokens of y_train (→n: target bin n instead)")
    labelled = list(zip(inspection.target.labels, _marked_pieces(inspection), strict=True))
    first = 0
    for label, run in groupby(labelled, key=lambda pair: pair[0]):
        tokens = [piece + mark for _, (piece, mark) in run]
        last = first + len(tokens) - 1
        table.add_row(
            str(first) if first == last else f"{first}–{last}", label, Text("".join(tokens)), style=LABEL_STYLES[label]
        )
        first = last + 1
    return table


def matches_table(target: MatchedTarget) -> Table:
    """Return each match, with the descriptions of both sides."""
    return _pair_table("Matches", target, target.matching.pairs, _MATCHED)


def following_table(target: MatchedTarget) -> Table:
    """Return each box that matches nothing and is trained towards a true one; it finds nothing."""
    return _pair_table("Boxes that follow a true one, and match nothing", target, target.matching.following, _FOLLOWING)


def _pair_table(title: str, target: MatchedTarget, pairs: Sequence[Pair], style: str) -> Table:
    table = _table(title, "predicted", "true", "IoU", "cost", "predicted desc", "true desc")
    for pair in pairs:
        pred, true = target.parsed.valid_objects[pair.pred], target.ground_truth.objects[pair.gt]
        figures = (f"{pair.iou:.4f}", f"{pair.cost:.4f}")
        table.add_row(pred.key, str(pair.gt), *figures, _plain(pred.desc), _plain(true.desc), style=style)
    return table


def unmatched_table(target: MatchedTarget) -> Table:
    """Return the valid objects of the answer that neither match nor follow a true one."""
    table = _table("Unmatched predictions", "predicted", "type", "bins", "desc")
    for i in target.matching.unmatched:
        one = target.parsed.valid_objects[i]
        table.add_row(one.key, _type(one), _bins(one.bins), _plain(one.desc), style=_UNMATCHED)
    return table


def dropped_table(target: MatchedTarget) -> Table:
    """Return the objects of the answer that cannot be matched, and why."""
    table = _table("Dropped objects", "predicted", "reason", "stays in the prefix", "desc")
    is_whole = target.prefix_text == target.parsed.prefix_text  # a rewritten answer has valid objects only
    for one in target.parsed.objects:
        if one.reason:
            stays = "yes, unsupervised" if one.in_prefix and is_whole else "no"
            table.add_row(one.key, one.reason, stays, _plain(one.desc), style=_DROPPED)
    return table


def missed_table(target: MatchedTarget) -> Table:
    """Return the true objects that the answer missed, as they are appended; one that a box follows is not."""
    table = _table("Missed objects (false negatives)", "true", "appended as", "type", "bins", "desc")
    keys = dict(zip(target.appended, json.loads("{" + target.append_text.removeprefix(", ")), strict=True))
    for i in target.false_negatives:
        one = target.ground_truth.objects[i]
        key, style = keys.get(i, "no, a box follows it"), _TAIL if i in keys else _FOLLOWING
        table.add_row(str(i), key, KEY_OF_KIND[one.kind], _bins(one.bins), _plain(one.desc), style=style)
    return table


def _object_styles(target: MatchedTarget) -> list[str]:
    styles = dict.fromkeys((pair.pred for pair in target.matching.following), _FOLLOWING)
    styles |= dict.fromkeys((pair.pred for pair in target.matching.pairs), _MATCHED)
    valid = iter(styles.get(i, _UNMATCHED) for i in range(len(target.parsed.valid_objects)))
    return [next(valid) if one.valid else _DROPPED for one in target.parsed.objects]


def _extent(one: ParsedObject, text: str, cursor: int) -> tuple[int, int]:
    """Return start and end of an object in the answer, key included. cursor: the end of the object before."""
    key = f'"{one.key}"'
    start = text.find(key, cursor)
    if one.reason == CUT_OFF:
        return start, len(text)
    return start, max(one.span[1], start + len(key))


def _marked_pieces(inspection: Inspection) -> list[tuple[str, str]]:
    """Return each token of `y_train` as text, and `→n` for a coordinate whose target, bin n, is not its own."""
    ids, vocab, targets = inspection.target.y_train_ids, inspection.vocab, inspection.target.coord_targets
    marks = ["" if targets.get(i) in (None, vocab.bin_of(one)) else f"→{targets[i]}" for i, one in enumerate(ids)]
    pieces = (piece.translate(_VISIBLE) for piece in vocab.align(list(ids)).pieces)
    return list(zip(pieces, marks, strict=True))


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
