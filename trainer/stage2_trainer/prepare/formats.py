"""Which command of `stage2 import` reads a file or a folder of annotations, by what it holds."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from itertools import islice
from pathlib import Path

from stage2_api.errors import refused
from stage2_trainer.data.files import files_below, open_regular
from stage2_trainer.data.record_forms import OURS, form_of

HEAD = 64 << 20  # bytes in which the first value of a file must end to be looked at: no other form is as long as COCO's
MOST_LISTED = 10_000  # files of a folder that are looked at for an annotation file
MOST_OPENED = 16  # of those: a folder may hold JSON of something else too
KINDS = (
    "a data file (.jsonl), one file of COCO, LVIS, Objects365, Label Studio, ms-swift or Qwen-VL (.json, .jsonl), or a "
    "folder with one of these, with data.yaml (YOLO), .xml (VOC) or LabelMe's .json files"
)


def import_words(data: Path, images: Sequence[Path] = (), own: Collection[str] = ()) -> tuple[str, ...] | None:
    """Return the words behind `stage2 import` that read annotations, without --output; None for a data file.

    images: folders of images; by default that of the file. own: names of files that this command writes, which are no
    annotations if they lie in the folder. Raises ConfigError for what no import reads.
    """
    if os.path.isfile(data / "data.yaml") or data.suffix in (".yaml", ".yml"):
        return "yolo", _argument(data)
    file = _only_file(data, own)
    if file is None and os.path.isdir(data):
        return _folder_words(data)
    if file is None or not os.path.isfile(file):
        raise _unknown(data)
    first = first_value(file)
    if isinstance(first, dict) and first.keys() >= OURS and isinstance(first["objects"], list):
        return None
    form = form_of(first)
    reader = form.reader if form else ""
    beside = str(images[0] if images else file.parent)
    if reader == "labelme":
        return "labelme", _argument(data if os.path.isdir(data) else file.parent)
    if reader in ("labelstudio", "chat"):
        return reader, _argument(file), "--images", beside
    if file.suffix == ".json":  # COCO, or a file that its reader describes
        return "coco", "--annotations", str(file), "--images", beside
    if file.suffix == ".jsonl":
        return None
    raise _unknown(data)


def data_file(data: Path, own: Collection[str] = ()) -> Path:
    """Return the data file that a path for which there is no import means: itself, or the only one of a folder."""
    return _only_file(data, own) or data


def _only_file(data: Path, own: Collection[str]) -> Path | None:
    """Return a file itself, or the only .jsonl or else the only .json of a folder without XML; None otherwise."""
    if not os.path.isdir(data):
        return data
    if any(data.glob("*.xml")) or os.path.isdir(data / "Annotations"):
        return None
    there = sorted(path for path in data.glob("*.json*") if path.name not in own)
    files = ([path for path in there if path.suffix == suffix] for suffix in (".jsonl", ".json"))
    return next((found[0] for found in files if len(found) == 1), None)


def _folder_words(folder: Path) -> tuple[str, ...]:
    """Return the words for a folder of many annotation files. Raises ConfigError."""
    if any(folder.glob("*.xml")) or os.path.isdir(folder / "Annotations"):
        return "voc", _argument(folder)
    below = sorted(path for path in islice(files_below(folder), MOST_LISTED) if path.suffix.lower() == ".json")
    forms = (form_of(first_value(path)) for path in below[:MOST_OPENED])
    if any(form is not None and form.reader == "labelme" for form in forms):
        return "labelme", _argument(folder)
    raise _unknown(folder)


def _argument(path: Path) -> str:
    """Return a path as an argument of a command, which would take one with a leading dash for an option."""
    return f"./{path}" if str(path).startswith("-") else str(path)


def first_value(path: Path) -> object:
    """Return the first value of a file of JSON, of its lines or of its list; None where there is none in its head."""
    try:
        with open_regular(path) as file:
            text = file.read(HEAD).decode("utf-8-sig", errors="replace").lstrip()
        value, _ = json.JSONDecoder().raw_decode(text.removeprefix("[").lstrip())
    except (OSError, ValueError, RecursionError):
        return None
    return value


def _unknown(data: Path) -> Exception:
    way_out = "`stage2 import --help` lists the forms; write other ones as docs/data.md says"
    return refused("--data", str(data), f"must be {KINDS}", way_out)
