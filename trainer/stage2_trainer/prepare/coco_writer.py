"""Records as a COCO annotation file, for tools that evaluate and show them."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from stage2_api.coordinates import BINS
from stage2_trainer.data.files import aside_of, check_new_file, relative_path
from stage2_trainer.data.records import Line, Record, RecordRules, lines
from stage2_trainer.matching.ground_truth import GTObject
from stage2_trainer.prepare.annotated_image import Tally
from stage2_trainer.prepare.coco import FEDERATED
from stage2_trainer.prepare.outline import area

DIGITS = 4  # of a pixel
MOST_DIGITS = 18  # of an id, so that it is a whole number to other tools, too

SEVERAL_IMAGES = "it has several images, and COCO's entries have one"
NO_FILE = "its image is in the record itself (data: URL), and COCO's entries name files"
NO_PLACE = "summary, or a key of metadata, for which COCO has no place"


@dataclass(frozen=True)
class _Plan:
    """What is known of all records before the first is written: numbers of categories; whether sample ids are ids."""

    categories: dict[str, int]
    numbered: bool


def write_coco(
    path: Path, output: Path, rules: RecordRules, tally: Tally, on_line: Callable[[Line], None] | None = None
) -> None:
    """Write a COCO file of a data file's records; it gets its name when it is whole, and replaces none.

    Categories are numbered by name. Images keep their sample ids where all of these are different whole numbers, as
    those of an imported COCO file are; else they are numbered by their lines, from 1. Coordinates are pixels again.

    Raises:
        ConfigError: a record is broken, or the output is there already.
    """
    check_new_file("--coco", output)
    plan = _plan(_records(path, rules, None))
    output.parent.mkdir(parents=True, exist_ok=True)
    aside = aside_of(output)
    try:
        with aside.open("w", encoding="utf-8") as file:
            _write(_records(path, rules, on_line), plan, output.parent, file, tally)
        check_new_file("--coco", output)  # which somebody may have made meanwhile
        aside.rename(output)
    finally:
        aside.unlink(missing_ok=True)


def _records(path: Path, rules: RecordRules, on_line: Callable[[Line], None] | None) -> Iterator[Record]:
    for line in lines(path):
        if on_line is not None:
            on_line(line)
        yield line.record(rules.without_images())


def _plan(records: Iterable[Record]) -> _Plan:
    names: set[str] = set()
    numbers: set[int] = set()
    numbered = True
    for record in records:
        names.update(one.desc for one in record.objects)
        names.update(name for listed in _federated(record).values() for name in listed)
        number = int(record.sample_id) if _is_number(record.sample_id) else None
        numbered = numbered and number is not None and number not in numbers
        numbers |= {number} if numbered and number is not None else set()
    return _Plan({name: number for number, name in enumerate(sorted(names), start=1)}, numbered)


def _federated(record: Record) -> dict[str, list[str]]:
    """Return the lists of LVIS that a record has in its metadata."""
    found = {key: record.metadata.get(key) for key in FEDERATED}
    return {key: one for key, one in found.items() if isinstance(one, list) and all(isinstance(n, str) for n in one)}


def _is_number(name: str) -> bool:
    return name.isdecimal() and name.isascii() and len(name) <= MOST_DIGITS and str(int(name)) == name


def _write(records: Iterable[Record], plan: _Plan, folder: Path, file: TextIO, tally: Tally) -> None:
    """Write images as they come and annotations aside, which follow when all images are written."""
    categories = [{"id": number, "name": name} for name, number in plan.categories.items()]
    file.write(f'{{"info": {{}}, "licenses": [], "categories": {_json(categories)},\n"images": [')
    with tempfile.TemporaryFile("w+", encoding="utf-8") as annotations:
        for record in records:
            if len(record.images) > 1 or record.images[0].startswith("data:"):
                tally.leave_out_image(SEVERAL_IMAGES if len(record.images) > 1 else NO_FILE, record.sample_id)
                continue
            entry = _image(record, plan, folder, tally)
            file.write((",\n" if tally.records else "\n") + _json(entry))
            tally.records += 1
            for one in record.objects:
                tally.objects += 1
                annotation = _annotation(one, record, entry["id"], tally.objects, plan)
                annotations.write((",\n" if tally.objects > 1 else "\n") + _json(annotation))
        file.write('],\n"annotations": [')
        annotations.seek(0)
        shutil.copyfileobj(annotations, file)
    file.write("]}\n")


def _image(record: Record, plan: _Plan, folder: Path, tally: Tally) -> dict[str, Any]:
    federated = _federated(record)
    if record.summary is not None or set(record.metadata) - set(federated):
        tally.change(NO_PLACE, record.sample_id)
    return {
        "id": int(record.sample_id) if plan.numbered else record.index + 1,
        **({} if plan.numbered else {"sample_id": record.sample_id}),
        "file_name": relative_path(Path(record.images[0]), folder),
        "width": record.width,
        "height": record.height,
        **{key: [plan.categories[name] for name in names] for key, names in federated.items()},
    }


def _annotation(one: GTObject, record: Record, image: int, number: int, plan: _Plan) -> dict[str, Any]:
    sides = record.width, record.height
    pixels = [k * sides[i % 2] / BINS for i, k in enumerate(one.bins)]
    xs, ys = pixels[::2], pixels[1::2]
    left, top, width, height = min(xs), min(ys), max(xs) - min(xs), max(ys) - min(ys)
    covered = width * height if one.kind == "bbox" else area(list(zip(xs, ys, strict=True)))
    return {
        "id": number,
        "image_id": image,
        "category_id": plan.categories[one.desc],
        "bbox": [round(value, DIGITS) for value in (left, top, width, height)],
        "area": round(covered, DIGITS),
        "segmentation": [] if one.kind == "bbox" else [[round(value, DIGITS) for value in pixels]],
        "iscrowd": 0,
    }


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)
