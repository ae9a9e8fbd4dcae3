"""`stage2 data`: the contents of a data file, as text or JSON, and as a page of pictures."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from stage2_api.errors import EXIT_CONFIG, ConfigError, counted, refused
from stage2_cli.console import file_progress, show_config_error
from stage2_cli.requests import DataRequest
from stage2_cli.steps import ImportFailed, imported
from stage2_cli.unlabelled import Examined, examine, write_labelled
from stage2_report.inspection import KEY_OF_KIND
from stage2_report.terminal import Terminal, print_json
from stage2_trainer.data.drawing import Outline, captioned_page, draw_outlines
from stage2_trainer.data.files import check_new_file, new_file
from stage2_trainer.data.images import ImageError, load_image
from stage2_trainer.data.object_order import ROWS, ObjectOrder
from stage2_trainer.data.profile import Count, Lengths, Profile, Size, profile
from stage2_trainer.data.reading_order import Bounds, in_reading_order
from stage2_trainer.data.records import Record, RecordRules, lines
from stage2_trainer.matching.ground_truth import Unit

MOST_ROWS = 20
PLAIN_WIDTH = 100  # of tables in a file or a pipe
SIZES: dict[Size, str] = {"small": "below 32 x 32 pixels", "medium": "below 96 x 96", "large": "above"}
WRITTEN = {
    "tokens": "coordinate tokens",
    "bins": "plain numbers, bins",
    "pixels": "plain numbers, pixels",
    "both": "tokens and plain numbers",
    "none": "no objects",
}
PAGE_COLUMNS = 4
PICTURE_WIDTH = 340
PICTURE_HEIGHT = 400
COLORS = ("#cf222e", "#0969da", "#1a7f37", "#8250df", "#bc4c00", "#bf3989", "#1b7c83", "#7d4e00")
QUANTILES = {"median": 0.5, "90 %": 0.9, "99 %": 0.99, "most": 1.0}


def show_data(request: DataRequest) -> int:
    """Describe a data file, or annotations, which are imported for this; return 0, or 64 if it has invalid records.

    Raises ConfigError. Returns the import's exit code if that fails.
    """
    try:
        with imported(request.file, request.units) as (records, roots):
            if roots:
                check_imported(request)
            _check_outputs(request, records)
            rules = RecordRules(units=None if roots else _units_of_records(request), image_roots=roots)
            return _show_records(request, records, rules)
    except ImportFailed as failed:
        return failed.code


def check_imported(request: DataRequest) -> None:
    """Raise ConfigError if a data file is to be derived from annotations: their imported records are temporary."""
    for option, output in (("--sorted", request.ordered), ("--add-labels", request.add_labels)):
        if output is not None:
            rule = f"is written from a data file, and {request.file} holds annotations"
            raise refused(option, str(output), rule, "run `stage2 import` first, and give its data file")


def _check_outputs(request: DataRequest, path: Path) -> None:
    """Raise ConfigError unless the request's files can be written for a data file."""
    if request.pictures is not None:
        check_new_file("--pictures", request.pictures)
    if request.ordered is not None:
        _check_beside("--sorted", path, request.ordered)
    if request.add_labels is None:
        return
    if request.unlabelled_by is None:
        rule = "needs a model that finds objects without a label"
        raise refused("--add-labels", str(request.add_labels), rule, "add --unlabelled-by MODEL")
    _check_beside("--add-labels", path, request.add_labels)


def _units_of_records(request: DataRequest) -> Unit | None:
    """Return the units of plain numbers in a data file. Raises ConfigError for those that annotations alone have."""
    units = request.units
    if units == "shares" or units == "thousandths":
        rule = f"is of annotations, and {request.file} is a data file, whose plain numbers are bins or pixels"
        raise refused("--units", units, rule, "give --units bins or pixels, or leave it out")
    return units


def _show_records(request: DataRequest, path: Path, rules: RecordRules) -> int:
    lengths_of = _token_counts(request.model) if request.model else (lambda texts: [len(text) for text in texts])
    with file_progress(path) as on_line:
        found = profile(path, rules, lengths_of, on_line)
    unit = "tokens" if request.model else "characters"
    examined = None
    if request.unlabelled_by and not found.problems:
        examined = examine(path, request.unlabelled_by, rules, all_images=request.add_labels is not None)
    if request.as_json:
        more = {"unlabelled": examined.document()} if examined else {}
        print_json({**document(found, unit), **more}, indent=1)
    else:
        _show(found, unit)
        if examined:
            Terminal().print(examined.line(), soft_wrap=True)
    if found.problems:
        show_config_error(ConfigError(found.problems), source=str(path))
        return EXIT_CONFIG
    _write(request, path, rules, found, examined)
    return os.EX_OK


def _write(request: DataRequest, path: Path, rules: RecordRules, found: Profile, examined: Examined | None) -> None:
    """Write the request's files. Raises ConfigError."""
    if request.pictures is not None and examined:
        examined.draw(request.pictures)
    elif request.pictures is not None:
        write_page(found.shown, request.pictures)
    if request.ordered is not None:
        write_sorted(path, request.ordered, rules)
    if request.add_labels is not None and examined:
        write_labelled(path, request.add_labels, rules, examined)


def document(found: Profile, unit: str) -> dict[str, Any]:
    """Return the profile of a data file as a JSON object."""
    return {
        "file": str(found.path),
        "records": found.records,
        "broken": found.broken,
        "objects": found.kinds.total(),
        "kinds": {KEY_OF_KIND[kind]: count for kind, count in sorted(found.kinds.items())},
        "written": dict(found.written),
        "classes": dict(found.classes.most_common()),
        "further_classes": found.further_classes,
        "sizes": {size: found.sizes[size] for size in ("small", "medium", "large")},
        "order": _order(found.order),
        "objects_per_record": _quantiles(found.objects),
        f"answer_{unit}": _quantiles(found.answers),
        "longest_answers": [{"length": length, "record": name} for length, name in found.answers.longest],
        "suspicious": {
            reason: {"count": count, "first": found.suspicions.places[reason]}
            for reason, count in found.suspicions.counts.most_common()
        },
        "classes_alike": found.alike,
        "problems": [str(problem) for problem in found.problems],
    }


def _order(found: ObjectOrder) -> dict[str, Any]:
    """Return the order that most neighbours follow, and the shares of ties and near ties in it and in rows."""
    if found.best is None:
        return {"name": None, "share": None, "ambiguous": None, "ambiguous_in_rows": None}
    name, share = found.best
    ambiguous = {"ambiguous": found.ambiguous(name), "ambiguous_in_rows": found.ambiguous(ROWS)}
    return {"name": name, "share": share, **ambiguous}


def _quantiles(lengths: Lengths) -> dict[str, int]:
    return {name: lengths.quantile(share) for name, share in QUANTILES.items()}


def _show(found: Profile, unit: str) -> None:
    console = Terminal(width=None if sys.stdout.isatty() else PLAIN_WIDTH)
    counts = f"{counted(found.records, 'record')}, {counted(found.kinds.total(), 'object')}"
    broken = f", {counted(found.broken, 'broken line')}" if found.broken else ""
    console.print(f"{found.path}: {counts}{broken}")
    for line in _lines(found, unit) if found.records else ():
        console.print(f"  {line}")
    if found.classes:
        console.print(_table(found))
    if found.order.advice is not None:
        console.print(f"advice: {found.order.advice}")
    for reason, count in found.suspicions.counts.most_common():
        first = found.suspicions.places[reason]
        more = "; …" if count > len(first) else ""
        console.print(f"suspicious: {reason}: {count:,} ({'; '.join(first)}{more})")
    for group in found.alike[:MOST_ROWS]:
        names = ", ".join(f"{name!r} ({found.classes[name]:,})" for name in group)
        console.print(f"suspicious: descriptions that differ only in case or spaces: {names}")


def _lines(found: Profile, unit: str) -> list[str]:
    kinds = {KEY_OF_KIND[kind]: count for kind, count in sorted(found.kinds.items())}
    written = {WRITTEN[how]: count for how, count in found.written.most_common()}
    sizes = {f"{size} ({meaning})": found.sizes[size] for size, meaning in SIZES.items()}
    longest = "; ".join(f"{length:,}: {name}" for length, name in found.answers.longest)
    need = "" if unit == "tokens" else "; --model DIR counts tokens"
    return [
        f"coordinates, by record: {_listed(written)}",
        f"geometry: {_listed(kinds)}",
        f"sizes, as COCO defines them: {_listed(sizes)}",
        f"objects per record: {_listed(_quantiles(found.objects))}",
        f"order of the objects: {found.order}",
        f"answers in {unit}: {_listed(_quantiles(found.answers))}{need}",
        f"longest answers: {longest}",
    ]


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items()) or "none"


def _table(found: Profile) -> Table:
    total = found.kinds.total()
    more = len(found.classes) - MOST_ROWS
    hidden = sum(count for _, count in found.classes.most_common()[MOST_ROWS:]) + found.further_classes
    table = Table(title=f"{counted(len(found.classes), 'description')}{' or more' if found.further_classes else ''}")
    table.add_column("description", no_wrap=True, max_width=60)
    for column in ("objects", "share"):
        table.add_column(column, justify="right")
    for name, count in found.classes.most_common(MOST_ROWS):
        plain = name.isprintable() and name == " ".join(name.split())
        table.add_row(Text(name if plain else repr(name)), f"{count:,}", f"{count / total:.1%}")
    if more > 0:
        table.add_row(f"{more:,} more", f"{hidden:,}", f"{hidden / total:.1%}")
    return table


def _token_counts(model: Path) -> Count:
    """Return a function that counts the tokens of answers. Raises ConfigError for a missing or unsuitable tokenizer."""
    from stage2_report.tokenizer_file import load_coord_tokenizer, token_counts

    tokenizer, _ = load_coord_tokenizer(model, option="--model")  # without the tokens, answers would be longer
    return lambda texts: token_counts(tokenizer, texts)


def _check_beside(option: str, path: Path, output: Path) -> None:
    """Raise ConfigError unless a file can be created in the folder to which the paths of images are relative."""
    check_new_file(option, output)
    if os.path.realpath(output.parent) != os.path.realpath(path.parent):
        rule = f"must be in the folder of {path}, to which the paths of its images are relative"
        raise refused(option, str(output), rule, f"write {path.parent / output.name}")


def write_sorted(path: Path, output: Path, rules: RecordRules) -> None:
    """Write a data file whose records list their objects in reading order, and are the same in all else."""
    with new_file("--sorted", output) as aside, aside.open("w", encoding="utf-8") as file:
        for line in lines(path):
            record = json.loads(line.text)
            objects = zip(line.record(rules.without_images()).objects, record["objects"], strict=True)
            in_order = in_reading_order(
                objects, lambda pair: Bounds.from_bins(pair[0].bins), lambda pair: (pair[0].bins, pair[0].desc)
            )
            record["objects"] = [written for _, written in in_order]
            file.write(json.dumps(record, ensure_ascii=False) + "\n")


def write_page(records: Sequence[Record], path: Path) -> None:
    """Draw records on a page, with one colour per description. Raises ConfigError if no image is readable."""
    colors: dict[str, str] = {}
    cells = []
    for record in records:
        try:
            image = load_image(record.images[0])
        except ImageError:
            continue  # the profile reads only image headers
        outlines = [
            Outline(one.kind, one.bins, one.desc, colors.setdefault(one.desc, COLORS[len(colors) % len(COLORS)]))
            for one in record.objects
        ]
        width = max(1, min(PICTURE_WIDTH, PICTURE_HEIGHT * image.width // image.height))
        cells.append(
            (draw_outlines(image, outlines, width=width), f"{record.sample_id} ({counted(len(outlines), 'object')})")
        )
    if not cells:
        rule = "a page needs records with objects and readable images"
        raise refused("--pictures", str(path), rule, "see the problems listed above")
    path.parent.mkdir(parents=True, exist_ok=True)
    captioned_page(cells, columns=PAGE_COLUMNS, width=PICTURE_WIDTH).save(path, format="PNG")
